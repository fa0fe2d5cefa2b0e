"""Make the ranks of a group equal: in what they hold, and in how far they have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwise.comm.watched import await_collective
from shardwise.errors import ConfigError

_MAX_BYTES = 32 * 2**20  # per broadcast: large enough for bandwidth, small enough for memory


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the group's first rank; shapes and dtypes agree on all ranks.

    Of wrapper subclasses the tensors within are overwritten.
    Raises: ConfigError for a subclass that does not show them (``__tensor_flatten__``).
    """
    if group.size() == 1:
        return
    tensors = [part for tensor in tensors for part in _plain(tensor)]
    source = dist.get_global_rank(group, 0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for batch in (batch for kind in by_kind.values() for batch in _batches(kind)):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            await_collective(dist.broadcast(flat, source, group=group, async_op=True), group)
            for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    if cast(Any, type(tensor)).__torch_dispatch__ is cast(Any, torch.Tensor).__torch_dispatch__:
        return [tensor]
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ConfigError(
            f"a {type(tensor).__name__} cannot be made equal on all ranks, because its class does not define "
            "__tensor_flatten__. Give its parameter in ignored_params, or call replicate(module, mesh=mesh), which expects "
            "equal values"
        )
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    batches: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if not batches or num_bytes > room:
            batches.append([])
            room = _MAX_BYTES
        batches[-1].append(tensor)
        room -= num_bytes
    return batches


def all_have_come(group: dist.ProcessGroup) -> None:
    """Return once all ranks of ``group`` have called this: one all-reduce of one number."""
    if group.size() > 1:
        await_collective(
            dist.all_reduce(torch.ones((), dtype=torch.int32, device="cpu"), group=group, async_op=True), group
        )
