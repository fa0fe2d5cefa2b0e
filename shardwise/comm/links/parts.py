"""Parts of sections: packing them, and summing them so that every transport gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.comm.c10d import resolve_scale
from shardwise.comm.communicator import Scale
from shardwise.layout.bucket import Bucket


def section_parts(layout: Bucket, section: torch.Tensor, rank: int, first: int = 0) -> list[torch.Tensor]:
    """Return the windows of ``rank``'s parts in its section, from tensor number ``first`` on.

    ``section``: 1-D; it starts where tensor ``first`` does.
    """
    base = section.storage_offset() - (layout.offsets[first] if first < len(layout.offsets) else 0)
    return [
        section.as_strided(move.shape, move.packed_stride, base + move.packed_offset)
        for move in layout.parts(rank)[first:]
    ]


def pack_parts(layout: Bucket, parts: Sequence[torch.Tensor], section: torch.Tensor, rank: int, first: int = 0) -> None:
    """Copy ``parts`` (all those of ``rank``) from number ``first`` on into ``section``, as :func:`section_parts` cuts it."""
    chosen = parts[first:]
    if not chosen:
        return
    if sum(part.numel() for part in chosen) == section.numel() and all(part.dim() == 1 for part in chosen):
        torch.cat(list(chosen), out=section)
    else:
        torch_private.copy_all(section_parts(layout, section, rank, first), chosen)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype are equal to the bit; nans are, too."""
    bits = _BITS.get(left.element_size())
    return torch.equal(left, right) if bits is None else torch.equal(left.view(bits), right.view(bits))


def can_sum_in_parts(scale: Scale, size: int) -> bool:
    """True if :func:`sum_sections` can carry out ``scale``: gradients are not divided before the sum."""
    return resolve_scale(scale, size).before is None


def sum_sections(layout: Bucket, sections: Sequence[torch.Tensor], scale: Scale, rank: int, out: torch.Tensor) -> None:
    """Sum what every rank has for ``rank`` into ``out``: always in rank order, so any transport gives the same bits.

    Args:
        layout: of a section.
        sections: of every rank for this one, in rank order: 1-D, ``layout.section_numel`` elements.
        scale: how the sum becomes a mean.
        out: 1-D, ``layout.section_numel`` elements, may be one of ``sections``; padding is left undefined.
    """
    divisor = float(len(sections)) if scale.divisor is None else scale.divisor
    # One tensor after the other, so that sum and division find it in the cache.
    for start, numel in _extents(layout, rank):
        target = out.narrow(0, start, numel)
        terms = [target if section is out else section.narrow(0, start, numel) for section in sections]
        add_up(terms, divisor, target)


def add_up(terms: Sequence[torch.Tensor], divisor: float, out: torch.Tensor) -> None:
    """Sum two or more ``terms`` in their order and divide by ``divisor``; ``out`` may be one of them."""
    total = out
    if any(term is out for term in terms[2:]):
        total = torch.empty_like(out)  # the first sum must not overwrite a later term
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
    if divisor != 1:
        torch.div(total, divisor, out=out)
    elif total is not out:
        out.copy_(total)


def _extents(layout: Bucket, rank: int) -> list[tuple[int, int]]:
    large = [
        (offset, shard.shard_numel(rank))
        for offset, shard in zip(layout.offsets[: layout.num_large], layout.shards, strict=False)
    ]
    return [(start, numel) for start, numel in (*large, (layout.tail_start, layout.tail_numel)) if numel]
