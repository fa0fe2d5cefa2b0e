"""Whether another rank's process is there: a rank that is gone is named at once, one that is late is waited for."""

from __future__ import annotations

import json
import os
import platform
import select
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from shardwise.comm.at_exit import settle_at_exit
from shardwise.comm.cables import post_addresses
from shardwise.comm.store import BRIEF_S, JobStore
from shardwise.errors import StateError

LOOK_S = 0.5  # between two looks at the process of a rank that is late
_LEFT = ["left by an error"]  # in place of where a process is

# Ranks that have left their note in a store: every fully_shard comes by, one note is enough.
_announced: weakref.WeakKeyDictionary[dist.Store, set[int]] = weakref.WeakKeyDictionary()


class Liveness:
    """Whether a process of this host is there: by a handle, because its number may come back as another's."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # gone already, and waited for by its parent
            return
        self._poll.register(self._fd, select.POLLIN)

    def is_alive(self) -> bool:
        """Return False once the process has ended."""
        return self._fd is not None and not self._poll.poll(0)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


_inherited: list[
    dist.ProcessGroup
] = []  # the default group of the process that this one was forked from, if it had peers


def _note_fork() -> None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    _inherited[:] = [world] if world is not None and world.size() > 1 else []


os.register_at_fork(after_in_child=_note_fork)


def refuse_forked() -> None:
    """Raise in a process that was forked from a rank: it has the rank's connections, and none of the threads behind them.

    Raises: StateError.
    """
    if _inherited and dist.group.WORLD is _inherited[0]:
        raise StateError(
            f"process {os.getpid()} was forked from rank {dist.get_rank()} and cannot run its sharded modules: ranks would "
            "wait for it in vain. Run them in the rank itself, or start processes with the method 'spawn'"
        )


_declared: list[str] = []  # the names that on_host has been given and not taken back; the last one counts


@contextmanager
def on_host(name: str) -> Generator[None, None, None]:
    """Let this process count as one of another host, with others of the same ``name`` alone: several hosts on one machine.

    For tests and benchmarks.  To be entered before the first ``fully_shard``, ``replicate`` or optimizer.
    """
    _declared.append(name)
    try:
        yield
    finally:
        _declared.pop()


def host_id() -> str:
    """Return a text that is the same for all processes of one boot of one host, and for no others."""
    try:
        found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        found = platform.node()
    return "/".join([found, *_declared[-1:]])


def announce(store: dist.Store, rank: int) -> None:
    """Leave process id and addresses of global rank ``rank`` in ``store``, so that others can tell whether it has gone."""
    ranks = _announced.setdefault(store, set())
    if rank not in ranks:
        ranks.add(rank)
        settle_at_exit()
        job = JobStore(store)
        job.set(_note_key(rank), json.dumps([*_name_space(), os.getpid()]))
        post_addresses(job, "/".join([host_id(), _link("net")]))


def say_left(store: dist.Store, rank: int) -> None:
    """Let global rank ``rank``, whose process is ending by an error or has ended, count as gone on every host.

    Raises: TransportError if the store does not answer.
    """
    JobStore(store, BRIEF_S).set(_note_key(rank), json.dumps(_LEFT))


def is_gone(store: dist.Store, rank: int) -> bool:
    """Return True if global rank ``rank`` was a process of this host that has ended, or of any that ends by an error.

    False if that cannot be known.
    """
    try:
        text = JobStore(store, BRIEF_S).peek(_note_key(rank))
        if text is None:
            return False
        *space, pid = json.loads(text)
        if [*space, pid] == _LEFT:
            return True
        if space != _name_space() or Liveness(int(pid)).is_alive():
            return False
        say_left(store, rank)  # other hosts cannot see it
        return True
    except (RuntimeError, OSError, AttributeError):  # no store, no /proc, no pidfds
        return False


def is_elsewhere(store: dist.Store, rank: int) -> bool:
    """Return True if global rank ``rank`` is a process of another host; False if that cannot be known."""
    try:
        text = JobStore(store, BRIEF_S).peek(_note_key(rank))
    except RuntimeError:
        return False
    return text is not None and json.loads(text)[0] not in (host_id(), *_LEFT)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as errors name them.

    Example:
        >>> ranks_in_words([3]), ranks_in_words(range(10))
        ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _note_key(rank: int) -> str:
    return f"shardwise/process/{rank}"


def _name_space() -> list[str]:
    """Return in which host and container a process number means something."""
    return [host_id(), _link("pid")]


def _link(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
