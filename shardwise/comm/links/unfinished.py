"""Messages that nobody waits for any more, and the memory that they read and write: kept until their process group is gone.

Gloo says of a message whether it is done only to those who wait for it, a wait that gives up closes the group's connections,
and a message that is dropped before its peer has come keeps every later one between the two ranks from getting through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from shardwise.comm.watched import wait_all


@dataclass(slots=True, eq=False)
class _KeptWorks:
    works: list[dist.Work] = field(default_factory=list[dist.Work])
    memory: list[object] = field(default_factory=list[object])

    def drop(self) -> None:
        # First what may write, then what it writes to.
        self.works.clear()
        self.memory.clear()


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _KeptWorks] = weakref.WeakKeyDictionary()


def keep(group: dist.ProcessGroup, works: Iterable[dist.Work], memory: Iterable[object] = ()) -> None:
    """Keep ``works`` of ``group``, and ``memory`` that they may still read or write, until ``group`` is gone."""
    kept = _kept.get(group)
    if kept is None:
        kept = _kept[group] = _KeptWorks()
        weakref.finalize(group, kept.drop).atexit = False
    kept.works += works
    kept.memory += memory


def drop(group: dist.ProcessGroup) -> None:
    """Let go of what is kept of ``group``, whose connections are closed: nothing arrives by them any more."""
    kept = _kept.get(group)
    if kept is not None:
        kept.drop()


def num_kept(group: dist.ProcessGroup) -> int:
    """Return how many messages of ``group`` are kept."""
    kept = _kept.get(group)
    return 0 if kept is None else len(kept.works)


def let_end(works: list[dist.Work], group: dist.ProcessGroup) -> bool:
    """Wait for messages of ``group`` as :func:`wait_all` does; return False if one fails, because its rank may be gone."""
    try:
        wait_all(works, group)
    except RuntimeError:
        return False
    return True
