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


NUM_SUMS = 12
WIDTH = NUM_SUMS + 1  # the last number is the sum of squares, which needs no estimate
_MIN_COLUMNS = 64  # trailing dimensions are merged up to this: a product with few columns would be slow
_CHUNK = 1 << 20
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of splitmix64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Signs by what they are of, as float32; they grow as longer tensors come.
_tables: dict[tuple[int, torch.device], torch.Tensor] = {}


def _signs_at(places: torch.Tensor, salt: int) -> torch.Tensor:
    """Return +1 or -1 for each of ``places`` and each sum: bits of one 64-bit hash."""
    mixed = (places + 1) * _MULTIPLIERS[0] + salt
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIERS[2]
    bits = torch.arange(20, 20 + NUM_SUMS, device=places.device)
    return ((mixed[:, None] >> bits) & 1).float() * 2 - 1


def _signs(first: int, number: int, salt: int, device: torch.device) -> torch.Tensor:
    stop = first + number
    if stop > _CHUNK:
        return _signs_at(torch.arange(first, stop, device=device), salt)
    table = _tables.get((salt, device))
    if table is None or len(table) < stop:
        size = max(stop, 2 * len(table) if table is not None else 1024)
        _tables[salt, device] = table = _signs_at(torch.arange(size, device=device), salt)
    return table[first:stop]


def _places(box: Box, device: torch.device, first: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return the places in the full tensor of elements ``first`` to ``stop`` of a box."""
    rest = torch.arange(first, math.prod(box.sizes) if stop is None else stop, device=device)
    places, stride = torch.zeros_like(rest), 1
    for size, offset, number in zip(*map(reversed, box), strict=True):
        places += (rest % number + offset) * stride
        rest, stride = rest // number, stride * size
    return places


def _signs_of_box(box: Box, salt: int, device: torch.device) -> torch.Tensor:
    """Return the signs of the elements of a box, in order."""
    if box.shape[1:] == box.sizes[1:]:  # rows that lie one after the other
        first = box.offsets[0] * math.prod(box.shape[1:]) if box.shape else 0
        return _signs(first, math.prod(box.sizes), salt, device)
    return _signs_at(_places(box, device), salt)


@functools.lru_cache(4096)
def _signs_of_parts(box: Box, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs of the columns (trailing dimensions) and of the rows (the others) of a box, as float32."""
    cut = len(box.shape)
    while cut and math.prod(box.shape[cut:]) < _MIN_COLUMNS:
        cut -= 1
    rows, columns = (Box(*(each[part] for each in box)) for part in (slice(cut), slice(cut, None)))
    return _signs_of_box(columns, 1, device), _signs_of_box(rows, 2, device)


def _real(local: torch.Tensor, box: Box | None) -> tuple[torch.Tensor, Box]:
    """Return the dense real numbers of a tensor, and their place."""
    values = local.detach().to_dense() if local.layout is not torch.strided else local.detach()
    box = Box(tuple(values.shape), (0,) * values.ndim, tuple(values.shape)) if box is None else box
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
        box = Box((*box.shape, 2), (*box.offsets, 0), (*box.sizes, 2))
    return values, box


def sketch(local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """Return the float64 sums of ``local``, whose place is ``box`` (default: it is the full tensor).

    Costs 12 multiplications and additions an element.  Call it without gradients.
    """
    values, box = _real(local, box)
    if not values.numel():
        return torch.zeros(WIDTH, dtype=torch.float64, device=values.device)
    is_small = values.dtype.is_floating_point and values.dtype.itemsize <= 4
    values = values.to(torch.float32 if is_small else torch.float64)
    columns, rows = _signs_of_parts(box, values.device)
    matrix = values.reshape(len(rows), len(columns))
    flat = matrix.reshape(-1)
    sums = matrix @ columns.to(values.dtype)
    sums = (sums * rows).sum(0, dtype=torch.float64) if len(rows) > 1 else (sums * rows)[0].double()
    return torch.cat((sums, torch.dot(flat, flat).double()[None]))


def digest(local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """Return an int64 that depends on every bit of a tensor and its place; sums of those of all parts are that of the whole.

    Integers wrap around, so that their sums do not depend on the order.
    """
    values, box = _real(local, box)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return total
    numbers = values.contiguous().view(-1).view(_INTEGERS[values.element_size()])
    for first in range(0, numbers.numel(), _CHUNK):
        chunk = numbers[first : first + _CHUNK]
        mixed = chunk.to(torch.int64) + _places(box, values.device, first, first + chunk.numel()) * _MULTIPLIERS[0]
        mixed = (mixed ^ (mixed >> 31)) * _MULTIPLIERS[0]
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def exactly(found: torch.Tensor, local: torch.Tensor, box: Box | None) -> torch.Tensor:
    """Return a sketch and, after it, the halves of the digest of the same part, which float64 holds exactly."""
    number = digest(local, box)
    return torch.cat((found, torch.stack((number >> 32, number & 0xFFFFFFFF)).double()))


# Of DTensors, by shape, placements and mesh: their parts on this rank, and the ranks that have the others.
_parts: dict[object, tuple[Box | None, tuple[int, ...]]] = {}


def _part_of(tensor: DTensor) -> tuple[Box | None, tuple[int, ...]]:
    key = tensor.shape, tensor.placements, tensor.device_mesh
    found = _parts.get(key)
    if found is None:
        box, owners, coordinate = None, list[int](), tensor.device_mesh.get_coordinate() or ()
        is_cut = [not isinstance(each, Replicate) for each in tensor.placements]
        if any(is_cut):
            along = tuple(slice(None) if cut else at for cut, at in zip(is_cut, coordinate, strict=True))
            owners = tensor.device_mesh.mesh[along].reshape(-1).tolist()
            for part in tensor.__create_chunk_list__()[:1]:
                box = Box(tuple(tensor.shape), tuple(part.offsets), tuple(part.sizes))
        found = _parts[key] = box, tuple(owners)
    return found


def sketch_of(tensor: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the sketch of this rank's part of ``tensor``, and the ranks whose parts make it whole (none: it is whole).

    None for what has no values: on meta, or partial sums.  ``exact``: followed by the digest.
    """
    local, box, owners = tensor, None, ()
    if isinstance(tensor, DTensor):
        if any(each.is_partial() for each in tensor.placements):
            return None
        local = torch_private.local_of(tensor)
        box, owners = _part_of(tensor)
    if local.is_meta:
        return None
    found = sketch(local, box)
    return exactly(found, local, box) if exact else found, owners
