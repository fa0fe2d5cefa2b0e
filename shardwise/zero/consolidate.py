"""The state of a ZeroRedundancyOptimizer as one plain dict: streamed to one rank, and loaded from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from shardwise.comm.board import Board
from shardwise.comm.owned import gather_objects, receive_tensor, send_tensor
from shardwise.errors import ConfigError, LayoutError
from shardwise.layout.owners import OwnedSlice
from shardwise.optim.forms import load_indexed
from shardwise.optim.pieces import copied
from shardwise.zero.checks import Partition
from shardwise.zero.local import LocalOptimizer
from shardwise.zero.local_pieces import LocalPiece, elements_of, flat_view
from shardwise.zero.share import Share

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

    piece: OwnedSlice
    values: dict[str, Any]


def consolidate(local: LocalOptimizer, board: Board, to: int) -> Consolidated:
    """Stream all state to group rank ``to``.  Collective; every rank sends in the order of its pieces.

    Tensors are sent from where they lie and received in place: the extra memory is the state itself on ``to`` and, on
    senders, nothing (a copy of one tensor if it has gaps in memory).
    """
    what = f"consolidate_state_dict(to={to})"
    share = local.share
    mine = sorted(share.local_pieces, key=lambda own: (own.piece.tensor, own.piece.start))
    described = [PieceState(own.piece, _describe(own.piece, local.state_of(own), share.partition)) for own in mine]
    gathered = gather_objects(described, to, board, what)
    if gathered is None:
        for own in mine:
            for value in local.state_of(own).values():
                if _is_streamed(value, own.piece, share.partition):
                    send_tensor(_flat(value), to, board, what)
        return Consolidated(to, None)
    states = {own.piece: local.state_of(own) for own in mine}
    whole: dict[int, StateOfParam] = {}
    merged = [item for items in gathered for item in items if item.values]
    for item in sorted(merged, key=lambda item: (item.piece.tensor, item.piece.start)):
        values = whole.setdefault(item.piece.tensor, {})
        for name, value in item.values.items():
            if not isinstance(value, Described):
                values.setdefault(name, value)
                continue
            target = _target(values, name, value, item.piece, share)
            if item.piece in states:
                target.copy_(_flat(states[item.piece][name]))
            else:
                receive_tensor(target, item.piece.owner, board, what)
    return Consolidated(to, whole)


def whole_state_dict(state: Mapping[int, StateOfParam], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return consolidated ``state`` as the plain optimizer's state dict."""
    indices = iter(range(sum(len(group["params"]) for group in groups)))
    numbered = [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]
    return {"state": {index: dict(values) for index, values in state.items()}, "param_groups": numbered}


def load_whole(local: LocalOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Give the local optimizer its share of a whole ``state_dict``, as copies; options come from the dict.

    Raises: ConfigError if the groups do not match, LayoutError if a state tensor does not fit its parameter.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    load_share(local, state_dict, keys, _share_of)


def load_share(
    local: LocalOptimizer,
    state_dict: Mapping[str, Any],
    keys: Sequence[Any],
    take: Callable[[LocalPiece, str, Any], Any],
) -> None:
    """Let the local optimizer load state and options of ``state_dict``.

    ``keys``: of each parameter in its "state".  ``take``: returns a piece's part of a value, given its name.
    Raises: ConfigError if the groups do not match.
    """
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    _check_groups([len(group["params"]) for group in groups], local.groups)
    states: list[StateOfParam | None] = []
    for own in local.share.local_pieces:
        values = state_dict["state"].get(keys[own.piece.tensor])
        states.append({name: take(own, name, value) for name, value in values.items()} if values else None)
    load_indexed(local.optim, states, groups)
    local.pull_options()


def _check_groups(sizes: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
    expected = [len(group["params"]) for group in groups]
    if len(sizes) != len(expected):
        raise ConfigError(
            f"loaded state dict has a different number of parameter groups: {len(sizes)}, expected {len(expected)}"
        )
    if list(sizes) != expected:
        raise ConfigError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: found "
            f"{list(sizes)} parameters, expected {expected}"
        )


def _is_streamed(value: object, piece: OwnedSlice, kind: Partition) -> TypeGuard[torch.Tensor]:
    if type(value) is not torch.Tensor or value.dim() == 0:  # what has a form of its own travels as an object
        return False
    return kind == "whole" or tuple(value.shape) == (piece.numel,)


def _describe(piece: OwnedSlice, state: Mapping[str, Any], kind: Partition) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        if _is_streamed(value, piece, kind):
            strides = value.stride() if _flat(value).data_ptr() == value.data_ptr() else _dense_strides(value.shape)
            found[name] = Described(tuple(value.shape), strides, value.dtype, value.device.type == "cpu")
        else:
            found[name] = copied(value.cpu() if type(value) is torch.Tensor else value)
    return found


def _flat(value: torch.Tensor) -> torch.Tensor:
    try:
        return flat_view(value.detach())
    except LayoutError:
        return value.detach().contiguous().view(-1)


def _dense_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _share_of(local: LocalPiece, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if local.is_param or value.dim() == 0:
        return copied(value)
    if value.shape != local.param.shape:
        raise LayoutError(
            f"state {name!r} of parameter {local.piece.tensor} has shape {tuple(value.shape)}, expected "
            f"{tuple(local.param.shape)}: partition='even' needs element-wise state; use partition='whole'"
        )
    return elements_of(local.piece, local.param, value.detach()).clone()


def _target(values: StateOfParam, name: str, value: Described, piece: OwnedSlice, share: Share) -> torch.Tensor:
    param = share.params[piece.tensor]
    device = torch.device("cpu") if value.on_cpu else param.device
    if share.partition == "whole":
        values[name] = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        return flat_view(values[name])
    if name not in values:
        values[name] = torch.empty_like(param, dtype=value.dtype, device=device, requires_grad=False)
    return flat_view(values[name])[piece.start : piece.stop]
