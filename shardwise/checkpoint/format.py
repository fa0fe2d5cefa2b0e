"""The manifest: what a checkpoint contains, where, and checksums of everything, its own included.  A value, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
import xxhash

from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpointError
from shardwise.optim.slices import Window, whole

# ---- Dtypes by their names in the safetensors format.

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
    "C64": torch.complex64, "C128": torch.complex128,  # C128 is stored as pairs of F64: safetensors lacks it
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}

# ---- Which rank writes which part of which tensor, and which bytes of a part are needed. Pure arithmetic.

# the lowest rank writes replicated tensors below this size: counters and statistics stay together
SMALL_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's windows of a tensor of ``shape``; ``is_lowest``: the lowest rank that has the tensor writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    windows: tuple[Window, ...]
    is_lowest: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """One part of a tensor and the rank that writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    window: Window
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.window.numel * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The part's name in its file: the tensor's name, with the offsets if the part does not cover the tensor."""
        if self.window == whole(self.shape):
            return self.name
        return f"{self.name}@{','.join(map(str, self.window.offsets))}"


def held_to_text(held: Iterable[Held]) -> str:
    """Return one rank's windows as text, for the other ranks."""
    rows = [[h.name, h.dtype, h.shape, [[w.offsets, w.sizes] for w in h.windows], h.is_lowest] for h in held]
    return json.dumps(rows, separators=(",", ":"))


def held_from_text(text: str) -> list[Held]:
    """Return what :func:`held_to_text` wrote."""
    rows: list[Any] = json.loads(text)
    return [
        Held(name, dtype, tuple(shape), tuple(Window(tuple(o), tuple(s)) for o, s in windows), is_lowest)
        for name, dtype, shape, windows, is_lowest in rows
    ]


def share_out(held_by_rank: Sequence[Sequence[Held]]) -> tuple[Write, ...]:
    """Return which rank writes what: each part of each tensor once; replicated parts are balanced by bytes.

    The result is equal on every rank, in file order: dtypes by size, so that all are aligned, then names.
    Cost: O(n log n) in the parts of all ranks.
    Raises: CheckpointError if ranks disagree about a tensor, or if their parts do not cover it.

    Example:
        >>> pair = [Held("a", "F32", (2,), (whole((2,)),))]
        >>> [write.rank for write in share_out([pair, pair])]
        [0]
    """
    holders: dict[str, dict[Window, list[int]]] = {}
    first: dict[str, tuple[int, Held]] = {}
    for rank, rows in enumerate(held_by_rank):
        for held in rows:
            known_rank, known = first.setdefault(held.name, (rank, held))
            if (known.dtype, known.shape) != (held.dtype, held.shape):
                raise CheckpointError(
                    f"{held.name}: rank {known_rank} has {known.dtype} {list(known.shape)}, rank {rank} {held.dtype} "
                    f"{list(held.shape)}; every rank must save the same state"
                )
            for window in held.windows:
                if window.numel or not prod(held.shape):
                    holders.setdefault(held.name, {}).setdefault(window, []).append(rank)
    loads = [0] * len(held_by_rank)
    writes: list[Write] = []
    shared: list[tuple[Held, Window, list[int]]] = []
    for name, (_, held) in first.items():
        windows = holders.get(name, {})
        if not _make_up(windows, held.shape):
            numel = sum(window.numel for window in windows)
            raise CheckpointError(
                f"{name}: the ranks hold {numel} of its {prod(held.shape)} elements in {len(windows)} part(s) that do not make "
                "up the tensor; save from all ranks of its mesh, with the group that they form"
            )
        for window, ranks in windows.items():
            num_bytes = window.numel * DTYPE_BYTES[held.dtype]
            if len(ranks) == 1 or num_bytes < SMALL_BYTES or held.is_lowest:
                writes.append(Write(name, held.dtype, held.shape, window, ranks[0]))
                loads[ranks[0]] += num_bytes
            else:
                shared.append((held, window, ranks))
    for held, window, ranks in sorted(shared, key=lambda item: (-item[1].numel * DTYPE_BYTES[item[0].dtype],)):
        rank = min(ranks, key=lambda each: (loads[each], each))
        writes.append(Write(held.name, held.dtype, held.shape, window, rank))
        loads[rank] += writes[-1].num_bytes
    return tuple(sorted(writes, key=lambda w: (-DTYPE_BYTES[w.dtype], w.name, w.window)))


def _make_up(windows: Iterable[Window], shape: Sequence[int]) -> bool:
    """Return True if ``windows`` cover each element of a tensor once."""
    found = sorted(windows)
    open_: list[Window] = []
    for window in found:
        if window.offsets:
            open_ = [other for other in open_ if other.offsets[0] + other.sizes[0] > window.offsets[0]]
        if window.numel and any(other.meet(window) for other in open_):
            return False
        open_.append(window)
    return bool(found) and sum(each.numel for each in found) == prod(shape)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``begin:end`` of a part, row-major, and the window of their elements.

    ``hull``: all elements in these bytes.  ``wanted``: the needed ones.  Both are relative to the tensor.
    """

    begin: int
    end: int
    hull: Window
    wanted: Window

    @property
    def is_exact(self) -> bool:
        """True if all bytes are needed."""
        return self.hull.numel == self.wanted.numel


def runs_of(part: Window, wanted: Window, itemsize: int, most_bytes: int) -> list[ByteRange]:
    """Return the byte ranges of ``part`` to read for ``wanted``, a window inside it, in ascending order.

    Ranges contain whole rows of the part up to ``most_bytes``, since files are read in blocks anyway; longer rows are
    split.

    Example:
        >>> [(run.begin, run.end) for run in runs_of(whole((4, 3)), Window((1, 0), (2, 3)), 4, 1024)]
        [(12, 36)]
    """
    dims = len(part.sizes)
    starts = [w - p for w, p in zip(wanted.offsets, part.offsets, strict=True)]
    strides = [itemsize * prod(part.sizes[dim + 1 :]) for dim in range(dims)]
    found: list[ByteRange] = []

    def is_full(dim: int) -> bool:
        return all(wanted.sizes[d] == part.sizes[d] for d in range(dim, dims))

    def add(place: list[int], dim: int, first: int, count: int, base: int) -> None:
        offsets = (*place, part.offsets[dim] + first, *part.offsets[dim + 1 :])
        hull = Window(offsets, (*(1 for _ in place), count, *part.sizes[dim + 1 :]))
        inner = (*place, part.offsets[dim] + first, *wanted.offsets[dim + 1 :])
        window = Window(inner, (*(1 for _ in place), count, *wanted.sizes[dim + 1 :]))
        begin = base + first * strides[dim]
        found.append(ByteRange(begin, begin + count * strides[dim], hull, window))

    def walk(place: list[int], dim: int, base: int) -> None:
        first, count = starts[dim], wanted.sizes[dim]
        if is_full(dim + 1):
            add(place, dim, first, count, base)
        elif strides[dim] <= most_bytes:
            each = max(1, most_bytes // strides[dim])
            for row in range(first, first + count, each):
                add(place, dim, row, min(each, first + count - row), base)
        else:
            for row in range(first, first + count):
                walk([*place, part.offsets[dim] + row], dim + 1, base + row * strides[dim])

    if not dims:
        return [ByteRange(0, itemsize, part, wanted)]
    walk([], 0, 0)
    return found


# ---- Names of state in a checkpoint, and the valid names of files.

MANIFEST = "manifest.json"
LOCK = ".lock"
SAVING = ".saving-"
REMOVING = ".removing-"
REPLACED = ".replaced-"

_STEP = re.compile(r"step-(\d{8,18})")
_PART = re.compile(r"part-\d{5,9}\.safetensors")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile and checkpoint_wrapper put these into names


def join(*parts: str) -> str:
    """Return one name of several parts; slashes inside a part are escaped.

    Example:
        >>> join("optimizer", "state", "head/weight", "exp_avg")
        'optimizer/state/head%2Fweight/exp_avg'
    """
    return "/".join([part.replace("%", "%25").replace("/", "%2F") for part in parts])


def split(name: str) -> list[str]:
    """Return the parts that :func:`join` has joined.

    Example:
        >>> split("optimizer/state/head%2Fweight/exp_avg")
        ['optimizer', 'state', 'head/weight', 'exp_avg']
    """
    return [part.replace("%2F", "/").replace("%25", "%") for part in name.split("/")]


def plain(fqn: str) -> str:
    """Return a parameter's name in the model without wrappers.

    Example:
        >>> plain("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def step_folder(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps.

    Example:
        >>> step_folder(1234)
        'step-00001234'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder of that name; None for other names.

    A checkpoint that was set aside for a replacement that was never committed counts under its own step.
    """
    found = _STEP.fullmatch(name.removeprefix(REPLACED))
    return int(found[1]) if found else None


def part_file(number: int) -> str:
    """Return the name of the file with the tensors of one rank."""
    return f"part-{number:05d}.safetensors"


def is_part_file(name: str) -> bool:
    """Return True for names that :func:`part_file` makes: a manifest cannot refer to other files."""
    return _PART.fullmatch(name) is not None


# ---- Parsing of untrusted JSON: every field's type is checked, and errors name the key.

MOST_SIZE = 2**48  # of a tensor's dim, and bytes of a file
_MOST_DIMS = 64


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.  Raises: DamagedCheckpointError if it is none, or has a key twice."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{what}: not the JSON that was written ({str(error)[:120]})") from None
    if not isinstance(found, dict):
        raise DamagedCheckpointError(f"{what}: expected a JSON object, found {type(found).__name__}")
    return cast(dict[str, Any], found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def as_text(value: object, key: str) -> str:
    """Return ``value`` if it is a string.  Raises: DamagedCheckpointError with ``key``; so do the functions below."""
    if not isinstance(value, str):
        raise wrong(key, "a string", value)
    return value


def as_number(value: object, key: str, most: int = MOST_SIZE) -> int:
    """Return ``value`` if it is a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise wrong(key, f"a whole number from 0 to {most}", value)
    return value


def as_list(value: object, key: str, length: int | None = None) -> list[Any]:
    """Return ``value`` if it is a list, and has ``length`` if that is given."""
    if not isinstance(value, list) or (length is not None and len(cast(list[Any], value)) != length):
        raise wrong(key, "a list" + (f" of {length}" if length is not None else ""), value)
    return cast(list[Any], value)


def as_table(value: object, key: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object."""
    if not isinstance(value, dict):
        raise wrong(key, "an object", value)
    return cast(dict[str, Any], value)


def as_sizes(value: object, key: str) -> tuple[int, ...]:
    """Return ``value`` if it is the shape of a tensor."""
    found = as_list(value, key)
    if len(found) > _MOST_DIMS:
        raise wrong(key, f"up to {_MOST_DIMS} dims", value)
    sizes = tuple(as_number(size, f"{key}[{dim}]") for dim, size in enumerate(found))
    if prod(max(size, 1) for size in sizes) > MOST_SIZE:  # even of an empty tensor: torch computes strides from it
        raise wrong(key, f"dims whose product is at most {MOST_SIZE}", value)
    return sizes


def wrong(key: str, expected: str, found: object) -> DamagedCheckpointError:
    """Return the error for a value of another type."""
    return DamagedCheckpointError(f"{key}: expected {expected}, found {str(found)[:60]!r}")


# ---- Checksums per block of a file: computed while it is written, compared for exactly the blocks that are read.

BLOCK_BYTES = 4 * 2**20


def sum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of ``data``: XXH3, 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


# ---- Tensors as bytes.


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the name of ``dtype``.  Raises: ConfigError with ``what`` if files cannot contain it."""
    if dtype not in _NAMES:
        raise ConfigError(f"{what}: tensors of {dtype} cannot be saved; convert it to one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def dtype_of(name: object, what: str) -> torch.dtype:
    """Return the dtype of that name.  Raises: CheckpointError with ``what``."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"{what}: {name!r} is not a dtype of this format")
    return _DTYPES[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, on its own memory."""
    if not tensor.numel():
        return memoryview(b"")
    # torch calls a dim of one element contiguous whatever its stride is
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return cast(Any, flat.numpy()).data


# ---- The header of a safetensors file: eight bytes of length, JSON, then the tensors one after the other.

LENGTH_BYTES = 8
MOST_BYTES = 100_000_000  # of a header: the limit of the safetensors library
_META = "__metadata__"
SAVE_KEY, STEP_KEY = "shardwise.save", "shardwise.step"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: bytes ``begin:end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file; ``data_begin``: offset of the tensors."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_begin: int


def make_header(writes: Sequence[Write], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with the tensors of ``writes`` in this order, and the offset of each tensor."""
    fields: dict[str, Any] = {_META: dict(metadata)}
    offset = 0
    begins: list[int] = []
    for write in writes:
        dtype, sizes = write.dtype, list(write.window.sizes)
        if dtype == "C128":  # the format lacks it: pairs of numbers
            dtype, sizes = "F64", [*sizes, 2]
        begins.append(offset)
        fields[write.key] = {"dtype": dtype, "shape": sizes, "data_offsets": [offset, offset + write.num_bytes]}
        offset += write.num_bytes
    body = json.dumps(fields, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    start = LENGTH_BYTES + len(body)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body, [start + begin for begin in begins]


def header_bytes(start: bytes, num_bytes: int, what: str) -> int:
    """Return the size of a file's header, given its first eight bytes; the file has ``num_bytes``.

    Raises: DamagedCheckpointError with ``what`` if the size is impossible.
    """
    length = int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or length > min(MOST_BYTES, num_bytes - LENGTH_BYTES):
        raise DamagedCheckpointError(f"{what}: its header claims to be {length} bytes long, the file is {num_bytes}")
    return LENGTH_BYTES + length


def parse_header(data: bytes, num_bytes: int, what: str) -> Header:
    """Return the header in the first bytes ``data`` of a file of ``num_bytes``.

    Raises: DamagedCheckpointError, with ``what`` and the key, for what is not a header or does not fit the file.
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


FORMAT = "shardwise.checkpoint"
VERSION = 1
_SUM_BEGIN, _SUM_END = b',"sum":"', b'"}\n'
_SUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of tensors: ``sums[i]`` is the checksum of its block ``i`` of ``block_bytes``; files of other tools have none."""

    name: str
    num_bytes: int
    block_bytes: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part of a tensor: bytes ``begin:end`` of file number ``file``, under the name ``key``."""

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
        """Bytes of the full tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def tensor_records(placed: Iterable[tuple[Write, int, int]]) -> dict[str, TensorRecord]:
    """Return the tensors whose parts are ``placed``: each with the number of its file, and where it begins there."""
    found: dict[str, tuple[Write, list[PartRecord]]] = {}
    for write, file, begin in placed:
        part = PartRecord(file, write.key, write.window, begin, begin + write.num_bytes)
        found.setdefault(write.name, (write, []))[1].append(part)
    return {name: TensorRecord(w.dtype, w.shape, tuple(parts)) for name, (w, parts) in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of one save.

    Attributes:
        save_id: 32 hex digits, in every file of the save.
        num_ranks: ranks that saved; only per-rank state depends on it.
        ties: names of tied tensors -> name of the tensor that they share.
        values: encoded state that is not a tensor, by name.
    """

    save_id: str
    step: int
    num_ranks: int
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def record_of(self, name: str) -> TensorRecord | None:
        """Return the tensor called ``name``, which may be a tied name."""
        return self.tensors.get(self.ties.get(name, name))


def to_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as JSON that ends with the checksum of everything before it."""
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

    Memory: a small multiple of ``data``; sizes in it are checked against the sizes of the files before use.
    Raises: DamagedCheckpointError, with ``what`` and the key, for any other bytes than were written.
    """
    tail = len(_SUM_BEGIN) + _SUM_BYTES + len(_SUM_END)
    body, end = data[:-tail], data[-tail:]
    if end != _SUM_BEGIN + sum_of(body).encode() + _SUM_END:
        raise DamagedCheckpointError(
            f"{what}: its checksum does not match its {len(data)} bytes: it was truncated or changed"
        )
    return from_fields(parse_json(body + b"}", what), what)


def from_fields(fields: dict[str, Any], what: str) -> Manifest:
    """Return the manifest with these fields.  Raises: DamagedCheckpointError with the first key that is wrong."""
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
        raise DamagedCheckpointError(f"{what}: files: a name occurs twice")
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
    if not _make_up([part.window for part in parts], shape):
        numel = sum(part.window.numel for part in parts)
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
    """Refuse two tensors on the same bytes, which would take more memory than the files have.

    Raises: DamagedCheckpointError.
    """
    ranges = sorted(
        (part.file, part.begin, part.end) for t in tensors.values() for part in t.parts if part.end > part.begin
    )
    for (file, _, end), (other, begin, _) in pairwise(ranges):
        if file == other and begin < end:
            raise DamagedCheckpointError(f"{what}: two tensors share bytes {begin}:{end} of {files[file].name}")
