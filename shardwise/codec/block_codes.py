"""Rows of float32 numbers in fewer bits: 8-bit codes with a scale for each block, or bfloat16."""

from __future__ import annotations

import torch

from shardwise.codec.compression_policy import Coding

_STEPS = 127
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

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Code ``rows`` (R, n), float32, into ``out`` (R, ``num_bytes(n)``), uint8, rows at multiples of 4 bytes."""
        if self.coding == "bf16":
            out.view(torch.bfloat16).copy_(rows)
            return
        num_rows, numel = rows.shape
        blocks = rows.reshape(num_rows, numel // self.block, self.block)
        scales = torch.linalg.vector_norm(blocks, float("inf"), dim=-1) / _STEPS
        scales.masked_fill_(~torch.isfinite(scales), float("nan")).masked_fill_(scales < _TINY, 0.0)
        divisors = torch.where(scales > 0, scales, float("inf"))
        codes = blocks.div(divisors.unsqueeze(-1)).round_().nan_to_num_(0.0, 0.0, 0.0)
        split = 4 * scales.shape[1]
        out[:, :split].view(torch.float32).copy_(scales)
        out[:, split:].view(torch.int8).copy_(codes.view(num_rows, numel))

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the float32 rows (R, ``numel``) of ``coded``, which :meth:`encode` has filled."""
        if self.coding == "bf16":
            return coded.view(torch.bfloat16).float()
        split = 4 * (numel // self.block)
        scales, codes = coded[:, :split].view(torch.float32), coded[:, split:].view(torch.int8)
        blocks = codes.float().view(coded.shape[0], -1, self.block)
        return blocks.mul_(scales.unsqueeze(-1)).view(coded.shape[0], numel)
