"""Where optimizer state of units lives between updates, and parameters and gradients between uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise import torch_private
from shardwise.arguments import explains_fields
from shardwise.fsdp.precision import CPUOffloadPolicy

State = Sequence[torch.Tensor]
"""A unit's optimizer state with a number per element, always in the same order; empty before its first update."""


class Tier(Protocol):
    """Stores the optimizer state of units, by their number.

    One update of a unit calls :meth:`load`, then :meth:`store`, on the thread of the updates; then either :meth:`commit` or
    :meth:`restore`, on the thread of the user, while no update runs.  Between two updates the optimizer holds what
    :meth:`store` or :meth:`restore` returned, which need not have memory (tensors on the device ``meta``).
    """

    def load(self, unit: int, held: State, keeps: bool) -> State:
        """Return the state of ``unit`` in host memory, where it may be changed; ``held``: what the optimizer holds.

        ``keeps``: the state of now must be kept, since :meth:`restore` may follow.
        """
        ...

    def store(self, unit: int, state: State) -> State:
        """Take the updated ``state``; return what the optimizer holds until the next load."""
        ...

    def commit(self, unit: int) -> None:
        """Make the stored state of ``unit`` the state that the next :meth:`restore` returns to."""
        ...

    def restore(self, unit: int) -> State:
        """Drop the state stored since the last commit; return what the optimizer holds.  Empty if there was none then."""
        ...


class HostTier:
    """State in host memory: an update changes it in place, after a copy if it may have to be undone."""

    def __init__(self) -> None:
        # by unit: the state in use, and the copies, whose memory later updates reuse
        self._state: dict[int, State] = {}
        self._copies: dict[int, list[torch.Tensor]] = {}

    def load(self, unit: int, held: State, keeps: bool) -> State:
        """Return ``held``, of which ``keeps`` makes a copy."""
        self._state[unit] = held
        if keeps:
            copies = self._copies.setdefault(unit, [])
            if [(each.shape, each.dtype) for each in copies] != [(each.shape, each.dtype) for each in held]:
                copies = self._copies[unit] = [torch.empty_like(each) for each in held]
            torch_private.copy_all(copies, list(held))
        return held

    def store(self, unit: int, state: State) -> State:
        """Return ``state``."""
        return state

    def commit(self, unit: int) -> None:
        """Do nothing: the state was changed in place."""

    def restore(self, unit: int) -> State:
        """Copy the values from before the last load back."""
        torch_private.copy_all(list(self._state[unit]), self._copies[unit])
        return self._state[unit]


@explains_fields
@dataclass(frozen=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """Keep sharded parameters and gradients in files that are mapped into memory: the kernel writes and reads pages of them.

    The files have no names, and their space is taken when they are made.  Other ranks of the host map them, too.

    Attributes:
        folder: of a local disk.
    """

    pin_memory: bool = False
    folder: str = field(kw_only=True)
