"""The forms of optimizer state in checkpoints: by parameter name, or by parameter index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, NoReturn, cast, get_args

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.collectives.owned import as_sent, full_tensor_of, sum_bytes
from shardwise.errors import ConfigError, LayoutError, StateError
from shardwise.optim.slices import ParamSlice, PerSlice, copied, in_order_of, local_boxes, local_of
from shardwise.torch_private import ShardedTensor

# ---- State by parameter names, with values that checkpoints can save and reshard.


class _OverNames(dict[str, Any]):
    """A dict whose keys or values are names of parameters.  Pickles and copies as an OrderedDict."""

    def __init__(self, names: Sequence[str], entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._names = tuple(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (list(self.items()),))


class ByName(_OverNames):
    """A dict keyed by parameter names that also accepts a parameter's index instead of its name.

    torch's ``get_optimizer_state_dict`` renames keys through indices; here they map back to names.

    Example:
        >>> state = ByName(["weight", "bias"], {"bias": 1})
        >>> state[0] = 2
        >>> state
        {'bias': 1, 'weight': 2}
    """

    def __setitem__(self, key: str | int, value: Any) -> None:
        super().__setitem__(self._names[key] if isinstance(key, int) else key, value)

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(self._names[key] if isinstance(key, int) else key)


class NamedGroup(_OverNames):
    """A param group whose ``"params"`` are names; assigned indices become names."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            value = [self._names[item] if isinstance(item, int) else item for item in value]
        super().__setitem__(key, value)


class OwnGroup(dict[str, Any]):
    """A param group of named parameters; ``group["param_names"]`` returns the names.

    The names are no entry: torch's ``set_optimizer_state_dict`` requires every entry of a group in the checkpoint, and
    checkpoints of optimizers without names lack this one.
    """

    def __init__(self, entries: Mapping[str, Any], names: Sequence[str]) -> None:
        super().__init__(entries)
        self._names = list(names)

    def __missing__(self, key: str) -> Any:
        if key == "param_names":
            return list(self._names)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry, also for ``"param_names"``."""
        return list(self._names) if key == "param_names" else super().get(key, default)


def refuse_other_state() -> NoReturn:
    """Refuse state that user code assigns or removes where no update would notice.

    Raises: StateError, always.
    """
    raise StateError(
        "the state of a sharded optimizer was written to: updates do not use entries that are added, and use those that are "
        "removed. Change its tensors in place, call load_state_dict(), or build a new optimizer"
    )


class _ReadOnly:
    """A mixin for read-only mappings."""

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        refuse_other_state()

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


class HeldState(_ReadOnly, dict[Any, Any]):
    """The state of one parameter, as users read it.  Pickles and copies as a dict.

    Example:
        >>> state = HeldState({"exp_avg": 1})
        >>> state["exp_avg"]
        1
        >>> state.clear()
        Traceback (most recent call last):
        shardwise.errors.StateError: the state of a sharded optimizer was written to, ...
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class BlankState(HeldState):
    """The state of all parameters before the first step."""

    def __missing__(self, key: object) -> HeldState:
        return HeldState()


def wrap(slices: Sequence[ParamSlice], value: Any) -> Any:
    """Return a state value as users see it: a value per element becomes a tensor of the parameter's kind."""
    if not isinstance(value, PerSlice):
        return value
    first, param = value[0], slices[0].param
    if isinstance(param, DTensor):
        spec = torch_private.spec_of(param, first.dtype)
        return torch_private.dtensor_from_local(first, spec, is_kept=True)
    if isinstance(param, ShardedTensor):
        return torch_private.sharded_tensor_like(param, [] if slices[0].stand_in is not None else list(value))
    return first


def unwrap(name: str, key: str, value: Any, slices: Sequence[ParamSlice], adopt: bool) -> Any:
    """Return a state value of any kind (DTensor, ShardedTensor, full tensor), cut into the parameter's slices.

    Values that are not per element are returned unchanged; they are single numbers.
    Tensors are copied, so that later steps do not write into what was loaded; with ``adopt``, tensors that are placed
    like the parameter are used themselves.  Collective if a DTensor is on another mesh or has other placements than the
    parameter.

    Raises: LayoutError if the value does not fit.
    """
    param = slices[0].param
    if isinstance(value, DTensor):
        if tuple(value.shape) != tuple(param.shape):
            raise misfit(name, key, value, param.shape)
        if isinstance(param, DTensor) and value.device_mesh == param.device_mesh:
            if adopt and value.placements == param.placements:
                return PerSlice([torch_private.wait_tensor(torch_private.local_of(value))])
            placed = cast(DTensor, as_sent(value)).redistribute(placements=param.placements)
            local = torch_private.wait_tensor(torch_private.local_of(placed))
            return PerSlice([local.clone() if local.dtype is value.dtype else local.view(value.dtype).clone()])
        value = full_tensor_of(value)
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        held = [] if slices[0].stand_in is not None else list(slices)
        if local_boxes(value) == [param_slice.box for param_slice in held]:
            return PerSlice(
                [s.tensor if adopt else s.tensor.clone() for s in shards]
                or [torch.empty_like(local_of(slices[0]), dtype=value.dtype)]  # its stand-in's
            )
        value = gather_sharded(value)
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor and value.dim():
        raise LayoutError(
            f"{name}: state {key!r} is a {type(value).__name__}, a tensor subclass, expected a plain tensor: "
            "it is the state of another optimizer class"
        )
    if value.dim() and tuple(value.shape) == tuple(param.shape):
        if adopt and type(param) in (torch.Tensor, torch.nn.Parameter) and value.device == param.device:
            return PerSlice([value])
        return PerSlice(param_slice.box.cut(value).to(local_of(param_slice).device).clone() for param_slice in slices)
    if value.dim() and value.numel() > 1:
        raise misfit(name, key, value, param.shape)
    return copied(value)


def full_value(value: Any, to_cpu: bool) -> Any:
    """Return a state value as a full plain tensor with its own memory, or unchanged.  Collective for sharded values."""
    if isinstance(value, DTensor):
        is_full = all(isinstance(placement, Replicate) for placement in value.placements)
        full = (torch_private.local_of(value).detach() if is_full else full_tensor_of(value)).clone()
    else:
        full = gather_sharded(value) if isinstance(value, ShardedTensor) else copied(value)
    return full.cpu() if to_cpu and isinstance(full, torch.Tensor) else full


def gather_sharded(value: ShardedTensor) -> torch.Tensor:
    """Return a full ShardedTensor on every rank.  Collective; moves twice the tensor's bytes."""
    group = torch_private.process_group_of(value)
    shards = value.local_shards()
    device = shards[0].tensor.device if shards else torch.device("cpu" if not torch.cuda.is_available() else "cuda")
    whole = torch.zeros(tuple(value.size()), dtype=value.dtype, device=device)
    for shard, box in zip(shards, local_boxes(value), strict=True):
        box.cut(whole).copy_(shard.tensor.detach())
    sum_bytes(whole, group)
    return whole


def misfit(name: str, key: str, value: torch.Tensor, shape: Sequence[int]) -> LayoutError:
    """Return the error for a state value that has another shape than its parameter."""
    return LayoutError(
        f"{name}: state {key!r} has shape {tuple(value.shape)}, expected that of the parameter, {tuple(shape)}. "
        "Load a state dict of names (state_dict() or full_state_dict()), not one of another rank's local tensors"
    )


# named: {"state": {NAME: {KEY: value}}, "param_groups": [{"params": [NAME, ...], OPTION: value}]}
# indexed: the same with parameter indices instead of names, as in plain optimizers.
StateForm = Literal["named", "indexed"]


def in_form(form: StateForm, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return named ``state`` and ``groups`` in a form.

    Raises: ConfigError for an unknown form.

    Example:
        >>> in_form("indexed", {"a": {"step": 1}}, [{"params": ["a"], "lr": 0.1}])
        {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    if form not in get_args(StateForm):
        raise ConfigError(f"the form is {form!r}, expected one of {get_args(StateForm)}")
    if form == "named":
        return {"state": dict(state), "param_groups": [dict(group) for group in groups]}
    number = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: values for name, values in state.items()},
        "param_groups": [{**options_of(group), "params": [number[n] for n in group["params"]]} for group in groups],
    }


def load_indexed(
    optimizer: Optimizer, states: Iterable[Mapping[str, Any] | None], options: Sequence[Mapping[str, Any]]
) -> None:
    """Load ``states``, one per parameter in the order of the optimizer's groups, and the options of its groups.

    State with one value per element gets the memory format of its parameter.
    """
    indices = count()
    groups = [
        {**options_of(option), "params": [next(indices) for _ in group["params"]]}
        for option, group in zip(options, optimizer.param_groups, strict=True)
    ]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        index: {key: in_order_of(param, value) for key, value in state.items()}
        for index, (param, state) in enumerate(zip(params, states, strict=True))
        if state is not None
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, without the parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the options of param groups, group by group."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


@contextmanager
def synced_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> Generator[None, None, None]:
    """Copy the options of ``source`` to ``target`` on entry, and back on exit."""
    copy_options(source, target)
    try:
        yield
    finally:
        copy_options(target, source)


def step_in_sync(
    step: Callable[..., Any],
    closure: Callable[[], Any] | None,
    outer: Sequence[dict[str, Any]],
    inner: Sequence[dict[str, Any]],
) -> Any:
    """Run ``step``, which reads the groups ``inner``, with the options in ``outer``, which users set; also in ``closure``."""

    def closure_of_user() -> Any:
        assert closure is not None
        with synced_options(inner, outer):
            return closure()

    with synced_options(outer, inner):
        return step() if closure is None else step(closure=closure_of_user)
