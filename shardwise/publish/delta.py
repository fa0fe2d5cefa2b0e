"""Changes of a part of a tensor, and their positions as bytes.

Nothing here reads a file or knows a rank.  docs/design/034-weight-deltas.md has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shardwise.optim.slices import Window

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_BYTES = max(_INTS)  # of an element: larger ones have no integers of their size


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as integers, on its own memory: NaNs are compared, and zeros have signs."""
    return tensor.detach().view(_INTS[tensor.element_size()])


# ---- Positions: ascending, as differences in as few bytes as they take (unsigned LEB128).

_MOST_DIGITS = 7  # of 7 bits: 49 bits, more than any tensor has elements


def encode_positions(positions: torch.Tensor) -> bytes:
    """Return ascending positions as the number of unchanged elements before each, in LEB128.

    Example:
        >>> encode_positions(torch.tensor([0, 1, 200])).hex()
        '0000c601'
    """
    gaps = np.diff(positions.numpy(), prepend=-1)[:, None] - 1
    num_digits = max(1, -(-int(gaps.max(initial=0)).bit_length() // 7))
    rest = gaps >> 7 * np.arange(num_digits)  # of each number, from each digit on
    is_digit = rest > 0
    is_digit[:, 0] = True
    return (rest & 127 | (rest > 127) << 7)[is_digit].astype(np.uint8).tobytes()


def decode_positions(data: np.ndarray, count: int, numel: int) -> torch.Tensor:
    """Return ``count`` positions below ``numel``.  Raises: ValueError unless ``data``, bytes, has exactly them."""
    ends = np.flatnonzero(data < 128)
    lengths = np.diff(ends, prepend=-1)
    if len(ends) != count or lengths.sum() != len(data) or lengths.max(initial=0) > _MOST_DIGITS:
        raise ValueError(f"{len(ends)} positions for {count} values")
    starts = ends - lengths + 1
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, lengths))
    gaps = np.add.reduceat((data.astype(np.int64) & 127) << shifts, starts) if count else starts
    positions = np.cumsum(gaps + 1) - 1
    if (gaps >= numel).any() or (count and positions[-1] >= numel):
        raise ValueError(f"positions beyond {numel} elements")
    return torch.from_numpy(positions)


@dataclass(frozen=True, slots=True)
class PartChange:
    """New elements of the part ``window`` of the tensor ``name``.

    Attributes:
        local: ascending positions in the part, row-major; None: all of them.
        bits: the new elements as integers: of ``local``, or of the sizes of the part.
    """

    name: str
    window: Window
    local: torch.Tensor | None
    bits: torch.Tensor

    def rows(self) -> torch.Tensor:
        """Return which rows (along dim 0) of the tensor are new."""
        first, count = (self.window.offsets[0], self.window.sizes[0]) if self.window.sizes else (0, 1)
        if self.local is None:
            return torch.arange(first, first + count, device="cpu")
        found = torch.div(self.local, max(1, prod(self.window.sizes[1:])), rounding_mode="floor")
        return torch.unique_consecutive(found) + first

    def put(self, part: torch.Tensor) -> None:
        """Write the new elements into ``part``, the integers that the tensor has there, of any strides and device."""
        if self.local is None:
            part.copy_(self.bits)
        else:
            part.put_(self.local.to(part.device), self.bits.to(part.device))


def change_of(name: str, window: Window, bits: torch.Tensor, earlier: torch.Tensor) -> tuple[PartChange, bytes]:
    """Return what is in ``bits``, all of a part, and not in ``earlier``, with its positions as bytes, in the fewest bytes."""
    local = (bits != earlier).view(-1).nonzero().view(-1)
    most_bytes = bits.nbytes - len(local) * bits.element_size()  # of positions
    if len(local) <= most_bytes and len(positions := encode_positions(local)) <= most_bytes:
        return PartChange(name, window, local, bits.view(-1)[local]), positions
    return PartChange(name, window, None, bits), b""
