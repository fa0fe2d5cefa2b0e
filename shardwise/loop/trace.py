"""``trace``: record the calls of a model's steps with their times."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.unit import Unit
from shardwise.observe import Call, Listener, listening

_COMPUTATION = frozenset({"forward", "backward", "recompute"})
_WAITS = frozenset({"wait", "wait for gradients"})
_WITH_BYTES = frozenset({"unshard", "wait", "reduce", "reduction", "all-gather", "exchange"})
_BLOCKING = frozenset({"wait", "wait for gradients", "exchange", "all-reduce"})
# Calls that launch a collective -> the call that ends it, and the lane of the collective.
_LAUNCHES = {
    "unshard": ("wait", "all-gathers"),
    "all-gather": ("wait", "all-gathers"),
    "reduce": ("wait for gradients", "reductions"),
    "reduction": ("wait", "reductions"),
}
_LANE_NAMES = ("computation", "calls", "waits", "all-gathers", "reductions")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of time, such as a call, a wait or the forward of a unit.

    Attributes:
        what: "unshard", "wait", "reshard", "reduce", "wait for gradients", "forward", "backward", ...; "all-gather on its
            way" and "reduction on its way" last from the launch to the end of the wait for it.
        unit: path of the unit's module ("" is the root), or the purpose of an optimizer's message.
        lane: "computation", "calls", "waits", "all-gathers" or "reductions".
        begin_s, end_s: monotonic seconds of this host.
        num_bytes: bytes of the buffers of the call; 0 if there are none.
    """

    what: str
    unit: str
    lane: str
    begin_s: float
    end_s: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end_s - self.begin_s


@dataclass(slots=True)
class Trace:
    """The record of everything that happened inside ``with trace()``.

    Attributes:
        spans: all spans, in the order of their ends.
        calls: the calls of the engine, in order, in the form in which plans predict them.
    """

    spans: list[Span] = field(default_factory=list[Span])
    calls: list[Call] = field(default_factory=list[Call])

    def exposed_s(self) -> dict[str, float]:
        """Return the seconds that this host waited for other ranks, by unit, the longest first."""
        waits: dict[str, float] = defaultdict(float)
        for each in self.spans:
            if each.what in _BLOCKING:
                waits[each.unit] += each.seconds
        return dict(sorted(waits.items(), key=lambda item: -item[1]))

    def table(self) -> str:
        """Return a table of the times of each unit, the longest waits first."""
        rows = [["unit", "waits exposed", "forward", "backward", "all-gathers", "reductions", "bytes"]]
        for unit in dict.fromkeys([*self.exposed_s(), *[each.unit for each in self.spans]]):
            mine = [each for each in self.spans if each.unit == unit]
            cells = [sum(each.seconds for each in mine if each.what in _BLOCKING)]
            cells += [sum(each.seconds for each in mine if each.what == what) for what in ("forward", "backward")]
            cells += [sum(each.seconds for each in mine if each.lane == lane) for lane in _LANE_NAMES[3:]]
            sent = sum(each.num_bytes for each in mine if each.what in _WITH_BYTES)
            rows.append([unit or "(root)", *[f"{1e3 * seconds:.2f} ms" for seconds in cells], format_bytes(sent)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def to_json(self) -> str:
        """Return the Chrome trace format, which Perfetto reads too: one row for each lane, microseconds from the first."""
        first = min((each.begin_s for each in self.spans), default=0.0)
        row: dict[str, object] = {"name": "thread_name", "ph": "M", "pid": 0}
        events = [{**row, "tid": number, "args": {"name": lane}} for number, lane in enumerate(_LANE_NAMES)]
        for each in sorted(self.spans, key=lambda span: (span.begin_s, -span.end_s)):
            times = {"ts": round(1e6 * (each.begin_s - first), 3), "dur": round(1e6 * each.seconds, 3)}
            where = {"ph": "X", "pid": 0, "tid": _LANE_NAMES.index(each.lane)}
            args = {"unit": each.unit, "bytes": each.num_bytes}
            events.append({"name": f"{each.what} {each.unit or '(root)'}", **where, **times, "args": args})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to ``path``; open it with Perfetto or ``chrome://tracing``."""
        Path(path).write_text(self.to_json())


class _Recorder(Listener):
    """Records spans and events into ``trace``; of the engine of ``unit`` only, or of all engines if that is None."""

    def __init__(self, trace: Trace, unit: Unit | None) -> None:
        self._trace, self._unit = trace, unit
        self._open: dict[int, list[tuple[str, str, float]]] = {}
        self._launched: dict[tuple[str, str], tuple[float, str]] = {}

    def begin(self, track: str, what: str, subject: str) -> None:
        """Record that ``what`` begins on this thread."""
        now = time.monotonic()
        self._open.setdefault(threading.get_ident(), []).append((what, subject, now))
        if what in _LAUNCHES:
            ends_with, lane = _LAUNCHES[what]
            self._launched[ends_with, subject] = (now, lane)

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        """Record that the last such span ends, and a call of the engine."""
        is_ours = self._unit is None or not track.startswith("engine") or track == self._unit.track.name
        if call is not None and is_ours:
            self._trace.calls.append(call)
        stack = self._open.get(threading.get_ident(), [])
        found = next((each for each in reversed(stack) if each[:2] == (what, subject)), None)
        if found is None:
            return  # the span began before the trace
        if what in ("forward", "backward", "recompute"):
            stack.remove(found)  # spans of units nest, but need not end in that order
        else:
            del stack[stack.index(found) :]
        if not is_ours:
            return
        now, spans = time.monotonic(), self._trace.spans
        lane = "computation" if what in _COMPUTATION else "waits" if what in _WAITS else "calls"
        spans.append(Span(what, subject, lane, found[2], now, num_bytes))
        launched = self._launched.pop((what, subject), None)
        if launched is not None:
            begin_s, lane = launched
            spans.append(Span(f"{lane.removesuffix('s')} on its way", subject, lane, begin_s, now, num_bytes))


@contextmanager
def trace(model: nn.Module | None = None) -> Generator[Trace, None, None]:
    """Record every call of the body with its begin, end, lane, bytes and unit.

    Args:
        model: a model after ``fully_shard``, ``shard_model`` or ``replicate``: only its engine is recorded.  None: all engines
            of this process.  Collectives of ``ZeroRedundancyOptimizer`` and ``ShardedOptimizer`` are recorded in any case.

    Yields: a :class:`Trace`; read it after the body.  Times are from this host's clock: on an accelerator they are times of
    launches and of waits of the host.  A span costs about 2 microseconds; without a trace there is no cost.
    Raises: ConfigError if ``model`` has no unit.

    Example:
        >>> with shardwise.trace(model) as trace:  # doctest: +SKIP
        ...     loss(model, batch).backward()
        >>> print(trace.table())  # doctest: +SKIP
        >>> trace.save("trace.json")  # doctest: +SKIP
    """
    attachment = attachment_of(model) if model is not None else None
    if model is not None and attachment is None:
        raise ConfigError(
            f"{type(model).__name__} is no unit; trace a module that was sharded, or trace() without a model"
        )
    unit = attachment.unit if attachment is not None else None
    recorded = Trace()
    with listening(_Recorder(recorded, unit)):
        yield recorded
