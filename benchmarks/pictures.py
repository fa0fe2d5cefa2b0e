"""Draw docs/pictures from benchmarks/results: a step's time, and the memory of a rank, ours beside torch's.

``python benchmarks/pictures.py`` writes both; it needs the standard library alone.  ``tests/test_pages.py`` fails while the
pictures show other figures than the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
TIMED = {
    "FSDP2": "torch FSDP2",
    "FSDP2 tuned": "torch FSDP2, tuned by hand",
    "DDP + bucket view": "torch DDP, bucket views",
    "shardwise full": "fully_shard per block",
    "shardwise recommended (gloo)": "shard_model, fused, gloo",
    "shardwise recommended": "shard_model, fused",
    "shardwise ZeRO-2 + fused": "ZeRO-2, fused",
}
HELD = {
    "DDP + bucket view": "torch DDP, bucket views",
    "torch ZeRO + bucket view": "DDP, torch's ZeRO",
    "FSDP2": "torch FSDP2",
    "shardwise replicate": "replicate",
    "shardwise ZeRO-1 + fused": "DDP, our ZeRO (ZeRO-1)",
    "shardwise recommended": "shard_model, fused",
}
LEFT, ROW, BAR_HIGH, WIDTH = 190, 22, 14, 360
OURS, THEIRS, INK = "#2a6f97", "#b0bec5", "#37474f"


@dataclass(frozen=True)
class Bar:
    """One contender; ``text`` stands beside the bar."""

    label: str
    value: float
    text: str
    is_ours: bool


@dataclass(frozen=True)
class Panel:
    """Bars under a title; ``mark``: where a line goes across them."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None


def rows_of(shape: str) -> dict[str, dict[str, Any]]:
    """Return the rows of one benchmark on two ranks, by contender."""
    found = json.loads((RESULTS / f"bench_{shape}_w2_gloo.json").read_text())
    return {row["name"]: row for row in found["rows"]}


def speed() -> str:
    """Return the picture of a step's time, as a multiple of the same training without communication."""
    panels = []
    for shape, what in (("wide", "8 blocks of width 512"), ("deep", "64 blocks of width 64")):
        rows = rows_of(shape)
        bars = [
            Bar(label, rows[name]["x_local"], f"{rows[name]['x_local']:.2f}", name.startswith("shardwise"))
            for name, label in TIMED.items()
        ]
        panels.append(Panel(f"step time as a multiple of no communication (less is faster): {what}", bars, 1.0))
    return draw(panels)


def memory() -> str:
    """Return the picture of the most memory that a rank has in use in a warm step."""
    rows = rows_of("wide")
    bars = [
        Bar(label, peak, f"{peak:.0f} MiB", name.startswith("shardwise"))
        for name, label in HELD.items()
        for peak in [rows[name]["memory"]["peak_live_bytes"] / 2**20]
    ]
    return draw([Panel("most memory in use by a rank in a step: 8 blocks of width 512", bars)])


def draw(panels: Sequence[Panel]) -> str:
    """Return panels one under another as SVG, all with one scale."""
    most = max(bar.value for panel in panels for bar in panel.bars)
    parts: list[str] = []
    y = 0
    for panel in panels:
        parts.append(f'<text x="8" y="{y + 18}" font-weight="bold">{escape(panel.title)}</text>')
        y += 28
        top = y
        for bar in panel.bars:
            length = round(bar.value / most * WIDTH)
            parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(bar.label)}</text>')
            color = OURS if bar.is_ours else THEIRS
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR_HIGH}" fill="{color}"/>')
            parts.append(f'<text x="{LEFT + length + 6}" y="{y + 12}">{bar.text}</text>')
            y += ROW
        if panel.mark is not None:
            x = LEFT + round(panel.mark / most * WIDTH)
            parts.append(f'<path d="M{x} {top - 4}V{y - 4}" stroke="{INK}" stroke-dasharray="3 3"/>')
        y += 12
    size = f'width="{LEFT + WIDTH + 80}" height="{y}" viewBox="0 0 {LEFT + WIDTH + 80} {y}"'
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join([ground, *parts]) + "\n</svg>\n"


def main() -> None:
    """Write both pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, picture in (("speed.svg", speed()), ("memory.svg", memory())):
        (PICTURES / name).write_text(picture)
        print(f"{(PICTURES / name).relative_to(ROOT)}: {len(picture):,} bytes")


if __name__ == "__main__":
    main()
