"""The manifest: what a checkpoint holds, where, and the sums of all of it, its own included.  A value, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.json_fields import as_list, as_number, as_sizes, as_table, as_text, parse_json, wrong
from shardwise.checkpoint.names import MANIFEST, is_part_file
from shardwise.checkpoint.plan import DTYPE_BYTES, Window, overlapping
from shardwise.errors import DamagedCheckpointError

FORMAT = "shardwise.checkpoint"
VERSION = 1
_SUM_BEGIN, _SUM_END = b',"sum":"', b'"}\n'
_SUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of tensors: ``sums[i]`` is that of its block ``i`` of ``block_bytes``; none in files of other tools."""

    name: str
    num_bytes: int
    block_bytes: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part of a tensor: bytes ``begin:end`` of file number ``file``, called ``key`` there."""

    file: int
    key: str
    window: Window
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor under its plain name."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartRecord, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one save wrote.

    Attributes:
        save_id: 32 hex digits, in every file of the save.
        num_ranks: ranks that saved; only state per rank depends on it.
        ties: names of tensors that are another one's, by name.
        values: state that is no tensor, encoded, by name.
    """

    save_id: str
    step: int
    num_ranks: int
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def record_of(self, name: str) -> TensorRecord | None:
        """Return the tensor called ``name``, also by a name that it shares."""
        return self.tensors.get(self.ties.get(name, name))


def to_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as JSON that ends with the sum over all before it."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "save": manifest.save_id,
        "step": manifest.step,
        "ranks": manifest.num_ranks,
        "files": [
            {"name": file.name, "bytes": file.num_bytes, "block_bytes": file.block_bytes, "sums": list(file.sums)}
            for file in manifest.files
        ],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "parts": [
                    [part.file, part.key, list(part.window.offsets), list(part.window.sizes), part.begin, part.end]
                    for part in tensor.parts
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "ties": dict(manifest.ties),
        "values": dict(manifest.values),
    }
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return data + _SUM_BEGIN + sum_of(data).encode() + _SUM_END


def from_bytes(data: bytes, what: str = MANIFEST) -> Manifest:
    """Return the manifest in ``data``.

    Memory: a small multiple of ``data``; no size in it is believed before it fits the sizes of the files.
    Raises: DamagedCheckpointError, which names ``what`` and the key, for any other bytes than were written.
    """
    tail = len(_SUM_BEGIN) + _SUM_BYTES + len(_SUM_END)
    body, end = data[:-tail], data[-tail:]
    if end != _SUM_BEGIN + sum_of(body).encode() + _SUM_END:
        raise DamagedCheckpointError(f"{what}: its own sum does not fit its {len(data)} bytes: cut off, or changed")
    return from_fields(parse_json(body + b"}", what), what)


def from_fields(fields: dict[str, Any], what: str) -> Manifest:
    """Return the manifest with these fields.  Raises: DamagedCheckpointError naming the first key that is wrong."""
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise DamagedCheckpointError(
            f"{what}: format {str(fields.get('format'))[:40]!r} version {str(fields.get('version'))[:8]}, expected "
            f"{FORMAT!r} version {VERSION}: it is of another version of shardwise, or no checkpoint"
        )
    save_id = as_text(fields.get("save"), f"{what}: save")
    if len(save_id) != 32 or set(save_id) - set("0123456789abcdef"):
        raise wrong(f"{what}: save", "32 hex digits", save_id)
    files = tuple(
        _file(value, f"{what}: files[{i}]") for i, value in enumerate(as_list(fields.get("files"), f"{what}: files"))
    )
    if len({file.name for file in files}) != len(files):
        raise DamagedCheckpointError(f"{what}: files: a name is there twice")
    tensors = {
        name: _tensor(value, files, f"{what}: tensors[{name[:80]!r}]")
        for name, value in as_table(fields.get("tensors"), f"{what}: tensors").items()
    }
    _check_disjoint(tensors, files, what)
    ties = as_table(fields.get("ties"), f"{what}: ties")
    for name, first in ties.items():
        if as_text(first, f"{what}: ties[{name[:80]!r}]") not in tensors or name in tensors:
            raise DamagedCheckpointError(
                f"{what}: ties[{name[:80]!r}]: {first[:80]!r} is no tensor, or {name[:80]!r} is"
            )
    return Manifest(
        save_id,
        as_number(fields.get("step"), f"{what}: step"),
        as_number(fields.get("ranks"), f"{what}: ranks", 2**31),
        files,
        tensors,
        ties,
        as_table(fields.get("values"), f"{what}: values"),
    )


def _file(value: object, key: str) -> FileRecord:
    fields = as_table(value, key)
    name = as_text(fields.get("name"), f"{key}.name")
    if not is_part_file(name):
        raise wrong(f"{key}.name", "part-NNNNN.safetensors", name)
    num_bytes = as_number(fields.get("bytes"), f"{key}.bytes")
    block_bytes = as_number(fields.get("block_bytes"), f"{key}.block_bytes", 2**30)
    sums = as_list(fields.get("sums"), f"{key}.sums")
    if block_bytes < 1 or len(sums) != -(-num_bytes // block_bytes):
        raise DamagedCheckpointError(f"{key}: {len(sums)} sums for {num_bytes} bytes in blocks of {block_bytes}")
    return FileRecord(name, num_bytes, block_bytes, tuple(as_text(each, f"{key}.sums") for each in sums))


def _tensor(value: object, files: Sequence[FileRecord], key: str) -> TensorRecord:
    fields = as_table(value, key)
    dtype = as_text(fields.get("dtype"), f"{key}.dtype")
    if dtype not in DTYPE_BYTES:
        raise wrong(f"{key}.dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    shape = as_sizes(fields.get("shape"), f"{key}.shape")
    parts = tuple(
        _part(each, shape, dtype, files, f"{key}.parts[{i}]")
        for i, each in enumerate(as_list(fields.get("parts"), f"{key}.parts"))
    )
    numel = sum(part.window.numel for part in parts)
    if numel != prod(shape) or overlapping(sorted(part.window for part in parts)) is not None or not parts:
        raise DamagedCheckpointError(f"{key}: {len(parts)} parts of {numel} elements do not make up {list(shape)}")
    return TensorRecord(dtype, shape, parts)


def _part(value: object, shape: tuple[int, ...], dtype: str, files: Sequence[FileRecord], key: str) -> PartRecord:
    file, name, offsets, sizes, begin, end = as_list(value, key, 6)
    number = as_number(file, f"{key}[0]", len(files) - 1)
    window = Window(as_sizes(offsets, f"{key}[2]"), as_sizes(sizes, f"{key}[3]"))
    begin, end = as_number(begin, f"{key}[4]"), as_number(end, f"{key}[5]")
    if len(window.offsets) != len(shape) or len(window.sizes) != len(shape):
        raise wrong(f"{key}[2:4]", f"{len(shape)} dims", [offsets, sizes])
    if any(o + s > n for o, s, n in zip(window.offsets, window.sizes, shape, strict=True)):
        raise wrong(f"{key}[2:4]", f"a part of {list(shape)}", [offsets, sizes])
    if end - begin != window.numel * DTYPE_BYTES[dtype] or end > files[number].num_bytes:
        raise DamagedCheckpointError(
            f"{key}: bytes {begin}:{end} for {window.numel} of {dtype}, in {files[number].name} of {files[number].num_bytes}"
        )
    return PartRecord(number, as_text(name, f"{key}[1]"), window, begin, end)


def _check_disjoint(tensors: Mapping[str, TensorRecord], files: Sequence[FileRecord], what: str) -> None:
    """Two tensors on the same bytes would take memory beyond the files' size."""
    ranges = sorted(
        (part.file, part.begin, part.end) for t in tensors.values() for part in t.parts if part.end > part.begin
    )
    for (file, _, end), (other, begin, _) in pairwise(ranges):
        if file == other and begin < end:
            raise DamagedCheckpointError(f"{what}: two tensors share bytes {begin}:{end} of {files[file].name}")
