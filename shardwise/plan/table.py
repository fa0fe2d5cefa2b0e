"""The units of a model as a table to read."""

from __future__ import annotations

from dataclasses import dataclass

_HEADINGS = ("unit", "modules", "parameters", "bytes", "padding", "route")


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One unit.

    Attributes:
        name: paths of its modules in the model, compressed (``blocks.0-7``); "" is the model itself.
        num_modules: how many modules unshard together.
        numel: elements of its parameters, unsharded.
        num_bytes: bytes of these, in the dtypes they are kept in.
        padding_ratio: elements that an all-gather moves divided by ``numel``; 1.0: none are padding.
        route: how ranks exchange its parameters ("shared memory", "send/recv", "collectives"); "" while that is not known,
            before the second forward, or if they do not.
    """

    name: str
    num_modules: int
    numel: int
    num_bytes: int
    padding_ratio: float
    route: str = ""


@dataclass(frozen=True, slots=True)
class UnitTable:
    """The units of a model in module order, the model's own first; ``str()`` is a table, with routes once any is known.

    ``ahead_bytes``: what full parameters and staging stay within, where units are gathered ahead by bytes and a step has run.
    """

    rows: tuple[UnitRow, ...]
    ahead_bytes: int | None = None

    def __str__(self) -> str:
        lines = [_HEADINGS, *(_cells(row) for row in self.rows)]
        if not any(row.route for row in self.rows):
            lines = [line[:-1] for line in lines]  # nothing is known of any route before the first step
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = [_aligned(line, widths) for line in lines]
        numel, num_bytes = sum(row.numel for row in self.rows), sum(row.num_bytes for row in self.rows)
        if len(self.rows) == 1:
            text.append("1 unit: no block is a unit of its own, so all parameters are gathered at once")
        else:
            text.append(f"{len(self.rows)} units, {numel:,} parameters, {_readable(num_bytes)}")
        if self.ahead_bytes is not None:
            text.append(f"gathered ahead within {_readable(self.ahead_bytes)}")
        return "\n".join(text)


def _cells(row: UnitRow) -> tuple[str, ...]:
    name = row.name or "(root)"
    padding = f"{row.padding_ratio:.2f}"
    return name, str(row.num_modules), f"{row.numel:,}", _readable(row.num_bytes), padding, row.route or "-"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers = (
        cell.ljust(width) if not index else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, *numbers))


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
