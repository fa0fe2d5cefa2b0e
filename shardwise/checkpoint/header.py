"""The header of a safetensors file: eight bytes of length, JSON, then the tensors one after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwise.checkpoint.json_fields import as_list, as_number, as_sizes, as_table, as_text, parse_json, wrong
from shardwise.checkpoint.plan import DTYPE_BYTES, Write
from shardwise.errors import DamagedCheckpointError

LENGTH_BYTES = 8
MOST_BYTES = 100_000_000  # of a header: the bound of the safetensors library
_META = "__metadata__"
SAVE_KEY, STEP_KEY = "shardwise.save", "shardwise.step"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: bytes ``begin:end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds; ``data_begin``: where the tensors begin."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_begin: int


def make_header(writes: Sequence[Write], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with the tensors of ``writes`` in this order, and where each tensor begins."""
    fields: dict[str, Any] = {_META: dict(metadata)}
    offset = 0
    begins: list[int] = []
    for write in writes:
        dtype, sizes = write.dtype, list(write.window.sizes)
        if dtype == "C128":  # the format has no such: pairs of numbers
            dtype, sizes = "F64", [*sizes, 2]
        begins.append(offset)
        fields[write.key] = {"dtype": dtype, "shape": sizes, "data_offsets": [offset, offset + write.num_bytes]}
        offset += write.num_bytes
    body = json.dumps(fields, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    start = LENGTH_BYTES + len(body)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body, [start + begin for begin in begins]


def header_bytes(start: bytes, num_bytes: int, what: str) -> int:
    """Return how many bytes of a file of ``num_bytes`` are header, from its first eight.

    Raises: DamagedCheckpointError naming ``what`` if it cannot be.
    """
    length = int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or length > min(MOST_BYTES, num_bytes - LENGTH_BYTES):
        raise DamagedCheckpointError(f"{what}: its header is said to be {length} bytes long, the file is {num_bytes}")
    return LENGTH_BYTES + length


def parse_header(data: bytes, num_bytes: int, what: str) -> Header:
    """Return the header in the first bytes ``data`` of a file of ``num_bytes``.

    Raises: DamagedCheckpointError, naming ``what`` and the key, for what is no header or does not fit the file.
    """
    fields = parse_json(data[LENGTH_BYTES:], f"{what}: header")
    metadata = as_table(fields.pop(_META, {}), f"{what}: header.{_META}")
    for key, value in metadata.items():
        as_text(value, f"{what}: header.{_META}[{key[:40]!r}]")
    entries: dict[str, Entry] = {}
    for name, value in fields.items():
        entries[name] = _entry(value, len(data), num_bytes, f"{what}: header[{name[:80]!r}]")
    end = len(data)
    for entry in sorted(entries.values(), key=lambda each: (each.begin, each.end)):
        if entry.begin != end:
            raise DamagedCheckpointError(
                f"{what}: header: tensors leave a gap or overlap at byte {min(end, entry.begin)}"
            )
        end = entry.end
    if end != num_bytes:
        raise DamagedCheckpointError(f"{what}: header: its tensors end at byte {end}, the file at {num_bytes}")
    return Header(entries, metadata, len(data))


def _entry(value: object, data_begin: int, num_bytes: int, key: str) -> Entry:
    fields = as_table(value, key)
    dtype = as_text(fields.get("dtype"), f"{key}.dtype")
    if dtype not in DTYPE_BYTES:
        raise wrong(f"{key}.dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    shape = as_sizes(fields.get("shape"), f"{key}.shape")
    begin, end = (
        as_number(each, f"{key}.data_offsets") for each in as_list(fields.get("data_offsets"), f"{key}.data_offsets", 2)
    )
    if begin > end or data_begin + end > num_bytes or end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise DamagedCheckpointError(
            f"{key}: bytes {begin}:{end} for {list(shape)} of {dtype} in a file of {num_bytes}"
        )
    return Entry(dtype, shape, data_begin + begin, data_begin + end)
