"""What a run reads: plain text, JSONL, Parquet files, and folders of the ``datasets`` package, as sources with a beginning and
an end, and their documents one after another.

Only Parquet needs ``pyarrow``, and only dataset folders need ``datasets``: ``pip install 'shardwise[data]'``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

ROWS = 512  # of a table, read at once
PIECE_BYTES = 1 << 22
_JSONL = frozenset({".jsonl", ".ndjson"})
_PARQUET = frozenset({".parquet", ".pq"})
_HELD_OUT = ("validation", "valid", "val", "dev", "test", "eval")  # splits that are never trained on
_SAMPLE_BYTES = 4096
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b\x1a"))
_MOST_CONTROL = 0.02


@dataclass(frozen=True, slots=True)
class TextSource:
    """A part of what is read: [start, stop) of a file's bytes, or of the rows of a table.

    Attributes:
        path: the file, or the folder of a dataset.
        name: relative to the folder that was named; files are split by it.
        kind: "text" and "jsonl" are measured in bytes, "parquet" and "datasets" in rows.
        column: of JSONL and tables: where the text is.
        unit_bytes: of a row, on average; 1 for files measured in bytes.
        part: of a dataset with splits: "train" or "validation"; "" for what is still to be split.
    """

    path: Path
    name: str
    start: int
    stop: int
    kind: str = "text"
    column: str = "text"
    unit_bytes: float = 1.0
    part: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the disk: of a table, about."""
        return int((self.stop - self.start) * self.unit_bytes)


def optional_module(name: str, what: str) -> Any:
    """Return a module of a package that only some runs need.  Raises: ConfigError, about ``what``, that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which is not installed here ({error}). Install with: pip install 'shardwise[data]'"
        ) from error


def file_source(path: Path, name: str, column: str) -> TextSource:
    """Return a file whole, as what its name says it is.  Raises: ConfigError if it has no such column, or is no text at all."""
    kind = "jsonl" if path.suffix in _JSONL else "parquet" if path.suffix in _PARQUET else "text"
    size = path.stat().st_size
    if kind == "parquet":
        rows = _parquet_rows(path, column)
        return TextSource(path, name, 0, rows, kind, column, size / max(1, rows))
    source = TextSource(path, name, 0, size, kind, column)
    if kind == "jsonl" and size:
        next(_read_jsonl(source), None)
    return source


def is_dataset(folder: Path) -> bool:
    """Return True for a folder that ``save_to_disk`` of the datasets package wrote."""
    is_one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return is_one or (folder / "dataset_dict.json").is_file()


def dataset_sources(folder: Path, column: str) -> list[TextSource]:
    """Return the splits of a dataset folder; those of a held-out name are only validated on.  Raises: ConfigError."""
    if not (folder / "dataset_dict.json").is_file():
        return [_dataset_source(folder, folder.name, column, "")]
    names = sorted(path.name for path in folder.iterdir() if is_dataset(path))
    held_out = [name for name in names if name in _HELD_OUT]
    chosen = min(held_out, key=_HELD_OUT.index, default=None)
    trained = [name for name in names if name not in held_out]
    if not trained:
        raise ConfigError(
            f"--data {folder} has only held-out splits ({', '.join(names)}). Name one of them: {folder}/SPLIT."
        )
    parts = [(name, "train" if chosen else "") for name in trained] + ([(chosen, "validation")] if chosen else [])
    return [_dataset_source(folder / name, name, column, part) for name, part in parts]


def _dataset_source(folder: Path, name: str, column: str, part: str) -> TextSource:
    table = _open_dataset(folder)
    first = table[0] if len(table) else {column: ""}
    _text_in(first, column, f"{folder}: row 0")
    size = sum(path.stat().st_size for path in folder.glob("*.arrow"))
    return TextSource(folder, name, 0, len(table), "datasets", column, size / max(1, len(table)), part)


def _open_dataset(folder: Path) -> Any:
    datasets = optional_module("datasets", f"--data {folder} (a datasets folder)")
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets raise what they like
        raise ConfigError(f"--data {folder}: the datasets package cannot read it: {_first_line(error)}") from error


def read_documents(source: TextSource) -> Iterator[str]:
    """Yield the texts of a JSONL file or table, in order.  Raises: ConfigError that names the line or row that has none."""
    if source.kind == "jsonl":
        yield from _read_jsonl(source)
    elif source.kind == "parquet":
        yield from _read_parquet(source)
    else:
        table = _open_dataset(source.path)
        for first in range(source.start, source.stop, ROWS):
            rows: Mapping[str, Sequence[object]] = table[first : min(first + ROWS, source.stop)]
            for index, value in enumerate(rows[source.column]):
                yield _text_in({source.column: value}, source.column, f"{source.path}: row {first + index}")


def read_pieces(source: TextSource) -> Iterator[bytes]:
    """Yield the bytes of plain text."""
    left = source.stop - source.start
    with source.path.open("rb") as file:
        file.seek(source.start)
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece


def _read_jsonl(source: TextSource) -> Iterator[str]:
    """A line belongs to the part of the file in which it begins, so that any cut is a cut between documents."""
    with source.path.open("rb") as file:
        if source.start:
            file.seek(source.start - 1)
            file.readline()
        while file.tell() < source.stop and (line := file.readline()):
            if not line.strip():
                continue
            where = f"{source.path}: the line that ends at byte {file.tell()}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"--data {where} is not JSON ({error}). A .jsonl file has one object per line."
                ) from error
            yield _text_in(values, source.column, where)


def _parquet_rows(path: Path, column: str) -> int:
    file = _open_parquet(path)
    names = list(file.schema_arrow.names)
    if column not in names:
        raise _no_column(str(path), column, names)
    return int(file.metadata.num_rows)


def _open_parquet(path: Path) -> Any:
    parquet = optional_module("pyarrow.parquet", f"--data {path} (a Parquet file)")
    try:
        return parquet.ParquetFile(path)
    except Exception as error:
        raise ConfigError(f"--data {path}: pyarrow cannot read it: {_first_line(error)}") from error


def _read_parquet(source: TextSource) -> Iterator[str]:
    row = 0
    for batch in _open_parquet(source.path).iter_batches(batch_size=ROWS, columns=[source.column]):
        for value in batch.column(0).to_pylist():
            if source.start <= row < source.stop:
                yield _text_in({source.column: value}, source.column, f"{source.path}: row {row}")
            row += 1
        if row >= source.stop:
            return


def _text_in(values: object, column: str, where: str) -> str:
    if not isinstance(values, dict):
        raise ConfigError(f"--data {where} is {type(values).__name__}, expected an object with {column!r}.")
    if column not in values:
        raise _no_column(where, column, [str(name) for name in values])
    found: object = values[column]
    if not isinstance(found, str):
        raise ConfigError(
            f"--data {where}: {column!r} is {type(found).__name__}, expected text. Name a column with --text-column."
        )
    return found


def _no_column(where: str, column: str, names: Sequence[str]) -> ConfigError:
    listed = ", ".join(names[:12]) or "none"
    return ConfigError(f"--data {where} has no column {column!r}; its columns: {listed}. Name one with --text-column.")


def why_binary(path: Path) -> str:
    """Return what says that a file is no text, "" if nothing does: looks at its beginning and its middle."""
    with path.open("rb") as file:
        start = file.read(_SAMPLE_BYTES)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return "it is UTF-16: write it as UTF-8"
        file.seek(path.stat().st_size // 2)
        sample = start + file.read(_SAMPLE_BYTES)
    if b"\0" in sample:
        return "it has zero bytes"
    num_control = len(sample) - len(sample.translate(None, _CONTROL))
    return "it is full of control characters" if num_control > _MOST_CONTROL * len(sample) else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
