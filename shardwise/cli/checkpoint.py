"""``shardwise checkpoint``: show, verify and compare checkpoints in one process, in bounded memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shardwise.checkpoint.compare import TensorDifference, compare_tensors, compare_values, names_in
from shardwise.checkpoint.convert import convert
from shardwise.checkpoint.dtypes import bytes_of
from shardwise.checkpoint.export import export_model, export_torch
from shardwise.checkpoint.files import DiskFiles
from shardwise.checkpoint.folder import list_checkpoints
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.names import MANIFEST, step_of
from shardwise.checkpoint.reader import read_manifest, verify
from shardwise.checkpoint.stream import stream
from shardwise.cli import checkpoint_tables as tables
from shardwise.cli.exits import EXIT_FAILED
from shardwise.errors import ConfigError, DamagedCheckpointError
from shardwise.recipes.checkpoints import read_progress
from shardwise.recipes.old_checkpoints import is_old
from shardwise.recipes.plain_console import PlainConsole
from shardwise.recipes.plain_text import plain

FILES = DiskFiles()
_OLD = ".metadata"  # of torch's own format
_WIDTH = 400  # columns: names of tensors are long, and a terminal folds lines better than a table its cells


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Do what was asked for; return the exit code: 0, or 1 for damage and differences.

    Raises: ConfigError for a place without checkpoints, DamagedCheckpointError where one cannot be read.
    """
    console = PlainConsole(highlight=False, width=_WIDTH)
    if arguments.action == "verify":
        return _verify(console, find_checkpoints(Path(arguments.path), arguments.step))
    if arguments.action == "diff":
        return _diff(console, *(find_checkpoints(Path(each), None)[-1] for each in (arguments.first, arguments.second)))
    if arguments.action == "export":
        return _export(console, arguments)
    if arguments.action == "convert":
        return _convert(console, arguments)
    return _show(console, find_checkpoints(Path(arguments.path), arguments.step), arguments.sums)


def find_checkpoints(path: Path, step: int | None) -> list[Path]:
    """Return the checkpoints at ``path``, oldest first; with ``step`` that one alone.

    Raises: ConfigError that says what is there instead.
    """
    if (path / MANIFEST).is_file():
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


@contextmanager
def _progress(total: int, what: str) -> Generator[Progress, None, None]:
    """Show how many of ``total`` bytes are done, on standard error, if somebody looks."""
    bar = Progress(
        TextColumn(what),
        BarColumn(bar_width=32),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=PlainConsole(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    bar.add_task(what, total=max(total, 1))
    with bar:
        yield bar


def _advance(bar: Progress, num_bytes: int) -> None:
    bar.advance(bar.task_ids[0], num_bytes)


def _show(console: Console, checkpoints: list[Path], with_sums: bool) -> int:
    if len(checkpoints) > 1:
        console.print(tables.list_of([(path, _manifest_or_reason(path)) for path in checkpoints]))
    path = checkpoints[-1]
    manifest = read_manifest(FILES, path)
    sums = _sums(path, manifest) if with_sums else {}
    for table in tables.contents(path, manifest, sums):
        console.print(table)
    return 0


def _manifest_or_reason(path: Path) -> Manifest | str:
    try:
        return read_manifest(FILES, path)
    except DamagedCheckpointError as error:  # a list shows what there is, also what is damaged
        return str(error)


def _sums(path: Path, manifest: Manifest) -> dict[str, str]:
    found: dict[str, str] = {}
    state = xxhash.xxh3_128()
    with _progress(sum(each.num_bytes for each in manifest.tensors.values()), "reading") as bar:
        for window in stream(FILES, path, manifest, sorted(manifest.tensors)):
            data = bytes_of(window.tensor.contiguous())
            state.update(data)
            _advance(bar, len(data))
            if window.is_last:
                found[window.name] = state.hexdigest()
                state.reset()
    return found


def _verify(console: Console, checkpoints: list[Path]) -> int:
    results: list[tuple[Path, Manifest | str, list[str]]] = []
    for path in checkpoints:
        manifest = _manifest_or_reason(path)
        if isinstance(manifest, str):
            results.append((path, manifest, [manifest]))
            continue
        problems: list[str] = []
        with _progress(sum(file.num_bytes for file in manifest.files), path.name) as bar:
            for number, file in enumerate(manifest.files):
                problems += verify(FILES, path, (number, len(manifest.files)))
                _advance(bar, file.num_bytes)
        results.append((path, manifest, problems))
    console.print(tables.verified([(path, manifest, len(problems)) for path, manifest, problems in results]))
    damage = [each for _, _, problems in results for each in problems]
    for each in damage:
        print(f"shardwise: error: {plain(each)}", file=sys.stderr)
    return EXIT_FAILED if damage else 0


def _diff(console: Console, first: Path, second: Path) -> int:
    mine, theirs = read_manifest(FILES, first), read_manifest(FILES, second)
    left, right = names_in(mine), names_in(theirs)
    differences: list[TensorDifference] = []
    total = sum(mine.tensors[name].num_bytes for name in mine.tensors if name in right)
    with _progress(total, "comparing") as bar:
        differences += compare_tensors(FILES, (first, mine), (second, theirs), lambda count: _advance(bar, count))
    values = compare_values(mine, theirs)
    alone = tables.Alone(sorted(left - right), sorted(right - left))
    if not (differences or values or alone.first or alone.second):
        console.print(f"{first} and {second} hold the same {len(left)} tensors, to the bit, and the same values")
        return 0
    for table in tables.differences(first, second, differences, values, alone):
        console.print(table)
    console.print(f"{len(left & right) - len(differences)} tensors are the same to the bit")
    return EXIT_FAILED


def _export(console: Console, arguments: argparse.Namespace) -> int:
    path = find_checkpoints(Path(arguments.path), arguments.step)[-1]
    manifest, out = read_manifest(FILES, path), Path(arguments.out)
    is_whole = arguments.format == "torch"
    if is_whole and out.exists():
        raise ConfigError(f"{out} exists; name a file that does not.")
    chosen = [t for n, t in manifest.tensors.items() if is_whole or n.startswith(f"{arguments.key}/")]
    with _progress(sum(each.num_bytes for each in chosen), "exporting") as bar:
        seen = partial(_advance, bar)
        if is_whole:
            written = [export_torch(path, out, progress=seen)]
        else:
            key, most_bytes = arguments.key, arguments.file_bytes
            written = export_model(path, out, key=key, most_bytes=most_bytes, progress=seen)
    for each in written:
        console.print(f"{each}  {tables.format_size(each.stat().st_size)}", markup=False)
    return 0


def _convert(console: Console, arguments: argparse.Namespace) -> int:
    path = Path(arguments.path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder.")
    step = arguments.step if arguments.step is not None else step_of(path.name) or 0
    more = {"progress": asdict(read_progress(path))} if is_old(path) else None
    written = convert(path, arguments.out, step=step, more=more)
    console.print(tables.verified([(written, read_manifest(FILES, written), len(verify(FILES, written)))]))
    return 0
