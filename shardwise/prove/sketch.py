"""Sketches: a dozen signed sums of a tensor's elements, which add up over its shards however it is cut.

The sign of an element is a hash of its place in the full tensor.  So the sum of the sketches of all shards is the sketch of the
full tensor, and the difference of two sketches is the sketch of the difference, whose norm it estimates.  A digest depends on
every bit, and adds up in the same way.
Source: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, 1996.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private


class Box(NamedTuple):
    """A part of a tensor: the shape of the full one, and where the part begins and how large it is in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


NUM_SUMS = 12  # after them comes the sum of squares, which needs no estimate
_MIN_COLUMNS = 64  # trailing dimensions are merged up to this: a product with few columns would be slow
_CHUNK = 1 << 20
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of splitmix64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _places(box: Box, device: torch.device) -> torch.Tensor:
    """Return the places in the full tensor of the elements of a part, in order."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    for size, offset, number in zip(*box, strict=True):
        places = (places[:, None] * size + torch.arange(offset, offset + number, device=device)).reshape(-1)
    return places


@functools.lru_cache(4096)
def _signs(box: Box, salt: int, device: torch.device) -> torch.Tensor:
    """Return +1 or -1 for each sum and each element of a part: bits of one 64-bit hash of the element's place."""
    mixed = (_places(box, device) + 1) * _MULTIPLIERS[0] + salt
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIERS[2]
    return ((mixed >> torch.arange(20, 20 + NUM_SUMS, device=device)[:, None]) & 1).double() * 2 - 1


@functools.lru_cache(4096)
def _rows_and_columns(box: Box, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs of the leading dimensions, and of the trailing ones in ``dtype``; an element has their product."""
    cut = len(box.shape)
    while cut and math.prod(box.shape[cut:]) < _MIN_COLUMNS:
        cut -= 1
    rows, columns = (Box(*(each[part] for each in box)) for part in (slice(cut), slice(cut, None)))
    return _signs(rows, 2, device), _signs(columns, 1, device).to(dtype)


def _real(local: torch.Tensor, box: Box | None) -> tuple[torch.Tensor, Box]:
    """Return the dense real numbers of a tensor, and their place (default: it is the full tensor)."""
    values = local.detach() if local.layout is torch.strided else local.detach().to_dense()
    box = Box(tuple(values.shape), (0,) * values.ndim, tuple(values.shape)) if box is None else box
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()), Box((*box.shape, 2), (*box.offsets, 0), (*box.sizes, 2))
    return values, box


def sketch(local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """Return the float64 sums of ``local``, whose place is ``box`` (default: it is the full tensor).

    Costs 12 multiplications and additions an element.  Call it without gradients.
    """
    values, box = _real(local, box)
    flat = values.to(
        torch.float32 if values.is_floating_point() and values.dtype.itemsize <= 4 else torch.float64
    ).reshape(-1)
    rows, columns = _rows_and_columns(box, flat.device, flat.dtype)
    parts = columns @ flat.view(rows.shape[1], columns.shape[1]).t()
    return torch.cat((torch.linalg.vecdot(parts.double(), rows), torch.dot(flat, flat).view(1)))


def digest(local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """Return an int64 that depends on every bit of a tensor and its place; sums of those of all parts are that of the whole.

    Integers wrap around, so that their sums do not depend on the order.
    """
    values, box = _real(local, box)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    numbers = values.contiguous().view(-1).view(_INTEGERS[values.element_size()])
    for chunk, places in zip(numbers.split(_CHUNK), _places(box, values.device).split(_CHUNK), strict=True):
        mixed = chunk.to(torch.int64) + places * _MULTIPLIERS[0]
        mixed = (mixed ^ (mixed >> 31)) * _MULTIPLIERS[0]
        total += (mixed ^ (mixed >> 29)).sum()
    return total


# By shape, placements and mesh of a DTensor: its part on this rank, and the ranks that have the others.
_parts: dict[object, tuple[Box, tuple[int, ...]] | None] = {}


def _part_of(tensor: DTensor) -> tuple[Box, tuple[int, ...]] | None:
    key = tensor.shape, tensor.placements, tensor.device_mesh
    if key not in _parts:
        cuts = [not isinstance(each, Replicate) for each in tensor.placements]
        at = tuple(
            slice(None) if cut else i for cut, i in zip(cuts, tensor.device_mesh.get_coordinate() or (), strict=True)
        )
        owners = tuple(tensor.device_mesh.mesh[at].reshape(-1).tolist())
        box = Box(tuple(tensor.shape), (0,) * tensor.ndim, (0,) * tensor.ndim)
        for part in tensor.__create_chunk_list__()[:1]:
            box = Box(tuple(tensor.shape), tuple(part.offsets), tuple(part.sizes))
        _parts[key] = (box, owners) if any(cuts) else None
    return _parts[key]


def sketch_of(tensor: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the sketch of this rank's part of ``tensor``, and the ranks whose parts make it whole (none: it is whole).

    None for what has no values: on meta, or partial sums.  ``exact``: the halves of the digest follow, which float64 holds.
    """
    local, (box, owners) = torch_private.local_of(tensor), (None, ())
    if local.is_meta or (isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements)):
        return None
    if isinstance(tensor, DTensor):
        box, owners = _part_of(tensor) or (None, ())
    found = sketch(local, box)
    if exact:
        number = digest(local, box)
        found = torch.cat((found, torch.stack((number >> 32, number & 0xFFFFFFFF)).double()))
    return found, owners
