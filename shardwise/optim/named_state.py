"""State under parameter names, as values that checkpoints can save and reshard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private
from shardwise.comm.matrices import sum_bytes
from shardwise.errors import LayoutError, StateError
from shardwise.optim.pieces import ParamSlice, PerPiece, copied, local_boxes, local_of


class ByName(dict[str, Any]):
    """A dict keyed by parameter names that also takes a parameter's index in place of its name.

    torch's ``get_optimizer_state_dict`` renames keys through indices; here that leads back to the names.  Pickles and
    copies as an OrderedDict.

    Example:
        >>> state = ByName(["weight", "bias"], {"bias": 1})
        >>> state[0] = 2
        >>> state
        {'bias': 1, 'weight': 2}
    """

    def __init__(self, names: Sequence[str], entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._names = tuple(names)

    def __setitem__(self, key: str | int, value: Any) -> None:
        super().__setitem__(self._names[key] if isinstance(key, int) else key, value)

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(self._names[key] if isinstance(key, int) else key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (list(self.items()),))


class NamedGroup(dict[str, Any]):
    """A param group whose ``"params"`` are names; indices put there become names."""

    def __init__(self, names: Sequence[str], entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._names = tuple(names)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            value = [self._names[item] if isinstance(item, int) else item for item in value]
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (list(self.items()),))


class OwnGroup(dict[str, Any]):
    """A param group of parameters with names, which ``group["param_names"]`` gives.

    They are no entry: torch's ``set_optimizer_state_dict`` asks checkpoints for every entry of a group, and those of
    optimizers that were not given names have no such.
    """

    def __init__(self, entries: Mapping[str, Any], names: Sequence[str]) -> None:
        super().__init__(entries)
        self._names = list(names)

    def __missing__(self, key: str) -> Any:
        if key == "param_names":
            return list(self._names)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry, the names of the parameters included."""
        return list(self._names) if key == "param_names" else super().get(key, default)


def refuse_other_state() -> NoReturn:
    """Raises: StateError for state that user code puts in place, or takes off, where no update would see it."""
    raise StateError(
        "the state of a sharded optimizer was written to, where entries that are put there or taken off reach no update. "
        "Change tensors of it in place, call load_state_dict(), or build a new optimizer"
    )


class _ReadOnly:
    """A mapping that is read alone."""

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        refuse_other_state()

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


class HeldState(_ReadOnly, dict[Any, Any]):
    """State as users read it.  Pickles and copies as a dict.

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
    """The state of all parameters before there is any."""

    def __missing__(self, key: object) -> HeldState:
        return HeldState()


class StateView(_ReadOnly, Mapping[torch.Tensor, Mapping[str, Any]]):
    """The state of each parameter, read from where it lies now; tensors in it are the live ones."""

    def __init__(self, read: Callable[[], Mapping[torch.Tensor, Mapping[str, Any]]]) -> None:
        self._read = read

    def __getitem__(self, key: torch.Tensor) -> Mapping[str, Any]:
        return self._read()[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def wrap(pieces: Sequence[ParamSlice], value: Any) -> Any:
    """Return a state value as users see it: one per element is of the parameter's kind."""
    if not isinstance(value, PerPiece):
        return value
    first, param = value[0], pieces[0].param
    if isinstance(param, DTensor):
        spec = torch_private.spec_of(param)
        if first.dtype != param.dtype:
            spec = torch_private.make_spec(spec.mesh, spec.placements, param.shape, param.stride(), first.dtype)
        return torch_private.dtensor_from_local(first, spec)
    if isinstance(param, ShardedTensor):
        return torch_private.sharded_tensor_like(param, [] if pieces[0].stand_in is not None else list(value))
    return first


def unwrap(
    name: str, key: str, value: Any, pieces: Sequence[ParamSlice], is_elementwise: bool, adopt: bool = False
) -> Any:
    """Return a state value of any kind (DTensor, ShardedTensor, whole tensor) cut into the parameter's pieces.

    What is not per element comes back as it is; ``is_elementwise`` optimizers have such state as single numbers only.

    Copies, so that later steps do not write into what was loaded; with ``adopt`` what is placed like the parameter stays
    where it is.  Collective where a DTensor lies on another mesh or
    has other placements than the parameter.
    Raises: LayoutError if it does not fit.
    """
    param = pieces[0].param
    if isinstance(value, DTensor):
        if tuple(value.shape) != tuple(param.shape):
            raise LayoutError(_misfit(name, key, value, param))
        if isinstance(param, DTensor) and value.device_mesh == param.device_mesh:
            if adopt and value.placements == param.placements:
                return PerPiece([torch_private.wait_tensor(torch_private.local_of(value))])
            placed = value.redistribute(placements=param.placements)
            local = torch_private.wait_tensor(torch_private.local_of(placed))
            return PerPiece([local.clone()])
        value = value.full_tensor()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        held = [] if pieces[0].stand_in is not None else list(pieces)
        if local_boxes(value) == [piece.box for piece in held]:
            return PerPiece(
                [s.tensor if adopt else s.tensor.clone() for s in shards] or [_like_stand_in(pieces[0], value.dtype)]
            )
        value = gather_sharded(value)
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor and value.dim():
        if is_elementwise:
            raise LayoutError(
                f"{name}: state {key!r} is a {type(value).__name__}, a form of its own, expected plain numbers per element: "
                "it is that of another optimizer class"
            )
        return copied(value)
    if value.dim() and tuple(value.shape) == tuple(param.shape):
        if adopt and type(param) in (torch.Tensor, torch.nn.Parameter) and value.device == param.device:
            return PerPiece([value])
        return PerPiece(piece.box.cut(value).to(local_of(piece).device).clone() for piece in pieces)
    if is_elementwise and value.dim() and value.numel() > 1:
        raise LayoutError(_misfit(name, key, value, param))
    return copied(value)


def full_value(value: Any) -> Any:
    """Return a state value whole, as a plain tensor (its own memory) or as it is.  Collective for sharded ones."""
    if isinstance(value, DTensor):
        if all(isinstance(placement, Replicate) for placement in value.placements):
            return torch_private.local_of(value).detach().clone()
        return torch_private.wait_tensor(value.full_tensor().detach()).clone()
    if isinstance(value, ShardedTensor):
        return gather_sharded(value)
    return copied(value)


def gather_sharded(value: ShardedTensor) -> torch.Tensor:
    """Return the whole of a ShardedTensor on every rank.  Collective; moves twice the tensor's bytes."""
    group = torch_private.process_group_of(value)
    shards = value.local_shards()
    device = shards[0].tensor.device if shards else torch.device("cpu" if not torch.cuda.is_available() else "cuda")
    whole = torch.zeros(tuple(value.size()), dtype=value.dtype, device=device)
    for shard, box in zip(shards, local_boxes(value), strict=True):
        box.cut(whole).copy_(shard.tensor.detach())
    sum_bytes(whole, group)
    return whole


def _like_stand_in(piece: ParamSlice, dtype: torch.dtype) -> torch.Tensor:
    assert piece.stand_in is not None
    return torch.empty_like(piece.stand_in, dtype=dtype)


def _misfit(name: str, key: str, value: torch.Tensor, param: torch.Tensor) -> str:
    return (
        f"{name}: state {key!r} has shape {tuple(value.shape)}, expected that of the parameter, {tuple(param.shape)}. "
        "Load a state dict of names (state_dict() or full_state_dict()), not one of another rank's local tensors"
    )
