"""Transfers between owners and the other ranks, and sums of values that every rank has.

ZeroRedundancyOptimizer calls ``torch.distributed`` in this file only, and looks collectives up when it calls them.
Every function issues its calls in an order that depends on its arguments alone.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import torch_private
from shardwise.consistency.agreement import GroupAgreement
from shardwise.consistency.process_groups import as_sent, await_collective, gather_objects, group_of
from shardwise.consistency.store import refuse_deadlock
from shardwise.layout import align
from shardwise.observe import EVERYBODY, note, span

# ---- One all-to-all of tensors from every rank to every rank: shards to the owners of whole matrices, and back.
# Collectives are looked up on ``torch.distributed`` when called.

_ALIGNMENT = 16  # bytes: views of any dtype may start at multiples of it


class Expected(NamedTuple):
    """Shape and dtype of a tensor that will arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that have different parts of the same tensors.

    Attributes:
        members: their global ranks, ascending.  rank: index of this rank among them.
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
    """Return the ranks of ``group``, numbered as the group numbers them."""
    members = tuple(dist.get_process_group_ranks(group))
    return Ranks(members, dist.get_rank(group), group)


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> Ranks:
    """Return the ranks that differ from this one along ``axes`` of ``mesh`` only.

    Several axes need a group of their own unless they span the world; creating it is collective over its ranks.
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


def exchanged_bytes(num_bytes: int) -> int:
    """Return the bytes that a tensor of ``num_bytes`` takes in the buffers of :func:`exchange`."""
    return align(num_bytes, _ALIGNMENT)


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``sends[r]`` to rank r; return the tensors that arrived from each rank, as ``expected[r]`` describes them.

    One all-to-all of bytes, whatever the dtypes.  The returned tensors are windows of one buffer on ``device``.
    """
    if ranks.group is None or ranks.size == 1:
        return [list(tensors) for tensors in sends]
    note("exchange", "", sends)
    out_sizes = [_packed_bytes([(t.numel(), t.dtype) for t in tensors]) for tensors in sends]
    in_sizes = [_packed_bytes([(prod(e.shape), e.dtype) for e in items]) for items in expected]
    packed = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
    start = 0
    for tensors, num_bytes in zip(sends, out_sizes, strict=True):
        offset = start
        for tensor in tensors:
            if tensor.numel():
                _window(packed, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
            offset += exchanged_bytes(tensor.numel() * tensor.dtype.itemsize)
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
            offset += exchanged_bytes(prod(item.shape) * item.dtype.itemsize)
        found.append(windows)
        start += num_bytes
    return found


def sum_bytes(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Assemble, in place, a contiguous tensor of which every rank has a part and zeros elsewhere.

    The sum is over bytes, so that negative zeros and nans arrive unchanged.
    """
    if group.size() > 1:
        await_collective(dist.all_reduce(whole.view(-1).view(torch.uint8), group=group, async_op=True), group)


@torch.no_grad()
def full_tensor_of(sharded: DTensor) -> torch.Tensor:
    """Return the full tensor, of any dtype, on every rank of its mesh.  Collective."""
    full = torch_private.wait_tensor(cast(DTensor, as_sent(sharded)).full_tensor())
    return full if full.dtype is sharded.dtype else full.view(sharded.dtype)


def sum_of(value: torch.Tensor, group: dist.ProcessGroup, is_max: bool) -> torch.Tensor:
    """Return the sum (or maximum) of ``value`` over the ranks of ``group``."""
    if group.size() > 1:
        with span("", "all-reduce", "sum", value.numel() * value.element_size()):
            op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
            await_collective(dist.all_reduce(value, op=op, group=group, async_op=True), group)
    return value


def _window(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    return buffer.narrow(0, offset, num_bytes).view(dtype).view(shape)


def _packed_bytes(items: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(exchanged_bytes(numel * dtype.itemsize) for numel, dtype in items)


# smaller tensors share a message: a gloo broadcast costs as much as copying this many bytes
PACK_BELOW_BYTES = 256 * 1024
PACK_UPTO_BYTES = 8 * 1024 * 1024

_Object = TypeVar("_Object")


@dataclass(frozen=True, slots=True)
class Owned:
    """A 1-D contiguous tensor whose values are valid on group rank ``owner``."""

    owner: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One broadcast: a single tensor in place, or several of one dtype and device, packed."""

    owner: int
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class BroadcastHandle:
    """A launched broadcast; ``wait`` writes the owner's values into the tensors."""

    call: Broadcast
    buffer: torch.Tensor
    work: dist.Work
    agreement: GroupAgreement
    what: str

    def wait(self) -> None:
        """Wait, and unpack.

        Raises: DesyncError if the owner or another rank did not take part.
        """
        note(EVERYBODY, self.what)
        with span(self.agreement.track.name, "wait", self.what), _explaining(self.agreement, self.what):
            await_collective(self.work, self.agreement.group, self._check)
        if len(self.call.tensors) > 1 and self.call.owner != self.agreement.rank:
            parts = self.buffer.split([tensor.numel() for tensor in self.call.tensors])
            for tensor, part in zip(self.call.tensors, parts, strict=True):
                tensor.copy_(part)

    def _check(self) -> None:
        refuse_deadlock()
        if self.agreement.failure() is not None:
            raise RuntimeError("another rank has reported that it failed")  # _explaining() says why


def plan_broadcasts(owned: Iterable[Owned]) -> tuple[Broadcast, ...]:
    """Combine tensors into few broadcasts: large ones are sent in place, small ones are packed per owner.

    The order depends only on the order, owners, sizes, dtypes and devices of ``owned``.  It alternates owners, so that
    all ranks send at the same time.
    """
    packs: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
    calls: list[Broadcast] = []
    for owner, tensor in ((item.owner, item.tensor) for item in owned if item.tensor.numel()):
        if tensor.nbytes >= PACK_BELOW_BYTES:
            calls.append(Broadcast(owner, (tensor,)))
            continue
        key = (owner, tensor.dtype, tensor.device)
        pack = packs.setdefault(key, [])
        pack.append(tensor)
        if sum(each.nbytes for each in pack) >= PACK_UPTO_BYTES:
            calls.append(Broadcast(owner, tuple(packs.pop(key))))
    calls.extend(Broadcast(owner, tuple(pack)) for (owner, _, _), pack in packs.items())
    return _alternate(calls)


def launch_broadcasts(calls: Sequence[Broadcast], agreement: GroupAgreement, what: str) -> list[BroadcastHandle]:
    """Launch the broadcasts; nothing may write to their tensors before ``wait``.

    Raises: DesyncError if the group has already failed.
    """
    if agreement.size == 1 or agreement.track.note("all-gather", what, [call.tensors for call in calls]):
        return []
    num_bytes = sum(tensor.numel() * tensor.element_size() for call in calls for tensor in call.tensors)
    with span(agreement.track.name, "all-gather", what, num_bytes), _explaining(agreement, what):
        return [_launch(call, agreement, what) for call in calls]


def _launch(call: Broadcast, agreement: GroupAgreement, what: str) -> BroadcastHandle:
    first = call.tensors[0]
    if len(call.tensors) == 1:
        buffer = first
    elif call.owner == agreement.rank:
        buffer = torch.cat([as_sent(tensor) for tensor in call.tensors]).view(first.dtype)
    else:
        buffer = first.new_empty(sum(tensor.numel() for tensor in call.tensors))
    work = dist.broadcast(as_sent(buffer), group_src=call.owner, group=agreement.group, async_op=True)
    assert work is not None
    return BroadcastHandle(call, buffer, work, agreement, what)


@contextmanager
def _explaining(agreement: GroupAgreement, what: str) -> Generator[None, None, None]:
    try:
        yield
    except RuntimeError as error:
        raise agreement.explain(what, error) from error


def gather_objects_of(agreement: GroupAgreement, value: _Object, what: str) -> list[_Object]:
    """Return every rank's ``value`` (picklable, small) in rank order."""
    with _explaining(agreement, what):
        return gather_objects(value, agreement.group) if agreement.size > 1 else [value]


def broadcast_tensor(tensor: torch.Tensor, owner: int, agreement: GroupAgreement, what: str) -> None:
    """Send a contiguous tensor of group rank ``owner`` to all, in place.

    Raises: DesyncError if another rank failed or did not take part.
    """
    with _explaining(agreement, what):
        work = dist.broadcast(as_sent(tensor), group_src=owner, group=agreement.group, async_op=True)
        await_collective(work, agreement.group)


def broadcast_object(
    obj: object,
    src_rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  the seed's signature
) -> object:
    """Return the ``obj`` of global rank ``src_rank`` on every rank, with its tensors on ``device``.

    Objects are unpickled: use it only with ranks that you trust.  Source: the function of the same name in torch's
    ZeroRedundancyOptimizer; callers of that one can call this one.
    """
    if dist.get_rank() == src_rank:
        stream = io.BytesIO()
        torch.save(obj, stream)
        data = torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8).to(device)
        _broadcast(torch.tensor([data.numel()], device=device), src_rank, group)
        _broadcast(data, src_rank, group)
        return obj
    length = torch.zeros(1, dtype=torch.int64, device=device)
    _broadcast(length, src_rank, group)
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    _broadcast(data, src_rank, group)
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location=device, weights_only=False)


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    await_collective(dist.broadcast(tensor, src=source, group=group, async_op=True), group)


def _alternate(calls: Sequence[Broadcast]) -> tuple[Broadcast, ...]:
    turns: dict[int, int] = {}
    keyed: list[tuple[int, int, Broadcast]] = []
    for call in calls:
        turn = turns.get(call.owner, 0)
        turns[call.owner] = turn + 1
        keyed.append((turn, call.owner, call))
    return tuple(call for _, _, call in sorted(keyed, key=lambda item: item[:2]))
