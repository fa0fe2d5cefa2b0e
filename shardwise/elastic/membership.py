"""What ``elastic`` needs of a launcher: which processes are the ranks, from one generation of process groups to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from shardwise import torch_private

VARIABLE = "SHARDWISE_ELASTIC"  # of a rank's environment: what Launcher.prepare tells it
CONNECT_S, BUILD_S = 10.0, 60.0  # for ranks that have come to connect; for groups that build() makes


@dataclass(frozen=True, slots=True)
class Generation:
    """The processes that are ranks from here on.

    Attributes:
        number: counts from 1.  members: numbers of the processes, in the order of ranks.
        is_urgent: a member of the generation before is lost; else it ends after a step.
        cause: why that one ended, in words.  hosts: that of each rank; empty: all are on one.
        seen_s: when this process learnt of it, by the host's monotonic clock.
    """

    number: int
    members: tuple[int, ...]
    is_urgent: bool
    cause: str
    hosts: tuple[int, ...] = ()
    seen_s: float = 0.0


class RanksChanged(RuntimeError):
    """What a rank waits for will not come: a rank of its generation is lost."""


class Membership(Protocol):
    """This process, which is a rank of some generations.

    Attributes:
        fds: descriptors of the memory files for the state, by set and rank.
        timeout_s: of process groups, once build() has returned.
    """

    fds: Sequence[Sequence[int]]
    timeout_s: float

    def join(self, num_used: Callable[[int], int]) -> Generation:
        """Wait for a generation that this process is a rank of, and make its default process group.

        ``num_used``: returns how many of so many members take part; the others wait.
        """
        ...

    def formed(self) -> None:
        """Note that all ranks of the generation have entered it."""
        ...

    def newest_number(self) -> int:
        """Return the number of the newest generation that is announced."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Return True if ``error`` was raised because a rank is lost, and this process stays: it is to leave and join."""
        ...

    def leave(self) -> None:
        """Leave the generation: nothing of its groups stays."""
        ...

    def raised(self, error: BaseException) -> None:
        """Note that ``error`` ends this process."""
        ...

    def finish(self) -> None:
        """Note that the run is over: from here on a lost rank ends it."""
        ...


def set_timeouts(seconds: float) -> None:
    """Set the timeout of all groups."""
    for group in torch_private.all_groups():
        group.set_timeout(timedelta(seconds=seconds))


def backend() -> str:
    """Return the backend of default groups."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
