"""From text to numbers and back: bytes as they are, or the tokens of a ``tokenizers`` JSON file (``--tokenizer``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.recipes.config import NUM_BYTES
from shardwise.recipes.documents import TextSource, optional_module, read_documents, read_pieces
from shardwise.safe_files import read_bytes

TOKENIZER = "tokenizer.json"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_TOGETHER = 256  # documents that are encoded at once, on all cores
_PIECE_CHARACTERS = 1 << 16  # of plain text, cut behind a line


class Vocabulary(Protocol):
    """What the numbers of a run's text stand for.

    Attributes:
        size: numbers are in [0, size).
        unit: the word for one of them.
        digest: of the tokenizer's file; "" for bytes.
        itemsize: bytes of one in the cache.
    """

    @property
    def size(self) -> int: ...
    @property
    def unit(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    def read(self, source: TextSource) -> Iterator[NDArray[Any]]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, numbers: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Every byte is a number; documents of files that have several end with a newline."""

    size: int = NUM_BYTES
    unit: str = "byte"
    digest: str = ""
    itemsize: int = 1

    def read(self, source: TextSource) -> Iterator[NDArray[Any]]:
        """Yield the numbers of a source, piece by piece."""
        if source.kind == "text":
            pieces: Iterable[bytes] = read_pieces(source)
        else:
            pieces = (document.encode() + b"\n" for document in read_documents(source))
        for piece in pieces:
            yield np.frombuffer(piece, dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of ``text``."""
        return list(text.encode())

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of ``numbers``; what is no UTF-8 becomes the replacement character."""
        return bytes(number for number in numbers if number < NUM_BYTES).decode("utf-8", errors="replace")


class Tokens:
    """The tokens of a ``tokenizers`` JSON file; documents end with its end-of-text token, with a newline if it has none.

    Nothing else is added to a text: a template with special tokens, which the file may have, is for other uses.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        tokenizers = optional_module("tokenizers", f"--tokenizer {path}")
        data = read_bytes(path.parent, path.name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises bare Exceptions
            raise ConfigError(
                f"--tokenizer {path} cannot be read ({str(error).splitlines()[0]}). Name a tokenizer.json of the tokenizers "
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
        """Yield the numbers of a source, piece by piece."""
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
        """Return the text of ``numbers``; those of no token are passed over."""
        return str(
            self._tokenizer.decode([number for number in numbers if number < self.size], skip_special_tokens=False)
        )


def open_vocabulary(path: Path | None) -> Vocabulary:
    """Return the tokens of the file ``path``, bytes for None.

    Raises: ConfigError if there is no such file, it cannot be read, or the tokenizers package is missing.
    """
    if path is None:
        return Bytes()
    if not path.is_file():
        raise ConfigError(f"--tokenizer {path}: no such file. Name a {TOKENIZER} of the tokenizers package.")
    return Tokens(path)


def _plain_texts(source: TextSource) -> Iterator[str]:
    """Yield plain text in pieces that end behind a line if there are lines; wrong UTF-8 becomes the replacement character."""
    left = b""
    for piece in read_pieces(source):
        left += piece
        while len(left) > _PIECE_CHARACTERS:
            cut = left.rfind(b"\n", 0, _PIECE_CHARACTERS) + 1 or _whole_characters(left[:_PIECE_CHARACTERS])
            yield left[:cut].decode("utf-8", errors="replace")
            left = left[cut:]
    if left:
        yield left.decode("utf-8", errors="replace")


def _whole_characters(data: bytes) -> int:
    """Return how many bytes of ``data`` to take so that no UTF-8 character is cut in two."""
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back if data[-back] >= 0xC0 else len(data)
    return len(data)
