"""Sketches: a dozen signed sums of a tensor's elements, which add up over its shards however it is cut.

The sign of an element is a hash of its place in the full tensor.  So the sum of the sketches of all shards is the sketch of the
full tensor, and the difference of two sketches is the sketch of the difference, whose norm it estimates.  A digest depends on
every bit, and adds up in the same way.
Source: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, 1996; rows are added first as in
Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2002.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private


class Box(NamedTuple):
    """A part of a tensor: the shape of the full one, and where the part begins and how large it is in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Named = Mapping[str, torch.Tensor]
Sketches = dict[str, tuple[torch.Tensor, tuple[int, ...]]]  # of parts, with the ranks whose parts make a tensor whole
NOTHING: Named = MappingProxyType({})
SIGNS = 2  # counted up with the rule for signs: sketches by different rules do not compare
NUM_SUMS = 12  # after them comes the sum of squares, which needs no estimate
_MOST_STACKED = 1 << 14  # elements: a copy of more costs more than a call
_MIN_COLUMNS = 64  # trailing dimensions are merged up to this: a product with few columns would be slow
_BLOCKS = range(16, 1024)  # of rows: the first number that divides all; more are slower, and fewer estimate worse
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of splitmix64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _places(box: Box, device: torch.device) -> torch.Tensor:
    """Return the places in the full tensor of the elements of a part, in order."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    for size, offset, number in zip(*box, strict=True):
        places = (places[:, None] * size + torch.arange(offset, offset + number, device=device)).reshape(-1)
    return places


def _signs(places: torch.Tensor, salt: int, dtype: torch.dtype) -> torch.Tensor:
    """Return +1 or -1 for each sum and each place: bits of one 64-bit hash of the place."""
    mixed = (places + 1) * _MULTIPLIERS[0] + salt
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIERS[2]
    return ((mixed >> torch.arange(20, 20 + NUM_SUMS, device=places.device)[:, None]) & 1).to(dtype) * 2 - 1


@functools.lru_cache(4096)
def _tables(box: Box, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return signs of rows, blocks and columns, whose product an element has.

    Columns are trailing dimensions.  Rows are the others; a fixed number of them is a block of the full tensor.  Rows have one
    sign, alike in all sums, so that those of a block are added once, and not for each sum.

    Shape: (blocks here, 1, rows of each), (sums, 1, blocks here), (sums, columns).
    """
    cut = next((at for at in range(len(box.shape), 0, -1) if math.prod(box.shape[at:]) >= _MIN_COLUMNS), 0)
    rows, columns = (Box(*(each[part] for each in box)) for part in (slice(cut), slice(cut, None)))
    total, first = math.prod(rows.shape), math.prod(rows.shape[1:]) * sum(rows.offsets[:1])
    size = next((total // number for number in _BLOCKS if total and total % number == 0), 1)
    # Of a part, blocks may be cut: what is added is as many rows as divide all of it.
    step = math.gcd(size, first, math.prod(rows.sizes)) if rows.sizes[1:] == rows.shape[1:] else 1
    places = _places(rows, device)
    of_rows = _signs(places, 2, dtype)[0].reshape(-1, 1, step)
    of_blocks = _signs(places[::step] // size, 3, dtype)[:, None]
    return [of_rows, of_blocks, _signs(_places(columns, device), 1, dtype)]


def _real(values: torch.Tensor, box: Box) -> tuple[torch.Tensor, Box]:
    """Return the real numbers of tensors, and their place."""
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()), Box((*box.shape, 2), (*box.offsets, 0), (*box.sizes, 2))
    return values, box


def sketch(stack: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the float64 sums of each tensor in a stack, a row each; the place of all is ``box``.

    Costs two multiplications and additions an element where rows are in blocks.  Call it without gradients.
    """
    values, box = _real(stack, box)
    dtype = torch.float32 if values.is_floating_point() and values.dtype.itemsize <= 4 else torch.float64
    of_rows, of_blocks, of_columns = _tables(box, values.device, dtype)
    num, (blocks, _, step), columns = len(stack), of_rows.shape, of_columns.shape[1]
    flat = values.to(dtype).reshape(num, blocks * step * columns)
    of_rows = of_rows.expand(num, blocks, 1, step).reshape(num * blocks, 1, step)
    added = torch.bmm(of_rows, flat.view(num * blocks, step, columns)).view(num * blocks, columns)
    sums = ((of_columns @ added.t()).view(NUM_SUMS, num, blocks) * of_blocks).sum(2, dtype=torch.float64)
    # Of one tensor, torch.dot: vecdot writes the squares of all.
    squares = torch.dot(flat[0], flat[0]) if num == 1 else torch.linalg.vecdot(flat, flat)
    return torch.cat((sums, squares.view(1, num))).t()


def digest(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Return an int64 that depends on every bit of a tensor and its place; sums of those of all parts are that of the whole.

    Integers wrap around, so that their sums do not depend on the order.
    """
    values, box = _real(local, box)
    numbers = values.contiguous().view(-1).view(_INTEGERS[values.element_size()]).to(torch.int64)
    mixed = numbers + _places(box, values.device) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 31)) * _MULTIPLIERS[0]
    return (mixed ^ (mixed >> 29)).sum()


# What this rank has of a tensor, and the ranks whose parts make it whole; none: it is whole.
Part = tuple[Box, tuple[int, ...]]
_parts: dict[object, Part | None] = {}  # by shape, placements and mesh of a DTensor


def _part_of(tensor: torch.Tensor) -> Part | None:
    """Return the part of a tensor on this rank; None for what has no values: on meta, or partial sums."""
    if not isinstance(tensor, DTensor):
        return None if tensor.is_meta else (Box(tensor.shape, (0,) * tensor.ndim, tensor.shape), ())
    mesh = tensor.device_mesh
    key = tensor.shape, tensor.placements, mesh
    if key not in _parts:
        cuts = [not isinstance(each, Replicate) for each in tensor.placements]
        at = tuple(slice(None) if cut else i for cut, i in zip(cuts, mesh.get_coordinate() or (), strict=True))
        chunk = tensor.__create_chunk_list__()[0]
        box = Box(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))
        owners = tuple(mesh.mesh[at].reshape(-1).tolist()) if any(cuts) else ()
        _parts[key] = None if any(each.is_partial() for each in tensor.placements) else (box, owners)
    return None if tensor.is_meta else _parts[key]


@torch.no_grad()
def sketches_of(tensors: Named, like: Named = NOTHING, exact: bool = False) -> Sketches:
    """Return the sketches of this rank's parts of tensors that have values, with the ranks whose parts make each whole.

    Args:
        tensors: DTensors, and local ones.
        like: for some of these, a DTensor that is cut as they are.
        exact: the halves of the digest follow, which float64 holds.
    """
    stacks: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        local, part = torch_private.local_of(tensor), _part_of(like.get(name, tensor))
        if part is not None:  # small ones of one shape are sketched together
            own = name if local.numel() > _MOST_STACKED else ""
            stacks.setdefault((part, local.dtype, local.device, own), {})[name] = local.to_dense()
    found: Sketches = {}
    for ((box, owners), *_), members in stacks.items():
        first, *others = members.values()
        kind = first.device.type  # whose autocast would make products of bfloat16
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            sums = sketch(torch.stack([first, *others]) if others else first[None], box)
        if exact:
            numbers = torch.stack([digest(each, box) for each in members.values()])
            sums = torch.cat((sums, torch.stack((numbers >> 32, numbers & 0xFFFFFFFF), 1).double()), 1)
        found |= {name: (row, owners) for name, row in zip(members, sums.unbind(), strict=True)}
    return {name: found[name] for name in tensors if name in found}
