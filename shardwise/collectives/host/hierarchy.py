"""Link ranks on several hosts: shared memory inside a host, messages between hosts; each byte crosses once per host.

Every host has the same number of ranks.  Ranks with the same index on their hosts form a *column*.  In an all-gather, a
rank receives the sections of its column in an inbox in shared memory, and all ranks of the host copy from there: a
shard arrives once, no matter how many ranks a host has.  A reduce-scatter sums inside the host first: each rank adds up
its host's gradients for every rank of its column, sends those sums, and adds the sums of the other hosts in the order
of hosts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.collectives.host.send_recv import NUM_INBOXES, TAG_GATHER, TAG_SCATTER, Inboxes, Messages, PeerLink, keep
from shardwise.collectives.host.shared_memory import NEXT_FREE, NUM_SLOTS, HostLink
from shardwise.collectives.protocol import GatherEnds, Handle, Scale, ScatterEnds
from shardwise.collectives.routes import Link, PassKind, sum_sections
from shardwise.consistency.failure_report import cited, store_of_job
from shardwise.errors import TransportError
from shardwise.layout import Bucket

_ARRIVED = NEXT_FREE  # the last all-gather whose sections from other hosts are in this rank's inbox
_TAKEN = NEXT_FREE + 1  # this rank has read all inboxes of this all-gather and of those before it

_SUM = Scale(1.0)
_IS_SUM, _HAS_ABORTED = 0, 1  # values of the last element of a message with sums


def column_of(rank: int, ranks_per_host: int, num_ranks: int) -> range:
    """Return the ranks that have the same index on their hosts as ``rank``."""
    return range(rank % ranks_per_host, num_ranks, ranks_per_host)


class TieredLink(Link):
    """The link of a group with ranks on several hosts.

    Args:
        inside: the link between the ranks of this host.  between: the link between the ranks of this rank's column.
        inboxes: where sections from other hosts are received.
    """

    name = "shared memory, send/recv between hosts"

    def __init__(self, inside: HostLink, between: PeerLink, inboxes: Inboxes) -> None:
        self.inside, self.between = inside, between
        self.inboxes = inboxes
        self._gathers: list[_TierGather] = []  # launched but not waited for, in launch order
        self._scatters: list[_TierScatter] = []
        self._unsummed: deque[_TierScatter] = deque()
        self._num_gathers = self._num_scatters = 0
        # Receives of aborted passes that still write to inboxes; the next pass waits for them before it uses an inbox.
        self._unfinished_recvs: list[dist.Work] = []
        weakref.finalize(self, _keep_unfinished, between.group, self._unfinished_recvs, inside.segments).atexit = False

    # ---- passes ----

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        self._num_gathers = self._num_scatters = 0
        try:
            self.between.wait_all(self._unfinished_recvs)
        except BaseException:
            self.inside.abort()
            raise
        is_agreed = self._open_inside(kind, wants_collectives)
        try:
            return self.between.open(kind, not is_agreed)
        except BaseException:
            self.abort()
            raise

    def _open_inside(self, kind: PassKind, wants_collectives: bool) -> bool:
        try:
            return self.inside.open(kind, wants_collectives)
        except TransportError:
            with contextlib.suppress(RuntimeError):  # the other host may be gone; it needs no notice then
                self.between.refuse(kind, self.inside.local_peers.blamed)
            raise

    def close(self) -> None:
        for gather in list(self._gathers):
            gather.wait()
        self.between.close()
        self.inside.close()

    def abort(self) -> None:
        self.inside.abort()  # first, so that the ranks of this host stop waiting
        for launched in (*self._gathers, *self._scatters):
            launched.abandon()
        self._gathers.clear()
        self._scatters.clear()
        self._unsummed.clear()
        self.between.abort()

    def defer_recvs(self, recvs: list[dist.Work]) -> None:
        """Hand over ``recvs``, which may still write to inboxes; the next pass waits for them."""
        self._unfinished_recvs += recvs
        recvs.clear()

    def progress(self) -> None:
        """Launch what needs no wait: receives whose inbox is free, and sums whose parts this host has posted."""
        for gather in self._gathers:
            if not gather.is_expected:
                if not self._is_free(gather.index):
                    break
                gather.expect()
        while self._unsummed and self.inside.is_posted(self._unsummed[0].posted.index):
            self._unsummed.popleft().sum_inside()

    # ---- all-gathers ----

    def takes_gather(self, ends: GatherEnds) -> bool:
        return self.inside.takes_gather(ends) and self.inboxes.takes(ends)

    def all_gather(self, ends: GatherEnds) -> Handle:
        gather = _TierGather(self, ends, self._num_gathers)
        self._num_gathers += 1
        self._gathers.append(gather)
        self.progress()
        return gather

    def _is_free(self, index: int) -> bool:
        old = index - NUM_INBOXES
        local_peers = self.inside.local_peers
        return old < 0 or (self._taken >= old and local_peers.have_reached(_TAKEN, local_peers.stamp(old)))

    @property
    def _taken(self) -> int:
        return (self._gathers[0].index if self._gathers else self._num_gathers) - 1

    def wait_arrived(self, gather: _TierGather) -> None:
        """Wait until the sections of ``gather`` and of those before it are in this rank's inbox, and publish that."""
        local_peers = self.inside.local_peers
        for each in list(self._gathers):
            if each.index <= gather.index - NUM_INBOXES:
                each.wait()  # this gather reuses its inbox
        for each in [each for each in self._gathers if each.index <= gather.index and not each.has_arrived]:
            if not each.is_expected:
                local_peers.wait_for_all(
                    _TAKEN, local_peers.stamp(each.index - NUM_INBOXES), "parameters from another host"
                )
                each.expect()
            self.between.wait_all(each.recvs)
            each.has_arrived = True
            local_peers.publish(_ARRIVED, local_peers.stamp(each.index))

    def read_inboxes(self, gather: _TierGather, ends: GatherEnds) -> None:
        """Copy the sections that all ranks of this host have received for ``gather`` to the full parameters."""
        local_peers = self.inside.local_peers
        local_peers.wait_for_all(_ARRIVED, local_peers.stamp(gather.index), "parameters from another host")
        self.inboxes.copy_out(gather.index, ends.buckets())

    def release_inboxes(self, gather: _TierGather) -> None:
        """Publish that this rank has read the inboxes of ``gather``."""
        self._gathers.remove(gather)
        local_peers = self.inside.local_peers
        local_peers.publish(_TAKEN, local_peers.stamp(self._taken))

    # ---- reductions ----

    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        return self.inside.takes_scatter(ends, scale)

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return 2 * len(self.between.peers) * (layout.section_numel + 1) * itemsize

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        self.progress()
        self.sum_until(self._num_scatters - NUM_SLOTS)  # the slot may still hold this rank's own parts
        scatter = _TierScatter(self, ends, scale)
        self._num_scatters += 1
        self._scatters.append(scatter)
        self._unsummed.append(scatter)
        return scatter

    def sum_until(self, index: int) -> None:
        """Sum all reductions up to number ``index`` inside the host, and send the sums."""
        while self._unsummed and self._unsummed[0].posted.index <= index:
            self._unsummed.popleft().sum_inside()

    def forget_scatter(self, scatter: _TierScatter) -> None:
        """Remove ``scatter``, which is delivered or cancelled."""
        self._scatters.remove(scatter)


def _keep_unfinished(group: dist.ProcessGroup, unfinished: list[dist.Work], memory: Sequence[object]) -> None:
    if unfinished:
        keep(group, unfinished, memory)


class _TierGather(Messages[GatherEnds]):
    """An all-gather: this rank's sections are sent to its column at once, the others' received once an inbox is free.

    Attributes:
        index: number of this all-gather in its pass.  is_expected: its receives are launched.
        recvs: receives that have not ended.
        has_arrived: all have ended, and this rank has published that.
    """

    def __init__(self, link: TieredLink, ends: GatherEnds, index: int) -> None:
        super().__init__(link.between, ends)
        self._link, self.index = link, index
        self._buckets = ends.buckets()
        self._near = link.inside.all_gather(ends)
        sections = [bucket.section() for bucket in self._buckets]
        self.is_expected = self.has_arrived = False
        self.recvs: list[dist.Work] = []
        between = link.between
        sends = [
            between.send(section, peer, TAG_GATHER) for peer in between.peers for section in sections if section.numel()
        ]
        # the messages read the shards themselves, which change only after the pass
        if all(bucket.dtype is bucket.full_dtype for bucket in self._buckets):
            between.wait_sends_at_close(sends)
        else:
            self.works, self.memory = sends, [sections]

    def expect(self) -> None:
        """Launch the receives into the inbox."""
        self.is_expected = True
        self._receive(self._link.inboxes.windows(self.index, self._buckets))

    def _receive(self, windows: Sequence[dict[int, torch.Tensor]]) -> None:
        between = self._link.between
        self.recvs += [
            between.recv(each[peer], peer, TAG_GATHER)
            for peer in between.peers
            for each in windows
            if each[peer].numel()
        ]

    def finish(self, ends: GatherEnds) -> None:
        link = self._link
        link.progress()
        self._near.wait()
        link.wait_arrived(self)
        link.read_inboxes(self, ends)
        link.between.wait_all(self.works)
        self._end()

    def drop(self, ends: GatherEnds) -> None:
        self._near.cancel()
        try:
            self._link.wait_arrived(self)  # other ranks of this host may read this inbox
            self._link.between.wait_all(self.works)
        except RuntimeError:
            self.abandon()
        self._end()

    def _end(self) -> None:
        self._buckets = ()
        self.release()
        self._link.release_inboxes(self)

    def abandon(self) -> None:
        """Abandon what has not ended; the memory that it may still write to is not reused before it has."""
        self._ends = None
        link, buckets, self._buckets = self._link, self._buckets, ()
        if not self.is_expected:
            # The column sends these sections anyway; without a receive, the next receive would get their message.
            sizes = [(bucket.layout.section_numel, bucket.full_dtype) for bucket in buckets]
            with contextlib.suppress(RuntimeError):  # a closed connection delivers nothing
                self._receive(
                    [{p: torch.empty(n, dtype=d, device="cpu") for p in link.between.peers} for n, d in sizes]
                )
        link.defer_recvs(self.recvs)
        super().abandon()


class _TierScatter(Messages[ScatterEnds]):
    """A reduce-scatter that posts this rank's parts for its host, and sums inside the host, then between hosts.

    Attributes:
        posted: what this rank has posted.
    """

    holds_input = False

    def __init__(self, link: TieredLink, ends: ScatterEnds, scale: Scale) -> None:
        between = link.between
        super().__init__(between, ends)
        self._link = link
        divisor = float(link.inside.num_ranks) if scale.divisor is None else scale.divisor
        self._scale = replace(scale, divisor=divisor)
        self.posted = link.inside.post(ends)
        self._unsent: ScatterEnds | None = ends
        self._sums: dict[int, torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}
        for peer in between.peers:
            self._sums[peer], self._received[peer] = (self.staged(ends.section_numel + 1, ends.dtype) for _ in range(2))
            self.works.append(between.recv(self._received[peer], peer, TAG_SCATTER))

    def sum_inside(self) -> None:
        """Add up what this host has for every rank of the column; send the sums."""
        ends, link = self._unsent, self._link
        assert ends is not None
        inside, numel = link.inside, ends.section_numel
        inside.wait_posted(ends, self.posted.index)
        for peer, total in self._sums.items():
            inside.sum_posted(ends, self.posted, _SUM, peer, total[:numel])
            total[numel] = _IS_SUM
            self._send(peer, total)
        inside.sum_posted(ends, self.posted, _SUM, inside.rank, ends.target())
        inside.free_slot(self.posted.index)
        self._unsent = None

    def _send(self, peer: int, message: torch.Tensor) -> None:
        self.works.append(self._link.between.send(message, peer, TAG_SCATTER))

    def finish(self, ends: ScatterEnds) -> None:
        link = self._link
        self._wait_all_works()
        out, numel = ends.target(), ends.section_numel
        sums: dict[int, torch.Tensor] = {link.inside.rank: out}
        for peer, message in self._received.items():
            if message[numel] != _IS_SUM:
                its = link.inside.members[peer]
                raise TransportError(
                    f"rank {its} raised an exception in backward before it could send gradients of {ends.label} to rank "
                    f"{link.inside.members[link.inside.rank]}; see the error of rank {its}{cited(store_of_job(), [its])}"
                )
            sums[peer] = message[:numel]
        sum_sections(ends.layout, [sums[rank] for rank in sorted(sums)], self._scale, link.inside.rank, out)
        sums.clear()
        self._end()
        ends.deliver(out)

    def _wait_all_works(self) -> None:
        self._link.sum_until(self.posted.index)
        self._link.progress()
        self._link.between.wait_all(self.works)

    def drop(self, ends: ScatterEnds) -> None:
        try:
            self._wait_all_works()
        except RuntimeError:
            self.abandon()
        self._end()

    def _end(self) -> None:
        self._link.forget_scatter(self)
        self._sums, self._received = {}, {}
        self.release()

    def abandon(self) -> None:
        """Abandon what has not ended; notify the other hosts that no sums will arrive."""
        self._ends = None
        ends, self._unsent = self._unsent, None
        if ends is not None:
            for peer, message in self._sums.items():
                message[ends.section_numel] = _HAS_ABORTED
                with contextlib.suppress(RuntimeError):  # the other host may be gone; it needs no notice then
                    self._send(peer, message)
        super().abandon()
