"""Coded tensors between ranks: gathered as bytes; gradients to their ranks in an all-to-all, summed there in rank order.

Collectives are those of the process group's backend, on its lane, so that it is the same on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.black_box import hearers, note, now, remember, tell, thread
from shardwise.codec.coded_sections import CodedSection
from shardwise.comm.buffers import BufferPool
from shardwise.comm.c10d import C10dCommunicator, Launched, OnLane, OnLaneInPlace, all_to_all_rows
from shardwise.comm.coding_state import Compression, norm_of
from shardwise.comm.communicator import (
    BucketEnds,
    GatherEnds,
    NamedTensor,
    Pending,
    Scale,
    ScatterEnds,
    SumContents,
)
from shardwise.comm.links.coded_sums import CodedSum, CodedSums
from shardwise.comm.links.link import Link
from shardwise.comm.links.parts import section_parts
from shardwise.comm.links.routes import LeftOut, RoutedCommunicator, Spans


class _CodedGather:
    """The ends of an all-gather of coded sections: every rank decodes all of them, its own as well."""

    def __init__(
        self, ends: Sequence[BucketEnds], sections: Sequence[CodedSection], compression: Compression, pool: BufferPool
    ) -> None:
        self._ends = ends
        self._sections = sections
        self._compression = compression
        self._pool = pool
        self._message_bytes = sum(section.message_bytes for section in sections)

    def buckets(self) -> Sequence[BucketEnds]:
        return ()

    def shard(self) -> torch.Tensor:
        message = torch.zeros(1, self._message_bytes, dtype=torch.uint8, device=self._pool.device)
        start = 0
        norms: list[torch.Tensor] = []
        lost: list[torch.Tensor] = []
        for ends, section in zip(self._ends, self._sections, strict=True):
            part, mine = message.narrow(1, start, section.message_bytes), ends.section().view(1, -1)
            section.put_rest(mine, part)
            if section.runs:
                rows = section.take_coded(mine)
                norms.append(norm_of([rows]))
                section.code.encode(rows, section.codes_in(part), rows)
                lost.append(rows)
            start += section.message_bytes
        params = [param for ends in self._ends for param in ends.params]
        self._compression.gathers.see(norm_of(norms), norm_of(lost), params)
        return message.view(-1)

    def deliver(self, packed: torch.Tensor) -> None:
        messages, start = packed.view(-1, self._message_bytes), 0
        size = messages.shape[0]
        for ends, section in zip(self._ends, self._sections, strict=True):
            flat, lease = self._pool.lend(size * section.numel, section.dtype)
            rows = flat.view(size, section.numel)
            section.decode(messages.narrow(1, start, section.message_bytes), rows)
            for rank in range(size):
                torch_private.copy_all(ends.full_parts(rank), section_parts(ends.layout, rows[rank], rank))
            lease.release()
            start += section.message_bytes


class CompressedCommunicator(RoutedCommunicator):
    """One group of ranks whose tensors travel coded; what is not coded travels by the backend, never by a link.

    Collectives that a user has set of their own go before.
    """

    def __init__(self, packed: C10dCommunicator, spans: Spans, compression: Compression, sums: CodedSums) -> None:
        super().__init__(packed, spans)
        self._compression = compression
        self._sums = sums

    @property
    def planned_link(self) -> Link | None:
        return None

    def all_gather(self, pieces: GatherEnds) -> Pending:
        """Gather sections as messages of bytes."""
        remember((now(), thread(), "", 0, "all-gather", ""))
        if hearers and tell("all-gather", "", pieces):
            return LeftOut(pieces, self.size)
        coding, packed, ends = self._compression.policy.gather, self.packed, pieces.buckets()
        if coding is None or packed.custom.all_gather is not None:
            return packed.all_gather(pieces)
        sections = [self._compression.section_of(each, each.full_dtype, coding) for each in ends]
        if not any(section.runs for section in sections):
            return packed.all_gather(pieces)
        others = self.size - 1
        plain = sum(section.numel * section.dtype.itemsize for section in sections)
        self._compression.gathers.count(sum(each.message_bytes for each in sections) * others, plain * others)
        return packed.all_gather(_CodedGather(ends, sections, self._compression, packed.pool))

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
        """Send every rank its section, coded; sum what comes in float32, in rank order; scale the sum."""
        remember((now(), thread(), "", 0, "reduction", pieces.label))
        if hearers and tell("reduction", pieces.label, pieces):
            return LeftOut(pieces)
        coding, packed = self._compression.policy.reduce, self.packed
        if coding is None or packed.custom.reduce_scatter is not None:
            return packed.reduce_scatter(pieces, scale)
        section = self._compression.section_of(pieces, pieces.dtype, coding)
        if not section.runs:
            return packed.reduce_scatter(pieces, scale)
        lane, size = packed.lane, self.size
        flat, lease = packed.pool.lend(section.numel * size, pieces.dtype)
        pieces.fill(flat)
        self._compression.reductions.count(
            section.message_bytes * (size - 1), section.numel * pieces.dtype.itemsize * (size - 1)
        )
        if lane.is_concurrent:
            lane.wait_current()
            with lane.run():
                sent = self._messages(flat.view(size, -1), section, pieces.params)
                received = torch.empty_like(sent)
                work = all_to_all_rows(received, sent, packed.group, async_op=False)
                if work is not None:
                    work.wait()  # the lane does, not the host
                self._deliver_sum(pieces, section, received, scale)
            return OnLane(lane, lease.release, lease.release, flat)
        sent = self._messages(flat.view(size, -1), section, pieces.params)
        lease.release()
        received = torch.empty_like(sent)
        work = all_to_all_rows(received, sent, packed.group, async_op=True)
        return Launched(work, lambda: self._deliver_sum(pieces, section, received, scale), lambda: None, packed.group)

    def _messages(self, rows: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> torch.Tensor:
        messages = torch.zeros(rows.shape[0], section.message_bytes, dtype=torch.uint8, device=rows.device)
        section.put_rest(rows, messages)
        coded = section.take_coded(rows)
        self._compression.add_residuals(coded, section, params)
        was = norm_of([coded])
        section.code.encode(coded, section.codes_in(messages), coded)  # is what that has lost from here on
        self._compression.keep_residuals(coded, section, params)
        self._compression.reductions.see(was, norm_of([coded]), params)
        return messages

    def _deliver_sum(self, pieces: ScatterEnds, section: CodedSection, received: torch.Tensor, scale: Scale) -> None:
        total = section.sum_of(received).view(-1)
        target = pieces.target()
        target.copy_(total.div_(self._divisor(scale)))
        pieces.deliver(target)

    def _divisor(self, scale: Scale) -> float:
        return float(self.size) if scale.divisor is None else scale.divisor

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Pending:
        """Reduce in place: coded parts to one rank each, which sums them, and the sums, coded again, to all."""
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        coding, lane = self._compression.policy.reduce, self.packed.lane
        section = None
        if contents is not None and coding is not None:
            section = self._compression.section_of(contents, tensor.dtype, coding)
        if contents is None or section is None or not section.runs:
            return self.packed.all_reduce(tensor, scale)
        coded = CodedSum(self.packed, self._compression, section, tensor, contents.params, scale)
        if not lane.is_concurrent:
            return self._sums.launch(coded)
        lane.wait_current()
        with lane.run():
            coded.begin()
            coded.turn()
            coded.end()
        return OnLaneInPlace(lane)
