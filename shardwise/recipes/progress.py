"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere, and the last table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardwise.recipes.held_bytes import HeldBytes, fold_held, format_bytes
from shardwise.recipes.plain_console import PlainConsole


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures shown for a step.  ``peak_bytes`` is the largest of all ranks; ``eta_s`` is the time left."""

    step: int
    loss: float
    tokens_per_s: float
    peak_bytes: int
    eta_s: float


class ProgressDisplay:
    """Shows steps on rank 0's standard output; use as a context manager so that the cursor comes back."""

    def __init__(self, steps: int, done: int, *, is_shown: bool) -> None:
        self.console = PlainConsole(quiet=not is_shown, highlight=False, soft_wrap=True)
        self._steps = steps
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
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

    def report(self, report: StepReport) -> None:
        """Show the figures of a step: in the bar, or as one line where there is no terminal."""
        figures = f"loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s  {format_bytes(report.peak_bytes)}/rank"
        if self._bar.disable:
            eta = f"{int(report.eta_s) // 60}m{int(report.eta_s) % 60:02d}s"
            self.console.print(f"step {report.step}/{self._steps}  {figures}  ETA {eta}")
        else:
            self._bar.update(self._task, completed=report.step, figures=figures)

    def say(self, text: str) -> None:
        """Print a line (above the bar on a terminal)."""
        self.console.print(text, markup=False)

    def show(self, table: Table) -> None:
        """Print a table."""
        self.console.print(table, soft_wrap=False)


def memory_table(held: Sequence[HeldBytes], unsharded: HeldBytes, peak_name: str) -> Table:
    """Return the summary: per rank the bytes of each kind, beside what a rank holds without sharding."""
    num_ranks = len(held)
    table = Table(title=f"What each of {num_ranks} rank(s) held, beside an unsharded run", title_justify="left")
    table.add_column("", no_wrap=True)
    if num_ranks <= 2:
        columns = {f"rank {rank}": item for rank, item in enumerate(held)}
    else:
        columns = {"smallest rank": fold_held(min, held), "largest rank": fold_held(max, held)}
    for name in (*columns, "unsharded", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = fold_held(max, held)
    rows = ("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"), ("optimizer state", "optimizer_bytes")
    for name, field in (*rows, ("sum", "state_bytes")):
        whole = int(getattr(unsharded, field))
        saved = max(0.0, 1 - int(getattr(largest, field)) / whole)
        cells = [format_bytes(int(getattr(item, field))) for item in columns.values()]
        table.add_row(name, *cells, format_bytes(whole), f"{saved:.0%}", end_section=name in ("optimizer state", "sum"))
    table.add_row(peak_name, *(format_bytes(item.peak_bytes) for item in columns.values()), "", "")
    return table
