"""Changes of a tensor's parts as bytes, and digests of tensors that ranks compute from their own parts.

Nothing here reads a file or knows a rank.  docs/weight_deltas.md has the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from shardwise.optim.slices import Window

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_BYTES = max(_INTS)  # of an element: digests take 64 bits of each


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
    gaps = np.diff(positions.numpy(), prepend=-1) - 1
    lengths = np.ones(len(gaps), dtype=np.int64)
    for digit in range(1, _MOST_DIGITS):
        longer = gaps >= 1 << 7 * digit
        if not longer.any():
            break
        lengths += longer
    starts = np.cumsum(lengths) - lengths
    found = np.empty(int(lengths.sum()), dtype=np.uint8)
    for digit in range(int(lengths.max(initial=0))):
        has = lengths > digit
        found[starts[has] + digit] = gaps[has] >> 7 * digit & 127 | (lengths[has] > digit + 1) << 7
    return found.tobytes()


def decode_positions(data: bytes | bytearray, count: int, numel: int) -> torch.Tensor:
    """Return ``count`` positions below ``numel``.  Raises: ValueError unless ``data`` has exactly them."""
    bytes_ = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(bytes_ < 128)
    if len(ends) != count or (len(bytes_) and bytes_[-1] >= 128):
        raise ValueError(f"{len(ends)} positions for {count} values")
    lengths = np.diff(ends, prepend=-1)
    starts, gaps = ends - lengths + 1, np.zeros(count, dtype=np.int64)
    most = int(lengths.max(initial=0))
    for digit in range(min(most, _MOST_DIGITS)):
        has = lengths > digit
        gaps[has] |= (bytes_[starts[has] + digit].astype(np.int64) & 127) << 7 * digit
    positions = np.cumsum(gaps + 1) - 1
    if most > _MOST_DIGITS or (gaps >= numel).any() or (count and positions[-1] >= numel):
        raise ValueError(f"positions beyond {numel} elements")
    return torch.from_numpy(positions)


# ---- Digests: a sum over elements, so that each rank adds up its own part, and what has changed is enough for the next one.

_GOLDEN, _MIX, _MIX_AGAIN = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64
_CHUNK = 2**17  # elements whose temporary memory stays in caches
MODULUS = 2**64


def digest_of(bits: torch.Tensor, positions: torch.Tensor, key: int) -> int:
    """Return the digest of elements ``bits`` at ``positions`` in a tensor: the sum of splitmix64(key, position, bits).

    Two tensors that differ by accident have one digest with a probability of 2**-64; it is no protection against intent.
    """
    total = 0
    for some, at in zip(bits.split(_CHUNK), positions.split(_CHUNK), strict=True):
        state = (at + 1).mul_(_GOLDEN).add_(some).add_(key)
        for shift, factor in ((30, _MIX), (27, _MIX_AGAIN), (31, 1)):
            state ^= (state >> shift).bitwise_and_((1 << 64 - shift) - 1)  # int64 shifts its sign in
            state *= factor
        total += int(state.sum())
    return total % MODULUS


@dataclass(frozen=True, slots=True)
class PartChange:
    """New elements of a part of a tensor of ``shape``.

    Attributes:
        local: ascending positions in the part, row-major; None: all of them.
        bits: the new elements as integers: of ``local``, or of the sizes of the part.
        positions: ``local`` as bytes, if it is to be written.
    """

    shape: tuple[int, ...]
    window: Window
    local: torch.Tensor | None
    bits: torch.Tensor
    positions: bytes = b""

    def since(self, earlier: PartChange) -> PartChange:
        """Return what of this whole part is not in ``earlier``, the whole part before, in the fewest bytes."""
        bits, itemsize = self.bits.view(-1), self.bits.element_size()
        local = (bits != earlier.bits.view(-1)).nonzero().view(-1)
        most_bytes = bits.nbytes - len(local) * itemsize  # of positions
        if len(local) <= most_bytes:
            positions = encode_positions(local)
            if len(positions) <= most_bytes:
                return PartChange(self.shape, self.window, local, bits[local], positions)
        return replace(self, bits=self.bits.clone())

    def digest(self, bits: torch.Tensor, key: int) -> int:
        """Return the digest of ``bits``, of which there are as many, at the positions of this change."""
        total, start = 0, 0
        for some in bits.reshape(-1).split(_CHUNK):
            total += digest_of(some, self._positions(start, start + len(some)).to(bits.device), key)
            start += len(some)
        return total % MODULUS

    def rows(self) -> torch.Tensor:
        """Return which rows (along dim 0) of the tensor are new."""
        first, count = (self.window.offsets[0], self.window.sizes[0]) if self.shape else (0, 1)
        if self.local is None:
            return torch.arange(first, first + count, device="cpu")
        found = torch.div(self.local, max(1, prod(self.window.sizes[1:])), rounding_mode="floor")
        return torch.unique_consecutive(found) + first

    def old(self, target: torch.Tensor) -> torch.Tensor:
        """Return the elements that ``target``, the whole tensor, has where this change has new ones."""
        place, index = self._reach(target)
        return place[index]

    def put(self, target: torch.Tensor) -> None:
        """Write the new elements into ``target``, the whole tensor, of any strides."""
        place, index = self._reach(target)
        place[index] = self.bits.to(place.device)

    def after(self, earlier: PartChange | None) -> PartChange:
        """Return what ``earlier``, of the same part, and this change are together; ``earlier`` may be written into."""
        if self.local is None or earlier is None:
            return self
        if earlier.local is None:
            earlier.bits.view(-1)[self.local] = self.bits
            return earlier
        both, bits = torch.cat([earlier.local, self.local]), torch.cat([earlier.bits, self.bits])
        local, order = torch.sort(both, stable=True)
        is_last = torch.ones(len(local), dtype=torch.bool, device="cpu")
        is_last[:-1] = local[1:] != local[:-1]
        return PartChange(self.shape, self.window, local[is_last], bits[order[is_last]])

    def _reach(self, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return this part of ``target``, and the index of the new elements in it."""
        place = self.window.cut(bits_of(target))
        if self.local is None:
            return place, ...
        local = self.local.to(place.device)
        return (place.view(-1), local) if place.is_contiguous() else (place, torch.unravel_index(local, place.shape))

    def _positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions in the tensor of the elements ``start`` to ``stop`` of this change."""
        local = torch.arange(start, stop, device="cpu") if self.local is None else self.local[start:stop]
        if self.window.sizes[1:] == self.shape[1:]:
            return local + self.window.offsets[0] * prod(self.shape[1:]) if self.shape else local
        found, stride = torch.zeros_like(local), 1
        for size, offset, full in self._dims():
            found += (local % size + offset) * stride
            local, stride = local // size, stride * full
        return found

    def _dims(self) -> Iterator[tuple[int, ...]]:
        return zip(*(each[::-1] for each in (self.window.sizes, self.window.offsets, self.shape)), strict=True)
