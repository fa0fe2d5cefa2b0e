"""Compression: the user's policy, the codes, and collectives of coded tensors.

Tensors are gathered as bytes; gradients are exchanged in an all-to-all and summed in rank order.

They use the collectives of the process group's backend, on its stream, so that CPU and GPU run the same code.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.arguments import explains_fields
from shardwise.collectives.c10d import (
    GroupCommunicator,
    HostWork,
    InPlaceStreamWork,
    StreamWork,
    all_gather_single,
    all_to_all_rows,
)
from shardwise.collectives.routes import (
    BucketEnds,
    GatherEnds,
    Handle,
    LeftOut,
    NamedTensor,
    PassTracker,
    Scale,
    ScatterEnds,
    SectionContents,
    SumContents,
    section_parts,
)
from shardwise.collectives.streams import BufferPool, SideStream
from shardwise.consistency.process_groups import await_collective
from shardwise.errors import ConfigError
from shardwise.layout import Bucket, align
from shardwise.observe import listeners, note, tell

# ---- Compression of parameters and gradients: the user's policy, the codes, and how sections become messages.

Coding = Literal["int8", "bf16"]
_MIN_BLOCK = 8


@explains_fields
@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """How many bits the parameters and gradients of a unit take in collectives.

    Master weights and optimizer state stay exact.  So do tensors with fewer than two dimensions (norms, biases), small
    tensors, float64 tensors and those that ``exact`` names.  All ranks must use the same policy.

    Attributes:
        gather: coding of all-gathers of parameters: "int8", "bf16", or None for none.  All ranks compute with the
            decoded parameters; each decodes its own shard too, so that parameters are bitwise equal on all.  Only for
            parameters that are sharded and not replicated.
        reduce: coding of the reduction of gradients: of the reduce-scatter, or, on a mesh with replicas, of the
            all-reduce over replicas only.  Ranks decode and then sum in float32, in rank order.
        block: elements that share one int8 scale; 8 or more.
        error_feedback: add the coding error of a gradient to the next gradient.  Costs 4 bytes on every rank for each
            coded element whose gradient it sends: of the whole unit if parameters are sharded, of the shard between
            replicas.
        min_bytes: tensors whose full size is smaller stay exact.
        exact: shell patterns of names of parameters that stay exact, from the root or from any module below it:
            ``("*embed*", "head.weight")``.
        warn_above: warn if coding changes a unit's parameters or gradients by more than this, relative, in the 2-norm.

    Raises: ConfigError for other values. Source: ZeRO++, arXiv 2306.10209 (blocks, reduction through an all-to-all);
    error feedback: arXiv 1809.07599.

    Example:
        >>> CompressionPolicy(gather="int8", reduce="int8").block
        256
    """

    gather: Coding | None = None
    reduce: Coding | None = None
    block: int = 256
    error_feedback: bool = True
    min_bytes: int = 16_384
    exact: tuple[str, ...] = ()
    warn_above: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("gather", self.gather), ("reduce", self.reduce)):
            if value is not None and value not in get_args(Coding):
                raise ConfigError(f"CompressionPolicy: {name} is {value!r}, expected 'int8', 'bf16' or None")
        for name, value, least in (("block", self.block, _MIN_BLOCK), ("min_bytes", self.min_bytes, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"CompressionPolicy: {name} is {value!r}, expected a whole number, {least} or more")
        if isinstance(self.exact, str) or not all(isinstance(each, str) for each in self.exact):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"CompressionPolicy: exact is {self.exact!r}, expected a tuple of patterns of names")
        if not self.warn_above > 0:
            raise ConfigError(f"CompressionPolicy: warn_above is {self.warn_above!r}, expected a number above 0")


def takes(policy: CompressionPolicy, name: str, shape: tuple[int, ...], itemsize: int) -> bool:
    """Return True if ``policy`` codes the tensor ``name`` of full ``shape`` with ``itemsize`` bytes per element."""
    num_bytes = itemsize
    for extent in shape:
        num_bytes *= extent
    is_large = len(shape) >= 2 and num_bytes >= max(policy.min_bytes, 1) and itemsize <= 4
    return is_large and not any(_names(pattern, name) for pattern in policy.exact)


def _names(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` matches ``name`` or what follows any of its dots.

    Names begin at the unit before the first forward, and at the root after it; both must match the same patterns.
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


# ---- Codes of float32 rows: 8-bit integers with one scale per block, or bfloat16.

_STEPS = 127
_AT_ONCE = 2**19  # elements: 2 MiB, which five passes read and write; smaller runs cost more calls
_TINY = torch.finfo(torch.float32).tiny  # smaller scales lose digits: such a block is sent as zeros


class BlockCode:
    """A coding of float32 rows.  Equal rows become equal bytes on any device.

    ``int8``: each block of ``block`` elements becomes a float32 scale (its largest magnitude / 127) and codes from -127
    to 127, rounded half to even.  The error of an element is at most half the scale, or 1.5e-36.  A block with an inf
    or nan decodes to nan, so that checks for overflow still find it.  ``bf16``: rounded to nearest; the relative error
    is at most 1/256.

    Source of the blocks: ZeRO++, arXiv 2306.10209.
    """

    def __init__(self, coding: Coding, block: int) -> None:
        self.coding = coding
        self.block = block

    def num_bytes(self, numel: int) -> int:
        """Return the coded bytes of a row of ``numel`` elements; ``numel`` is a multiple of ``block``."""
        return 2 * numel if self.coding == "bf16" else numel + 4 * (numel // self.block)

    def encode(self, rows: torch.Tensor, out: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Code ``rows`` (R, n), float32, into ``out`` (R, ``num_bytes(n)``), uint8.

        Rows of ``out`` must start at multiples of 4 bytes.  ``lost``, if given, receives the coding error: ``rows``
        minus the decoded rows; it may be ``rows`` itself.
        """
        if self.coding == "bf16":
            coded = out.view(torch.bfloat16).copy_(rows)
            if lost is not None:
                torch.sub(rows, coded, out=lost)
            return
        scales, codes = self._parts(out, rows.shape[1])
        runs = self._runs(rows)
        scratch = rows.new_empty(rows.shape[0], runs[0][1] if runs else 0)
        for start, numel in runs:
            true = self._blocks(rows, start, numel)
            scale = torch.maximum(true.amax(-1), true.amin(-1).neg_()).div_(_STEPS)
            scale.masked_fill_(~torch.isfinite(scale), float("nan")).masked_fill_(scale < _TINY, 0.0)
            divisors = torch.where(scale > 0, scale, float("inf"))
            rounded = self._blocks(scratch, 0, numel)
            torch.div(true, divisors.unsqueeze(-1), out=rounded)
            rounded.round_().nan_to_num_(0.0, 0.0, 0.0)
            self._scales(scales, start, numel).copy_(scale)
            codes.narrow(1, start, numel).copy_(scratch.narrow(1, 0, numel))
            if lost is not None:
                torch.sub(true, rounded.mul_(scale.unsqueeze(-1)), out=self._blocks(lost, start, numel))

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the float32 rows (R, ``numel``) that :meth:`encode` has written to ``coded``."""
        rows = torch.empty(coded.shape[0], numel, dtype=torch.float32, device=coded.device)
        self.decode_run(coded, numel, 0, rows)
        return rows

    def decode_run(self, coded: torch.Tensor, numel: int, first: int, out: torch.Tensor) -> None:
        """Decode elements ``first`` to ``first + n`` of the rows (R, ``numel``) in ``coded`` into ``out`` (R, n).

        ``out`` may have any dtype; ``first`` must be a multiple of ``block``; ``n`` need not be.
        """
        if self.coding == "bf16":
            out.copy_(coded.view(torch.bfloat16).narrow(1, first, out.shape[1]))
            return
        scales, codes = self._parts(coded, numel)
        for start, size in self._runs(out):
            target, begin = out.narrow(1, start, size), first + start
            whole = size - size % self.block if out.dtype == torch.float32 else 0
            if whole:
                target.narrow(1, 0, whole).copy_(codes.narrow(1, begin, whole))
                self._blocks(target, 0, whole).mul_(self._scales(scales, begin, whole).unsqueeze(-1))
            if whole < size:
                padded = align(size - whole, self.block)
                last = codes.narrow(1, begin + whole, padded).float()
                self._blocks(last, 0, padded).mul_(self._scales(scales, begin + whole, padded).unsqueeze(-1))
                target.narrow(1, whole, size - whole).copy_(last.narrow(1, 0, size - whole))

    def _parts(self, coded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the codes in ``coded``, whose rows have ``numel`` elements."""
        split = 4 * (numel // self.block)
        return coded[:, :split].view(torch.float32), coded[:, split : split + numel].view(torch.int8)

    def _scales(self, scales: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        return scales.narrow(1, start // self.block, numel // self.block)

    def _blocks(self, rows: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        return rows.narrow(1, start, numel).unflatten(1, (-1, self.block))

    def _runs(self, rows: torch.Tensor) -> list[tuple[int, int]]:
        """Return the (start, elements) of runs to process one after the other: on the host a run fits its caches."""
        num_rows, numel = rows.shape
        step = numel if rows.is_cuda else align(_AT_ONCE // max(num_rows, 1) + 1, self.block)
        return [(start, min(step, numel - start)) for start in range(0, numel, max(step, 1))]


# ---- Sections of several tensors as messages: some tensors are coded, the rest is copied byte by byte.

_ALIGNMENT = 16  # bytes


class CodedRange(NamedTuple):
    """Elements of a section that are coded.

    Attributes:
        tensor: index of the tensor.  start, numel: its elements in the section.  coded_start: its start among the coded
            elements.
    """

    tensor: int
    start: int
    numel: int
    coded_start: int


@dataclass(frozen=True, slots=True)
class CodedSection:
    """The layout of a section's message: first the exact elements, then the codes.  Every tensor begins a new block.

    Attributes:
        code: coding of the coded tensors.  dtype: of the section, which has ``numel`` elements.
        runs: the coded ranges: ``coded_numel`` elements with their padding to blocks.
        rest: (start, elements, start among the exact elements) of exact ranges, with the padding between tensors.
    """

    code: BlockCode
    dtype: torch.dtype
    numel: int
    runs: tuple[CodedRange, ...]
    coded_numel: int
    rest: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, layout: Bucket, is_coded: Sequence[bool], dtype: torch.dtype, code: BlockCode) -> CodedSection:
        """Return the layout for sections of ``layout`` that codes the tensors for which ``is_coded`` is True."""
        runs: list[CodedRange] = []
        rest: list[tuple[int, int, int]] = []
        coded = exact = end = 0
        for index, (shard, start) in enumerate(zip(layout.shards, layout.offsets, strict=True)):
            if is_coded[index] and shard.section_numel:
                if start > end:
                    rest.append((end, start - end, exact))
                    exact += start - end
                runs.append(CodedRange(index, start, shard.section_numel, coded))
                coded = align(coded + shard.section_numel, code.block)
                end = start + shard.section_numel
        if layout.section_numel > end:
            rest.append((end, layout.section_numel - end, exact))
        return cls(code, dtype, layout.section_numel, tuple(runs), coded, tuple(rest))

    @property
    def rest_numel(self) -> int:
        """Number of exact elements."""
        return sum(numel for _, numel, _ in self.rest)

    @property
    def message_bytes(self) -> int:
        """Bytes of one section's message."""
        return self._codes_start + align(self.code.num_bytes(self.coded_numel), _ALIGNMENT)

    @property
    def _codes_start(self) -> int:
        return align(self.rest_numel * self.dtype.itemsize, _ALIGNMENT)

    def codes_in(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the codes in ``messages`` (R, ``message_bytes``)."""
        return messages.narrow(1, self._codes_start, self.code.num_bytes(self.coded_numel))

    def _rest_in(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, : self.rest_numel * self.dtype.itemsize].view(self.dtype)

    def take_coded(self, sections: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the elements of ``sections`` (R, numel) that are coded, as float32 rows (R, coded_numel) with zero padding.

        ``out``, if given, receives them: (R, coded_numel or more), with zeros in the excess.
        """
        found = out
        if found is None:
            found = torch.empty(sections.shape[0], self.coded_numel, dtype=torch.float32, device=sections.device)
        found.narrow(1, self.coded_numel, found.shape[1] - self.coded_numel).zero_()
        for _, start, numel, coded in self.runs:
            found.narrow(1, coded, numel).copy_(sections.narrow(1, start, numel))
            found.narrow(1, coded + numel, align(numel, self.code.block) - numel).zero_()
        return found

    def put_coded(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        """Write ``rows``, as :meth:`take_coded` returns them, to their places in ``sections``."""
        for _, start, numel, coded in self.runs:
            sections.narrow(1, start, numel).copy_(rows.narrow(1, coded, numel))

    def put_rest(self, sections: torch.Tensor, messages: torch.Tensor) -> None:
        """Write the exact elements of ``sections`` into ``messages``."""
        target = self._rest_in(messages)
        for start, numel, exact in self.rest:
            target.narrow(1, exact, numel).copy_(sections.narrow(1, start, numel))

    def decode(self, messages: torch.Tensor, sections: torch.Tensor) -> None:
        """Decode ``messages`` (R, message_bytes) into ``sections`` (R, numel)."""
        source = self._rest_in(messages)
        for start, numel, exact in self.rest:
            sections.narrow(1, start, numel).copy_(source.narrow(1, exact, numel))
        codes = self.codes_in(messages)
        for _, start, numel, coded in self.runs:
            self.code.decode_run(codes, self.coded_numel, coded, sections.narrow(1, start, numel))

    def sum_of(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the float32 sum (1, numel) of the decoded rows of ``messages`` (R, message_bytes), in row order."""
        total = torch.zeros(1, self.numel, dtype=torch.float32, device=messages.device)
        one = torch.empty_like(total)
        for row in messages.unsqueeze(1):
            self.decode(row, one)
            total += one
        return total


# ---- Sums of coding errors over ranks: checkpoints save them, so that any number of ranks can load them.


def sum_at_owners(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return (n,), the sum in rank order of all ranks' rows for this rank; ``rows``: (ranks, n), float32.  Collective."""
    received = torch.empty_like(rows)
    await_collective(all_to_all_rows(received, rows.contiguous(), group, async_op=True), group)
    total = torch.zeros_like(rows[0])
    for row in received:
        total += row
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


class Compression:
    """The coding of parameters that gather and reduce together.

    Attributes:
        policy: the user's choice.
        residuals: by parameter, the coding errors of its gradients, which are added to its next gradients: float32
            rows, one for each rank of the reduce-scatter (its section), or a single row between replicas.
        gathers, reductions: their coding errors and bytes.
    """

    def __init__(self, policy: CompressionPolicy) -> None:
        self.policy = policy
        self.residuals: dict[NamedTensor, torch.Tensor] = {}
        self.gathers, self.reductions = (Meter(what, policy.warn_above) for what in ("gather", "reduction"))
        self._sections: dict[tuple[int, torch.dtype, Coding], tuple[Bucket, CodedSection]] = {}

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


@dataclass(frozen=True, slots=True)
class _CodedGather:
    """The ends of an all-gather of coded sections: every rank decodes all sections, its own included."""

    _bucket_ends: Sequence[BucketEnds]
    _sections: Sequence[CodedSection]
    _compression: Compression
    _pool: BufferPool

    @property
    def take_over(self) -> None:
        """The message is no parameter: it is decoded."""

    @property
    def _message_bytes(self) -> int:
        return sum(section.message_bytes for section in self._sections)

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


class CompressedCommunicator(GroupCommunicator):
    """A group of ranks whose tensors travel coded.  Uncoded tensors travel through the backend, never through a link.

    Collectives that a user has set take precedence.
    """

    def __init__(
        self, compression: Compression, group: dist.ProcessGroup, stream: SideStream, pool: BufferPool, **options: Any
    ) -> None:
        """``options``: as of :class:`GroupCommunicator`."""
        super().__init__(group, stream, pool, PassTracker(), **options)
        self._compression = compression

    def all_gather(self, ends: GatherEnds) -> Handle:
        """Gather sections as messages of bytes."""
        coding, bucket_ends = self._compression.policy.gather, ends.buckets()
        if coding is None or self.custom.all_gather is not None:
            return super().all_gather(ends)
        sections = [self._compression.section_of(each, each.full_dtype, coding) for each in bucket_ends]
        if not any(section.runs for section in sections):
            return super().all_gather(ends)
        others = self.size - 1
        plain = sum(section.numel * section.dtype.itemsize for section in sections)
        self._compression.gathers.count(sum(each.message_bytes for each in sections) * others, plain * others)
        return super().all_gather(_CodedGather(bucket_ends, sections, self._compression, self.pool))

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Send every rank its section, coded; decode and sum in float32, in rank order; scale the sum."""
        coding = self._compression.policy.reduce
        if coding is None or self.custom.reduce_scatter is not None:
            return super().reduce_scatter(ends, scale)
        section = self._compression.section_of(ends, ends.dtype, coding)
        if not section.runs:
            return super().reduce_scatter(ends, scale)
        if listeners and tell("reduction", ends.label, ends):
            return LeftOut(ends)
        stream, size = self.stream, self.size
        flat, buffer = self.pool.acquire_tensor(section.numel * size, ends.dtype)
        ends.fill(flat)
        self._compression.reductions.count(
            section.message_bytes * (size - 1), section.numel * ends.dtype.itemsize * (size - 1)
        )
        stream.wait_current()
        with stream.run():
            sent = self._messages(flat.view(size, -1), section, ends.params)
            received = torch.empty_like(sent)
            work = all_to_all_rows(received, sent, self.group, async_op=not stream.is_concurrent)
            if stream.is_concurrent:
                if work is not None:
                    work.wait()  # the side stream waits, not the host
                self._deliver_sum(ends, section, received, scale)
                return StreamWork(stream, buffer.release, buffer.release, flat)
        buffer.release()
        return HostWork(work, lambda got: self._deliver_sum(ends, section, got, scale), received, None, self.group)

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
        target.copy_(total.div_(scale.over(self.size)))
        ends.deliver(target)

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Handle:
        """All-reduce in place: each rank sums one coded part, codes the sum again, and sends it to all."""
        coding, stream = self._compression.policy.reduce, self.stream
        if contents is None or coding is None:
            return super().all_reduce(tensor, scale)
        section = self._compression.section_of(contents, tensor.dtype, coding)
        if not section.runs:
            return super().all_reduce(tensor, scale)
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        stream.wait_current()
        with stream.run():
            self._sum(tensor, section, contents.params, scale)
        return InPlaceStreamWork(stream)

    def _sum(self, tensor: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor], scale: Scale) -> None:
        """Sum ``tensor`` in place, with the current stream; on the host, wait: for the parts, then for their sums."""
        code, size = section.code, self.size
        windows = [tensor.narrow(0, start, numel) for start, numel, _ in section.rest]
        if windows:
            exact = torch.cat(windows)
            self.all_reduce_here(exact, scale)
            torch_private.copy_all(windows, list(exact.split([window.numel() for window in windows])))
        numel = align(-(-section.coded_numel // size), code.block)  # elements that one rank sums
        coded_bytes = code.num_bytes(numel)
        num_bytes = align(coded_bytes, 16)
        takes = [(size * numel, torch.float32), *[(size * num_bytes, torch.uint8)] * 2]
        taken = [self.pool.acquire_tensor(*each) for each in takes]
        whole, sent, received = (flat.view(1 if flat.is_floating_point() else size, -1) for flat, _ in taken)
        section.take_coded(tensor.view(1, -1), whole)
        self._compression.add_residuals(whole, section, params)
        rows, was = whole.view(size, numel), norm_of([whole])
        code.encode(rows, sent[:, :coded_bytes], rows)  # from here on, ``rows`` is the coding error
        self._compression.reductions.record(was, norm_of([whole]), params)
        self._compression.reductions.count(
            2 * num_bytes * (size - 1), 2 * section.coded_numel * tensor.dtype.itemsize * (size - 1) // size
        )
        is_async = not self.stream.is_concurrent
        self._complete(all_to_all_rows(received, sent, self.group, is_async))
        total = torch.zeros(1, numel, dtype=torch.float32, device=tensor.device)
        for row in received.unsqueeze(1):
            total += code.decode(row[:, :coded_bytes], numel)
        result = sent[:1]
        code.encode(total, result[:, :coded_bytes], total)
        rows[self.rank] += total[0]  # the error of the coded sum; this rank adds it to its own next gradient
        self._compression.store_residuals(whole, section, params)
        self._complete(all_gather_single(received.view(-1), result.view(-1), self.group, is_async))
        code.decode_run(received[:, :coded_bytes], numel, 0, rows)
        section.put_coded(whole.div_(scale.over(self.size)), tensor.view(1, -1))
        for _, buffer in taken:
            buffer.release()

    def _complete(self, work: dist.Work | None) -> None:
        HostWork(work, lambda _: None, torch.empty(0, device="cpu"), None, self.group).wait()
