"""Generations of an elastic run: which processes are its ranks, from one default process group to the next."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from shardwise import torch_private

VARIABLE = "SHARDWISE_ELASTIC"  # of a rank's environment: what Launcher.prepare tells it
MOST_BYTES = 1 << 18  # of a message
CONNECT_S, BUILD_S = 10.0, 60.0  # for ranks that have come to connect; for groups that build() makes


@dataclass(frozen=True, slots=True)
class Generation:
    """The processes that are ranks from here on.

    Attributes:
        number: counts from 1.  members: numbers of the processes, in the order of ranks.
        lost_in: the newest number that begins as a member was lost: that ends earlier ones at once, others after a step.
        cause: why the one before ended, in words.  hosts: that of each rank; empty: all are on one.
        begin_s: when it was decided, by the host's monotonic clock.
    """

    number: int
    members: tuple[int, ...]
    lost_in: int
    cause: str
    hosts: tuple[str, ...] = ()
    begin_s: float = 0.0


BEFORE_ALL = Generation(0, (), 0, "")


@dataclass(frozen=True, slots=True)
class Announcement:
    """All that the launcher tells a process; a later one replaces it.

    Attributes:
        newest: the newest generation.  entered: the newest that all its members have come to.
        settled: the newest in which this process has had an error, and no other rank was lost.
    """

    newest: Generation = BEFORE_ALL
    entered: Generation = BEFORE_ALL
    settled: int = 0


class RanksChanged(RuntimeError):
    """What a rank waits for will not come: a rank of its generation is lost."""


def set_timeouts(seconds: float) -> None:
    """Set the timeout of all groups."""
    for group in torch_private.all_groups():
        group.set_timeout(timedelta(seconds=seconds))


def backend() -> str:
    """Return the backend of default groups."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
