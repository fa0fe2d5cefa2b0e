"""The tables that ``shardwise checkpoint`` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.compare import TensorDifference, ValueDifference
from shardwise.checkpoint.manifest import Manifest

_MOST_TEXT = 100


@dataclass(frozen=True, slots=True)
class Alone:
    """Names of tensors that only one of two checkpoints has."""

    first: Sequence[str]
    second: Sequence[str]


def format_size(num_bytes: int) -> str:
    """Return bytes in powers of 1024, as files are measured.

    Example:
        >>> format_size(1536)
        '1.5 KiB'
    """
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.4g} {unit}"


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=escape(title), title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def list_of(checkpoints: Sequence[tuple[Path, Manifest | str]]) -> Table:
    """Return one row per checkpoint."""
    table = _table(
        str(checkpoints[0][0].parent),
        "checkpoint",
        "ranks",
        "tensors",
        "size",
        "save",
        right=("ranks", "tensors", "size"),
    )
    for path, found in checkpoints:
        if isinstance(found, str):
            table.add_row(path.name, "", "", "", escape(f"DAMAGED: {found}"))
        else:
            size = sum(file.num_bytes for file in found.files)
            table.add_row(path.name, str(found.num_ranks), str(len(found.tensors)), format_size(size), found.save_id)
    return table


def contents(path: Path, manifest: Manifest, sums: Mapping[str, str]) -> list[Table]:
    """Return the tensors, the values and the files of a checkpoint; ``sums``: of tensors, by name."""
    total = sum(each.num_bytes for each in manifest.tensors.values())
    title = f"{path}: step {manifest.step}, saved by {manifest.num_ranks} rank(s)"
    tensors = _table(
        title, "tensor", "dtype", "shape", "size", "parts", *(["sum"] if sums else []), right=("size", "parts")
    )
    for name, record in sorted(manifest.tensors.items()):
        tied = sorted(tie for tie, first in manifest.ties.items() if first == name)
        label = name + (f" (also {', '.join(tied)})" if tied else "")
        shape = " x ".join(map(str, record.shape)) or "scalar"
        row = [escape(label), record.dtype, shape, format_size(record.num_bytes), str(len(record.parts))]
        tensors.add_row(*row, *([sums[name]] if sums else []))
    tensors.add_section()
    numel = sum(_numel(record.shape) for record in manifest.tensors.values())
    tensors.add_row(f"{len(manifest.tensors)} tensors", "", f"{numel:,} elements", format_size(total), "")
    files = _table("files", "file", "size", "blocks", "sum of sums", right=("size", "blocks"))
    for file in manifest.files:
        files.add_row(file.name, format_size(file.num_bytes), str(len(file.sums)), sum_of("".join(file.sums).encode()))
    values = _table("values", "name", "value")
    for name, value in sorted(manifest.values.items()):
        values.add_row(escape(name), escape(_short(value)))
    return [tensors, values, files]


def verified(results: Sequence[tuple[Path, Manifest | str, int]]) -> Table:
    """Return one row per checkpoint; the last of each is the number of problems."""
    table = _table("", "checkpoint", "files", "size", "blocks", "result", right=("files", "size", "blocks"))
    for path, manifest, num_problems in results:
        result = f"DAMAGED: {num_problems} problem(s)" if num_problems else "whole"
        if isinstance(manifest, str):
            table.add_row(str(path), "", "", "", result)
            continue
        size = format_size(sum(file.num_bytes for file in manifest.files))
        blocks = str(sum(len(file.sums) for file in manifest.files))
        table.add_row(escape(str(path)), str(len(manifest.files)), size, blocks, result)
    return table


def differences(
    first: Path, second: Path, tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], alone: Alone
) -> list[Table]:
    """Return what differs: tensors, values, and names that one of the two has."""
    found: list[Table] = []
    if tensors:
        heads = ("tensor", "first", "second", "elements", "largest difference", "relative")
        table = _table(f"{first} | {second}", *heads, right=heads[3:])
        for each in tensors:
            relative = each.most / each.largest if each.largest else float("inf") if each.most else 0.0
            figures = (
                ["-"] * 3
                if each.num_different is None
                else [str(each.num_different), f"{each.most:.3g}", f"{relative:.2g}"]
            )
            table.add_row(escape(each.name), each.first, "same" if each.first == each.second else each.second, *figures)
        found.append(table)
    if values:
        table = _table("values", "name", "first", "second")
        for value in values:
            table.add_row(*map(escape, (value.name, _short(value.first), _short(value.second))))
        found.append(table)
    for path, names in ((first, alone.first), (second, alone.second)):
        if names:
            table = _table(f"in {path} alone", "tensor")
            for name in names:
                table.add_row(escape(name))
            found.append(table)
    return found


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _short(value: object) -> str:
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text)} characters)"
