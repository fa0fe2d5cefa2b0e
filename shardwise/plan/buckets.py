"""Which gradients travel together where a sum over replicas is all there is to do.  Pure; no function takes a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwise.plan.visits import Edge, ExecutionOrder

LEAST_BYTES = 1 << 20  # below, what a collective costs its ranks besides waiting is more than its bytes
_LATENCIES = 10
_MOST_OF_UNIT = 32  # buckets of one unit: each takes two or three calls of Python


def bucket_bytes(latency_s: float, bytes_per_s: float) -> int:
    """Return from how many bytes on a bucket is full: sending it takes ten times the latency, which then costs a tenth."""
    return max(LEAST_BYTES, round(_LATENCIES * latency_s * bytes_per_s))


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a unit's gradients share a bucket by.

    Attributes:
        key: units with the same one may share.
        num_bytes: of its gradients that go into a bucket, more than 0.
        limit: a bucket with so many bytes is full.
    """

    key: Hashable
    num_bytes: int
    limit: int


@dataclass(frozen=True, slots=True)
class UnitBucket:
    """Units whose gradients are reduced in one collective.

    Attributes:
        units: in the order in which backward is expected to end them.
        awaited: those of them that backward does end: it waits for these, not for what no loss depends on.
    """

    units: tuple[int, ...]
    awaited: tuple[int, ...]


def form_buckets(order: ExecutionOrder, sharing: Sequence[Sharing | None]) -> tuple[UnitBucket, ...]:
    """Return the buckets of a step that visits units in ``order``, in the order in which they are to be sent.

    Who is with whom follows from the forward alone, which a first step shows too: sums over more than two ranks depend on
    where an element lies in a bucket, so a run that begins again, from a checkpoint or after a fault, must find the
    same ones.  Backward ends units in the opposite order of their first use.  When buckets are sent, and what is waited for,
    follows from the backward of ``order`` if it has one.

    Args:
        order: the visits of a step, or of its forward.
        sharing: of every unit, by number; None: it shares with nobody, and is in no bucket.
    """
    used = [visit.unit for visit in order.visits if visit.edge is Edge.ENTER_FORWARD]
    runs: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for unit in reversed(list(dict.fromkeys(used))):
        terms = sharing[unit]
        if terms is None:
            continue
        if terms.key not in filling:
            filling[terms.key], filled[terms.key] = [], 0
            runs.append(filling[terms.key])
        filling[terms.key].append(unit)
        filled[terms.key] += terms.num_bytes
        if filled[terms.key] >= terms.limit:
            del filling[terms.key]
    return _as_ended(order, runs)


def split_unit(num_bytes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of a unit that is alone in its model: indices of its gradients, in the order of sending.

    Backward brings the gradients of later parameters first.  The sizes alone decide, as in :func:`form_buckets`.

    Args:
        num_bytes: of every gradient, in the order of the parameters.
        limit: a bucket with so many bytes is full; with more, if there were too many of them otherwise.
    """
    limit = max(limit, -(-sum(num_bytes) // _MOST_OF_UNIT))
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    filled = 0
    for index in reversed(range(len(num_bytes))):
        filling.append(index)
        filled += num_bytes[index]
        if filled >= limit:
            buckets.append(tuple(filling))
            filling, filled = [], 0
    return (*buckets, tuple(filling)) if filling else tuple(buckets)


def _as_ended(order: ExecutionOrder, runs: Sequence[Sequence[int]]) -> tuple[UnitBucket, ...]:
    ends = {visit.unit: at for at, visit in enumerate(order.visits) if visit.edge is Edge.EXIT_BACKWARD}
    if not ends:
        return tuple([UnitBucket(tuple(run), tuple(run)) for run in runs])
    never = len(order.visits)
    buckets = [UnitBucket(tuple(run), tuple([unit for unit in run if unit in ends])) for run in runs]
    return tuple(sorted(buckets, key=lambda bucket: max([ends[unit] for unit in bucket.awaited], default=never)))
