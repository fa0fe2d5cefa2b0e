"""Sketches: a dozen signed sums of a tensor's elements, which add up over its shards however it is cut.

The sign of an element is a hash of its place in the full tensor.  So the sum of the sketches of all shards is the sketch of the
full tensor, and the difference of two sketches is the sketch of the difference, whose norm it estimates.  A digest depends on
every bit, and adds up in the same way.
Source: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, 1996.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
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
NUM_SUMS = 12  # after them comes the sum of squares, which needs no estimate
_MOST_STACKED = 1 << 14  # elements: a copy of more costs more than a call
_MIN_COLUMNS = 64  # trailing dimensions are merged up to this: a product with few columns would be slow
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


def _real(values: torch.Tensor, box: Box) -> tuple[torch.Tensor, Box]:
    """Return the real numbers of tensors, and their place."""
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()), Box((*box.shape, 2), (*box.offsets, 0), (*box.sizes, 2))
    return values, box


def _whole(tensor: torch.Tensor) -> Box:
    return Box(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))


def sketch(stack: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the float64 sums of each tensor in a stack, a row each; the place of all is ``box``.

    Costs 12 multiplications and additions an element.  Call it without gradients.
    """
    values, box = _real(stack, box)
    dtype = torch.float32 if values.is_floating_point() and values.dtype.itemsize <= 4 else torch.float64
    signs_of_rows, signs = _rows_and_columns(box, values.device, dtype)
    num, num_rows, num_columns = len(stack), signs_of_rows.shape[1], signs.shape[1]
    flat = values.to(dtype).reshape(num, num_rows * num_columns)
    parts = (signs @ flat.view(num * num_rows, num_columns).t()).double().view(NUM_SUMS, num, num_rows)
    sums = torch.linalg.vecdot(parts, signs_of_rows[:, None]).t()
    return torch.cat((sums, torch.linalg.vecdot(flat, flat)[:, None]), 1)


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
        return None if tensor.is_meta else (_whole(tensor), ())
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


def sketches_of(tensors: Named, like: Named = NOTHING, exact: bool = False) -> Sketches:
    """Return the sketches of this rank's parts of tensors that have values, with the ranks whose parts make each whole.

    Args:
        tensors: DTensors, and local ones.
        like: for some of these, a DTensor that is cut as they are.
        exact: the halves of the digest follow, which float64 holds.
    """
    stacks: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        local, part = torch_private.local_of(tensor).detach().to_dense(), _part_of(like.get(name, tensor))
        if part is not None:  # small ones of one shape are sketched together
            own = name if local.numel() > _MOST_STACKED else ""
            stacks.setdefault((part, local.dtype, local.device, own), {})[name] = local
    found: Sketches = {}
    for ((box, owners), *_), members in stacks.items():
        first, *others = members.values()
        sums = sketch(torch.stack([first, *others]) if others else first[None], box)
        if exact:
            numbers = torch.stack([digest(each, box) for each in members.values()])
            sums = torch.cat((sums, torch.stack((numbers >> 32, numbers & 0xFFFFFFFF), 1).double()), 1)
        found |= {name: (row, owners) for name, row in zip(members, sums, strict=True)}
    return {name: found[name] for name in tensors if name in found}
