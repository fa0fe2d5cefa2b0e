"""Meetings of ranks through the store: each says something, and all hear what all have said.

No collective: a thread may call beside training, and a rank that has gone is named.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from shardwise.black_box import Track
from shardwise.comm.alive import announce, read_post
from shardwise.comm.store import JobStore
from shardwise.errors import StateError, TransportError
from shardwise.torch_private import process_group_store, process_group_timeout_s

_GRACE_S = 3.0


class RollCall:
    """Calls in one order on all ranks; ``size`` 1 without a store meets nobody.

    Args:
        prefix: of the keys in the store; the same on every rank, and of this object alone.
        members: global ranks.  rank: this one's place among them.
    """

    def __init__(
        self, store: JobStore | None, prefix: str, members: tuple[int, ...], rank: int, timeout_s: float
    ) -> None:
        self._store, self._prefix, self._members, self._timeout_s = store, prefix, members, timeout_s
        self.rank, self.size = rank, len(members)
        self._number = 0
        self._track = Track(prefix)

    def branch(self, name: str) -> RollCall:
        """Return another order of calls, for another thread; ``name`` is the same on all ranks and new."""
        return RollCall(self._store, f"{self._prefix}/{name}", self._members, self.rank, self._timeout_s)

    def call(self, said: str) -> list[str]:
        """Return what every rank has said, in rank order, once all have.

        Raises: TransportError on every rank that is there if one is gone or does not come in time.
        """
        store = self._store
        if store is None:
            return [said]
        number, self._number = self._number, self._number + 1
        place = f"{self._prefix}/{number}"
        self._track.note("meeting")
        if self.rank:
            store.set(f"{place}/{self.rank}", said)
            # Who waits for the answer waits longer: rank 0 knows who is missing.
            verdict = json.loads(self._read(store, f"{place}/all", 0, time.monotonic() + self._timeout_s + _GRACE_S))
        else:
            verdict = self._collect(store, place, said)
            store.set(f"{place}/all", json.dumps(verdict))
            for rank in range(1, self.size):
                store.delete(f"{place}/{rank}")
            if number:  # whoever has called again has read the last answer
                store.delete(f"{self._prefix}/{number - 1}/all")
        if isinstance(verdict, str):
            raise TransportError(verdict)
        return verdict

    def _collect(self, store: JobStore, place: str, said: str) -> list[str] | str:
        deadline = time.monotonic() + self._timeout_s
        try:
            return [said, *(self._read(store, f"{place}/{rank}", rank, deadline) for rank in range(1, self.size))]
        except TransportError as error:
            return str(error)

    def _read(self, store: JobStore, key: str, rank: int, deadline: float) -> str:
        try:
            return read_post(store.inner, key, self._members[rank], max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise TransportError(f"rank {self._members[rank]} did not come within {self._timeout_s:g} s") from error


def open_roll_call(group: dist.ProcessGroup | None, topic: str) -> RollCall:
    """Return the next roll call about ``topic`` of ``group`` (None: all ranks, or this process alone without any group).

    Every rank opens those of one topic in the same order.  Raises: StateError outside of ``group``.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return RollCall(None, topic, (0,), 0, 0.0)
    rank = dist.get_rank(group)
    if rank < 0:
        raise StateError("this process is not a member of the process group that saves or loads the checkpoint")
    members = tuple(dist.get_process_group_ranks(group))
    if len(members) == 1 or dist.get_backend(group) == "fake":
        return RollCall(None, topic, (0,), 0, 0.0)
    store = JobStore(process_group_store(group))
    announce(store.inner, members[rank])
    number = store.add(f"shardwise/{topic}/opened/{rank}", 1)
    return RollCall(store, f"shardwise/{topic}/{number}", members, rank, process_group_timeout_s(group))
