"""Record a case on one rank, as it is or as the plain thing.

No file of the fuzzer is imported at the top: in the processes of the plain run wrappers are replaced first.
"""

from __future__ import annotations

import functools

import torch.distributed as dist

from shardwise.prove import plain
from shardwise.prove.record import RunRecorder, Terms


@functools.cache
def _replace_wrappers() -> None:
    plain.replace_wrappers()


def record(text: str, folder: str, role: str) -> None:
    """Carry out the first phase of the case ``text``, as the first of its contenders that is ours, recorded as ``role``."""
    terms = Terms(f"{folder}/{role}", role, rank=dist.get_rank())
    if role == "tested":
        recorder = RunRecorder(terms)
    else:
        _replace_wrappers()
        plain._wraps.clear()  # pyright: ignore[reportPrivateUsage]  ``prove`` runs one script per process
        plain._moves.clear()  # pyright: ignore[reportPrivateUsage]
        recorder = plain.PlainRecorder(terms)
    from fuzz.eligible import is_ours
    from fuzz.phases import Play, Seat
    from fuzz.play import make_side

    play = Play.load(text)
    seat = Seat.of(dist.get_rank(), dist.get_world_size(), play.settings.mesh)
    with recorder.install():
        for _ in play.phases[0].program(make_side(play, seat, next(filter(is_ours, play.contenders)), "cpu")):
            pass
