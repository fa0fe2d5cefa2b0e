"""Memory layouts of optimizer state and of its copies, and parameters and gradients in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.arguments import explains_fields
from shardwise.collectives.buffer_pool import limit_heap
from shardwise.fsdp.precision import CPUOffloadPolicy
from shardwise.layout import align

State = Sequence[torch.Tensor]
"""A unit's optimizer state with a number per element, always in the same order; empty before its first update."""
GAP_BYTES = 64


def layout_of(tensors: State) -> tuple[list[int], int]:
    """Return where each tensor begins in memory that has copies of all, and its size, in bytes.

    Copies are neighbours where the tensors are: fused kernels round the last elements of a run in another way.
    """
    starts, stop, end = [0] * len(tensors), 0, 0
    for index, each in sorted(enumerate(tensors), key=lambda pair: pair[1].data_ptr()):
        if each.data_ptr() != end or stop % each.element_size():
            stop = align(stop, GAP_BYTES) + GAP_BYTES
        starts[index] = stop
        stop += each.numel() * each.element_size()
        end = each.data_ptr() + each.numel() * each.element_size()
    return starts, stop


def views_in(memory: torch.Tensor, like: State, starts: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors that begin at ``starts`` in ``memory``, which is bytes, with the shapes and dtypes of ``like``."""
    return [
        memory[start : start + each.numel() * each.element_size()].view(each.dtype).view(each.shape)
        for each, start in zip(like, starts, strict=True)
    ]


@explains_fields
@dataclass(frozen=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """Keep sharded parameters and gradients in files that are mapped into memory, which they leave when a unit is done.

    That is after its forward, its backward, and its update (with :class:`OptimizerOffload`; other optimizers need all of them
    in memory).  The files have no names, and their space is taken when they are made.  Other ranks of the host map them, too.

    Attributes:
        folder: of a local disk.
    """

    pin_memory: bool = False
    folder: str = field(kw_only=True)

    def __post_init__(self) -> None:
        limit_heap()
