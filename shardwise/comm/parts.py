"""Parts of sections: packing them, and summing them so that every transport gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.comm.c10d import resolve_scale
from shardwise.comm.protocol import Scale
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


def can_sum_in_parts(scale: Scale, size: int) -> bool:
    """True if :func:`sum_sections` can carry out ``scale``: gradients are not divided before the sum."""
    return resolve_scale(scale, size)[0] is None


def sum_sections(
    layout: Bucket,
    own_parts: Sequence[torch.Tensor],
    own_tail: torch.Tensor,
    peers: Sequence[torch.Tensor | None],
    scale: Scale,
    rank: int,
    out: torch.Tensor,
) -> None:
    """Sum what every rank has for ``rank`` into ``out``: always in rank order, so any transport gives the same bits.

    Args:
        layout: of a section.
        own_parts: this rank's windows of its own gradients.
        own_tail: the small ones of them packed: 1-D, ``layout.tail_numel`` elements.
        peers: for each rank its section for this one (1-D, ``layout.section_numel`` elements); None for this rank.
        scale: how the sum becomes a mean.
        out: 1-D, ``layout.section_numel`` elements; padding is left undefined.
    """
    size = len(peers)
    divisor = float(size) if scale.divisor is None else scale.divisor
    large = layout.num_large
    for index, move in enumerate(layout.parts(rank)[:large]):
        start, numel = move.packed_offset, own_parts[index].numel()
        own = own_parts[index].reshape(-1)
        terms = [own if section is None else section.narrow(0, start, numel) for section in peers]
        _sum(terms, divisor, out.narrow(0, start, numel))
    if layout.tail_numel:
        start = layout.tail_start
        terms = [own_tail if section is None else section.narrow(0, start, layout.tail_numel) for section in peers]
        _sum(terms, divisor, out.narrow(0, start, layout.tail_numel))


def _sum(terms: Sequence[torch.Tensor], divisor: float, out: torch.Tensor) -> None:
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
    if divisor != 1:
        out.div_(divisor)
