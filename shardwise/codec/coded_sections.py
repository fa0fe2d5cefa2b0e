"""Sections of several tensors as messages: some of the tensors coded, all else byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.codec.block_codes import BlockCode
from shardwise.layout.bucket import Bucket, align

_ALIGNMENT = 16  # bytes


class CodedRange(NamedTuple):
    """Elements of a section that are coded.

    Attributes:
        tensor: its number.  start, numel: its elements in the section.  coded_start: where they start among what is coded.
    """

    tensor: int
    start: int
    numel: int
    coded_start: int


@dataclass(frozen=True, slots=True)
class CodedSection:
    """How a section becomes a message: what stays exact first, then the codes; every tensor begins a block of its own.

    Attributes:
        code: of the coded tensors.  dtype: of the section, of ``numel`` elements.
        runs: what is coded, ``coded_numel`` elements with their padding to blocks.
        rest: (start, elements) of what is not, padding between tensors included.
    """

    code: BlockCode
    dtype: torch.dtype
    numel: int
    runs: tuple[CodedRange, ...]
    coded_numel: int
    rest: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Bucket, is_coded: Sequence[bool], dtype: torch.dtype, code: BlockCode) -> CodedSection:
        """Return the one for sections of ``layout`` in which the tensors for which ``is_coded`` says so are coded."""
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
        """Elements that are not coded."""
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
        """Return what is to be coded of ``sections`` (R, numel) as float32 rows (R, coded_numel), padding zero.

        They are written to ``out`` where it is given: (R, coded_numel or more), zero where there is more.
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
        """Write ``rows``, as :meth:`take_coded` gives them, to their places in ``sections``."""
        for _, start, numel, coded in self.runs:
            sections.narrow(1, start, numel).copy_(rows.narrow(1, coded, numel))

    def put_rest(self, sections: torch.Tensor, messages: torch.Tensor) -> None:
        """Write what stays exact of ``sections`` into ``messages``."""
        at, target = 0, self._rest_in(messages)
        for start, numel in self.rest:
            target.narrow(1, at, numel).copy_(sections.narrow(1, start, numel))
            at += numel

    def decode(self, messages: torch.Tensor, sections: torch.Tensor) -> None:
        """Write what ``messages`` (R, message_bytes) say into ``sections`` (R, numel)."""
        at, source = 0, self._rest_in(messages)
        for start, numel in self.rest:
            sections.narrow(1, start, numel).copy_(source.narrow(1, at, numel))
            at += numel
        codes = self.codes_in(messages)
        for _, start, numel, coded in self.runs:
            self.code.decode_run(codes, self.coded_numel, coded, sections.narrow(1, start, numel))

    def sum_of(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the float32 sum (1, numel) of what ``messages`` (R, message_bytes) say, in the order of their rows."""
        total = torch.zeros(1, self.numel, dtype=torch.float32, device=messages.device)
        one = torch.empty_like(total)
        for row in messages.unsqueeze(1):
            self.decode(row, one)
            total += one
        return total
