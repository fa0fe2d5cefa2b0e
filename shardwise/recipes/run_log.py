"""What a run writes down as it goes: metrics.jsonl, TensorBoard events and the display.  Silent on all but rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from rich.table import Table

from shardwise.recipes.progress import ProgressDisplay, StepReport
from shardwise.recipes.run_folder import TrainRun, drop_later_metrics
from shardwise.safe_files import open_append


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


class RunLog(Protocol):
    """Where a run's figures go."""

    def advance(self, step: int) -> None: ...
    def trained(self, steps: Sequence[TrainedStep], tokens_per_s: float, peak_bytes: int, eta_s: float) -> None: ...
    def validated(self, step: int, loss: float) -> None: ...
    def say(self, text: str) -> None: ...
    def show(self, table: Table) -> None: ...
    def flush(self) -> None: ...


class SilentJournal:
    """The journal of every rank but the first."""

    def advance(self, step: int) -> None:
        del step

    def trained(self, steps: Sequence[TrainedStep], tokens_per_s: float, peak_bytes: int, eta_s: float) -> None:
        del steps, tokens_per_s, peak_bytes, eta_s

    def validated(self, step: int, loss: float) -> None:
        del step, loss

    def say(self, text: str) -> None:
        del text

    def show(self, table: Table) -> None:
        del table

    def flush(self) -> None:
        return


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...


class RunJournal:
    """Rank 0's journal."""

    def __init__(
        self,
        display: ProgressDisplay,
        lines: IO[str],
        scalars: ScalarWriter,
        done: Callable[[int], None] = lambda _: None,
        unit: str = "byte",
    ) -> None:
        self._unit = unit
        self._display = display
        self._done = done
        self._lines = lines
        self._scalars = scalars

    def advance(self, step: int) -> None:
        """Move the progress bar, and tell who watches."""
        self._display.advance(step)
        self._done(step)

    def trained(self, steps: Sequence[TrainedStep], tokens_per_s: float, peak_bytes: int, eta_s: float) -> None:
        """Record steps since the last call; ``tokens_per_s`` and memory, which are shown, belong to all of them together."""
        for item in steps:
            figures = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.learning_rate}
            own = {"tokens_per_s": round(item.tokens_per_s, 1), "time": round(item.time, 3)}
            self._write({"kind": "train", "step": item.step, **figures, **own})
            for name, value in figures.items():
                self._scalars.add_scalar(f"train/{name}", value, item.step)
            self._scalars.add_scalar("speed/tokens_per_s", item.tokens_per_s, item.step)
        last = steps[-1]
        self._scalars.add_scalar("memory/peak_bytes", peak_bytes, last.step)
        self._display.report(StepReport(last.step, last.loss, tokens_per_s, peak_bytes, eta_s))

    def validated(self, step: int, loss: float) -> None:
        """Record a validation loss."""
        self._write({"kind": "validation", "step": step, "loss": loss, "time": round(time.time(), 3)})
        self._scalars.add_scalar("validation/loss", loss, step)
        self._display.say(f"step {step}: validation loss {loss:.4f} nats per {self._unit}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._display.say(text)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._display.show(table)

    def flush(self) -> None:
        """Bring everything to the disk, so that no checkpoint is ahead of the figures."""
        self._lines.flush()
        self._scalars.flush()

    def _write(self, values: dict[str, float | str]) -> None:
        self._lines.write(json.dumps(values) + "\n")


def open_lines(run: TrainRun) -> IO[str]:
    """Open metrics.jsonl for appending, without the lines that the checkpoint does not know of."""
    drop_later_metrics(run.metrics, run.done.step if run.done else None)
    return open_append(run.folder, run.metrics.name)
