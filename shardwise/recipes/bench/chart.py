"""The picture of a benchmark: one bar per contender, its step time as a multiple of no communication at all."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardwise.recipes.bench.figures import Row

COLORS: Mapping[str, str] = MappingProxyType(
    {"local": "#7f7f7f", "DDP": "#9467bd", "ZeRO": "#8c564b", "FSDP2": "#ff7f0e", "shardwise": "#1f77b4"}
)


def draw_chart(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw ``rows`` from the top down, coloured by family; written as PNG at ``path``."""
    figure = Figure(figsize=(10.0, 1.6 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [row.name for row in rows]
    values = [row.x_local for row in rows]
    axes.barh(names, values, color=[COLORS[row.family] for row in rows], height=0.72)
    for index, row in enumerate(rows):
        label = f"{row.x_local:.2f}  ({1000 * row.median_s:.1f} ms)"
        axes.annotate(
            label, xy=(row.x_local, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.axvline(1.0, color="#333333", linestyle="--", linewidth=1.0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(values))
    axes.set_xlabel("step time / local (shorter is faster; dashed: no communication at all)")
    axes.set_title("\n".join(textwrap.wrap(title, 100)), fontsize=10)
    shown = {row.family for row in rows}
    handles = [Patch(color=color, label=family) for family, color in COLORS.items() if family in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
