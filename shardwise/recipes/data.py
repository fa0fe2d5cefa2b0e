"""Text as numbers: find the files, split them, cache them as two memory-mapped files, cut them into windows.

A number is a byte, or a token of ``--tokenizer``.  A window is ``context`` inputs and the number after each: a sample of
:class:`shardwise.Microbatches`, which visits each once per epoch, at any number of ranks.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import mmap
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.recipes.config import NUM_BYTES, typed
from shardwise.safe_files import create_file, open_input, opened, read_bytes, read_text, replace_file

# ---- The inputs of a run: plain text, and tables that the ``datasets`` package reads (``pip install 'shardwise[data]'``):
# JSONL and Parquet files, and folders of ``save_to_disk``; as sources with a begin and an end, documents in order.

ROWS = 512  # of a table, read at once
CHUNK_BYTES = 1 << 22
_READERS = {".jsonl": "from_json", ".ndjson": "from_json", ".parquet": "from_parquet", ".pq": "from_parquet"}
_HELD_OUT = ("validation", "valid", "val", "dev", "test", "eval")  # splits that are never trained on
_SAMPLE_BYTES = 4096
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b\x1a"))
_MOST_CONTROL = 0.02


@dataclass(frozen=True, slots=True)
class TextSource:
    """A part of the input: [start, stop) of a file's bytes, or of the rows of a table.

    Attributes:
        path: the file, or the folder of a dataset.
        name: relative to the folder that the user named; files are split by it.
        kind: "text" is measured in bytes, "table" in rows.
        column: of a table: the column with the text.
        unit_bytes: of a row, on average; 1 for files measured in bytes.
        part: of a dataset with splits: "train" or "validation"; "" if it is still to be split.
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
        """Its bytes on disk; approximate for a table."""
        return int((self.stop - self.start) * self.unit_bytes)


def optional_module(name: str, what: str) -> Any:
    """Return a module of a package that only some runs need.  Raises: ConfigError, about ``what``, with how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which is not installed here ({error}). Install with: pip install 'shardwise[data]'"
        ) from error


def file_source(path: Path, name: str, column: str) -> TextSource:
    """Return the source of a whole file, by its name.  Raises: ConfigError if it lacks the column, or is not text."""
    if path.suffix in _READERS:
        return _table_source(path, name, column)
    return TextSource(path, name, 0, path.stat().st_size)


def is_dataset(folder: Path) -> bool:
    """Return True for a folder written by ``save_to_disk`` of the datasets package."""
    is_one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return is_one or (folder / "dataset_dict.json").is_file()


def dataset_sources(folder: Path, column: str) -> list[TextSource]:
    """Return the splits of a dataset folder; held-out ones are used for validation only.  Raises: ConfigError."""
    if not (folder / "dataset_dict.json").is_file():
        return [_table_source(folder, folder.name, column)]
    names = sorted(path.name for path in folder.iterdir() if is_dataset(path))
    held_out = [name for name in names if name in _HELD_OUT]
    chosen = min(held_out, key=_HELD_OUT.index, default=None)
    trained = [name for name in names if name not in held_out]
    if not trained:
        raise ConfigError(
            f"--data {folder} has only held-out splits ({', '.join(names)}). Name one of them: {folder}/SPLIT."
        )
    parts = [(name, "train" if chosen else "") for name in trained] + ([(chosen, "validation")] if chosen else [])
    return [_table_source(folder / name, name, column, part) for name, part in parts]


def _table_source(path: Path, name: str, column: str, part: str = "") -> TextSource:
    table = _open_table(path)
    if column not in table.column_names:
        names = ", ".join(table.column_names[:12]) or "none"
        raise ConfigError(f"--data {path} has no column {column!r}; its columns: {names}. Name one with --text-column.")
    num_bytes = sum(each.stat().st_size for each in (path.glob("*.arrow") if path.is_dir() else (path,)))
    source = TextSource(path, name, 0, len(table), "table", column, num_bytes / max(1, len(table)), part)
    next(read_documents(source), None)
    return source


def _open_table(path: Path) -> Any:
    datasets = optional_module("datasets", f"--data {path}")
    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            return datasets.load_from_disk(str(path))
        return getattr(datasets.Dataset, _READERS[path.suffix])(str(path))
    except Exception as error:  # pyarrow and datasets can raise anything
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"--data {path}: the datasets package cannot read it: {reason}") from error


def read_documents(source: TextSource) -> Iterator[str]:
    """Yield the texts of a table, in order.  Raises: ConfigError with the first row without text."""
    table = _open_table(source.path)
    for first in range(source.start, source.stop, ROWS):
        rows: Sequence[object] = table[first : min(first + ROWS, source.stop)][source.column]
        for row, found in enumerate(rows, first):
            if not isinstance(found, str):
                raise ConfigError(
                    f"--data {source.path}: row {row}: {source.column!r} is {type(found).__name__}, expected text. "
                    "Name a column with --text-column."
                )
            yield found


def read_chunks(source: TextSource) -> Iterator[bytes]:
    """Yield the bytes of plain text."""
    left = source.stop - source.start
    with source.path.open("rb") as file:
        file.seek(source.start)
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def why_binary(path: Path) -> str:
    """Return the evidence that a file is not text, "" if there is none, from its beginning and its middle."""
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


def first_line(error: BaseException) -> str:
    """Return the first line of ``error``, or its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- From text to numbers and back: bytes, or the tokens of a ``tokenizers`` JSON file (``--tokenizer``).

TOKENIZER = "tokenizer.json"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_TOGETHER = 256  # documents that are encoded at once, on all cores
_CHUNK_CHARACTERS = 1 << 16  # of plain text, cut after a line


@dataclass(frozen=True, slots=True)
class Bytes:
    """Every byte is a number; documents of files with several documents end with a newline.

    Attributes:
        size: numbers are in [0, size).
        unit: the word for one of them.
        digest: of the tokenizer's file; "" for bytes.
        itemsize: bytes of one in the cache.
    """

    size: int = NUM_BYTES
    unit: str = "byte"
    digest: str = ""
    itemsize: int = 1

    def read(self, source: TextSource) -> Iterator[NDArray[Any]]:
        """Yield the numbers of a source, chunk by chunk."""
        if source.kind == "text":
            chunks: Iterable[bytes] = read_chunks(source)
        else:
            chunks = (document.encode() + b"\n" for document in read_documents(source))
        for chunk in chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of ``text``."""
        return list(text.encode())

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of ``numbers``; bytes that are not UTF-8 become replacement characters."""
        return bytes(number for number in numbers if number < NUM_BYTES).decode("utf-8", errors="replace")


class Tokens:
    """The tokens of a ``tokenizers`` JSON file; documents end with its end-of-text token, or with a newline if it has none.

    Attributes are those of :class:`Bytes`.  Nothing else is added to a text: a template with special tokens in the file
    is not used.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        tokenizers = optional_module("tokenizers", f"--tokenizer {path}")
        data = read_bytes(path.parent, path.name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises bare Exceptions
            raise ConfigError(
                f"--tokenizer {path} cannot be read ({first_line(error)}). Name a tokenizer.json of the tokenizers "
                "package."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"--tokenizer {path} has no tokens. Train it first.")
        self._end = next((ids[name] for name in _ENDS if name in ids), None)
        self.size = max(ids.values()) + 1
        self.itemsize = 2 if self.size <= 1 << 16 else 4
        self.digest = hashlib.sha256(data).hexdigest()

    def read(self, source: TextSource) -> Iterator[NDArray[Any]]:
        """Yield the numbers of a source, chunk by chunk."""
        is_plain = source.kind == "text"
        end = [] if self._end is None else [self._end]
        batch: list[str] = []
        for text in _plain_texts(source) if is_plain else read_documents(source):
            batch.append(text if is_plain or end else f"{text}\n")
            if len(batch) == _TOGETHER:
                yield self._numbers(batch, [] if is_plain else end)
                batch = []
        yield self._numbers(batch, [] if is_plain else end)
        if is_plain and end:
            yield np.array(end, dtype=f"<u{self.itemsize}")

    def _numbers(self, texts: Sequence[str], end: list[int]) -> NDArray[Any]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return np.array([number for each in encoded for number in (*each.ids, *end)], dtype=f"<u{self.itemsize}")

    def encode(self, text: str) -> list[int]:
        """Return the numbers of ``text``."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of ``numbers``; unknown numbers are skipped."""
        return str(
            self._tokenizer.decode([number for number in numbers if number < self.size], skip_special_tokens=False)
        )


Vocabulary = Bytes | Tokens  # the meaning of the numbers of a run's text


def open_vocabulary(path: Path | None) -> Vocabulary:
    """Return the tokens of the file ``path``, or bytes for None.

    Raises: ConfigError if there is no such file, it cannot be read, or the tokenizers package is missing.
    """
    if path is None:
        return Bytes()
    if not path.is_file():
        raise ConfigError(f"--tokenizer {path}: no such file. Name a {TOKENIZER} of the tokenizers package.")
    return Tokens(path)


def _plain_texts(source: TextSource) -> Iterator[str]:
    """Yield plain text in chunks that end after a line if possible; bytes that are not UTF-8 become replacement characters."""
    decoder, left = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for chunk in read_chunks(source):
        left += decoder.decode(chunk)
        while len(left) > _CHUNK_CHARACTERS:
            cut = left.rfind("\n", 0, _CHUNK_CHARACTERS) + 1 or _CHUNK_CHARACTERS
            yield left[:cut]
            left = left[cut:]
    left += decoder.decode(b"", final=True)
    if left:
        yield left


DEFAULT_LIMIT_BYTES = 12_000_000
VALIDATION_SHARE = 0.1
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})


@dataclass(frozen=True, slots=True)
class DataSplit:
    """The sources for training, and those for validation only; no byte is in both."""

    train: tuple[TextSource, ...]
    validation: tuple[TextSource, ...]


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The facts about the text in config.json.

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

    ``column``: of tables, the one with the text.  Binary files of a folder are skipped.
    Raises: ConfigError if there is nothing to read, or no text.
    """
    if data is None:
        return "source text of the Python standard library", _standard_library()
    path = Path(data)
    if path.is_file():
        found = [file_source(path, path.name, column)]
        problem = why_binary(path) if found[0].kind == "text" else ""
        if problem:
            raise ConfigError(
                f"--data {path} is not text ({problem}), expected UTF-8 text, .jsonl, .parquet, or a folder of such files. "
                "Unpack or convert it first."
            )
    elif is_dataset(path):
        found = dataset_sources(path, column)
    elif path.is_dir():
        shown = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in shown if p.is_file() and p.stat().st_size)
        found = [file_source(p, str(p.relative_to(path)), column) for p in files]
        found = [source for source in found if source.kind != "text" or not why_binary(source.path)]
    else:
        there = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ConfigError(f"--data {data} {there}: name a text file, or a folder of text files.")
    if sum(source.num_bytes for source in found) == 0:
        raise ConfigError(f"--data {path} contains no text (empty, hidden and binary files do not count).")
    return str(path), found


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


def split_sources(sources: Sequence[TextSource]) -> DataSplit:
    """Split by file, with about a tenth of the bytes for validation; a single file is cut near its end.

    A dataset with its own splits uses those.  Files are drawn in the order of a hash of their names, so that neighbours
    in a folder are spread, and an added file moves few others.  Each part has at least one file.
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


def check_facts(facts: TextFacts, context: int) -> None:
    """Refuse a cached text shorter than one window in either part.  Raises: ConfigError."""
    for name, num_bytes in (("training", facts.train_bytes), ("validation", facts.validation_bytes)):
        if (found := num_bytes // facts.itemsize) < context + 1:
            raise ConfigError(
                f"the {name} part of the text has {found} {facts.unit}s, but one window needs --context {context} + 1 = "
                f"{context + 1}. Give more text with --data, or use a smaller --context."
            )


_BYTES = Bytes()


def write_cache(folder: Path, description: str, split: DataSplit, vocabulary: Vocabulary = _BYTES) -> TextFacts:
    """Write train.bin, validation.bin and facts.json (last, so a half-written cache is never read).

    Raises: ConfigError for a document that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    train = int(_write_part(folder / "train.bin", split.train, vocabulary, digest.update).sum())
    counts = _write_part(folder / "validation.bin", split.validation, vocabulary, digest.update)
    validation = int(counts.sum())
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
) -> NDArray[np.int64]:
    """Write the numbers of ``sources``; return how often each occurs."""
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    with create_file(path.parent, path.name) as out:
        for source in sources:
            for numbers in vocabulary.read(source):
                data = numbers.tobytes()
                out.write(data)
                update(data)
                counts += np.bincount(numbers, minlength=vocabulary.size)
    return counts


def read_facts(folder: Path) -> TextFacts | None:
    """Return the facts of the cache in ``folder``, or None if there is no complete cache."""
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
    """Return the digest of a cache's current bytes, as ``write_cache`` computed it."""
    digest = hashlib.sha256()
    for name in ("train.bin", "validation.bin"):
        with open_input(folder, name) as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one memory-mapped file; ``mapping``: of it."""

    text: NDArray[np.unsignedinteger[Any]]
    context: int
    mapping: mmap.mmap | None = None

    def __len__(self) -> int:
        return count_windows(self.text.shape[0], self.context)

    def stack(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), each (len(indices), context) int64; reads only these windows from the file."""
        rows = np.stack([self.text[i * self.context : (i + 1) * self.context + 1] for i in indices]).astype(np.int64)
        if self.mapping is not None:  # what was read is not to stay resident
            self.mapping.madvise(mmap.MADV_DONTNEED)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.stack([index])

    __getitems__ = stack  # of a microbatch, for a DataLoader


def open_windows(path: Path, context: int, itemsize: int = 1) -> Windows:
    """Map a cached file of numbers of ``itemsize`` bytes; nothing is read before a window is requested."""
    with open_input(path.parent, path.name) as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Windows(np.frombuffer(mapping, dtype=f"<u{itemsize}"), context, mapping)


def count_windows(length: int, context: int) -> int:
    """Return how many windows of ``context`` inputs fit when each also needs the number after its last input."""
    return max(0, (length - 1) // context)


def validation_part(num_windows: int, wanted: int, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return (windows, weights) of one rank: evenly spread over the text, equally many on every rank.

    Ranks must call forward equally often, so a short part is filled with window 0 at weight 0.
    """
    count = min(wanted, num_windows)
    chosen = [i * num_windows // count for i in range(count)][rank::num_ranks]
    missing = -(-count // num_ranks) - len(chosen)
    return chosen + [0] * missing, [1] * len(chosen) + [0] * missing
