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
from shardwise.collectives.buffer_pool import BufferPool, PooledBuffer
from shardwise.collectives.c10d import (
    C10dCommunicator,
    InPlaceStreamWork,
    Launched,
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
from shardwise.observe import hearers, note, now, remember, tell, thread

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


# ---- Coded sums over replicas: each rank gets one part of every rank, sums it, and sends the sum, coded again, to all.
# These are two collectives with work of the host in between. The host waits for neither if it launches the second one
# after backward has continued.

# of unfinished sums; a single sum may be larger, and then overlaps at most this many bytes of others
MOST_OPEN_BYTES = 1 << 26


@dataclass(slots=True, eq=False)
class CodedSum:
    """The handle of one sum: every rank calls :meth:`begin`, :meth:`turn` and :meth:`end`, once each, in the same order.

    Attributes:
        packed, compression: the ranks, and the coding of what they send.
        tensor: 1-D; summed in place.  section, params: which of its elements are coded, and the parameters in it.
        sums: those that it is one of once it is launched.
    """

    holds_input: bool = field(default=False, init=False)

    packed: C10dCommunicator
    compression: Compression
    section: CodedSection
    tensor: torch.Tensor
    params: Sequence[NamedTensor]
    scale: Scale
    sums: CodedSums | None = None
    has_turned: bool = False
    has_ended: bool = False
    _numel: int = field(init=False)  # elements that one rank sums
    _rows: torch.Tensor = field(init=False)  # what is sent, then its coding error, then the sum
    _sent: torch.Tensor = field(init=False)
    _received: torch.Tensor = field(init=False)
    _rest: torch.Tensor | None = None
    _exact: Handle | None = None  # the sum of the exact elements
    _on_way: Handle | None = None
    _buffers: list[PooledBuffer] = field(default_factory=list[PooledBuffer])

    def begin(self) -> None:
        """Send every rank the part that it sums; start the all-reduce of the exact elements."""
        packed, compression, section, params = self.packed, self.compression, self.section, self.params
        size, code = packed.size, section.code
        self._sum_rest()
        numel = self._numel = align(-(-section.coded_numel // size), code.block)
        num_bytes = align(code.num_bytes(numel), 16)
        whole = self._take_tensor(size * numel, torch.float32).view(1, -1)
        section.take_coded(self.tensor.view(1, -1), whole)
        compression.add_residuals(whole, section, params)
        rows = self._rows = whole.view(size, numel)
        self._sent = self._take_tensor(size * num_bytes, torch.uint8).view(size, num_bytes)
        self._received = self._take_tensor(size * num_bytes, torch.uint8).view(size, num_bytes)
        was = norm_of([rows])
        code.encode(rows, self._codes(self._sent), rows)
        compression.reductions.record(was, norm_of([rows]), params)
        compression.reductions.count(
            2 * num_bytes * (size - 1), 2 * section.coded_numel * self.tensor.dtype.itemsize * (size - 1) // size
        )
        self._on_way = self._launched(all_to_all_rows(self._received, self._sent, packed.group, self._is_async))

    def turn(self) -> None:
        """Sum the part that this rank has received, and send the sum to all."""
        self.has_turned = True
        code, rows, numel = self.section.code, self._rows, self._numel
        self._wait()
        total = torch.zeros(1, numel, dtype=torch.float32, device=rows.device)
        for row in self._received.unsqueeze(1):
            total += code.decode(self._codes(row), numel)
        result = self._sent[:1]  # its first use is over: the all-to-all has sent it
        code.encode(total, self._codes(result), total)
        rows[self.packed.rank] += total[0]  # the error of the coded sum; this rank adds it to its own next gradient
        self.compression.store_residuals(rows.view(1, -1), self.section, self.params)
        work = all_gather_single(self._received.view(-1), result.view(-1), self.packed.group, self._is_async)
        self._on_way = self._launched(work)

    def end(self) -> None:
        """Write the sum into ``tensor``."""
        self.has_ended = True
        self._wait()
        section = self.section
        section.code.decode_run(self._codes(self._received), self._numel, 0, self._rows)
        size = self.packed.size
        total = self._rows.view(1, -1).div_(float(size) if self.scale.divisor is None else self.scale.divisor)
        section.put_coded(total, self.tensor.view(1, -1))
        if self._exact is not None:
            self._exact.wait()
        if self._rest is not None:
            windows = self._windows()
            torch_private.copy_all(windows, list(self._rest.split([window.numel() for window in windows])))
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()

    def is_done(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        if self.sums is not None:
            self.sums.end(self)

    def cancel(self) -> None:
        """Cancel the collectives in flight; other ranks do the same at the same place."""
        if self.has_ended or self.sums is None:
            return
        self.sums.forget(self)
        self.has_turned = self.has_ended = True
        on_way, exact, self._on_way, self._exact = self._on_way, self._exact, None, None
        for handle in (on_way, exact):
            if handle is not None:
                handle.cancel()
        for buffer in self._buffers:
            buffer.lose()  # an unfinished collective may still write to it
        self._buffers.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that the sum takes until it ends, without exact elements and scales."""
        return 6 * self.section.coded_numel  # float32 rows, and codes in two buffers

    def shares_with(self, other: CodedSum) -> bool:
        """Return True if both reduce gradients of one parameter: the later sum must add the coding error of the earlier."""
        return self.compression is other.compression and not {*map(id, self.params)}.isdisjoint(map(id, other.params))

    def _sum_rest(self) -> None:
        windows = self._windows()
        if not windows:
            return
        self._rest = torch.cat(windows)
        if self._is_async:
            self._exact = self.packed.all_reduce(self._rest, self.scale)
        else:
            self.packed.all_reduce_here(self._rest, self.scale)

    def _windows(self) -> list[torch.Tensor]:
        return [self.tensor.narrow(0, start, numel) for start, numel in self.section.rest]

    def _codes(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, : self.section.code.num_bytes(self._numel)]

    def _take_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        flat, buffer = self.packed.pool.acquire_tensor(numel, dtype)
        self._buffers.append(buffer)
        return flat

    @property
    def _is_async(self) -> bool:
        return not self.packed.stream.is_concurrent

    def _launched(self, work: torch.distributed.Work | None) -> Handle:
        return Launched(work, lambda _: None, self.tensor, None, self.packed.group)

    def _wait(self) -> None:
        on_way, self._on_way = self._on_way, None
        if on_way is not None:
            on_way.wait()


class CodedSums:
    """Sums of all groups of an engine that have begun and not ended, in launch order.

    A sum turns once the next unit's sums have begun, and ends once those of the unit after that have begun.  It does so
    earlier if it or the sum before it is waited for, or if more sums would take too much memory.  All ranks reach these
    places in the same order, and the sums travel while backward continues.

    Attributes:
        open: those sums.
    """

    def __init__(self) -> None:
        self.open: list[CodedSum] = []
        self._num_earlier = 0  # number of open sums that had begun before the last go_on()

    def launch(self, coded: CodedSum) -> Handle:
        """Begin ``coded``."""
        while self.open and sum([each.num_bytes for each in self.open]) > max(MOST_OPEN_BYTES, coded.num_bytes):
            self.end(self.open[0])
        for each in [each for each in self.open if each.shares_with(coded)]:
            self._turn(each)
        coded.begin()
        coded.sums = self
        self.open.append(coded)
        return coded

    def go_on(self) -> None:
        """End the sums that had turned, and turn the sums that had begun, before the last call of this."""
        earlier = self.open[: self._num_earlier]
        turned = [each for each in earlier if each.has_turned]
        if earlier:
            self._turn(earlier[-1])
        for each in turned:
            self.end(each)
        self._num_earlier = len(self.open)

    def end(self, coded: CodedSum) -> None:
        """End ``coded`` if it has not ended; first turn the sums before it and the one after it."""
        if coded.has_ended:
            return
        self._turn(coded)
        following = self.open[self.open.index(coded) + 1 :][:1]
        for each in following:
            self._turn(each)
        self.forget(coded)
        coded.end()

    def forget(self, coded: CodedSum) -> None:
        """Remove ``coded``."""
        if coded in self.open:
            number = self.open.index(coded)
            self._num_earlier -= number < self._num_earlier
            del self.open[number]

    def _turn(self, coded: CodedSum) -> None:
        """Turn ``coded`` and the sums before it, if they have not turned."""
        for each in self.open[: self.open.index(coded) + 1]:
            if not each.has_turned:
                each.turn()


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

    def __init__(
        self, packed: C10dCommunicator, pass_tracker: PassTracker, compression: Compression, sums: CodedSums
    ) -> None:
        super().__init__(packed, pass_tracker)
        self._compression = compression
        self._sums = sums

    @property
    def planned_link(self) -> Link | None:
        return None

    def all_gather(self, ends: GatherEnds) -> Handle:
        """Gather sections as messages of bytes."""
        remember((now(), thread(), "", 0, "all-gather", ""))
        if hearers and tell("all-gather", "", ends):
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
        remember((now(), thread(), "", 0, "reduction", ends.label))
        if hearers and tell("reduction", ends.label, ends):
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
        if stream.is_concurrent:
            stream.wait_current()
            with stream.run():
                sent = self._messages(flat.view(size, -1), section, ends.params)
                received = torch.empty_like(sent)
                work = all_to_all_rows(received, sent, packed.group, async_op=False)
                if work is not None:
                    work.wait()  # the side stream waits, not the host
                self._deliver_sum(ends, section, received, scale)
            return StreamWork(stream, buffer.release, buffer.release, flat)
        sent = self._messages(flat.view(size, -1), section, ends.params)
        buffer.release()
        received = torch.empty_like(sent)
        work = all_to_all_rows(received, sent, packed.group, async_op=True)
        return Launched(work, lambda got: self._deliver_sum(ends, section, got, scale), received, None, packed.group)

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
        section = None
        if contents is not None and coding is not None:
            section = self._compression.section_of(contents, tensor.dtype, coding)
        if contents is None or section is None or not section.runs:
            return self.packed.all_reduce(tensor, scale)
        coded = CodedSum(self.packed, self._compression, section, tensor, contents.params, scale)
        if not stream.is_concurrent:
            return self._sums.launch(coded)
        stream.wait_current()
        with stream.run():
            coded.begin()
            coded.turn()
            coded.end()
        return InPlaceStreamWork(stream)
