"""Memory of the fake accelerator: who allocated, wrote, read and freed every block of it, and on which lane.

The contract is that of torch's caching allocator: a block belongs to the lane that it was allocated on; when its last
tensor is gone it serves the lane's next allocation at once, whatever other lanes still do with it, unless they have been
recorded on it (``record_stream``).  Page-locked memory of the host is kept until copies that use it have ended.

Simplified: an allocation may get any block that its lane has freed, of whatever size, as the allocator splits and joins
blocks; tensors are taken to use all bytes between their first and their last element; blocks that a lane frees are not
returned to the driver, which would wait for everything.
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass, field
from typing import Literal

import torch

from fake_accelerator.timeline import HOST, Moment, Timeline
from shardwise.torch_private import swap_storage

Kind = Literal["device", "pinned", "pageable"]


class _Bytes(bytearray):
    """Memory that can be watched: it is gone when the last storage over it is."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes from ``start`` to ``end`` of the process's memory."""

    start: int
    end: int

    def overlaps(self, other: Extent) -> bool:
        """Return True if they share a byte."""
        return self.start < other.end and other.start < self.end

    def covers(self, other: Extent) -> bool:
        """Return True if all of ``other`` is within."""
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Access:
    """One operation reads, or writes, some bytes.  ``what``: the operation, and what the host was doing."""

    at: Moment
    extent: Extent
    is_write: bool
    what: str


@dataclass(slots=True, eq=False)
class Block:
    """One allocation.

    Attributes:
        lane: that it belongs to.  made_by: the operation that it was allocated for.
        recorded: lanes that the allocator waits for before it lends the block again.
        accesses: those that something later may have to come after.
    """

    extent: Extent
    kind: Kind
    lane: int
    made_by: str
    recorded: set[int] = field(default_factory=set[int])
    accesses: list[Access] = field(default_factory=list[Access])


@dataclass(frozen=True, slots=True)
class Violation:
    """An order that is missing.  ``kind``: the rule that is broken."""

    kind: Literal["race", "reuse", "wrong memory"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Allocations:
    """All blocks, by address.

    Attributes:
        violations: of the rules, in the order in which they were found.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, list[tuple[Block, list[Access]]]] = {}  # by lane: with what it has not come after
        self._watched: dict[int, weakref.ref[_Bytes]] = {}
        self.violations: list[Violation] = []

    def live_bytes(self, kind: Kind) -> int:
        """Return the bytes of all blocks of ``kind`` that the allocator has lent."""
        blocks = [self._blocks[start] for start in self._watched]
        return sum(block.extent.end - block.extent.start for block in blocks if block.kind == kind)

    def block_at(self, address: int) -> Block | None:
        """Return the block that the byte at ``address`` is in."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._starts[index]]
        return block if address < block.extent.end else None

    def adopt(self, storage: torch.UntypedStorage, kind: Kind, lane: int, what: str) -> Block:
        """Put memory of this allocator, with what it holds, under ``storage``, as if it had been allocated so."""
        self._reuse_freed(lane, what)
        memory = _Bytes(storage.nbytes())
        ours = torch.frombuffer(memory, dtype=torch.uint8)
        ours.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        start = ours.data_ptr()
        swap_storage(storage, ours.untyped_storage())
        block = self._add(Block(Extent(start, start + len(memory)), kind, lane, what))

        def free(_: object) -> None:
            self._free(block)

        self._watched[start] = weakref.ref(memory, free)
        return block

    def know(self, storage: torch.UntypedStorage, kind: Kind, lane: int) -> Block:
        """Note memory that was there before, under ``storage``, which stays where it is."""
        start = storage.data_ptr()
        block = self._add(Block(Extent(start, start + storage.nbytes()), kind, lane, "memory from before"))
        weakref.finalize(storage, self._forget, block)
        return block

    def _add(self, block: Block) -> Block:
        start, end = block.extent.start, block.extent.end
        stale = [self.block_at(start), *(self._blocks[each] for each in self._starts if start < each < end)]
        for old in stale:  # its memory has gone in a way that nobody heard of
            if old is not None:
                self._forget(old)
        self._blocks[start] = block
        bisect.insort(self._starts, start)
        return block

    def _forget(self, block: Block) -> None:
        start = block.extent.start
        if self._blocks.get(start) is block:
            del self._blocks[start]
            del self._starts[bisect.bisect_left(self._starts, start)]
            self._watched.pop(start, None)

    def _free(self, block: Block) -> None:
        self._forget(block)
        if block.kind == "device":
            late = [each for each in block.accesses if each.at.lane not in block.recorded]
            late = [each for each in late if not self._timeline.is_before(each.at, block.lane)]
            if late:
                self._freed.setdefault(block.lane, []).append((block, late))

    def _reuse_freed(self, lane: int, what: str) -> None:
        for block, late in self._freed.pop(lane, ()):
            for access in late:
                if not self._timeline.is_before(access.at, lane):
                    names = self._timeline.names
                    self._say(
                        "reuse",
                        f"{what} may get the memory of {block.made_by} on lane '{names[lane]}', which was freed while "
                        f"{access.what} on lane '{names[access.at.lane]}' may still use it: nothing orders the two",
                    )

    def access(self, block: Block, access: Access) -> None:
        """Note that work touches ``block``; what conflicts must have been done before."""
        names, lane = self._timeline.names, access.at.lane
        left: list[Access] = []
        for old in block.accesses:
            if (access.is_write or old.is_write) and old.extent.overlaps(access.extent):
                if old.at.lane != lane and not self._timeline.is_before(old.at, lane):
                    doing, did = ("writes", "wrote") if access.is_write else ("reads", "wrote")
                    did = did if old.is_write else "read"
                    self._say(
                        "race",
                        f"{access.what} on lane '{names[lane]}' {doing} memory of {block.made_by} that {old.what} {did} on "
                        f"lane '{names[old.at.lane]}': nothing orders the two",
                    )
                if access.is_write and access.extent.covers(old.extent):
                    continue
            elif not access.is_write and old.at.lane == lane and access.extent.covers(old.extent):
                continue
            left.append(old)
        left.append(access)
        block.accesses = left

    def _say(self, kind: Literal["race", "reuse", "wrong memory"], text: str) -> None:
        self.violations.append(Violation(kind, text))

    def refuse(self, kind: Literal["wrong memory"], text: str) -> None:
        """Note a violation that needs no second access."""
        self._say(kind, text)


def owner_lane(kind: Kind, current: int) -> int:
    """Return the lane that memory of ``kind`` belongs to when it is allocated while work goes to ``current``."""
    return current if kind == "device" else HOST
