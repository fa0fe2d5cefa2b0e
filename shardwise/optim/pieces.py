"""Parameters of any kind as pieces: the plain local tensors that a rank updates, and where they lie in the whole."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise import torch_private
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RowBox:
    """A rectangular part of a tensor: where it starts and how large it is, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of ``whole`` that the box covers."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != whole.size(dim):
                whole = whole.narrow(dim, min(start, whole.size(dim)), size)
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class ParamSlice:
    """One local tensor of a parameter.

    Attributes:
        shard: which local shard of a ShardedTensor; 0 for other kinds.
        box: its place in the whole parameter.
        stand_in: an empty tensor for a ShardedTensor of which this rank holds nothing, so that every parameter has
            state on every rank; None for pieces that exist.
    """

    name: str
    param: torch.Tensor
    shard: int
    box: RowBox
    stand_in: torch.Tensor | None = None


class PerPiece(tuple[torch.Tensor, ...]):
    """A state value with a number per element of the parameter: one tensor per piece, in the order of the pieces."""

    __slots__ = ()


def copied(value: Any) -> Any:
    """Return a copy of a state value; of a tensor in a form of its own, which need not know ``clone``, by pickling it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if type(value) is torch.Tensor else pickle.loads(pickle.dumps(value))


def in_order_of(param: torch.Tensor, value: Any) -> Any:
    """Return ``value`` with the strides of ``param`` if shapes match: fused optimizers pair elements by memory order."""
    if type(value) is not torch.Tensor or value.shape != param.shape:
        return value
    if value.stride() == torch.empty_like(param, device="meta").stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def state_of_piece(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the state of piece ``index``; what all pieces share is copied, since each optimizer tensor counts alone."""
    return {key: value[index] if isinstance(value, PerPiece) else copied(value) for key, value in values.items()}


def is_sharded_tensor(param: torch.Tensor) -> TypeGuard[ShardedTensor]:
    """Return True for torch's older kind of sharded tensors."""
    return isinstance(param, ShardedTensor)


def is_sharded(param: torch.Tensor) -> bool:
    """Return True if ranks hold different parts of ``param``; the same answer on every rank."""
    if isinstance(param, ShardedTensor):
        return torch_private.process_group_of(param).size() > 1
    if not isinstance(param, DTensor):
        return False
    return any(
        not isinstance(placement, Replicate) and param.device_mesh.size(axis) > 1
        for axis, placement in enumerate(param.placements)
    )


def local_boxes(tensor: ShardedTensor) -> list[RowBox]:
    """Return where the local shards lie; empty ones start at most at the end."""
    shape = tuple(tensor.size())
    return [
        RowBox(
            tuple(min(start, size) for start, size in zip(shard.metadata.shard_offsets, shape, strict=True)),
            tuple(shard.metadata.shard_sizes),
        )
        for shard in tensor.local_shards()
    ]


def pieces_of(name: str, param: torch.Tensor) -> list[ParamSlice]:
    """Return this rank's pieces of ``param``, at least one.

    Raises: ConfigError for a DTensor with partial sums, which has no values to update.
    """
    if isinstance(param, ShardedTensor):
        boxes = local_boxes(param)
        if boxes:
            return [ParamSlice(name, param, index, box) for index, box in enumerate(boxes)]
        shape = (0, *param.shape[1:])
        device = torch.device("cpu") if not torch.cuda.is_available() else param.device
        stand_in = torch.empty(shape, dtype=param.dtype, device=device)
        return [ParamSlice(name, param, 0, RowBox((0,) * len(shape), shape), stand_in)]
    if isinstance(param, DTensor):
        if any(isinstance(placement, Partial) for placement in param.placements):
            raise ConfigError(
                f"{name}: placements {param.placements} hold partial sums; redistribute to Replicate or Shard first"
            )
        offsets, sizes = torch_private.chunks_of(param)[0]
        return [ParamSlice(name, param, 0, RowBox(offsets, sizes))]
    return [ParamSlice(name, param, 0, RowBox((0,) * param.dim(), tuple(param.shape)))]


def local_of(piece: ParamSlice) -> torch.Tensor:
    """Return the tensor that holds the piece now; user code may have put another one in place of the last."""
    param = piece.param
    if isinstance(param, DTensor):
        return torch_private.local_of(param)
    if isinstance(param, ShardedTensor):
        return param.local_shards()[piece.shard].tensor if piece.stand_in is None else piece.stand_in
    return param


def gradient_of(piece: ParamSlice) -> torch.Tensor | None:
    """Return the gradient of the piece, placed like it; None if there is none.

    A DTensor's gradient with other placements than its parameter is redistributed: on its local values a step would be
    silently wrong.
    """
    param = piece.param
    if isinstance(param, DTensor):
        gradient = param.grad
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise ConfigError(f"{piece.name}: the gradient is a plain tensor, expected a DTensor like the parameter")
        spec, wanted = torch_private.spec_of(gradient), torch_private.spec_of(param)
        if spec is not wanted and spec.placements != wanted.placements:
            gradient = gradient.redistribute(placements=param.placements)
        local = torch_private.local_of(gradient)
        return local if type(local) is torch.Tensor else torch_private.wait_tensor(local)
    if isinstance(param, ShardedTensor):
        if piece.stand_in is not None:
            return torch.empty_like(piece.stand_in)
        return param.local_shards()[piece.shard].tensor.grad
    return param.grad


def clear_gradient(pieces: Sequence[ParamSlice], set_to_none: bool) -> None:
    """Drop the gradients of one parameter's pieces, or make them zero."""
    param = pieces[0].param
    holders = [local_of(piece) for piece in pieces] if isinstance(param, ShardedTensor) else [param]
    for holder in holders:
        if holder.grad is None:
            continue
        if set_to_none:
            holder.grad = None
        else:
            gradient = holder.grad.detach()
            if gradient is not holder.grad and holder.grad.grad_fn is not None:
                holder.grad = gradient
            torch_private.local_of(gradient).zero_()
