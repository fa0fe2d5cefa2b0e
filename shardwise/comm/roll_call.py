"""Meetings of ranks through the store: each says something, and all hear what all have said.

No collective: a thread may call beside training, and a rank that has gone is named.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch.distributed as dist

from shardwise.black_box import Track
from shardwise.comm.posts import ANSWER_S, GRACE_S, Posts, open_posts
from shardwise.errors import StateError, TransportError

_NEAR = (
    8  # ranks of a host are neighbours: that many on each side are looked after, so that a look costs the store little
)


class RollCall:
    """Calls in one order on all ranks; without posts this process meets nobody."""

    def __init__(self, posts: Posts | None) -> None:
        self._posts = posts
        self.rank, self.size = (posts.rank, posts.size) if posts is not None else (0, 1)
        self._number = 0
        self._track = Track(posts.prefix if posts is not None else "")

    def branch(self, name: str) -> RollCall:
        """Return another order of calls, for another thread; ``name`` is the same on all ranks and new."""
        posts = self._posts
        return RollCall(None if posts is None else replace(posts, prefix=f"{posts.prefix}/{name}"))

    def call(self, said: str) -> list[str]:
        """Return what every rank has said, in rank order, once all have.

        Raises: TransportError on every rank that is there if one is gone or does not come in time.
        """
        posts = self._posts
        if posts is None:
            return [said]
        number, self._number = self._number, self._number + 1
        self._track.note("meeting")
        posts.post(f"{number}", said)
        if posts.rank:
            # Who waits for the answer waits longer: rank 0 knows who is missing.
            near = [rank for rank in posts.peers() if abs(rank - posts.rank) <= _NEAR]
            answer = posts.collect(f"{number}/all", [0], posts.timeout_s + GRACE_S, needs=near)
            gone = [] if answer else posts.gone(near)
            if not answer and 0 not in gone and posts.collect(f"{number}", [0], 0.0):
                # It is there: on another host, where it has not seen who is gone, or asking who is late for the reason.
                answer = posts.collect(f"{number}/all", [0], GRACE_S if gone else ANSWER_S)
            verdict = json.loads(answer[0]) if answer else _absence(posts, gone or [0])
        else:
            others = posts.peers()
            found = posts.collect(f"{number}", others)
            absent = [rank for rank in others if rank not in found]
            verdict = _absence(posts, absent) if absent else [said, *found.values()]
            posts.post(f"{number}/all", json.dumps(verdict))
            posts.forget(f"{number}", others)
            if number:  # whoever has called again has read the last answer
                for what in (f"{number - 1}", f"{number - 1}/all"):
                    posts.forget(what, [0])
        if isinstance(verdict, str):
            raise TransportError(verdict)
        return verdict


def _absence(posts: Posts, ranks: list[int]) -> str:
    return posts.absence(
        ranks,
        f"{posts.named(ranks)} did not make this call within {posts.timeout_s:g} s; save and load are collective: call them on "
        "every rank",
    )


def open_roll_call(group: dist.ProcessGroup | None, topic: str) -> RollCall:
    """Return the next roll call about ``topic`` of ``group`` (None: all ranks, or this process alone without any group).

    Every rank opens those of one topic in the same order.  Raises: StateError outside of ``group``.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return RollCall(None)
    if dist.get_rank(group) < 0:
        raise StateError("this process is not a member of the process group that saves or loads the checkpoint")
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return RollCall(None)
    return RollCall(open_posts(group, topic))
