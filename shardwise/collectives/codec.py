"""Compression of parameters and gradients: the user's policy, the codes, and how sections become messages."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from shardwise.arguments import explains_fields
from shardwise.errors import ConfigError
from shardwise.layout import Bucket, align

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
        rest: (start, elements) of the exact ranges, with the padding between tensors.
    """

    code: BlockCode
    dtype: torch.dtype
    numel: int
    runs: tuple[CodedRange, ...]
    coded_numel: int
    rest: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Bucket, is_coded: Sequence[bool], dtype: torch.dtype, code: BlockCode) -> CodedSection:
        """Return the layout for sections of ``layout`` that codes the tensors for which ``is_coded`` is True."""
        runs: list[CodedRange] = []
        rest: list[tuple[int, int]] = []
        coded = end = 0
        for index, (shard, start) in enumerate(zip(layout.shards, layout.offsets, strict=True)):
            if is_coded[index] and shard.section_numel:
                if start > end:
                    rest.append((end, start - end))
                runs.append(CodedRange(index, start, shard.section_numel, coded))
                coded = align(coded + shard.section_numel, code.block)
                end = start + shard.section_numel
        if layout.section_numel > end:
            rest.append((end, layout.section_numel - end))
        return cls(code, dtype, layout.section_numel, tuple(runs), coded, tuple(rest))

    @property
    def rest_numel(self) -> int:
        """Number of exact elements."""
        return sum(numel for _, numel in self.rest)

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
        at, target = 0, self._rest_in(messages)
        for start, numel in self.rest:
            target.narrow(1, at, numel).copy_(sections.narrow(1, start, numel))
            at += numel

    def decode(self, messages: torch.Tensor, sections: torch.Tensor) -> None:
        """Decode ``messages`` (R, message_bytes) into ``sections`` (R, numel)."""
        at, source = 0, self._rest_in(messages)
        for start, numel in self.rest:
            sections.narrow(1, start, numel).copy_(source.narrow(1, at, numel))
            at += numel
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
