"""Draw the pictures of docs/apis.md and docs/how_it_works.md: ``python docs/draw_concepts.py`` writes them into docs/pictures.

``tests/test_pages.py`` fails while a picture is not what this file draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PICTURES = Path(__file__).resolve().parent / "pictures"
KINDS = {"parameters": "#2a6f97", "gradients": "#e09f3e", "optimizer state": "#6a994e"}
EMPTY, INK, SHARED = "#eceff1", "#37474f", "#b0bec5"
RANKS, CELL, HIGH = 4, 22, 16  # ranks in a picture; width and height of a quarter of a tensor
# strategy -> for each kind: of how many parts a rank holds one
STRATEGIES = {
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 4),
    "zero2": (1, 4, 4),
    "fully_shard": (4, 4, 4),
    "hsdp": (2, 2, 2),
}
# event -> (row, start, length, color), in a step of two blocks
STEP = [
    ("gather 1", 0, 0, 2, KINDS["parameters"]),
    ("forward 1", 1, 2, 2, SHARED),
    ("gather 2", 0, 2, 2, KINDS["parameters"]),
    ("forward 2", 1, 4, 2, SHARED),
    ("gather 2", 0, 6, 2, KINDS["parameters"]),
    ("backward 2", 1, 8, 4, SHARED),
    ("gather 1", 0, 8, 2, KINDS["parameters"]),
    ("reduce 2", 0, 12, 2, KINDS["gradients"]),
    ("backward 1", 1, 12, 4, SHARED),
    ("reduce 1", 0, 16, 2, KINDS["gradients"]),
    ("optimizer", 1, 18, 2, KINDS["optimizer state"]),
]


def strategy(parts: tuple[int, ...]) -> str:
    """Return what each of four ranks holds; a filled quarter is held, an empty one is on another rank."""
    lines: list[str] = []
    for rank in range(RANKS):
        left = 120 + rank * (RANKS * CELL + 22)
        lines.append(text(left + RANKS * CELL // 2, 16, f"rank {rank}", anchor="middle"))
        for row, (color, count) in enumerate(zip(KINDS.values(), parts, strict=True)):
            held = RANKS // count
            first = rank % count * held
            for cell in range(RANKS):
                fill = color if first <= cell < first + held else EMPTY
                lines.append(box(left + cell * CELL, 26 + row * (HIGH + 8), CELL, HIGH, fill))
    lines += [text(110, 38 + row * (HIGH + 8), kind, anchor="end") for row, kind in enumerate(KINDS)]
    return picture(120 + RANKS * (RANKS * CELL + 22), 102, lines)


def step() -> str:
    """Return a step of two blocks over time: collectives above, computation below."""
    scale, left = 40, 110
    lines = [text(left - 10, 34, "communication", anchor="end"), text(left - 10, 74, "computation", anchor="end")]
    for name, row, start, length, color in STEP:
        x = left + start * scale
        lines.append(box(x, 16 + row * 40, length * scale - 2, 28, color))
        ink = INK if color == SHARED else "white"
        lines.append(text(x + length * scale // 2 - 1, 34 + row * 40, name, anchor="middle", fill=ink))
    return picture(left + 20 * scale + 8, 96, lines)


def box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="white"/>'


def text(x: int, y: int, words: str, anchor: str, fill: str = INK) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def picture(width: int, height: int, lines: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    head += 'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *lines, "</svg>\n"])


def drawings() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Yield each picture's file and what draws it."""
    yield from ((PICTURES / f"{name}.svg", partial(strategy, parts)) for name, parts in STRATEGIES.items())
    yield PICTURES / "step.svg", step


if __name__ == "__main__":
    for path, draw in drawings():
        path.write_text(draw())
