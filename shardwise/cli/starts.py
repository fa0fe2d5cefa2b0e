"""A name for one start of a job's ranks, agreed through a store that may hold what earlier starts have left in it."""

from __future__ import annotations

import json
import secrets
import time

import torch.distributed as dist

from shardwise.errors import TransportError

_START, _HERE, _ALL = "shardwise/start", "shardwise/start/here", "shardwise/start/all"
_PAUSE_S = 0.01


def name_start(store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> str:
    """Return a text that these ``num_ranks`` processes have in common with no others, earlier ones of their ranks included.

    torchrun keeps its store from start to start; addresses of processes that have ended would be taken for those of now.
    Rank 0 makes the name up; it is agreed once every rank has answered to it, and each has seen its own answer among all.
    Raises: TransportError naming the ranks that did not join in time.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    if rank == 0:
        store.set(_START, own)
        return _gather(store, own, num_ranks, deadline)
    answered = ""
    while time.monotonic() < deadline:
        name = _read(store, _START)
        if name and name != answered:
            store.set(f"{_HERE}/{rank}", json.dumps([name, own]))
            answered = name
        found = _read(store, _ALL)
        if found and json.loads(found)["answers"].get(str(rank)) == own:
            return str(json.loads(found)["name"])
        time.sleep(_PAUSE_S)
    raise TransportError(f"rank 0 did not join within {timeout_s:g} s")


def _gather(store: dist.Store, name: str, num_ranks: int, deadline: float) -> str:
    answers: dict[str, str] = {}
    while len(answers) < num_ranks - 1:
        for rank in range(1, num_ranks):
            said = json.loads(_read(store, f"{_HERE}/{rank}") or "[null, null]")
            if said[0] == name:
                answers[str(rank)] = said[1]
        if time.monotonic() > deadline:
            late = [str(rank) for rank in range(1, num_ranks) if str(rank) not in answers]
            raise TransportError(f"rank(s) {', '.join(late[:8])} did not join in time")
        time.sleep(_PAUSE_S)
    store.set(_ALL, json.dumps({"name": name, "answers": answers}))
    return name


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
