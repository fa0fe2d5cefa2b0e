"""The state of optimizers: its forms, by parameter name or index, and probes that find out what a class keeps and sums."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NoReturn, cast, get_args

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.collectives.owned import as_sent, full_tensor_of, sum_bytes
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError, LayoutError, StateError
from shardwise.optim.slices import (
    MakeOptimizer,
    ParamSlice,
    PerSlice,
    copied,
    in_order_of,
    known_base,
    local_boxes,
    local_of,
)
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


# ---- Sums over the elements of sharded tensors, which are also summed over ranks.

# takes this rank's number, which may be overwritten, and returns the sum over ranks
AddUp = Callable[[torch.Tensor], torch.Tensor]

_SUMS = ("sum", "dot", "vdot", "count_nonzero", "any")  # reductions that accept an empty shard
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")


class SumsOverRanks:
    """Sums over the elements of ``tensors`` that operations have computed are also summed over ranks.

    A result computed element by element from such tensors is per element too; a summed number is not, nor is what is
    computed from numbers.  The program decides which operations sum, not shapes, so that it is the same on every rank,
    even one with empty shards.

    Args:
        tensors: shards, their gradients and their state.
        add_up: sums one number over ranks.

    Attributes:
        num_sums: number of sums so far.

    Raises: ConfigError, on every rank, for a number that does not follow from the ranks' numbers, such as a mean.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], add_up: AddUp) -> None:
        self._add_up = add_up
        self._per_element: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._follow(tensor)

    def after(self, func: Any, given: tuple[Any, Any], out: object) -> None:
        """Sum over ranks what ``func(*given[0], **given[1])`` has summed, in ``out``; for :func:`torch_private.watching`."""
        inputs = [each for each in tensors_in(given) if self._is_per_element(each)]
        numbers = [each for each in tensors_in(out) if each.dim() == 0 and not self._is_per_element(each)]
        if numbers and inputs and all(each.dim() > 0 for each in inputs):
            self._take(func, given[0], numbers)
        elif inputs:
            for tensor in tensors_in(out):
                self._follow(tensor)

    def _take(self, func: Any, args: tuple[Any, ...], numbers: Sequence[torch.Tensor]) -> None:
        name = func.overloadpacket.__name__
        power = float(args[1]) if name in _NORMS and len(args) > 1 and args[1] is not None else 2.0
        if name not in (*_SUMS, *_NORMS) or not 0 < power < math.inf:
            raise ConfigError(
                f"the optimizer computes {name} over all elements of a tensor, which cannot be computed from its shards; "
                "pass update='whole_matrix' if it updates every parameter separately"
            )
        for number in numbers:
            if name in _NORMS:
                number.copy_(self._add_up(number**power) ** (1 / power))
            else:
                number.copy_(self._add_up(number.int() if number.dtype is torch.bool else number.clone()))

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._per_element[id(storage)] = weakref.ref(storage)

    def _is_per_element(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        found = self._per_element.get(id(storage))
        return found is not None and found() is storage


def per_element_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of ``optimizer`` with a number per element: parameters, gradients, and state of the same shape."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params if param.grad is not None]
    states = [
        value
        for param in params
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape
    ]
    return [*params, *gradients, *states]


# ---- Probes of optimizers on tensors of their own: the state that they create, and whether they treat every element
# alone. A list of names could not cover user classes, and a wrong guess would silently train another optimizer.

# Few elements reveal factors and norms. Many, in a number that any block size divides, reveal state per block: such
# optimizers have plain state for tensors that are small or no multiple of a block.
_SHAPES = ((6, 8), (256, 256))
_SCALES = (1.0, 1e-3)


@dataclass(frozen=True, slots=True)
class Probe:
    """An optimizer, with the ``options`` of a param group, that is tried out on tensors of its own on ``device``.

    What the optimizer raises is raised here.
    """

    make: MakeOptimizer
    options: Mapping[str, Any]
    device: torch.device

    def why_not_cut(self) -> str | None:
        """Return why the optimizer must not get parts of tensors; None if no reason is found.

        Cost: four steps on 65,536 elements; four more if it takes sums.
        """
        kinds: list[object] = []
        for shape, scale in zip(_SHAPES, _SCALES, strict=True):
            noise = torch.Generator("cpu").manual_seed(0)
            start, *gradients = (scale * torch.randn(shape, generator=noise, device="cpu") for _ in range(3))
            sizes = [start.numel() * 20 // 48 // 2 * 2, start.numel() - start.numel() * 20 // 48 // 2 * 2]
            (whole,), states = self._stepped([start], [[gradient] for gradient in gradients])
            for state in states:
                reason = why_not_elementwise(state, start.shape)
                if reason is not None:
                    return reason
            kinds.append([{k: (type(v), getattr(v, "dtype", None)) for k, v in state.items()} for state in states])
            if kinds[0] != kinds[-1]:  # a shard may be on the other side of the limit than the whole
                return "keeps the state of large tensors in another form than that of small ones"
            most = 1e-4 * (whole.cpu() - start).abs().max() + 1e-6 * scale
            cut = [list(gradient.flatten().split(sizes)) for gradient in gradients]
            parts, _ = self._stepped(list(start.flatten().split(sizes)), cut)
            if not _largest_gap(whole, parts) <= most:
                return "updates a tensor that is cut in two in another way than the whole"
            if self.takes_sums() and not _largest_gap(whole, self._stepped_by_halves(start, gradients, sizes)) <= most:
                return "takes sums over all elements of a tensor, and more than those"
        return None

    def takes_sums(self) -> bool:
        """Return True if steps sum over elements; over shards, that would be one rank's sum.  Cost: two small steps.

        Raises: ConfigError for a number that does not follow from those of shards.
        """
        ones = torch.ones(_SHAPES[0], device="cpu")
        return bool(self._sums_in(ones, [ones, ones]))

    def why_not_alone(self) -> str | None:
        """Return :meth:`why_not_cut`, or that the optimizer takes sums, which an optimizer with some of the slices cannot."""
        has_sums = "sums over all elements of all parameters"
        return self.why_not_cut() or (has_sums if self.takes_sums() else None)

    def _sums_in(self, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sums: list[torch.Tensor] = []

        def note(number: torch.Tensor) -> torch.Tensor:
            sums.append(number.clone())
            return number

        self._stepped([start], [[gradient] for gradient in gradients], note)
        return sums

    def _stepped_by_halves(
        self, start: torch.Tensor, gradients: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return two parts of ``start``, each stepped by an optimizer of its own that gets the sums of the whole."""
        sums, halves = self._sums_in(start, gradients), list[torch.Tensor]()
        for number, part in enumerate(start.flatten().split(sizes)):
            rows = [[gradient.flatten().split(sizes)[number]] for gradient in gradients]
            of_whole = iter(sums)
            halves += self._stepped([part], rows, lambda _, left=of_whole: next(left))[0]
        return halves

    def _stepped(
        self, start: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]], add_up: AddUp | None = None
    ) -> tuple[list[torch.Tensor], list[Mapping[str, Any]]]:
        tensors = [tensor.to(self.device, copy=True) for tensor in start]
        optimizer = _made(self.make, [{**self.options, "params": tensors}])
        for row in gradients:
            for tensor, gradient in zip(tensors, row, strict=True):
                tensor.grad = gradient.to(self.device, copy=True)
            watch = nullcontext()
            if add_up is not None:
                watch = torch_private.watching(SumsOverRanks(per_element_of(optimizer), add_up).after)
            with watch:
                torch_private.step_inside(optimizer)  # hooks of user code are not told of trials
        return tensors, [optimizer.state.get(tensor, {}) for tensor in tensors]


def _largest_gap(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return (whole.cpu().flatten() - torch.cat([part.cpu() for part in parts])).abs().max()


def states_after_zeros(make: MakeOptimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the state that a step creates for each tensor of ``groups``, in order; neither tensors nor optimizer change.

    Another optimizer steps on zeros, so names, shapes and dtypes are right and values are meaningless.
    """
    stand_ins = [[torch.zeros_like(tensor, requires_grad=False) for tensor in group["params"]] for group in groups]
    for tensor in (tensor for tensors in stand_ins for tensor in tensors):
        tensor.grad = torch.zeros_like(tensor)
    probe = _made(make, [{**options_of(g), "params": tensors} for g, tensors in zip(groups, stand_ins, strict=True)])
    torch_private.step_inside(probe)
    return [dict(probe.state.get(tensor, {})) for tensors in stand_ins for tensor in tensors]


def _made(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer that may step: schedule-free ones, for example, require a call of ``train()`` before."""
    optimizer = make(groups)
    train: object = getattr(optimizer, "train", None)
    if callable(train):
        train()
    return optimizer


def why_not_elementwise(state: Mapping[str, Any], shape: torch.Size) -> str | None:
    """Return which entry in the state of a tensor of ``shape`` is neither plain numbers per element nor a single number."""
    for key, value in state.items():
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() == 0
            or (type(value) is torch.Tensor and value.numel() <= 1)
        ):
            continue
        if type(value) is not torch.Tensor:
            return f"keeps state {key!r} as {type(value).__name__}, in a form of its own"
        if value.shape != shape:
            return f"keeps state {key!r} of shape {tuple(value.shape)} for a tensor of shape {tuple(shape)}"
    return None


# ---- Find out, before a load changes anything, that saved state is that of another optimizer class.

# Options that torch's schedulers add to param groups, whatever the class.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
# Options that change no name of state; some of their values need another device than the probe's.
_OF_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def why_other_class(
    optimizer: Optimizer,
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    states: Iterable[tuple[int, Collection[str]]],
    saved_class: str | None = None,
) -> str | None:
    """Return why ``optimizer`` cannot take over a saved param group; None if nothing speaks against it.

    Options of the class come from the checkpoint, so that SGD without momentum loads into SGD with momentum, as in torch.

    Args:
        own, saved: the options of the group here and there.
        states: per parameter with saved state, its number of dims and the names of its state.
        saved_class: the name of the class, where the checkpoint has it.
    """
    kind = type(optimizer)
    foreign = saved.keys() - own.keys() - _OF_SCHEDULERS
    lacking = optimizer.defaults.keys() - saved.keys() if saved else set[str]()
    there = [(dim, set(names)) for dim, names in states if names]
    here = _names_of_state(kind, {**own, **saved}, {dim for dim, _ in there})
    is_renamed = saved_class is not None and saved_class not in [base.__name__ for base in kind.__mro__]
    odd = [(here[dim], names) for dim, names in there if dim in here and here[dim] != names]
    if not (
        any(wanted - names for wanted, names in odd)
        or (foreign and (lacking or odd))
        or (is_renamed and (foreign or lacking))
    ):
        return None
    wanted, found = odd[0] if odd else (set[str](), there[0][1] if there else set[str]())
    return (
        f"it is the state of {saved_class or 'another optimizer class'} (state {_listed(found)}; options that "
        f"{kind.__name__} does not have: {_listed(foreign)}), and {kind.__name__} needs "
        f"{f'state {_listed(wanted)} and ' if odd else ''}options that are not there: {_listed(lacking)}. Load it into "
        "an optimizer of the class that was saved, or load the model without the optimizer"
    )


def _names_of_state(kind: type[Optimizer], options: Mapping[str, Any], dims: Collection[int]) -> dict[int, set[str]]:
    """Return the names of the state of a parameter by its number of dims; empty for a class that is not torch's."""
    base = known_base(kind)
    if base is None or not dims:
        return {}
    params = [torch.zeros([2] * dim, device="cpu") for dim in dims]
    wanted = {key: value for key, value in options_of(options).items() if key not in _OF_KERNELS}
    states = states_after_zeros(lambda groups: base(groups), [{**wanted, "params": params}])  # pyright: ignore
    return {dim: set(state) for dim, state in zip(dims, states, strict=True)}


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
