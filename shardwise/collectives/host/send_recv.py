"""Point-to-point messages of a gloo group, straight between full tensors and sections.

Gloo's own all-gather fills one buffer that must be copied out; its reduce-scatter is an all-reduce, with twice the
bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.collectives.buffer_pool import BufferPool, PooledBuffer
from shardwise.collectives.protocol import BucketEnds, GatherEnds, Handle, OnceHandle, Scale, ScatterEnds
from shardwise.collectives.routes import Link, PassKind, can_sum_in_parts, pack_parts, section_parts, sum_sections
from shardwise.consistency.failure_report import name_partners
from shardwise.consistency.process_groups import wait_all
from shardwise.errors import TransportError
from shardwise.layout import Bucket

# ---- Unfinished messages without a waiter, and the memory that they read and write, are kept as long as their process
# group.
# Gloo reports a message as done only to a caller that waits, a wait that times out closes the group's connections, and
# a message that is dropped before its peer has matched it blocks every later message between the two ranks.


@dataclass(slots=True, eq=False)
class _KeptWorks:
    works: list[dist.Work] = field(default_factory=list[dist.Work])
    memory: list[object] = field(default_factory=list[object])

    def drop(self) -> None:
        # Works first: they may still write to the memory.
        self.works.clear()
        self.memory.clear()


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _KeptWorks] = weakref.WeakKeyDictionary()


def keep(group: dist.ProcessGroup, works: Iterable[dist.Work], memory: Iterable[object] = ()) -> None:
    """Keep ``works`` of ``group``, and ``memory`` that they may read or write, as long as ``group`` exists."""
    kept = _kept.get(group)
    if kept is None:
        kept = _kept[group] = _KeptWorks()
        weakref.finalize(group, kept.drop).atexit = False
    kept.works += works
    kept.memory += memory


def drop(group: dist.ProcessGroup) -> None:
    """Drop what is kept for ``group``, whose connections are closed: no message arrives on them."""
    kept = _kept.get(group)
    if kept is not None:
        kept.drop()


def wait_without_error(works: list[dist.Work], group: dist.ProcessGroup) -> bool:
    """Wait for messages of ``group`` as :func:`wait_all` does; return False if one fails, because its rank may be gone."""
    try:
        wait_all(works, group)
    except RuntimeError:
        return False
    return True


# High numbers: users of the same group are likely to choose low ones.
_TAG_PASS, _TAG_GATHER, _TAG_SCATTER = 0x5A00, 0x5A01, 0x5A02
MAX_RANKS = 32  # beyond that, a message per peer and tensor costs more than the copies it saves
# On one host, a collective of fewer bytes (of what travels together) is cheaper than its messages
# (benchmarks/small_units.py). Between hosts messages always win: they send fewer bytes.
LEAST_BYTES_ON_HOST = 1 << 20
MIN_LARGE_SHARE = 0.5  # of a section: with many small tensors, messages save too few copies


class PeerLink(Link):
    """Point-to-point messages in place of collectives, for groups of up to ``MAX_RANKS`` ranks.

    Args:
        group: the process group.
        pool: memory for staging.
        is_on_one_host: all ranks are on one host but cannot share memory.
    """

    name = "send/recv"

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool, is_on_one_host: bool = False) -> None:
        self.group, self.pool = group, pool
        self.rank, self.size = group.rank(), group.size()
        # Each rank starts with its right neighbour, so that the first messages do not all go to the same rank.
        self.peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._is_on_one_host = is_on_one_host
        self._pass_number = 0
        self._sends: list[dist.Work] = []

    # ---- passes ----

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        self._pass_number += 1
        mine = torch.tensor([self._pass_number, kind == "backward", wants_collectives], dtype=torch.int64, device="cpu")
        theirs = {peer: torch.empty_like(mine) for peer in self.peers}
        works = [self.send(mine, peer, _TAG_PASS) for peer in self.peers]
        works += [self.recv(theirs[peer], peer, _TAG_PASS) for peer in self.peers]
        try:
            self.wait_all(works)
        except BaseException:
            keep(self.group, works, [mine, theirs])
            raise
        for peer, words in theirs.items():
            pass_number, is_backward, wants = words.tolist()
            if [pass_number, is_backward] != mine[:2].tolist():
                names = dist.get_process_group_ranks(self.group)
                raise TransportError(
                    f"rank {names[peer]} starts a {'backward' if is_backward else 'forward'} (number {pass_number}) where rank "
                    f"{names[self.rank]} starts a {kind} (number {self._pass_number}); every rank must make the same calls "
                    "in the same order"
                )
            wants_collectives = wants_collectives or bool(wants)
        return not wants_collectives

    def close(self) -> None:
        self.wait_all(self._sends)

    def abort(self) -> None:
        # A message that is dropped before its peer has it blocks every later one between the two ranks.
        keep(self.group, self._sends)
        self._sends = []

    # ---- collectives ----

    def takes_gather(self, ends: GatherEnds) -> bool:
        buckets = ends.buckets()
        return bool(buckets) and all(self._is_worth(each.layout, each.full_dtype.itemsize) for each in buckets)

    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        return self._is_worth(ends.layout, ends.dtype.itemsize) and can_sum_in_parts(scale, self.size)

    def _is_worth(self, layout: Bucket, itemsize: int) -> bool:
        least = LEAST_BYTES_ON_HOST if self._is_on_one_host else 0
        return layout.full_numel * itemsize >= least and is_worth_messages(layout)

    def gather_staging(self, layout: Bucket, itemsize: int) -> tuple[int, bool]:
        return (self.size - 1) * layout.tail_numel * itemsize, True

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return (self.size - 1) * (layout.section_numel + layout.tail_numel) * itemsize

    def all_gather(self, ends: GatherEnds) -> Handle:
        return _MessageGather(self, ends)

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        return _MessageScatter(self, ends, scale)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Launch a send of ``tensor``, which is contiguous and must not change until the message is received."""
        return self.group.send([tensor], peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Launch a receive into the contiguous ``tensor``."""
        return self.group.recv([tensor], peer, tag)

    def wait_all(self, works: list[dist.Work]) -> None:
        """Wait for ``works`` as :func:`process_groups.wait_all` does; its errors name the ranks of the group."""
        try:
            wait_all(works, self.group)
        except RuntimeError as error:
            name_partners(error, self.group)
            raise

    def wait_sends_at_close(self, works: list[dist.Work]) -> None:
        """Wait for these sends at the end of the pass; the shards that they read do not change before."""
        self._sends += works


_Ends = TypeVar("_Ends")


class Messages(OnceHandle[_Ends]):
    """A collective of messages over ``link``, with the memory that they read and write.

    Attributes:
        works: the messages.  memory: what they read besides buffers.
    """

    def __init__(self, link: PeerLink, ends: _Ends) -> None:
        super().__init__(ends)
        self.peer_link = link
        self.works: list[dist.Work] = []
        self.memory: list[object] = []
        self._buffers: list[PooledBuffer] = []

    # gloo reports a message as done only to a caller that waits, so is_done() does not ask.

    def drop(self, ends: _Ends) -> None:
        if wait_without_error(self.works, self.peer_link.group):
            self.release()
        else:
            self.abandon()

    def staged(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a message, released with this handle."""
        buffer = self.peer_link.pool.acquire(numel * dtype.itemsize, dtype)
        self._buffers.append(buffer)
        return buffer.flat

    def wait_works(self) -> None:
        """Wait for the messages; after an error keep their memory."""
        try:
            self.peer_link.wait_all(self.works)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Abandon what has not ended; keep the memory that it may write to."""
        memory = [*(buffer.lose() for buffer in self._buffers), *self.memory]
        keep(self.peer_link.group, self.works, memory)
        self._buffers, self.works, self.memory = [], [], []

    def release(self) -> None:
        """Release the memory of messages that have ended."""
        for buffer in self._buffers:
            buffer.release()
        self._buffers, self.memory = [], []


class _MessageGather(Messages[GatherEnds]):
    """An all-gather that receives large parts in place, and the small parts of each bucket as one message."""

    def __init__(self, link: PeerLink, ends: GatherEnds) -> None:
        super().__init__(link, ends)
        self._own = [(bucket, bucket.section()) for bucket in ends.buckets()]
        self._staged: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []  # targets, and what arrives
        for bucket, section in self._own:
            self._launch(bucket, section)

    def _launch(self, bucket: BucketEnds, section: torch.Tensor) -> None:
        link, layout, large = self.peer_link, bucket.layout, bucket.layout.num_large
        mine = section_parts(layout, section, link.rank)[:large]
        tail = section.narrow(0, layout.tail_start, layout.tail_numel)
        sends: list[dist.Work] = []
        for peer in link.peers:
            theirs = bucket.full_parts(peer)
            for part, target in zip(mine, theirs[:large], strict=True):
                if target.numel():
                    self.works.append(self._receive(target, peer))
                if part.numel():
                    sends.append(link.send(part.reshape(-1), peer, _TAG_GATHER))
            if layout.tail_numel:
                message = self.staged(layout.tail_numel, section.dtype)
                self._staged.append((theirs[large:], section_parts(layout, message, peer, large)))
                self.works.append(link.recv(message, peer, _TAG_GATHER))
                sends.append(link.send(tail, peer, _TAG_GATHER))
        # the messages read the shards themselves, which change only after the pass
        if section.dtype is bucket.dtype:
            link.wait_sends_at_close(sends)
        else:
            self.works += sends

    def _receive(self, target: torch.Tensor, peer: int) -> dist.Work:
        if target.is_contiguous():
            return self.peer_link.recv(target.reshape(-1), peer, _TAG_GATHER)
        # The window has gaps: the parameter is not sharded along dim 0.
        message = self.staged(target.numel(), target.dtype)
        self._staged.append(([target], [message.view(target.shape)]))
        return self.peer_link.recv(message, peer, _TAG_GATHER)

    def finish(self, ends: GatherEnds) -> None:
        rank = self.peer_link.rank
        for bucket, section in self._own:
            torch_private.copy_all(bucket.full_parts(rank), section_parts(bucket.layout, section, rank))
        self.wait_works()
        for targets, parts in self._staged:
            torch_private.copy_all(targets, parts)
        self._own, self._staged = [], []
        self.release()

    def abandon(self) -> None:
        """Abandon what has not ended; keep the memory that it may write to, full parameters too."""
        if self.works:
            self.memory += [bucket.lose_full() for bucket, _ in self._own]
        super().abandon()


class _MessageScatter(Messages[ScatterEnds]):
    """A reduce-scatter that sends large gradients from where they are, and the small ones for each peer as one message."""

    def __init__(self, link: PeerLink, ends: ScatterEnds, scale: Scale) -> None:
        super().__init__(link, ends)
        self._scale = scale
        layout, dtype, large = ends.layout, ends.dtype, ends.layout.num_large
        self._received = {peer: self.staged(layout.section_numel, dtype) for peer in link.peers}
        for peer, section in self._received.items():
            theirs = ends.full_parts(peer)
            for window, part in zip(section_parts(layout, section, link.rank)[:large], theirs[:large], strict=True):
                if window.numel():
                    self.works.append(link.recv(window.reshape(-1), peer, _TAG_SCATTER))
                if part.numel():
                    flat = part.reshape(-1).contiguous()  # a copy if the parameter is not sharded along dim 0
                    self.memory.append(flat)
                    self.works.append(link.send(flat, peer, _TAG_SCATTER))
            if layout.tail_numel:
                tail = self.staged(layout.tail_numel, dtype)
                pack_parts(layout, theirs, tail, peer, large)
                window = section.narrow(0, layout.tail_start, layout.tail_numel)
                self.works.append(link.recv(window, peer, _TAG_SCATTER))
                self.works.append(link.send(tail, peer, _TAG_SCATTER))

    def finish(self, ends: ScatterEnds) -> None:
        self.wait_works()
        link, layout = self.peer_link, ends.layout
        out = ends.target()
        pack_parts(layout, ends.full_parts(link.rank), out, link.rank)
        sections = [out if rank == link.rank else self._received[rank] for rank in range(link.size)]
        sum_sections(layout, sections, self._scale, link.rank, out)
        self._received.clear()
        self.release()
        ends.deliver(out)


def is_worth_messages(layout: Bucket) -> bool:
    """Return True if large tensors, which travel as messages of their own, are most of a section of ``layout``."""
    return layout.tail_start >= MIN_LARGE_SHARE * layout.section_numel
