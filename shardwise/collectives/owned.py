"""Owners: which rank updates what, transfers between owners and the other ranks, and sums of values that every rank has.

ZeroRedundancyOptimizer calls ``torch.distributed`` in this file only, and looks collectives up when it calls them.
Every function issues its calls in an order that depends on its arguments alone.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import torch_private
from shardwise.consistency.agreement import GroupAgreement
from shardwise.consistency.process_groups import await_collective, gather_objects, group_of
from shardwise.consistency.store import refuse_deadlock
from shardwise.errors import ConfigError
from shardwise.layout import align, batches
from shardwise.observe import EVERYBODY, note, span

# ---- Full tensors to owner ranks (ZeRO-1): which rank updates which elements of which tensor.


@dataclass(frozen=True, slots=True)
class OwnedSlice:
    """Elements ``start:stop`` (in memory order) of tensor number ``tensor``, updated by rank ``owner``."""

    tensor: int
    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def assign_owners(numels: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the owner rank of each tensor: largest first, to the least loaded, ties to the lower rank.

    ``loads``: the elements that each rank owns already (default: none), so that later tensors do not move earlier ones.
    Cost: O(n log n + n log W). Raises: ConfigError if ``num_ranks`` < 1 or ``loads`` has another length. Example:
        >>> assign_owners([9, 7, 5, 3], 2)
        (0, 1, 1, 0)
    """
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * num_ranks)]
    heapq.heapify(heap)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + numels[index], rank))
    return tuple(owners)


def whole_slices(numels: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> tuple[OwnedSlice, ...]:
    """Return one slice per tensor, in tensor order, with the owners of :func:`assign_owners`.

    Example:
        >>> whole_slices([4, 6], 2)[0]
        OwnedSlice(tensor=0, owner=1, start=0, stop=4)
    """
    owners = assign_owners(numels, num_ranks, loads)
    return tuple(OwnedSlice(index, owner, 0, numels[index]) for index, owner in enumerate(owners))


def add_loads(loads: Sequence[int], slices: Sequence[OwnedSlice]) -> tuple[int, ...]:
    """Return ``loads`` (elements per rank) with the elements of ``slices`` added to their owners."""
    total = list(loads)
    for owned_slice in slices:
        total[owned_slice.owner] += owned_slice.numel
    return tuple(total)


# ---- Equally many elements to each owner rank: for optimizers that treat every element separately.

ALIGNMENT_NUMEL = 64  # one cache line of the smallest dtype, 256 bytes of float32

RUN_NUMEL = 1 << 20  # 4 MiB of float32: sent together
RUN_NUMEL_PER_RANK = 1 << 17  # more with very many ranks, so that each rank's part of a run is worth a message


def even_ranges(numel: int, num_ranks: int, block: int = ALIGNMENT_NUMEL, loads: Sequence[int] = ()) -> list[range]:
    """Cut ``range(numel)`` into one range per rank (indexed by rank) at multiples of ``block``.

    Ranks that own fewer elements so far (``loads``) get the remainder, so the totals differ by at most one block after
    any number of cuts.  The ranges tile the space; the rank with the last, incomplete block comes last, the others are
    in rank order.
    Cost: O(W log W).
    Raises: ConfigError if ``num_ranks`` or ``block`` is below 1.
    Example:
        >>> even_ranges(10, 3, block=2)
        [range(0, 4), range(4, 8), range(8, 10)]
    """
    base, extra = divmod(numel // block, num_ranks)
    tail = numel % block
    totals = list(loads) if loads else [0] * num_ranks
    counts = [base * block] * num_ranks
    poorest = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
    for rank in poorest[:extra]:
        counts[rank] += block
    order = list(range(num_ranks))
    if tail:
        last = min(range(num_ranks), key=lambda rank: (totals[rank] + counts[rank], rank))
        counts[last] += tail
        order = [rank for rank in order if rank != last] + [last]
    ranges = [range(0)] * num_ranks
    start = 0
    for rank in order:
        ranges[rank] = range(start, start + counts[rank])
        start += counts[rank]
    return ranges


def even_slices(
    numels: Sequence[int], num_ranks: int, loads: Sequence[int] = (), block: int = ALIGNMENT_NUMEL
) -> tuple[OwnedSlice, ...]:
    """Concatenate the tensors, cut them with :func:`even_ranges`, and return the slices in that order.

    A tensor without elements becomes one empty slice of the rank that owns its place, so that its (empty) state has an
    owner too.
    Example:
        >>> [(p.tensor, p.owner, p.start, p.stop) for p in even_slices([3, 3], 2, block=1)]
        [(0, 0, 0, 3), (1, 1, 0, 3)]
    """
    cuts = even_ranges(sum(numels), num_ranks, block, loads)
    by_start = sorted((cut.start, cut.stop, rank) for rank, cut in enumerate(cuts) if len(cut))
    slices: list[OwnedSlice] = []
    at = 0
    for index, end in enumerate(accumulate(numels)):
        begin = end - numels[index]
        if begin == end:
            slices.append(OwnedSlice(index, by_start[at][2] if by_start else 0, 0, 0))
        while begin < end:
            _, stop, rank = by_start[at]
            upto = min(end, stop)
            slices.append(OwnedSlice(index, rank, begin - end + numels[index], upto - end + numels[index]))
            begin = upto
            if upto == stop and at + 1 < len(by_start):
                at += 1
    return tuple(slices)


def runs_of(numels: Sequence[int], num_ranks: int) -> list[range]:
    """Cut tensors, in order, into runs of full tensors with about as many elements as should be sent together.

    A remainder of less than half a run belongs to the last run.
    Example:
        >>> runs_of([1 << 19] * 5, 2)
        [range(0, 2), range(2, 5)]
    """
    least = max(RUN_NUMEL, RUN_NUMEL_PER_RANK * num_ranks)
    starts, held = [0], 0
    for index, numel in enumerate(numels):
        if held >= least:
            starts.append(index)
            held = 0
        held += numel
    if len(starts) > 1 and held <= least // 2:
        starts.pop()
    stops = [*starts[1:], len(numels)]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements ``start:stop`` (row-major) of a tensor into at most ``2 * len(shape) - 1`` rectangles: offsets and sizes.

    Checkpoints store boxes, not ranges.  The boxes are in element order and tile the range once.
    Example:
        >>> boxes((3, 4), 2, 11)
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not shape:
        return [((), ())] if stop > start else []
    row = prod(shape[1:])
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while start < stop:
        first = start // row
        if start % row == 0 and stop - start >= row:
            rows = (stop - start) // row
            found.append(((first, *[0] * (len(shape) - 1)), (rows, *shape[1:])))
            start += rows * row
            continue
        upto = min(stop, (first + 1) * row)
        inner = boxes(shape[1:], start - first * row, upto - first * row)
        found += [((first, *offsets), (1, *sizes)) for offsets, sizes in inner]
        start = upto
    return found


# ---- The ranks of a group get equal values.

_SENT_BY_GLOO = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64, torch.complex128}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_OF_THE_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` in a dtype of its size that every backend sends, for calls that move bits only.

    gloo refuses float8, int16 and unsigned numbers of more than one byte.  Of a DTensor, a DTensor is returned.

    Example:
        >>> as_sent(torch.zeros(2, dtype=torch.float8_e4m3fn)).dtype
        torch.uint8
    """
    if tensor.dtype in _SENT_BY_GLOO:
        return tensor
    dtype = _OF_THE_SIZE[tensor.dtype.itemsize]
    if not isinstance(tensor, DTensor):
        return tensor.detach().view(dtype)
    local = torch_private.wait_tensor(torch_private.local_of(tensor)).detach().view(dtype)
    return torch_private.dtensor_from_local(local, torch_private.spec_of(tensor, dtype))


_MAX_BYTES = 32 * 2**20  # per broadcast: large enough for bandwidth, small enough for memory


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the group's first rank; shapes and dtypes must be equal on all ranks.

    Of wrapper subclasses the inner tensors are overwritten.
    Raises: ConfigError for a subclass that does not define ``__tensor_flatten__``.
    """
    if group.size() == 1:
        return
    tensors = [as_sent(part) for tensor in tensors for part in plain_parts(tensor)]
    source = dist.get_global_rank(group, 0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        parts = [
            kind[at.start : at.stop]
            for kind in by_kind.values()
            for at in batches([tensor.nbytes for tensor in kind], _MAX_BYTES)
        ]
        for batch in parts:
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            await_collective(dist.broadcast(flat, source, group=group, async_op=True), group)
            for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor``, or the inner tensors of a wrapper subclass.  Raises: ConfigError if its class does not tell them."""
    if cast(Any, type(tensor)).__torch_dispatch__ is cast(Any, torch.Tensor).__torch_dispatch__:
        return [tensor]
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ConfigError(
            f"a {type(tensor).__name__} cannot be made equal on all ranks, because its class does not define "
            "__tensor_flatten__. Give its parameter in ignored_params, or call replicate(module, mesh=mesh), which expects "
            "equal values"
        )
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


# ---- One all-to-all of tensors from every rank to every rank: shards to the owners of whole matrices, and back.
# Collectives are looked up on ``torch.distributed`` when called.

_ALIGNMENT = 16  # bytes: views of any dtype may start at multiples of it


class Expected(NamedTuple):
    """Shape and dtype of a tensor that will arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


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


# By the default group, which a job has one of: groups over several axes of its meshes, by their ranks.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> Ranks:
    """Return the ranks that differ from this one along ``axes`` of ``mesh`` only.

    Several axes need a group of their own unless they span the world; creating it is collective over its ranks.  A job makes
    one for these ranks: a group has descriptors and threads.
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
    made = _groups.setdefault(world, {})
    if members not in made:
        made[members] = group_of(members)
    return ranks_of_group(made[members])


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
    sent = [[Expected(tuple(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in sends]
    out_sizes, in_sizes = (
        [sum(exchanged_bytes(each.num_bytes) for each in items) for items in rows] for rows in (sent, expected)
    )
    packed, received = (torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (out_sizes, in_sizes))
    for tensors, windows in zip(sends, _windows(packed, sent), strict=True):
        for tensor, window in zip(tensors, windows, strict=True):
            window.copy_(tensor.detach())
    with span("", "exchange", "matrices", sum(out_sizes)):
        work = dist.all_to_all_single(received, packed, in_sizes, out_sizes, group=ranks.group, async_op=True)
        await_collective(work, ranks.group)
    return _windows(received, expected)


def _windows(buffer: torch.Tensor, rows: Sequence[Sequence[Expected]]) -> list[list[torch.Tensor]]:
    """Return the windows of ``buffer`` for the tensors of each rank, one after another."""
    found: list[list[torch.Tensor]] = []
    offset = 0
    for items in rows:
        found.append([])
        for each in items:
            found[-1].append(buffer.narrow(0, offset, each.num_bytes).view(each.dtype).view(each.shape))
            offset += exchanged_bytes(each.num_bytes)
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


# smaller tensors share a message: a gloo broadcast costs as much as copying this many bytes
PACK_BELOW_BYTES = 256 * 1024
PACK_UPTO_BYTES = 8 * 1024 * 1024

_Object = TypeVar("_Object")


Owned = tuple[int, torch.Tensor]  # a group rank, and a 1-D contiguous tensor whose values are valid there


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
    for owner, tensor in ((owner, tensor) for owner, tensor in owned if tensor.numel()):
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


def _alternate(calls: Sequence[Broadcast]) -> tuple[Broadcast, ...]:
    turns, keyed = Counter[int](), list[tuple[int, int, Broadcast]]()
    for call in calls:
        keyed.append((turns[call.owner], call.owner, call))
        turns[call.owner] += 1
    return tuple(call for _, _, call in sorted(keyed, key=lambda item: item[:2]))
