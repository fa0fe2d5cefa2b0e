"""Fold a plan into bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.events import Call, Op


def unsharded_bytes(calls: Iterable[Call], reductions_in_flight: int = 1) -> Iterator[int]:
    """Yield, after each call, the bytes that staging buffers and full parameters hold at its highest point.

    ``reductions_in_flight`` is how many reduce-scatter inputs may live at once.  Shards, gradients and optimizer states
    are not counted: they do not move during a step.
    """
    live = 0
    staged: dict[str, Call] = {}
    reducing: list[int] = []
    for call in calls:
        if call.op is Op.UNSHARD:
            staged[call.unit] = call
            live += call.num_bytes
        elif call.op is Op.RESHARD:
            live -= call.num_bytes
        elif call.op is Op.REDUCE:
            while len(reducing) >= reductions_in_flight:
                live -= reducing.pop(0)
            reducing.append(call.num_bytes)
            live += call.num_bytes
        elif call.op is Op.WAIT:
            launch = staged.pop(call.unit, None)
            is_held = launch is not None and launch.in_place
            live += 0 if is_held else call.num_bytes
            yield live
            if launch is not None:
                live -= launch.num_bytes - (call.num_bytes if is_held else 0)
            continue
        elif call.op is Op.COMMIT and reducing:
            live -= sum(reducing)
            reducing.clear()
        yield live


def peak_bytes(calls: Iterable[Call], reductions_in_flight: int = 1) -> int:
    """Return the most bytes that :func:`unsharded_bytes` reaches."""
    return max(unsharded_bytes(calls, reductions_in_flight), default=0)
