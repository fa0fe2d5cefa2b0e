"""Tensors from every rank to every rank in one all-to-all: shards to the owners of whole matrices, and back.

Collectives are looked up on ``torch.distributed`` when called.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from shardwise.black_box import note
from shardwise.comm.groups import group_of
from shardwise.comm.watched import await_collective
from shardwise.spans import span

_ALIGNMENT = 16  # bytes: views of any dtype may start at a multiple of it


class Expected(NamedTuple):
    """A tensor that will come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that hold different parts of the same tensors.

    Attributes:
        members: their global ranks, ascending.  rank: this one's place among them.
        group: None for a single rank.
    """

    members: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)


def ranks_of_group(group: dist.ProcessGroup) -> Ranks:
    """Return the ranks of ``group``, numbered as it numbers them."""
    members = tuple(dist.get_process_group_ranks(group))
    return Ranks(members, dist.get_rank(group), group)


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> Ranks:
    """Return the ranks that differ from this one along ``axes`` of ``mesh`` alone.

    Several axes need a group of their own unless they span the world; making one is collective over its ranks.
    """
    if len(axes) == 1:
        return ranks_of_group(mesh.get_group(axes[0]))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(coordinate))
    members = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    world = dist.group.WORLD
    assert world is not None
    if len(members) == world.size():
        return ranks_of_group(world)
    return ranks_of_group(group_of(members))


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``sends[r]`` to rank r and return what came from each rank, as ``expected[r]`` describes it.

    One all-to-all of bytes, whatever the dtypes.  The returned tensors are windows of one buffer on ``device``.
    """
    if ranks.group is None or ranks.size == 1:
        return [list(tensors) for tensors in sends]
    note("exchange", "", sends)
    out_sizes = [_packed_bytes([(t.numel(), t.dtype) for t in tensors]) for tensors in sends]
    in_sizes = [_packed_bytes([(_numel(e.shape), e.dtype) for e in items]) for items in expected]
    packed = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
    start = 0
    for tensors, num_bytes in zip(sends, out_sizes, strict=True):
        offset = start
        for tensor in tensors:
            if tensor.numel():
                _window(packed, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
            offset += _aligned(tensor.numel() * tensor.dtype.itemsize)
        start += num_bytes
    received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
    with span("", "exchange", "matrices", sum(out_sizes)):
        work = dist.all_to_all_single(received, packed, in_sizes, out_sizes, group=ranks.group, async_op=True)
        await_collective(work, ranks.group)
    found: list[list[torch.Tensor]] = []
    start = 0
    for items, num_bytes in zip(expected, in_sizes, strict=True):
        offset = start
        windows: list[torch.Tensor] = []
        for item in items:
            windows.append(_window(received, offset, item.shape, item.dtype))
            offset += _aligned(_numel(item.shape) * item.dtype.itemsize)
        found.append(windows)
        start += num_bytes
    return found


def exchange_objects(sends: Sequence[Any], ranks: Ranks, device: torch.device) -> list[Any]:
    """Send the picklable ``sends[r]`` to rank r; return what each rank sent here.  For descriptions, not for data."""
    if ranks.group is None or ranks.size == 1:
        return list(sends)
    payloads = [torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8) for item in sends]
    sizes = [torch.tensor([payload.numel()], device="cpu") for payload in payloads]
    counts = exchange([[size] for size in sizes], [[Expected((1,), torch.int64)]] * ranks.size, ranks, device)
    expected = [[Expected((int(count[0].item()),), torch.uint8)] for count in counts]
    arrived = exchange([[payload] for payload in payloads], expected, ranks, device)
    return [pickle.loads(window[0].cpu().numpy().tobytes()) for window in arrived]


def sum_bytes(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put together, in place, a contiguous tensor of which every rank holds a part and zeros elsewhere.

    Summed as bytes, so that negative zeros and nans come through unchanged.
    """
    if group.size() > 1:
        await_collective(dist.all_reduce(whole.view(-1).view(torch.uint8), group=group, async_op=True), group)


def sum_of(value: torch.Tensor, group: dist.ProcessGroup, is_max: bool) -> torch.Tensor:
    """Return the sum (or maximum) of ``value`` over the ranks of ``group``."""
    if group.size() > 1:
        with span("", "all-reduce", "sum", value.numel() * value.element_size()):
            op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
            await_collective(dist.all_reduce(value, op=op, group=group, async_op=True), group)
    return value


def _window(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = _numel(shape) * dtype.itemsize
    return buffer.narrow(0, offset, num_bytes).view(dtype).view(shape)


def _packed_bytes(items: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(_aligned(numel * dtype.itemsize) for numel, dtype in items)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
