"""``StepMeter`` and ``trace``: the figures of a training loop's steps, averaged over ranks, and their calls with times."""

from __future__ import annotations

import json
import logging
import math
import operator
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.consistency.failure_report import naming_lost_peers
from shardwise.consistency.process_groups import gather_rows
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError, DesyncError
from shardwise.formatting import format_bytes, format_ranks
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.unit import Unit
from shardwise.observe import Call, Listener, listening
from shardwise.one_host import peak_resident_bytes, resident_bytes
from shardwise.planner.hardware import flops_of

# ---- ``trace``: record the calls of a model's steps with their times.

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


T = TypeVar("T")
_logger = logging.getLogger("shardwise.meter")
_MOST_SHAPES = 4096  # whose operations are known at once
_MOST_VALUES = 16  # of log(): the row that ranks exchange has a place for each
# Dense products in bfloat16, of the data sheets; the first name that is in the device's name counts.
_PEAK_FLOPS = {
    "B200": 2250e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "H20": 148e12,
    "H800": 989e12, "A100": 312e12, "A800": 312e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12, "L40S": 362e12,
    "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12, "MI250X": 383e12,
}  # fmt: skip
_OWN = ("steps", "step", "data", "tokens", "flops", "waits", "memory", "peak")  # figures in the row of every rank
_FIGURES = ("step_s", "data_s", "tokens_per_s", "mfu", "exposed_wait_s", "memory_bytes", "peak_memory_bytes")


class StepMeter:
    """Measures a training loop, and writes its figures every few steps.

    Args:
        model: the device of its first parameter is measured, unless ``device`` names another, as offload needs.
        tokens_per_step: tokens (or samples) that this rank trains on in a step; ranks of one tensor-parallel group divide
            those of their batch among them.
        every: :meth:`log` writes figures every so many steps.
        writers: of rank 0; each has ``add_scalar(tag, value, step)`` (TensorBoard), ``log_metrics(dict, step=)`` (MLflow,
            Lightning) or ``log(dict, step=)`` (Weights & Biases), or is a ``logging.Logger``.  None: the logger
            "shardwise.meter", at level INFO.
        peak_flops: operations per second that a rank's device can do; "auto": those of dense products in bfloat16, where the
            device is known; None: do not count operations.  They are counted in the first step, and in forwards of ``model``,
            with their backwards, whose inputs have other shapes than all before; counting slows these down.

    Example:
        >>> meter = shardwise.StepMeter(model, tokens_per_step=batch * seq)  # doctest: +SKIP
        >>> for batch in meter.data(loader):  # doctest: +SKIP
        ...     with meter.step():
        ...         loss = model(batch)
        ...         loss.backward()
        ...         optimizer.step()
        ...     meter.log(loss=loss)
    """

    def __init__(
        self,
        model: nn.Module,
        tokens_per_step: float = 0,
        *,
        every: int = 10,
        writers: Sequence[Any] | None = None,
        peak_flops: float | str | None = "auto",
        device: torch.device | None = None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"StepMeter: every is {every}, expected 1 or more")
        param = next(model.parameters(), None)
        self._device = device or (torch.device("cpu") if param is None else param.device)
        self._tokens, self._every = tokens_per_step, every
        self._write = [_writing(each) for each in ([_logger] if writers is None else writers)]
        self._peak_flops = _peak_flops(peak_flops, self._device)
        self.num_steps = 0
        self._flops: dict[
            Any, float
        ] = {}  # operations from the n-th forward of a step to the next one, by shapes of inputs
        self._passes: list[Any] | None = None  # those of the running step
        self._counting = ExitStack()
        self._sums = _Sums()
        self._model = model

    def data(self, batches: Iterable[T]) -> Generator[T, None, None]:
        """Yield ``batches``; the wait for each counts as time for data, also inside of a step."""
        iterator = iter(batches)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._sums.data_s += time.perf_counter() - begin
            yield batch

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Measure a step: the body is forward, backward and the optimizer's step.  One that raises does not count."""
        sums = self._sums
        if self.num_steps == 1 and sums.num_steps == 1:  # the first step warms up: it counts where it is alone
            sums = self._sums = _Sums(data_s=sums.data_s - sums.first_data_s)
        if self._passes is not None:
            raise ConfigError("StepMeter: step() within step(), expected one for each step of the optimizer")
        with ExitStack() as stack:
            passes = self._passes = []
            stack.callback(self._end_passes)
            if self._peak_flops is not None:  # a model between steps can be pickled and copied
                hook = self._model.register_forward_pre_hook(lambda _, *each: self._begin_pass(each), with_kwargs=True)
                stack.callback(hook.remove)
            self._begin_pass()
            is_traced = self._device.type == "cpu" and (self.num_steps + 1) % self._every == 0
            traced = stack.enter_context(trace()) if is_traced else None
            begin, data_s = time.perf_counter(), sums.data_s
            yield
            sums.step_s += time.perf_counter() - begin - (sums.data_s - data_s)
            sums.flops += sum(self._flops[each] for each in passes)
            passes.clear()
        sums.num_steps += 1
        self.num_steps += 1
        if self.num_steps == 1:
            sums.first_data_s = sums.data_s
        if traced is not None:
            sums.waits_s = sum(traced.exposed_s().values()) if traced.spans else math.nan

    def log(self, **values: float | Tensor) -> dict[str, float | None] | None:
        """Write figures if the last step is one of every ``every``, and return them; else None.

        Every rank must call it after every step.  ``values``, such as a loss or the norm of gradients, are those of this
        step, not of the steps before, averaged over ranks; the device is waited for only where they are written.  The first
        step warms up: its time counts only if no other step has followed.
        Raises: as :meth:`figures`.
        """
        if not self._sums.num_steps or self.num_steps % self._every:
            return None
        found = self.figures(**values)
        if not dist.is_initialized() or dist.get_rank() == 0:
            known = {name: value for name, value in found.items() if value is not None}
            for write in self._write:
                write(known, self.num_steps)
        return found

    def figures(self, **values: float | Tensor) -> dict[str, float | None]:
        """Return the figures of the steps since the last call, the same on every rank: one collective.

        Of a step, averaged over steps and ranks: ``step_s``, without the wait for data; ``data_s``.  Of all ranks:
        ``tokens_per_s``.  ``mfu``: operations (products of matrices, convolutions, attention) by those that the devices can
        do; what is computed again in backward counts too.  ``exposed_wait_s``: of the last step, how long the host waited for
        other ranks, the longest of all ranks.  ``memory_bytes``, ``peak_memory_bytes``: the largest of all ranks.
        ``values``: their means.  None: not measured.

        Raises: ConfigError for more than 16 values, and for one that is not a number, DesyncError then on the other ranks, and
            on every rank if they give other values; TransportError.
        """
        sums, self._sums = self._sums, _Sums()
        names = sorted(values)
        begin = time.perf_counter()
        given, wrong = list[float](), None
        try:
            if own := sorted({*_FIGURES} & {*names}):
                raise ConfigError(f"StepMeter: {own[0]} is a figure of its own, expected another name for the value")
            if len(names) > _MOST_VALUES:
                raise ConfigError(f"StepMeter: {len(names)} values, expected at most {_MOST_VALUES}")
            given = [_number(name, values[name]) for name in names]
        except ConfigError as error:  # raised once the other ranks know
            wrong = error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            sums.step_s += time.perf_counter() - begin  # what the steps have launched and the device had not done
        row = [
            sums.num_steps,
            sums.step_s,
            sums.data_s,
            self._tokens,
            sums.flops / max(sums.num_steps, 1) or math.nan,
            sums.waits_s,
            *_memory(self._device),
        ]
        row += [-1 if wrong else zlib.crc32(repr(names).encode()), *given, *[math.nan] * (_MOST_VALUES - len(given))]
        rows = _all(row, self._device)
        if wrong is not None:
            raise wrong
        checksums = [each[len(_OWN)] for each in rows]
        others = [rank for rank, each in enumerate(checksums) if each != checksums[0]]
        if others:
            raise DesyncError(
                f"StepMeter: {format_ranks(others)} and rank 0 give other values; here they are {', '.join(names) or 'none'}. "
                "Give the same names, and numbers, on every rank"
            )
        of = {name: [each[place] for each in rows] for place, name in enumerate(_OWN)}
        step_s, data_s = (
            fmean([total / max(count, 1.0) for total, count in zip(of[name], of["steps"], strict=True)])
            for name in ("step", "data")
        )
        whole_s = step_s + data_s
        peak = self._peak_flops
        found: dict[str, float] = {
            "step_s": step_s,
            "data_s": data_s,
            "tokens_per_s": sum(of["tokens"]) / whole_s if whole_s and self._tokens else math.nan,
            "mfu": fmean(of["flops"]) / whole_s / peak if whole_s and peak else math.nan,
            "exposed_wait_s": max(of["waits"]),
            "memory_bytes": max(of["memory"]),
            "peak_memory_bytes": max(of["peak"]),
        }
        known: dict[str, float | None] = {name: None if math.isnan(value) else value for name, value in found.items()}
        for place, name in enumerate(names, len(_OWN) + 1):
            known[name] = sum(each[place] for each in rows) / len(rows)  # fmean refuses inf and -inf together
        return known

    def _begin_pass(self, inputs: Any = ()) -> None:
        """Count the operations from here to the next forward, or to the end of the step, unless they are known."""
        if self._peak_flops is None or self._passes is None or torch.compiler.is_compiling():
            return
        shapes = [each.shape for each in tensors_in(inputs)]
        self._passes.append((len(self._passes), torch.is_grad_enabled(), *shapes))
        self._counting.close()
        if self._passes[-1] not in self._flops:
            self._flops[self._passes[-1]] = 0.0
            self._counting.enter_context(torch_private.watching(self._count, is_seen=False))

    def _count(self, func: Any, given: tuple[tuple[Any, ...], dict[str, Any]], out: Any) -> None:
        assert self._passes is not None
        self._flops[self._passes[-1]] += flops_of(func, *given, out) or 0.0

    def _end_passes(self) -> None:
        self._counting.close()
        if self._passes or len(self._flops) > _MOST_SHAPES:  # the step has raised, so that counts are of a part
            self._flops = {}
        self._passes = None


class _Sums:
    """Over the steps since the last figures; ``first_data_s``: what of it is of the first step of all."""

    def __init__(self, data_s: float = 0.0) -> None:
        self.num_steps, self.step_s, self.data_s, self.first_data_s = 0, 0.0, data_s, 0.0
        self.waits_s, self.flops = math.nan, 0.0


_IN_WORDS: Mapping[str, Callable[[float], str]] = {
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "step_s": lambda value: f"{1e3 * value:,.1f} ms/step",
    "data_s": lambda value: f"data {1e3 * value:,.1f} ms",
    "mfu": lambda value: f"MFU {value:.1%}",
    "peak_memory_bytes": lambda value: f"{format_bytes(value)}/rank",
}


def summary(figures: Mapping[str, float | None]) -> str:
    """Return what ``figures`` have of speed and memory in words."""
    known = {name: value for name in _IN_WORDS if (value := figures.get(name)) is not None}
    return "  ".join(_IN_WORDS[name](value) for name, value in known.items())


def _writing(writer: Any) -> Any:
    """Return a function of a dict and a step that gives both to ``writer``.  Raises: ConfigError."""
    if isinstance(writer, logging.Logger):
        return lambda figures, step: writer.info(
            "step %d: %s", step, " ".join(f"{k}={v:.6g}" for k, v in figures.items())
        )
    if hasattr(writer, "add_scalar"):
        return lambda figures, step: [writer.add_scalar(name, value, step) for name, value in figures.items()]
    for name in ("log_metrics", "log"):
        if hasattr(writer, name):
            return lambda figures, step: getattr(writer, name)(figures, step=step)
    raise ConfigError(
        f"StepMeter: a writer is a {type(writer).__name__}, expected one with add_scalar, log_metrics or log"
    )


def _peak_flops(asked: float | str | None, device: torch.device) -> float | None:
    if asked is None or isinstance(asked, (int, float)):
        return asked
    if asked != "auto":
        raise ConfigError(f"StepMeter: peak_flops is {asked!r}, expected a number, 'auto' or None")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"StepMeter: {name} is a tensor of shape {tuple(value.shape)}, expected a number; log its mean"
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    try:
        return float(value.detach() if isinstance(value, Tensor) else operator.truediv(value, 1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"StepMeter: {name} is a {type(value).__name__}, expected a number") from error


def _memory(device: torch.device) -> tuple[float, float]:
    """Return the bytes of this process now and at its peak: of CUDA's allocator, or resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    now = resident_bytes()
    return now, max(peak_resident_bytes(), now)


def _all(row: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return the rows of all ranks of the default process group; without one, that of this process."""
    if not dist.is_initialized():
        return [list(row)]
    on = torch.device("cpu") if "cpu:" in dist.get_backend_config() else device
    mine = torch.tensor(row, dtype=torch.float64, device=on)
    ranks = range(dist.get_world_size())
    return naming_lost_peers(lambda: gather_rows(mine), "figures cannot be averaged", ranks, dist.get_rank())
