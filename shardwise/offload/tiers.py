"""Where optimizer state of units lives between updates, and parameters and gradients between uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise import torch_private
from shardwise.arguments import explains_fields
from shardwise.collectives.buffer_pool import limit_heap
from shardwise.fsdp.precision import CPUOffloadPolicy
from shardwise.layout import align

State = Sequence[torch.Tensor]
"""A unit's optimizer state with a number per element, always in the same order; empty before its first update."""


_GAP_BYTES = 64


def layout_of(tensors: State) -> tuple[list[int], int]:
    """Return where each tensor begins in memory that has copies of all, and its size, in bytes.

    Copies are neighbours where the tensors are: fused kernels round the last elements of a run in another way.
    """
    starts, stop, end = [0] * len(tensors), 0, 0
    for index, each in sorted(enumerate(tensors), key=lambda pair: pair[1].data_ptr()):
        if each.data_ptr() != end or stop % each.element_size():
            stop = align(stop, _GAP_BYTES) + _GAP_BYTES
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


class HostTier:
    """Optimizer state in host memory, by number of the unit: changed in place, after a copy if that may have to be undone.

    An update of a unit calls :meth:`load`, then :meth:`store`, on the thread of the updates; then :meth:`commit` or
    :meth:`restore` follows on the thread of the user, while no update runs.
    """

    def __init__(self) -> None:
        # by unit: the state in use, and the copies, whose memory later updates reuse
        self._state: dict[int, State] = {}
        self._copies: dict[int, list[torch.Tensor]] = {}

    def load(self, unit: int, held: State, keeps: bool | None) -> State:
        """Return the state of ``unit`` in host memory, where it may be changed; ``held``: what the optimizer holds.

        ``keeps``: the state of now must be kept, since :meth:`restore` may follow.  None: it is for a reader.
        """
        self._state[unit] = held
        if keeps:
            copies = self._copies.setdefault(unit, [])
            if [(each.shape, each.dtype) for each in copies] != [(each.shape, each.dtype) for each in held]:
                copies = self._copies[unit] = [torch.empty_like(each) for each in held]
            torch_private.copy_all(copies, list(held))
        return held

    def store(self, unit: int, state: State) -> State:
        """Take the updated ``state``; return what the optimizer holds until the next load."""
        return state

    def commit(self, unit: int) -> None:
        """Make the stored state of ``unit`` the one that the next :meth:`restore` returns to."""

    def restore(self, unit: int) -> State:
        """Drop what was stored since the last commit; return what the optimizer holds.  Empty if there was none then."""
        torch_private.copy_all(list(self._state[unit]), self._copies[unit])
        return self._state[unit]


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
