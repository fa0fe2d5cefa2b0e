"""What a run shows on its terminal, and the figures that it writes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from shardwise.formatting import drop_output, format_bytes, plain
from shardwise.loop.meter import summary
from shardwise.recipes.run_folder import TrainRun, drop_later_metrics
from shardwise.recipes.sharding import HeldBytes, fold_held
from shardwise.safe_files import open_append

# ---- A console of rich that prints no command of a terminal that is in a text, and goes on where nobody reads any
# more.


class PlainConsole(Console):
    """Prints control characters of texts as text, and goes on without output where nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Say once that nobody reads, on standard error."""
        self.quiet = True
        drop_output()
        with contextlib.suppress(OSError):
            print("shardwise: standard output was closed; the work goes on without it", file=sys.stderr)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return what is printed, with control characters of texts written out."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)


# ---- What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere, and the last
# table.


class ProgressDisplay:
    """Shows steps on rank 0's standard output; use as a context manager so that the cursor comes back."""

    def __init__(self, steps: int, done: int, *, is_shown: bool) -> None:
        self.console = PlainConsole(quiet=not is_shown, highlight=False, soft_wrap=True)
        self._steps = steps
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (is_shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, figures="")

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def report(self, step: TrainedStep, speed: Mapping[str, float | None], eta_s: float) -> None:
        """Show the figures of a step: in the bar, or as one line where there is no terminal.

        ``speed``: of :class:`StepMeter`; ``eta_s``: the time left.
        """
        figures = f"loss {step.loss:.4f}  {summary(speed)}"
        if self._bar.disable:
            eta = f"{int(eta_s) // 60}m{int(eta_s) % 60:02d}s"
            self.console.print(f"step {step.step}/{self._steps}  {figures}  ETA {eta}")
        else:
            self._bar.update(self._task, completed=step.step, figures=figures)

    def say(self, text: str) -> None:
        """Print a line (above the bar on a terminal)."""
        self.console.print(text, markup=False)

    def show(self, table: Table) -> None:
        """Print a table."""
        self.console.print(table, soft_wrap=False)


BYTES_OF = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer state": "optimizer_bytes"}


def columns_of(held: Sequence[HeldBytes]) -> dict[str, HeldBytes]:
    """Return the memory of each of two ranks, or the smallest and the largest of more."""
    if len(held) <= 2:
        return {f"rank {rank}": item for rank, item in enumerate(held)}
    return {"smallest rank": fold_held(min, held), "largest rank": fold_held(max, held)}


def memory_table(held: Sequence[HeldBytes], unsharded: HeldBytes, peak_name: str) -> Table:
    """Return the summary: per rank the bytes of each kind, beside what a rank holds without sharding."""
    columns = columns_of(held)
    table = Table(title=f"What each of {len(held)} rank(s) held, beside an unsharded run", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in (*columns, "unsharded", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = fold_held(max, held)
    for name, field in (*BYTES_OF.items(), ("sum", "state_bytes")):
        whole = int(getattr(unsharded, field))
        saved = max(0.0, 1 - int(getattr(largest, field)) / whole)
        cells = [format_bytes(int(getattr(item, field))) for item in columns.values()]
        table.add_row(name, *cells, format_bytes(whole), f"{saved:.0%}", end_section=name in ("optimizer state", "sum"))
    table.add_row(peak_name, *(format_bytes(item.peak_bytes) for item in columns.values()), "", "")
    return table


# ---- What a run writes down as it goes: metrics.jsonl, TensorBoard events and the display.  Silent on all but rank
# 0.


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """The figures of one step and of no other.

    Attributes:
        step: how many are finished with this one.
        loss: over the whole batch, in nats per byte, or per token with a tokenizer.
        tokens_per_s: tokens of all ranks by the seconds of this step on rank 0.
        time: when it ended, in seconds since 1970.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float = 0.0
    time: float = 0.0


class RunLog:
    """What a run tells of itself; this one is that of every rank but the first, and silent."""

    def advance(self, step: int) -> None:
        """Move the progress bar."""

    def trained(self, steps: Sequence[TrainedStep], speed: Mapping[str, float | None], eta_s: float) -> None:
        """Record steps since the last call; ``speed``: of :class:`StepMeter`, belongs to all of them together."""

    def validated(self, step: int, loss: float) -> None:
        """Record a validation loss."""

    def say(self, text: str) -> None:
        """Print a line."""

    def flush(self) -> None:
        """Bring everything to the disk, so that no checkpoint is ahead of the figures."""


class FileRunLog(RunLog):
    """Rank 0's run log."""

    def __init__(
        self,
        display: ProgressDisplay,
        lines: IO[str],
        scalars: Any,  # a SummaryWriter of TensorBoard
        unit: str = "byte",
    ) -> None:
        self._unit = unit
        self._display = display
        self._lines = lines
        self._scalars = scalars

    def advance(self, step: int) -> None:
        """See :class:`RunLog`."""
        self._display.advance(step)

    def trained(self, steps: Sequence[TrainedStep], speed: Mapping[str, float | None], eta_s: float) -> None:
        """See :class:`RunLog`."""
        measured = {name: value for name in _SPEED_FIGURES if (value := speed.get(name)) is not None}
        last = steps[-1]
        for item in steps:
            figures = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.learning_rate}
            own = {"tokens_per_s": round(item.tokens_per_s, 1), "time": round(item.time, 3)}
            own |= {name: float(f"{value:.4g}") for name, value in measured.items()} if item is last else {}
            self._write({"kind": "train", "step": item.step, **figures, **own})
            for name, value in figures.items():
                self._scalars.add_scalar(f"train/{name}", value, item.step)
            self._scalars.add_scalar("speed/tokens_per_s", item.tokens_per_s, item.step)
        for name, value in measured.items():
            self._scalars.add_scalar(f"speed/{name}", value, last.step)
        self._scalars.add_scalar("memory/peak_bytes", speed["peak_memory_bytes"], last.step)
        self._display.report(last, speed, eta_s)

    def validated(self, step: int, loss: float) -> None:
        """See :class:`RunLog`."""
        self._write({"kind": "validation", "step": step, "loss": loss, "time": round(time.time(), 3)})
        self._scalars.add_scalar("validation/loss", loss, step)
        self._display.say(f"step {step}: validation loss {loss:.4f} nats per {self._unit}")

    def say(self, text: str) -> None:
        """See :class:`RunLog`."""
        self._display.say(text)

    def flush(self) -> None:
        """See :class:`RunLog`."""
        self._lines.flush()
        self._scalars.flush()

    def _write(self, values: dict[str, float | str]) -> None:
        self._lines.write(json.dumps(values) + "\n")


def open_lines(run: TrainRun) -> IO[str]:
    """Open metrics.jsonl for appending, without the lines that the checkpoint does not know of."""
    drop_later_metrics(run.metrics, run.done.step if run.done else None)
    return open_append(run.folder, run.metrics.name)


_SPEED_FIGURES = ("step_s", "data_s", "mfu", "exposed_wait_s")  # of StepMeter; None of them is written if not measured
