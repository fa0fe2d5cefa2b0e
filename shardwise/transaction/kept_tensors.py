"""Copies of tensors as they were, put back in place: whoever holds a tensor sees the old values again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from shardwise import torch_private
from shardwise.optim.owned_gradient import OwnedGradient
from shardwise.optim.pieces import copied


class Copies:
    """Copies of some tensors, in memory that is used again for tensors of the same shapes, as those of the next step are."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> int:
        """Copy ``tensors``, in place of those of last time; return the bytes.  DTensors: what this rank holds of them."""
        found = torch_private.locals_of(tensors)
        with torch.no_grad():
            if _are_alike(found, self._copies) and _are_plain(found):
                torch_private.copy_all(self._copies, found)
            else:
                self._copies = [copied(tensor.detach()) for tensor in found]
        self._tensors = found
        return sum(tensor.numel() * tensor.element_size() for tensor in found)

    def put_back(self) -> None:
        """Write the copies to the tensors they were taken of."""
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.detach().copy_(copy)

    def let_go(self) -> None:
        """Hold the tensors no longer; keep the memory of the copies."""
        self._tensors = []


def _are_alike(found: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(copies) and all(
        tensor.shape == copy.shape and tensor.dtype is copy.dtype and tensor.device == copy.device
        for tensor, copy in zip(found, copies, strict=True)
    )


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided for tensor in tensors)


def holders_of(param: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of this rank that hold ``param`` and its gradient: itself, or the shards of a ShardedTensor."""
    return [shard.tensor for shard in param.local_shards()] if isinstance(param, ShardedTensor) else [param]


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """``.grad`` of ``holder`` as it was: the object, and what lies in it."""

    holder: torch.Tensor
    gradient: torch.Tensor
    local: torch.Tensor
    fresh: torch.Tensor | None


class KeptGradients:
    """The gradients that parameters have when a step begins: of earlier microbatches, where these are accumulated."""

    def __init__(self) -> None:
        self._holders: list[torch.Tensor] = []
        self._found: list[_Gradient] = []
        self._copies = Copies()

    def keep(self, holders: Sequence[torch.Tensor]) -> int:
        """Copy the gradients of ``holders``; return the bytes: 0 where all are None."""
        self._holders = list(holders)
        self._found = [_as_it_is(each, each.grad) for each in holders if each.grad is not None]
        return self._copies.take([part for each in self._found for part in _parts(each)]) if self._found else 0

    def let_go(self) -> None:
        """Hold no gradient any longer."""
        self._holders, self._found = [], []
        self._copies.let_go()

    def put_back(self) -> None:
        """Set every gradient to what it was."""
        kept = {id(each.holder): each for each in self._found}
        for holder in self._holders:
            was = kept.get(id(holder))
            if was is None:
                if holder.grad is not None:
                    holder.grad = None
                continue
            if isinstance(was.gradient, OwnedGradient):
                was.gradient.fresh = was.fresh
            elif torch_private.local_of(was.gradient) is not was.local:
                torch_private.set_local(was.gradient, was.local)
            if holder.grad is not was.gradient:
                holder.grad = was.gradient
        if self._found:
            self._copies.put_back()


def _as_it_is(holder: torch.Tensor, gradient: Any) -> _Gradient:
    fresh = gradient.fresh if isinstance(gradient, OwnedGradient) else None
    return _Gradient(holder, gradient, torch_private.local_of(gradient), fresh)


def _parts(was: _Gradient) -> list[torch.Tensor]:
    return list(was.gradient.parts) if isinstance(was.gradient, OwnedGradient) else [was.local]


class KeptBuffers:
    """The buffers of ``model``: running statistics, which a forward changes."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [torch_private.buffers_of(module) for module in model.modules()]
        self._found: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self._copies = Copies()

    def keep(self) -> int:
        """Copy them; return the bytes."""
        self._found = [(place, name, buffer) for place in self._places for name, buffer in place.items()]
        buffers = {id(buffer): buffer for _, _, buffer in self._found if buffer is not None}
        return self._copies.take(list(buffers.values())) if buffers else 0

    def put_back(self) -> None:
        """Set every buffer to what it was."""
        for place, name, buffer in self._found:
            place[name] = buffer
        if any(buffer is not None for _, _, buffer in self._found):
            self._copies.put_back()
