"""report.png: the run in one picture, for someone who has not seen the code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from shardwise.plan.visits import Edge
from shardwise.planner.picture import COLOURS
from shardwise.planner.rank_memory import KINDS, UPDATE
from shardwise.recipes.held_bytes import HeldBytes
from shardwise.recipes.step_memory import HeldMemory, StepMemory
from shardwise.recipes.text import Baseline
from shardwise.safe_files import replace_file

_TRAIN, _VALIDATION, _REFERENCE = "#9ecae1", "#d62728", "#555555"
_RESTART, _SPEED = "#9467bd", "#17becf"
_KINDS = (
    ("parameters", "parameter_bytes", "#1f77b4"),
    ("gradients", "gradient_bytes", "#ff7f0e"),
    ("optimizer state", "optimizer_bytes", "#2ca02c"),
)


def draw_report(
    path: Path,
    title: str,
    metrics: Sequence[Mapping[str, float | str]],
    baseline: Baseline,
    memory: HeldMemory,
) -> None:
    """Draw loss curves over tokens per second, both by steps, beside memory: per rank, and over one step beside the plan.

    Written as PNG at ``path``.
    """
    figure = Figure(figsize=(13.5, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.add_gridspec(1, 2, width_ratios=(1.3, 1.0))
    left, right = (figure.add_subfigure(cells[0, column]) for column in range(2))
    upper, lower = left.add_gridspec(2, 1, height_ratios=(2.6, 1.0))
    loss = left.add_subplot(upper)
    speed = left.add_subplot(lower, sharex=loss)
    loss.tick_params(labelbottom=False)
    figure.suptitle(title, fontsize=12)
    _draw_loss(loss, metrics, baseline)
    _draw_speed(speed, metrics)
    rows = right.add_gridspec(2, 1, height_ratios=(1.0, 1.1)) if memory.step is not None else right.add_gridspec(1, 1)
    _draw_memory(right.add_subplot(rows[0]), memory.held, memory.unsharded)
    if memory.step is not None:
        _draw_step(right.add_subplot(rows[1]), memory.step)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    replace_file(path.parent, path.name, drawn.getvalue())


def _draw_loss(axes: Axes, metrics: Sequence[Mapping[str, float | str]], baseline: Baseline) -> None:
    unigram_nats, unit = baseline.unigram_nats, baseline.unit
    train = [(float(m["step"]), float(m["loss"])) for m in metrics if m["kind"] == "train"]
    validation = [(float(m["step"]), float(m["loss"])) for m in metrics if m["kind"] == "validation"]
    axes.plot(*_columns(train), color=_TRAIN, linewidth=1.2, label="training batches")
    axes.plot(
        *_columns(validation), color=_VALIDATION, marker="o", linewidth=1.8, label="validation text (never trained on)"
    )
    axes.axhline(unigram_nats, color=_REFERENCE, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"knowing only how often each {unit} occurs: {unigram_nats:.2f}",
        xy=(1.0, unigram_nats),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=_REFERENCE,
        fontsize=9,
    )
    restarts = [(float(m["step"]), int(m["ranks"])) for m in metrics if m["kind"] == "restart"]
    for index, (step, num_ranks) in enumerate(restarts):
        axes.axvline(step, color=_RESTART, linestyle=":", linewidth=1.2, label=None if index else "restarts")
        axes.annotate(
            f"{num_ranks} rank(s)", xy=(step, 0), xycoords=("data", "axes fraction"), xytext=(3, 4 + 11 * (index % 4)),
            textcoords="offset points", color=_RESTART, fontsize=8,
        )  # fmt: skip
    if validation:
        step, loss = validation[-1]
        axes.annotate(
            f"{loss:.2f}", xy=(step, loss), xytext=(0, -14), textcoords="offset points", ha="center",
            color=_VALIDATION, fontsize=10,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"loss: nats per {unit} (lower is better)")
    axes.set_title(f"How well the model predicts the next {unit}")
    bits = axes.secondary_yaxis("right", functions=(_nats_to_bits, _bits_to_nats))
    bits.set_ylabel(f"bits per {unit}")
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.97), frameon=False)
    axes.grid(alpha=0.25)


def _draw_speed(axes: Axes, metrics: Sequence[Mapping[str, float | str]]) -> None:
    """Draw tokens per second of every step, and their median, which no single slow step moves."""
    points = [(float(m["step"]), float(m["tokens_per_s"])) for m in metrics if "tokens_per_s" in m]
    axes.plot(*_columns(points), color=_SPEED, linewidth=1.0)
    title = "How fast it trains, all ranks together"
    if points:
        middle = float(np.median([speed for _, speed in points]))
        axes.axhline(middle, color=_REFERENCE, linestyle="--", linewidth=1.0)
        title += f" (median: {middle:,.0f})"
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("tokens per second")
    axes.set_title(title)
    axes.grid(alpha=0.25)


def _draw_memory(axes: Axes, held: Sequence[HeldBytes], unsharded: HeldBytes) -> None:
    if len(held) <= 8:
        bars = [(f"rank {i}", item) for i, item in enumerate(held)]
    else:
        bars = [(f"largest of\n{len(held)} ranks", max(held, key=lambda item: item.state_bytes))]
    bars.append(("any rank,\nunsharded", unsharded))
    bottoms = [0.0] * len(bars)
    for label, field, color in _KINDS:
        heights = [int(getattr(item, field)) / 1e6 for _, item in bars]
        axes.bar([name for name, _ in bars], heights, bottom=bottoms, color=color, label=label, width=0.6)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axes.text(index, total, f"{total:.1f} MB", ha="center", va="bottom", fontsize=9)
    axes.set_ylim(top=max(bottoms) * 1.32)
    axes.set_ylabel("megabytes held per rank")
    axes.set_title("What each rank holds between passes (no activations)")
    axes.legend(loc="upper left", frameon=False)
    axes.grid(axis="y", alpha=0.25)


def _draw_step(axes: Axes, step: StepMemory) -> None:
    """Draw the most bytes between edges of blocks, measured, over the plan's, stacked by kind."""
    places = np.arange(len(step.peaks) + 1)
    if step.planned is not None:
        moments = step.planned.by_edge()
        at = np.linspace(0, len(step.peaks), len(moments) + 1)  # the same places wherever the same edges were passed
        rows = [[moment.held[kind] / 1e6 for moment in moments] for kind in range(len(KINDS))]
        shown = [kind for kind, row in enumerate(rows) if any(row)]
        axes.stackplot(
            at,
            *[[*rows[kind], rows[kind][-1]] for kind in shown],
            labels=[f"planned: {KINDS[kind]}" for kind in shown],
            colors=[COLOURS[kind] for kind in shown],
            step="post",
            alpha=0.75,
        )
    measured = [num_bytes / 1e6 for _, num_bytes in step.peaks]
    axes.step(places, [*measured, measured[-1]], where="post", color="black", linewidth=1.6, label="measured")
    for name, edge, side in (("backward", Edge.ENTER_BACKWARD.value, "left"), ("update", UPDATE, "right")):
        begin = next((place for place, (each, _) in enumerate(step.peaks) if each.startswith(edge)), None)
        if begin is not None:
            axes.axvline(begin, color=_REFERENCE, linestyle=":", linewidth=1.0)
            axes.annotate(
                name, xy=(begin, 0.985), xycoords=("data", "axes fraction"), xytext=(3 if side == "left" else -3, 0),
                textcoords="offset points", ha=side, va="top", fontsize=8, color=_REFERENCE,
            )  # fmt: skip
    edge, most = step.peak
    title = f"Over step {step.step}, rank {step.rank}: {most / 1e6:.1f} MB at most ({edge})"
    if step.planned is not None:
        planned = step.planned.peak
        title += f"\nplanned: {planned.total / 1e6:.1f} MB ({planned.edge})"
    highest = max(most, 0 if step.planned is None else step.planned.peak.total) / 1e6
    axes.set(xlim=(0, len(step.peaks)), ylim=(0, 1.08 * highest), xticks=[], ylabel="megabytes in tensors")
    axes.set_xlabel("edges of blocks, in the order of the step")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=3, frameon=False, fontsize=8)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _nats_to_bits(nats: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(nats, dtype=np.float64) / math.log(2)


def _bits_to_nats(bits: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(bits, dtype=np.float64) * math.log(2)
