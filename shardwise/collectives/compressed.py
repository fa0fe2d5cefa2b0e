"""Collectives of coded tensors: gathered as bytes; gradients exchanged in an all-to-all and summed in rank order.

They use the collectives of the process group's backend, on its stream, so that CPU and GPU run the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.collectives.buffer_pool import BufferPool
from shardwise.collectives.c10d import (
    C10dCommunicator,
    HostWork,
    InPlaceStreamWork,
    StreamWork,
    all_gather_single,
    all_to_all_rows,
)
from shardwise.collectives.codec import BlockCode, CodedSection, Coding, CompressionPolicy, takes
from shardwise.collectives.protocol import (
    BucketEnds,
    GatherEnds,
    Handle,
    NamedTensor,
    Scale,
    ScatterEnds,
    SectionContents,
    SumContents,
)
from shardwise.collectives.routes import LeftOut, Link, PassTracker, RoutedCommunicator, section_parts
from shardwise.consistency.process_groups import await_collective
from shardwise.layout import Bucket, align
from shardwise.observe import listeners, note, tell

# ---- Sums of coding errors over ranks: checkpoints save them, so that any number of ranks can load them.


def sum_at_owners(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return (n,), the sum in rank order of all ranks' rows for this rank; ``rows``: (ranks, n), float32.  Collective."""
    received = torch.empty_like(rows)
    await_collective(all_to_all_rows(received, rows.contiguous(), group, async_op=True), group)
    total = torch.zeros_like(rows[0])
    for row in received:
        total += row
    return total


def sum_everywhere(row: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks of ``row`` (n,), float32, bitwise equal on all ranks.  Collective."""
    total = row.clone()
    await_collective(dist.all_reduce(total, group=group, async_op=True), group)
    return total


def own_part(total: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return ``total`` (n,) with zeros outside the ``rank``-th of ``size`` parts; over all ranks they sum to ``total``."""
    part = -(-total.numel() // size)
    kept = torch.zeros_like(total)
    window = slice(rank * part, (rank + 1) * part)
    kept[window] = total[window]
    return kept


# ---- State of a coding: the errors of gradients, the size of errors, and the bytes saved.

_MOST_LAYOUTS = 64


@dataclass(slots=True)
class Meter:
    """The errors that coding has caused, and the bytes that it has sent.

    Attributes:
        what: "gather" or "reduction".  bound: the relative error above which to warn.
        num_calls: collectives so far.
        last, worst: relative error, in the 2-norm, of the last collective and the largest; 0-dim, on the tensors'
            device.
        sent_bytes: bytes that this rank has sent.  plain_bytes: bytes that the same collectives would have sent
            uncoded.
    """

    what: str
    bound: float
    num_calls: int = 0
    last: torch.Tensor | None = None
    worst: torch.Tensor | None = None
    sent_bytes: int = 0
    plain_bytes: int = 0
    has_warned: bool = False

    def record(self, was: torch.Tensor, lost: torch.Tensor, params: Sequence[NamedTensor]) -> None:
        """Record one collective: :func:`norm_of` the coded tensors and of their coding errors.

        On an accelerator the host does not wait for the norms.
        """
        last = lost / was.clamp_min(torch.finfo(torch.float32).tiny)
        self.worst = last if self.worst is None else torch.fmax(self.worst, last)
        self.last = last
        self.num_calls += 1
        if last.device.type == "cpu":
            self.warn(params)

    def warn(self, params: Sequence[NamedTensor]) -> None:
        """Warn, once, if the largest error is above the bound."""
        if self.has_warned or self.worst is None or not self.worst.item() > self.bound:
            return
        self.has_warned = True
        first = params[0].fqn if params else "?"
        warnings.warn(
            f"compression: coding has changed a {self.what} of the unit of '{first}' by {self.worst.item():.3g} of its 2-norm, "
            f"above warn_above={self.bound}. Take smaller blocks or 'bf16', or name what is so uneven in "
            "CompressionPolicy(exact=...)",
            stacklevel=2,
        )

    def count(self, sent: int, plain: int) -> None:
        """Count the bytes of one collective."""
        self.sent_bytes += sent
        self.plain_bytes += plain


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all elements of ``tensors``, float32, 0-dim."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))


@dataclass(slots=True, eq=False)
class Compression:
    """The coding of parameters that gather and reduce together.

    Attributes:
        policy: the user's choice.
        residuals: by parameter, the coding errors of its gradients, which are added to its next gradients: float32
            rows, one for each rank of the reduce-scatter (its section), or a single row between replicas.
        gathers, reductions: their coding errors and bytes.
    """

    policy: CompressionPolicy
    residuals: dict[NamedTensor, torch.Tensor] = field(default_factory=dict[NamedTensor, torch.Tensor])
    gathers: Meter = field(init=False)
    reductions: Meter = field(init=False)
    _sections: dict[tuple[int, torch.dtype, Coding], tuple[Bucket, CodedSection]] = field(init=False)

    def __post_init__(self) -> None:
        self.gathers = Meter("gather", self.policy.warn_above)
        self.reductions = Meter("reduction", self.policy.warn_above)
        self._sections = {}

    def section_of(self, contents: SectionContents, dtype: torch.dtype, coding: Coding) -> CodedSection:
        """Return how sections of ``contents`` in ``dtype`` become messages; it has no runs if no tensor is coded."""
        layout = contents.layout
        key = (id(layout), dtype, coding)
        known = self._sections.get(key)
        if known is None:
            if len(self._sections) >= _MOST_LAYOUTS:
                self._sections.clear()
            saves = dtype.is_floating_point and (coding == "int8" or dtype.itemsize > 2)
            shapes = [shard.shape for shard in layout.shards]
            named = zip(contents.params, shapes, strict=True)
            is_coded = [saves and takes(self.policy, param.fqn, shape, dtype.itemsize) for param, shape in named]
            made = CodedSection.of(layout, is_coded, dtype, BlockCode(coding, self.policy.block))
            known = self._sections[key] = (layout, made)  # keep the layout alive, so that no other object gets its id
        return known[1]

    def add_residuals(self, rows: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> None:
        """Add the coding errors of earlier gradients of ``params`` to ``rows`` (R, coded elements or more)."""
        if self.policy.error_feedback:
            for tensor, _, numel, start in section.runs:
                residual = self.residuals.get(params[tensor])
                if residual is not None and residual.shape == (rows.shape[0], numel):
                    rows.narrow(1, start, numel).add_(residual)

    def store_residuals(self, lost: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> None:
        """Store ``lost`` (as ``rows`` of :meth:`add_residuals`) for the next gradients; replace non-finite values by zero."""
        if not self.policy.error_feedback:
            return
        for tensor, _, numel, start in section.runs:
            shape = (lost.shape[0], numel)
            residual = self.residuals.get(params[tensor])
            if residual is None or residual.shape != shape:
                residual = self.residuals[params[tensor]] = torch.empty(shape, dtype=torch.float32, device=lost.device)
            residual.copy_(lost.narrow(1, start, numel)).nan_to_num_(0.0, 0.0, 0.0)

    @property
    def residual_bytes(self) -> int:
        """Bytes of the stored coding errors."""
        return sum(each.nbytes for each in self.residuals.values())

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the residuals of now."""
        was = {param: residual.clone() for param, residual in self.residuals.items()}

        def restore() -> None:
            self.residuals.clear()
            self.residuals.update(was)

        return restore

    def round_trip(self, shard: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return ``shard`` of parameter ``name`` of full ``shape`` as all ranks see it after an all-gather in ``dtype``."""
        cast = shard.detach().to(dtype)
        coding = self.policy.gather
        saves = coding == "int8" or dtype.itemsize > 2
        if coding is None or not (saves and takes(self.policy, name, shape, dtype.itemsize)) or not shard.numel():
            return cast
        code, block = BlockCode(coding, self.policy.block), self.policy.block
        numel = -(-shard.numel() // block) * block
        row = torch.zeros(1, numel, dtype=torch.float32, device=shard.device)
        row[0, : shard.numel()].copy_(cast.reshape(-1))
        coded = torch.empty(1, code.num_bytes(numel), dtype=torch.uint8, device=shard.device)
        code.encode(row, coded)
        return code.decode(coded, numel)[0, : shard.numel()].view(shard.shape).to(dtype)


class _CodedGather:
    """The ends of an all-gather of coded sections: every rank decodes all sections, its own included."""

    take_over = None

    def __init__(
        self,
        bucket_ends: Sequence[BucketEnds],
        sections: Sequence[CodedSection],
        compression: Compression,
        pool: BufferPool,
    ) -> None:
        self._bucket_ends = bucket_ends
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
        for bucket_ends, section in zip(self._bucket_ends, self._sections, strict=True):
            part, mine = message.narrow(1, start, section.message_bytes), bucket_ends.section().view(1, -1)
            section.put_rest(mine, part)
            if section.runs:
                rows = section.take_coded(mine)
                norms.append(norm_of([rows]))
                section.code.encode(rows, section.codes_in(part), rows)
                lost.append(rows)
            start += section.message_bytes
        params = [param for bucket_ends in self._bucket_ends for param in bucket_ends.params]
        self._compression.gathers.record(norm_of(norms), norm_of(lost), params)
        return message.view(-1)

    def deliver(self, packed: torch.Tensor) -> None:
        messages, start = packed.view(-1, self._message_bytes), 0
        size = messages.shape[0]
        for bucket_ends, section in zip(self._bucket_ends, self._sections, strict=True):
            flat, buffer = self._pool.acquire_tensor(size * section.numel, section.dtype)
            rows = flat.view(size, section.numel)
            section.decode(messages.narrow(1, start, section.message_bytes), rows)
            for rank in range(size):
                torch_private.copy_all(
                    bucket_ends.full_parts(rank), section_parts(bucket_ends.layout, rows[rank], rank)
                )
            buffer.release()
            start += section.message_bytes


class CompressedCommunicator(RoutedCommunicator):
    """A group of ranks whose tensors travel coded.  Uncoded tensors travel through the backend, never through a link.

    Collectives that a user has set take precedence.
    """

    def __init__(self, packed: C10dCommunicator, pass_tracker: PassTracker, compression: Compression) -> None:
        super().__init__(packed, pass_tracker)
        self._compression = compression

    @property
    def planned_link(self) -> Link | None:
        return None

    def all_gather(self, ends: GatherEnds) -> Handle:
        """Gather sections as messages of bytes."""
        if listeners and tell("all-gather", "", ends):
            return LeftOut(ends, self.size)
        coding, packed, bucket_ends = self._compression.policy.gather, self.packed, ends.buckets()
        if coding is None or packed.custom.all_gather is not None:
            return packed.all_gather(ends)
        sections = [self._compression.section_of(each, each.full_dtype, coding) for each in bucket_ends]
        if not any(section.runs for section in sections):
            return packed.all_gather(ends)
        others = self.size - 1
        plain = sum(section.numel * section.dtype.itemsize for section in sections)
        self._compression.gathers.count(sum(each.message_bytes for each in sections) * others, plain * others)
        return packed.all_gather(_CodedGather(bucket_ends, sections, self._compression, packed.pool))

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Send every rank its section, coded; decode and sum in float32, in rank order; scale the sum."""
        if listeners and tell("reduction", ends.label, ends):
            return LeftOut(ends)
        coding, packed = self._compression.policy.reduce, self.packed
        if coding is None or packed.custom.reduce_scatter is not None:
            return packed.reduce_scatter(ends, scale)
        section = self._compression.section_of(ends, ends.dtype, coding)
        if not section.runs:
            return packed.reduce_scatter(ends, scale)
        stream, size = packed.stream, self.size
        flat, buffer = packed.pool.acquire_tensor(section.numel * size, ends.dtype)
        ends.fill(flat)
        self._compression.reductions.count(
            section.message_bytes * (size - 1), section.numel * ends.dtype.itemsize * (size - 1)
        )
        stream.wait_current()
        with stream.run():
            sent = self._messages(flat.view(size, -1), section, ends.params)
            received = torch.empty_like(sent)
            work = all_to_all_rows(received, sent, packed.group, async_op=not stream.is_concurrent)
            if stream.is_concurrent:
                if work is not None:
                    work.wait()  # the side stream waits, not the host
                self._deliver_sum(ends, section, received, scale)
                return StreamWork(stream, buffer.release, buffer.release, flat)
        buffer.release()
        return HostWork(work, lambda got: self._deliver_sum(ends, section, got, scale), received, None, packed.group)

    def _messages(self, rows: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> torch.Tensor:
        messages = torch.zeros(rows.shape[0], section.message_bytes, dtype=torch.uint8, device=rows.device)
        section.put_rest(rows, messages)
        coded = section.take_coded(rows)
        self._compression.add_residuals(coded, section, params)
        was = norm_of([coded])
        section.code.encode(coded, section.codes_in(messages), coded)  # from here on, ``coded`` is the coding error
        self._compression.store_residuals(coded, section, params)
        self._compression.reductions.record(was, norm_of([coded]), params)
        return messages

    def _deliver_sum(self, ends: ScatterEnds, section: CodedSection, received: torch.Tensor, scale: Scale) -> None:
        total = section.sum_of(received).view(-1)
        target = ends.target()
        target.copy_(total.div_(self._divisor(scale)))
        ends.deliver(target)

    def _divisor(self, scale: Scale) -> float:
        return float(self.size) if scale.divisor is None else scale.divisor

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Handle:
        """All-reduce in place: each rank sums one coded part, codes the sum again, and sends it to all."""
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        coding, stream = self._compression.policy.reduce, self.packed.stream
        if contents is None or coding is None:
            return self.packed.all_reduce(tensor, scale)
        section = self._compression.section_of(contents, tensor.dtype, coding)
        if not section.runs:
            return self.packed.all_reduce(tensor, scale)
        stream.wait_current()
        with stream.run():
            self._sum(tensor, section, contents.params, scale)
        return InPlaceStreamWork(stream)

    def _sum(self, tensor: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor], scale: Scale) -> None:
        """Sum ``tensor`` in place, with the current stream; on the host, wait: for the parts, then for their sums."""
        packed, code, size = self.packed, section.code, self.size
        windows = [tensor.narrow(0, start, numel) for start, numel in section.rest]
        if windows:
            exact = torch.cat(windows)
            packed.all_reduce_here(exact, scale)
            torch_private.copy_all(windows, list(exact.split([window.numel() for window in windows])))
        numel = align(-(-section.coded_numel // size), code.block)  # elements that one rank sums
        coded_bytes = code.num_bytes(numel)
        num_bytes = align(coded_bytes, 16)
        takes = [(size * numel, torch.float32), *[(size * num_bytes, torch.uint8)] * 2]
        taken = [packed.pool.acquire_tensor(*each) for each in takes]
        whole, sent, received = (flat.view(1 if flat.is_floating_point() else size, -1) for flat, _ in taken)
        section.take_coded(tensor.view(1, -1), whole)
        self._compression.add_residuals(whole, section, params)
        rows, was = whole.view(size, numel), norm_of([whole])
        code.encode(rows, sent[:, :coded_bytes], rows)  # from here on, ``rows`` is the coding error
        self._compression.reductions.record(was, norm_of([whole]), params)
        self._compression.reductions.count(
            2 * num_bytes * (size - 1), 2 * section.coded_numel * tensor.dtype.itemsize * (size - 1) // size
        )
        is_async = not packed.stream.is_concurrent
        self._complete(all_to_all_rows(received, sent, packed.group, is_async))
        total = torch.zeros(1, numel, dtype=torch.float32, device=tensor.device)
        for row in received.unsqueeze(1):
            total += code.decode(row[:, :coded_bytes], numel)
        result = sent[:1]
        code.encode(total, result[:, :coded_bytes], total)
        rows[self.rank] += total[0]  # the error of the coded sum; this rank adds it to its own next gradient
        self._compression.store_residuals(whole, section, params)
        self._complete(all_gather_single(received.view(-1), result.view(-1), packed.group, is_async))
        code.decode_run(received[:, :coded_bytes], numel, 0, rows)
        section.put_coded(whole.div_(self._divisor(scale)), tensor.view(1, -1))
        for _, buffer in taken:
            buffer.release()

    def _complete(self, work: dist.Work | None) -> None:
        HostWork(work, lambda _: None, torch.empty(0, device="cpu"), None, self.packed.group).wait()
