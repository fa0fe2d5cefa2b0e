"""``shardwise checkpoint``: show, verify and compare checkpoints in one process, in bounded memory."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.checkpoint.contents import unlike_leaves
from shardwise.checkpoint.convert import (
    CheckpointSource,
    TensorDifference,
    compare_tensors,
    convert,
    export_model,
)
from shardwise.checkpoint.files import Files, list_checkpoints, read_manifest, verify
from shardwise.checkpoint.format import MANIFEST, Manifest, bytes_of, step_of, sum_of
from shardwise.cli import EXIT_FAILED
from shardwise.errors import ConfigError, DamagedCheckpointError
from shardwise.formatting import format_bytes, plain
from shardwise.recipes.report import PlainConsole

# ---- The tables that ``shardwise checkpoint`` prints.

_MOST_TEXT = 100


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=escape(title), title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def table_of_checkpoints(checkpoints: Sequence[tuple[Path, Manifest | str]]) -> Table:
    """Return one row per checkpoint."""
    heads = ("ranks", "tensors", "size")
    table = _table(str(checkpoints[0][0].parent), "checkpoint", *heads, "save", right=heads)
    for path, found in checkpoints:
        if isinstance(found, str):
            table.add_row(path.name, "", "", "", escape(f"DAMAGED: {found}"))
        else:
            size = format_bytes(sum(file.num_bytes for file in found.files))
            table.add_row(path.name, str(found.num_ranks), str(len(found.tensors)), size, found.save_id)
    return table


def tables_of_contents(path: Path, manifest: Manifest, sums: Mapping[str, str]) -> list[Table]:
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
        row = [escape(label), record.dtype, shape, format_bytes(record.num_bytes), str(len(record.parts))]
        tensors.add_row(*row, *([sums[name]] if sums else []))
    tensors.add_section()
    numel = sum(math.prod(record.shape) for record in manifest.tensors.values())
    tensors.add_row(f"{len(manifest.tensors)} tensors", "", f"{numel:,} elements", format_bytes(total), "")
    files = _table("files", "file", "size", "blocks", "sum of sums", right=("size", "blocks"))
    for file in manifest.files:
        files.add_row(file.name, format_bytes(file.num_bytes), str(len(file.sums)), sum_of("".join(file.sums).encode()))
    values = _table("values", "name", "value")
    for name, value in sorted(manifest.values.items()):
        values.add_row(escape(name), escape(_short(value)))
    return [tensors, values, files]


def table_of_verified(results: Sequence[tuple[Path, Manifest | str, int]]) -> Table:
    """Return one row per checkpoint; the last of each is the number of problems."""
    table = _table("", "checkpoint", "files", "size", "blocks", "result", right=("files", "size", "blocks"))
    for path, manifest, num_problems in results:
        result = f"DAMAGED: {num_problems} problem(s)" if num_problems else "whole"
        if isinstance(manifest, str):
            table.add_row(str(path), "", "", "", result)
            continue
        size = format_bytes(sum(file.num_bytes for file in manifest.files))
        blocks = str(sum(len(file.sums) for file in manifest.files))
        table.add_row(escape(str(path)), str(len(manifest.files)), size, blocks, result)
    return table


def table_of_differences(
    tensors: Sequence[TensorDifference],
    values: Mapping[str, tuple[object, object]],
    alone: Sequence[tuple[Path, Sequence[str]]],
) -> list[Table]:
    """Return the differences: tensors, values, and names that only one of the two checkpoints (``alone``) has."""
    found: list[Table] = []
    if tensors:
        heads = ("tensor", "first", "second", "elements", "largest difference", "relative")
        table = _table(" | ".join(str(path) for path, _ in alone), *heads, right=heads[3:])
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
        for name, pair in values.items():
            table.add_row(*map(escape, (name, *map(_short, pair))))
        found.append(table)
    for path, names in alone:
        if names:
            table = _table(f"in {path} alone", "tensor")
            for name in names:
                table.add_row(escape(name))
            found.append(table)
    return found


def _short(value: object) -> str:
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text)} characters)"


# ---- The commands of ``shardwise checkpoint``.

FILES = Files()
_OLD = ".metadata"  # of torch's own format
_WIDTH = 400  # columns: names of tensors are long, and a terminal folds lines better than table cells


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code: 0, or 1 for damage and differences.

    Raises: ConfigError for a place without checkpoints, DamagedCheckpointError if one cannot be read.
    """
    console = PlainConsole(highlight=False, width=_WIDTH)
    actions = {"show": _show, "verify": _verify, "diff": _diff, "export": _export, "convert": _convert}
    return actions[arguments.action](console, arguments)


def find_checkpoints(path: Path, step: int | None) -> list[Path]:
    """Return the checkpoints at ``path``, oldest first; with ``step`` only that one.

    Raises: ConfigError with what is there instead.
    """
    if (path / MANIFEST).is_file():
        if step is not None and step != (own := read_manifest(FILES, path).step):
            raise ConfigError(f"{path} is the checkpoint of step {own}, not of --step {step}; name its folder.")
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = list_checkpoints(FILES, folder)
    chosen = [each.path for each in found if step in (None, each.step)]
    if chosen:
        return chosen
    if found:
        raise ConfigError(
            f"{folder} has no checkpoint of step {step}; it has: {', '.join(str(e.step) for e in found)}."
        )
    if path.is_file():
        is_part = (path.parent / MANIFEST).is_file()
        raise ConfigError(
            f"{path} is a file; name {path.parent if is_part else 'the folder of a checkpoint, or a run'}."
        )
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder.")
    is_old = (path / _OLD).is_file() or any(folder.glob(f"step-*/{_OLD}"))
    what = "checkpoints of torch's own format (DCP) alone" if is_old else "no checkpoint"
    raise ConfigError(f"{path} has {what}: name a run, a folder of checkpoints, or one with a {MANIFEST}.")


def _show(console: Console, arguments: argparse.Namespace) -> int:
    checkpoints = find_checkpoints(Path(arguments.path), arguments.step)
    if len(checkpoints) > 1:
        console.print(table_of_checkpoints([(path, _manifest_or_reason(path)) for path in checkpoints]))
    path = checkpoints[-1]
    manifest = read_manifest(FILES, path)
    source = CheckpointSource(path, manifest)
    names = sorted(manifest.tensors) if arguments.sums else ()
    sums = {name: sum_of(bytes_of(source.read(name))) for name in names}
    for table in tables_of_contents(path, manifest, sums):
        console.print(table)
    return 0


def _manifest_or_reason(path: Path) -> Manifest | str:
    try:
        return read_manifest(FILES, path)
    except DamagedCheckpointError as error:  # a list shows damaged checkpoints too
        return str(error)


def _verify(console: Console, arguments: argparse.Namespace) -> int:
    results: list[tuple[Path, Manifest | str, list[str]]] = []
    for path in find_checkpoints(Path(arguments.path), arguments.step):
        manifest = _manifest_or_reason(path)
        results.append((path, manifest, [manifest] if isinstance(manifest, str) else verify(FILES, path)))
    console.print(table_of_verified([(path, manifest, len(problems)) for path, manifest, problems in results]))
    damage = [each for _, _, problems in results for each in problems]
    for each in damage:
        print(f"shardwise: error: {plain(each)}", file=sys.stderr)
    return EXIT_FAILED if damage else 0


def _diff(console: Console, arguments: argparse.Namespace) -> int:
    first, second = (find_checkpoints(Path(each), None)[-1] for each in (arguments.first, arguments.second))
    mine, theirs = CheckpointSource.open(first), CheckpointSource.open(second)
    left, right = mine.names, theirs.names
    differences = list(compare_tensors(mine, theirs))
    values = unlike_leaves(mine.manifest.values, theirs.manifest.values)
    if not (differences or values or left ^ right):
        console.print(f"{first} and {second} hold the same {len(left)} tensors, to the bit, and the same values")
        return 0
    for table in table_of_differences(
        differences, values, [(first, sorted(left - right)), (second, sorted(right - left))]
    ):
        console.print(table)
    console.print(f"{len(left & right) - len(differences)} tensors are the same to the bit")
    return EXIT_FAILED


def _export(console: Console, arguments: argparse.Namespace) -> int:
    path = find_checkpoints(Path(arguments.path), arguments.step)[-1]
    written = export_model(path, arguments.out, key=arguments.key, most_bytes=arguments.file_bytes)
    for each in written:
        console.print(f"{each}  {format_bytes(each.stat().st_size)}", markup=False)
    return 0


def _convert(console: Console, arguments: argparse.Namespace) -> int:
    path = Path(arguments.path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder.")
    step = arguments.step if arguments.step is not None else step_of(path.name) or 0
    written = convert(path, arguments.out, step=step)
    console.print(table_of_verified([(written, read_manifest(FILES, written), len(verify(FILES, written)))]))
    return 0
