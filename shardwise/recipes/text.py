"""Text as numbers: find the files, split them, cache them as two memory-mapped files, cut them into windows.

A number is a byte, or a token of ``--tokenizer``.  A window is ``context`` inputs and the number after each.  Windows are
numbered 0, 1, 2, ... over the whole run: number g is in epoch g // num_windows, and inside an epoch a seeded permutation visits
each window once.  Step s takes numbers [s * batch, (s + 1) * batch), whatever the number of ranks, so a run can resume on
another number of ranks exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.recipes.config import NUM_BYTES, typed
from shardwise.recipes.documents import TextSource, dataset_sources, file_source, is_dataset, why_binary
from shardwise.recipes.tokens import Bytes, Vocabulary
from shardwise.safe_files import create_file, open_input, opened, read_text, replace_file

DEFAULT_LIMIT_BYTES = 12_000_000
VALIDATION_SHARE = 0.1
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})


@dataclass(frozen=True, slots=True)
class DataSplit:
    """Which sources are trained on and which only validated on; no byte is in both."""

    train: tuple[TextSource, ...]
    validation: tuple[TextSource, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What losses are set beside: the entropy of single bytes or tokens (``unit``) of the validation text."""

    unigram_nats: float
    unit: str = "byte"


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What config.json keeps about the text.

    Attributes:
        train_bytes, validation_bytes: of the two cached files.
        unigram_nats: the entropy of the validation text, per byte or token.
        digest: of both files.
        vocabulary: numbers are in [0, vocabulary).
        itemsize: bytes of a number.
        tokenizer: digest of the tokenizer's file; "" for bytes.
    """

    description: str
    num_files: int
    train_bytes: int
    validation_bytes: int
    unigram_nats: float
    digest: str
    vocabulary: int = NUM_BYTES
    itemsize: int = 1
    tokenizer: str = ""

    @property
    def unit(self) -> str:
        """The word for a number."""
        return "token" if self.tokenizer else "byte"


def find_sources(data: str | None, column: str = "text") -> tuple[str, list[TextSource]]:
    """Return (description, sources) of a file, a folder, or (None) the standard library of the running Python.

    ``column``: of JSONL, Parquet and dataset folders, where the text is.  Binary files of a folder are passed over.
    Raises: ConfigError if there is nothing to read, or nothing that is text.
    """
    if data is None:
        return "source text of the Python standard library", _standard_library()
    path = Path(data)
    if path.is_file():
        return str(path), _not_empty([_single(path, column)], path)
    if path.is_dir() and is_dataset(path):
        return str(path), _not_empty(dataset_sources(path, column), path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
        found = [file_source(p, str(p.relative_to(path)), column) for p in files if p.stat().st_size]
        return str(path), _not_empty([s for s in found if s.kind != "text" or not why_binary(s.path)], path)
    found = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise ConfigError(f"--data {data} {found}: name a text file, or a folder of text files.")


def _single(path: Path, column: str) -> TextSource:
    source = file_source(path, path.name, column)
    problem = why_binary(path) if source.kind == "text" else ""
    if problem:
        raise ConfigError(
            f"--data {path} is no text ({problem}), expected UTF-8 text, .jsonl, .parquet, or a folder of such files. "
            "Unpack or convert it first."
        )
    return source


def _not_empty(sources: list[TextSource], path: Path) -> list[TextSource]:
    if sum(source.num_bytes for source in sources) == 0:
        raise ConfigError(f"--data {path} holds no text (empty, hidden and binary files do not count).")
    return sources


def _standard_library() -> list[TextSource]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[TextSource] = []
    left = DEFAULT_LIMIT_BYTES
    for path in sorted(root.rglob("*.py")):
        size = path.stat().st_size if path.is_file() else 0
        if size and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]) and size <= left:
            sources.append(TextSource(path, str(path.relative_to(root)), 0, size))
            left -= size
    if not sources:
        raise ConfigError(f"the standard library at {root} has no .py files here: name a text with --data PATH.")
    return sources


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def split_sources(sources: Sequence[TextSource]) -> DataSplit:
    """Split by file, about a tenth of the bytes to validation; a single file is cut near its end.

    A dataset that has splits of its own is split as it says.

    Files are drawn in the order of a hash of their names: neighbours in a folder do not land together, and adding a
    file moves few others.  At least one file stays in each part.
    """
    if any(source.part for source in sources):
        held_out = tuple(source for source in sources if source.part == "validation")
        return DataSplit(tuple(source for source in sources if source not in held_out), held_out)
    if len(sources) == 1:
        only = sources[0]
        cut = only.stop - max(1, int((only.stop - only.start) * VALIDATION_SHARE))
        return DataSplit((replace(only, stop=cut),), (replace(only, start=cut),))
    budget = VALIDATION_SHARE * sum(source.num_bytes for source in sources)
    chosen: set[int] = set()
    for index in sorted(range(len(sources)), key=lambda i: hashlib.sha256(os.fsencode(sources[i].name)).digest()):
        if sources[index].num_bytes <= budget:
            budget -= sources[index].num_bytes
            chosen.add(index)
    if not chosen:
        chosen = {min(range(len(sources)), key=lambda i: sources[i].num_bytes)}
    return DataSplit(
        tuple(source for i, source in enumerate(sources) if i not in chosen),
        tuple(source for i, source in enumerate(sources) if i in chosen),
    )


def check_length(split: DataSplit, context: int) -> None:
    """Refuse plain text shorter than one window in either part; of other kinds that is known when they are read.

    Raises: ConfigError.
    """
    for name, sources in (("training", split.train), ("validation", split.validation)):
        if all(source.kind == "text" for source in sources):
            _check_part(name, sum(source.num_bytes for source in sources), context, "byte")


def check_facts(facts: TextFacts, context: int) -> None:
    """Refuse a cached text shorter than one window in either part.  Raises: ConfigError."""
    for name, num_bytes in (("training", facts.train_bytes), ("validation", facts.validation_bytes)):
        _check_part(name, num_bytes // facts.itemsize, context, facts.unit)


def _check_part(name: str, found: int, context: int, unit: str) -> None:
    if found < context + 1:
        raise ConfigError(
            f"the {name} part of the text has {found} {unit}s, but one window needs --context {context} + 1 = "
            f"{context + 1}. Give more text with --data, or use a smaller --context."
        )


_BYTES = Bytes()


def write_cache(folder: Path, description: str, split: DataSplit, vocabulary: Vocabulary = _BYTES) -> TextFacts:
    """Write train.bin, validation.bin and facts.json (last, so a half-written cache is never read).

    Raises: ConfigError for a document that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    train, _ = _write_part(folder / "train.bin", split.train, vocabulary, digest.update)
    validation, counts = _write_part(folder / "validation.bin", split.validation, vocabulary, digest.update)
    shares = counts[counts > 0] / max(1, validation)
    facts = TextFacts(
        description=description,
        num_files=len({source.path for source in (*split.train, *split.validation)}),
        train_bytes=train * vocabulary.itemsize,
        validation_bytes=validation * vocabulary.itemsize,
        unigram_nats=float(-(shares * np.log(shares)).sum()),
        digest=digest.hexdigest(),
        vocabulary=vocabulary.size,
        itemsize=vocabulary.itemsize,
        tokenizer=vocabulary.digest,
    )
    replace_file(folder, "facts.json", json.dumps(asdict(facts), indent=2) + "\n")
    return facts


def _write_part(
    path: Path, sources: Sequence[TextSource], vocabulary: Vocabulary, update: Callable[[bytes], None]
) -> tuple[int, NDArray[np.int64]]:
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    with create_file(path.parent, path.name) as out:
        for source in sources:
            for numbers in vocabulary.read(source):
                data = numbers.tobytes()
                out.write(data)
                update(data)
                counts += np.bincount(numbers, minlength=vocabulary.size)
    return int(counts.sum()), counts


def read_facts(folder: Path) -> TextFacts | None:
    """Return what ``write_cache`` left in ``folder``, or None if there is no whole cache."""
    try:
        text = read_text(folder, "facts.json")
        with suppress(ConfigError, ValueError, RecursionError):
            facts = typed(TextFacts, json.loads(text), str(folder / "facts.json"))
            sizes = (("train.bin", facts.train_bytes), ("validation.bin", facts.validation_bytes))
            return facts if all(_size_of(folder, name) == size for name, size in sizes) else None
    except FileNotFoundError:
        pass
    return None


def _size_of(folder: Path, name: str) -> int:
    with opened(folder, name) as fd:
        return os.fstat(fd).st_size


def digest_of(folder: Path) -> str:
    """Return the digest of a cache's bytes as they are now, as ``write_cache`` counted it."""
    digest = hashlib.sha256()
    for name in ("train.bin", "validation.bin"):
        with open_input(folder, name) as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one memory-mapped file."""

    text: NDArray[np.unsignedinteger[Any]]
    context: int

    def __len__(self) -> int:
        return count_windows(self.text.shape[0], self.context)

    def stack(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), each (len(indices), context) int64; reads only these windows from the file."""
        rows = np.stack([self.text[i * self.context : (i + 1) * self.context + 1] for i in indices]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def open_windows(path: Path, context: int, itemsize: int = 1) -> Windows:
    """Map a cached file of numbers of ``itemsize`` bytes; nothing is read until a window is asked for."""
    with open_input(path.parent, path.name) as file:
        return Windows(np.memmap(file, dtype=f"<u{itemsize}", mode="r"), context)


def count_windows(length: int, context: int) -> int:
    """Return how many windows of ``context`` inputs fit when each also needs the number after its last input."""
    return max(0, (length - 1) // context)


@lru_cache(maxsize=2)
def epoch_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of one epoch: a function of its arguments alone, so all ranks agree without talking."""
    return np.random.default_rng((seed, epoch)).permutation(num_windows)


def windows_of(start: int, stop: int, num_windows: int, seed: int) -> list[int]:
    """Return the windows with global numbers [start, stop)."""
    return [int(epoch_order(num_windows, seed, g // num_windows)[g % num_windows]) for g in range(start, stop)]


def microbatch_numbers(step: int, microbatch: int, rank: int, num_ranks: int, batch: int, accumulate: int) -> range:
    """Return the window numbers of one rank and microbatch; over ranks and microbatches they tile the step."""
    size = batch // (num_ranks * accumulate)
    start = step * batch + (rank * accumulate + microbatch) * size
    return range(start, start + size)


def validation_part(num_windows: int, wanted: int, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return (windows, weights) of one rank: evenly spread over the text, equally many on every rank.

    Ranks must call forward equally often, so a short part is filled up with window 0 at weight 0.
    """
    count = min(wanted, num_windows)
    chosen = [i * num_windows // count for i in range(count)][rank::num_ranks]
    missing = -(-count // num_ranks) - len(chosen)
    return chosen + [0] * missing, [1] * len(chosen) + [0] * missing
