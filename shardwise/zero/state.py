"""The state of a ZeroRedundancyOptimizer as one plain dict: streamed to one rank, and loaded from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from shardwise.comm.owned import gather_objects, receive_tensor, send_tensor
from shardwise.errors import ConfigError, LayoutError
from shardwise.layout.owners import Piece
from shardwise.optim.pieces import copied
from shardwise.zero.checks import Partition
from shardwise.zero.pieces import LocalPiece, flat_like, flat_view

if TYPE_CHECKING:
    from shardwise.api.zero import ZeroRedundancyOptimizer

StateOfParam = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The state as of the last consolidation to rank ``to``; ``state`` is None on the other ranks."""

    to: int
    state: dict[int, StateOfParam] | None


@dataclass(frozen=True, slots=True)
class Described:
    """A state tensor that will be sent on its own: what the receiver must allocate."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class PieceState:
    """State of one piece: per name a description of a tensor to come, or the value itself (scalars, objects)."""

    piece: Piece
    values: dict[str, Any]


def consolidate(zero: ZeroRedundancyOptimizer, to: int) -> Consolidated:
    """Stream all state to group rank ``to``.  Collective; every rank sends in the order of its pieces.

    Tensors are sent from where they lie and received in place: the extra memory is the state itself on ``to`` and, on
    senders, nothing (a copy of one tensor if it has gaps in memory).
    """
    what = f"consolidate_state_dict(to={to})"
    mine = sorted(zero.local_pieces, key=lambda local: (local.piece.tensor, local.piece.start))
    described = [PieceState(local.piece, _describe(zero, local)) for local in mine]
    gathered = gather_objects(described, to, zero.board, what)
    if gathered is None:
        for tensor in _streamed(zero, mine):
            send_tensor(tensor, to, zero.board, what)
        return Consolidated(to, None)
    own = {local.piece: local for local in mine}
    state: dict[int, StateOfParam] = {}
    merged = [item for items in gathered for item in items if item.values]
    for item in sorted(merged, key=lambda item: (item.piece.tensor, item.piece.start)):
        values = state.setdefault(item.piece.tensor, {})
        for name, value in item.values.items():
            if not isinstance(value, Described):
                values.setdefault(name, value)
                continue
            target = _target(values, name, value, item.piece, zero)
            if item.piece in own:
                target.copy_(_flat(zero.optim.state[own[item.piece].tensor][name]))
            else:
                receive_tensor(target, item.piece.owner, zero.board, what)
    return Consolidated(to, state)


def load_local(zero: ZeroRedundancyOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Give the local optimizer its share of a whole ``state_dict``, as copies; options come from the dict.

    Raises: ConfigError if the groups do not match, LayoutError if a state tensor does not fit its parameter.
    """
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    check_groups([len(group["params"]) for group in groups], zero)
    keys = [key for group in groups for key in group["params"]]
    state = state_dict["state"]
    found: dict[int, StateOfParam] = {}
    index_of = {id(local.tensor): local for local in zero.local_pieces}
    for index, tensor in enumerate(_local_tensors(zero)):
        local = index_of[id(tensor)]
        values = state.get(keys[local.piece.tensor])
        if values:
            found[index] = {name: _share(local, name, value) for name, value in values.items()}
    load_into(zero, found, groups)


def load_into(
    zero: ZeroRedundancyOptimizer, state: Mapping[int, StateOfParam], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Let the local optimizer load ``state`` (by its own indices) and the options of ``groups``."""
    counter = iter(range(len(zero.local_pieces)))
    options = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]
    local_groups = [
        {**option, "params": [next(counter) for _ in group["params"]]}
        for option, group in zip(options, zero.optim.param_groups, strict=True)
    ]
    zero.optim.load_state_dict({"state": dict(state), "param_groups": local_groups})


def check_groups(sizes: Sequence[int], zero: ZeroRedundancyOptimizer) -> None:
    """Raises: ConfigError unless ``sizes`` are the numbers of parameters of the optimizer's groups."""
    expected = [len(group["params"]) for group in zero.param_groups]
    if len(sizes) != len(expected):
        raise ConfigError(
            f"loaded state dict has a different number of parameter groups: {len(sizes)}, expected {len(expected)}"
        )
    if list(sizes) != expected:
        raise ConfigError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: found "
            f"{list(sizes)} parameters, expected {expected}"
        )


def _local_tensors(zero: ZeroRedundancyOptimizer) -> Iterator[torch.Tensor]:
    for group in zero.optim.param_groups:
        yield from group["params"]


def _is_streamed(value: object, piece: Piece, kind: Partition) -> TypeGuard[torch.Tensor]:
    if type(value) is not torch.Tensor or value.dim() == 0:  # what has a form of its own travels as an object
        return False
    return kind == "whole" or tuple(value.shape) == (piece.numel,)


def _describe(zero: ZeroRedundancyOptimizer, local: LocalPiece) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in zero.optim.state.get(local.tensor, {}).items():
        if _is_streamed(value, local.piece, zero.partition):
            strides = value.stride() if _flat(value).data_ptr() == value.data_ptr() else _dense_strides(value.shape)
            found[name] = Described(tuple(value.shape), strides, value.dtype, value.device.type == "cpu")
        else:
            found[name] = copied(value.cpu() if type(value) is torch.Tensor else value)
    return found


def _streamed(zero: ZeroRedundancyOptimizer, mine: Sequence[LocalPiece]) -> Iterator[torch.Tensor]:
    for local in mine:
        for value in zero.optim.state.get(local.tensor, {}).values():
            if _is_streamed(value, local.piece, zero.partition):
                yield _flat(value)


def _flat(value: torch.Tensor) -> torch.Tensor:
    try:
        return flat_view(value.detach())
    except LayoutError:
        return value.detach().contiguous().view(-1)


def _dense_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _share(local: LocalPiece, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if local.is_param or value.dim() == 0:
        return copied(value)
    if value.shape != local.param.shape:
        raise LayoutError(
            f"state {name!r} of parameter {local.piece.tensor} has shape {tuple(value.shape)}, expected "
            f"{tuple(local.param.shape)}: partition='even' needs element-wise state; use partition='whole'"
        )
    return flat_like(value.detach(), local.param)[local.piece.start : local.piece.stop].clone()


def _target(
    values: StateOfParam, name: str, value: Described, piece: Piece, zero: ZeroRedundancyOptimizer
) -> torch.Tensor:
    param = zero.all_params[piece.tensor]
    device = torch.device("cpu") if value.on_cpu else param.device
    if zero.partition == "whole":
        values[name] = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        return flat_view(values[name])
    if name not in values:
        values[name] = torch.empty_like(param, dtype=value.dtype, device=device, requires_grad=False)
    return flat_view(values[name])[piece.start : piece.stop]
