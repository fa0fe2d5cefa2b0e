"""Rows of float32 numbers in fewer bits: 8-bit codes with a scale for each block, or bfloat16."""

from __future__ import annotations

import torch

from shardwise.codec.compression_policy import Coding
from shardwise.layout.bucket import align

_STEPS = 127
_AT_ONCE = 2**19  # elements: 2 MiB, which five passes go over; less costs more calls
_TINY = torch.finfo(torch.float32).tiny  # below, scales lose digits: such a block is sent as zeros


class BlockCode:
    """One coding of float32 rows; equal rows become equal bytes, on any device.

    ``int8``: blocks of ``block`` elements; each becomes a float32 scale (its largest magnitude / 127) and codes from -127 to
    127, rounded half to even.  An element is off by at most half the scale, or 1.5e-36.  A block with an inf or nan decodes
    to nan: what looks for overflow still finds it.  ``bf16``: rounded to nearest, off by at most 1/256 of itself.

    Source of the blocks: ZeRO++, arXiv 2306.10209.
    """

    def __init__(self, coding: Coding, block: int) -> None:
        self.coding = coding
        self.block = block

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a row of ``numel`` elements, a multiple of ``block``."""
        return 2 * numel if self.coding == "bf16" else numel + 4 * (numel // self.block)

    def encode(self, rows: torch.Tensor, out: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Code ``rows`` (R, n), float32, into ``out`` (R, ``num_bytes(n)``), uint8, rows at multiples of 4 bytes.

        What decodes from it is ``rows`` less ``lost`` (as ``rows``), where that is given.
        """
        if self.coding == "bf16":
            coded = out.view(torch.bfloat16).copy_(rows)
            if lost is not None:
                torch.sub(rows, coded, out=lost)
            return
        scales, codes = self._parts(out, rows.shape[1])
        spans = self._spans(rows)
        scratch = rows.new_empty(rows.shape[0], spans[0][1] if spans else 0)
        for start, numel in spans:
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
        """Return the float32 rows (R, ``numel``) of ``coded``, which :meth:`encode` has filled."""
        rows = torch.empty(coded.shape[0], numel, dtype=torch.float32, device=coded.device)
        self.decode_run(coded, numel, 0, rows)
        return rows

    def decode_run(self, coded: torch.Tensor, numel: int, first: int, out: torch.Tensor) -> None:
        """Write elements of the rows (R, ``numel``) that ``coded`` holds into ``out`` (R, n), of any dtype.

        They begin at ``first``, a multiple of ``block``; ``n`` need not be one.
        """
        if self.coding == "bf16":
            out.copy_(coded.view(torch.bfloat16).narrow(1, first, out.shape[1]))
            return
        scales, codes = self._parts(coded, numel)
        for start, size in self._spans(out):
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
        """Return the scales and the codes in ``coded``, rows of ``numel`` elements."""
        split = 4 * (numel // self.block)
        return coded[:, :split].view(torch.float32), coded[:, split : split + numel].view(torch.int8)

    def _scales(self, scales: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        return scales.narrow(1, start // self.block, numel // self.block)

    def _blocks(self, rows: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        return rows.narrow(1, start, numel).unflatten(1, (-1, self.block))

    def _spans(self, rows: torch.Tensor) -> list[tuple[int, int]]:
        """Return (start, elements) of what to do at once of ``rows``: on the host what stays in its caches."""
        num_rows, numel = rows.shape
        step = numel if rows.is_cuda else align(_AT_ONCE // max(num_rows, 1) + 1, self.block)
        return [(start, min(step, numel - start)) for start in range(0, numel, max(step, 1))]
