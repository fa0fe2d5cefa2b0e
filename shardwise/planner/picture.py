"""The memory of one rank over a step, drawn: stacked by kind, the peak named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.planner.rank_memory import KINDS, RankMemory

COLOURS = ("#4c72b0", "#8172b3", "#937860", "#55a868", "#c44e52", "#dd8452", "#64b5cd", "#cccccc", "#8c8c8c")


def draw_memory(memory: RankMemory, title: str, room: float, path: Path) -> None:
    """Draw ``memory`` to ``path``; ``room``: bytes that a plan may fill.  Raises: ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib, which is not installed here: pip install 'shardwise[train]'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot
    moments, peak = memory.moments, memory.peak
    figure, axes = plt.subplots(figsize=(12, 6))
    rows = [[moment.held[kind] / 1e9 for moment in moments] for kind in range(len(KINDS))]
    shown = [number for number, row in enumerate(rows) if any(row)]
    places = range(len(moments))
    colours = [COLOURS[number] for number in shown]
    axes.stackplot(
        places, *[rows[number] for number in shown], labels=[KINDS[number] for number in shown], colors=colours
    )
    at = moments.index(peak)
    axes.annotate(
        f"{peak.total / 1e9:.3g} GB: {peak.place}",
        xy=(at, peak.total / 1e9),
        xytext=(0.5, 1.02),
        textcoords="axes fraction",
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )
    if room < 2 * peak.total:
        axes.axhline(room / 1e9, color="black", linestyle="--", linewidth=1, label="what a plan may fill")
    axes.set(xlabel="moments of the step", ylabel="GB on one rank", xlim=(0, len(moments) - 1))
    axes.set_title(title, pad=24)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
