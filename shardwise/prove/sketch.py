"""Sketches: a dozen signed sums of a tensor's elements, which add up over its shards however it is cut.

The sign of an element is a hash of its place in the full tensor.  So the sum of the sketches of all shards is the sketch of the
full tensor, and the difference of two sketches is the sketch of the difference, whose norm it estimates.
Source: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, 1996.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private

NUM_SUMS = 12
WIDTH = NUM_SUMS + 1  # the last number is the sum of squares, which needs no estimate
_MIN_COLUMNS = 64  # trailing dimensions are merged up to this: a product with few columns would be slow
_CHUNK = 1 << 18
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of splitmix64
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


def _signs_of_box(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], salt: int, device: torch.device):
    """Return the signs of a box of a tensor of ``shape``, a row for each of its elements in order."""
    if not shape or list(shape[1:]) == list(sizes[1:]):  # rows that lie one after the other
        inner = math.prod(shape[1:])
        return _signs(offsets[0] * inner if shape else 0, math.prod(sizes), salt, device)
    places = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, number in zip(shape, offsets, sizes, strict=True):
        places = places[..., None] * size + torch.arange(offset, offset + number, device=device)
    return _signs_at(places.reshape(-1), salt)


@functools.lru_cache(4096)
def _signs_of_parts(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs of the columns (trailing dimensions) and of the rows (the others) of a box, as float32."""
    cut = len(shape)
    while cut and math.prod(shape[cut:]) < _MIN_COLUMNS:
        cut -= 1
    columns = _signs_of_box(shape[cut:], offsets[cut:], sizes[cut:], 1, device)
    return columns, _signs_of_box(shape[:cut], offsets[:cut], sizes[:cut], 2, device)


def sketch(
    local: torch.Tensor, shape: tuple[int, ...] | None = None, offsets: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the float64 sums of ``local``, the box at ``offsets`` of a tensor of ``shape`` (default: all of it).

    Costs 12 multiplications and additions an element.  Call it without gradients.
    """
    values = local.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    shape = tuple(values.shape if shape is None else shape)
    offsets = (0,) * len(shape) if offsets is None else offsets
    if values.is_complex():
        values, shape, offsets = torch.view_as_real(values.resolve_conj()), (*shape, 2), (*offsets, 0)
    if not values.numel():
        return torch.zeros(WIDTH, dtype=torch.float64, device=values.device)
    is_small = values.dtype.is_floating_point and values.dtype.itemsize <= 4
    values = values.to(torch.float32 if is_small else torch.float64)
    columns, rows = _signs_of_parts(shape, offsets, tuple(values.shape), values.device)
    matrix = values.reshape(len(rows), len(columns))
    flat = matrix.reshape(-1)
    sums = matrix @ columns.to(values.dtype)
    sums = (sums * rows).sum(0, dtype=torch.float64) if len(rows) > 1 else (sums * rows)[0].double()
    return torch.cat((sums, torch.dot(flat, flat).double()[None]))


def sketch_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the sketch of this rank's part of ``tensor``, and the ranks whose parts make it whole (none: it is whole).

    None for what has no values: on meta, or partial sums.
    """
    if tensor.is_meta:
        return None
    if not isinstance(tensor, DTensor):
        return sketch(tensor), ()
    if any(each.is_partial() for each in tensor.placements):
        return None
    local, mesh = torch_private.local_of(tensor), tensor.device_mesh
    is_cut = [not isinstance(each, Replicate) for each in tensor.placements]
    if not any(is_cut):
        return sketch(local), ()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    ranks = mesh.mesh[tuple(slice(None) if cut else at for cut, at in zip(is_cut, coordinate, strict=True))]
    found = torch.zeros(WIDTH, dtype=torch.float64, device=local.device)
    if local.numel():
        ((offsets, sizes),) = torch_private.chunks_of(tensor)
        found = sketch(local.reshape(sizes), tuple(tensor.shape), offsets)
    return found, tuple(ranks.reshape(-1).tolist())
