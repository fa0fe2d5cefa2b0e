"""For callers of ``torch.distributed.checkpoint`` (DCP): committed and verified saves, and safe reads of DCP's own folders.

A trainer that calls ``dcp.save`` and ``dcp.load`` passes one more argument, ``storage_writer=DcpWriter(path)`` or
``storage_reader=DcpReader(path)``.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.contents import Request, decode, encode
from shardwise.checkpoint.files import (
    Files,
    clean,
    commit,
    give_back,
    read_manifest,
    read_requests,
    take,
    write_all,
)
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    MANIFEST,
    MOST_SIZE,
    FileRecord,
    Manifest,
    PartRecord,
    Window,
    Write,
    bytes_of,
    dtype_name,
    dtype_of,
    part_file,
    step_of,
    to_bytes,
    whole,
)
from shardwise.checkpoint.save import SaveId, make_manifest, write_part
from shardwise.errors import CheckpointError
from shardwise.safe_files import MOST_BYTES, opened, read_bytes

# ---- The ``.metadata`` of a DCP folder, which is a pickle: it is scanned before it is unpickled, and checked after.

NAME = ".metadata"
_MOST_DEEP = 32  # DCP's own nests eight deep; Python hashes deep tuples on the process's stack
_DCP = "torch.distributed.checkpoint.metadata"
_STATEFUL = {
    **dict.fromkeys(
        (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
            "TensorProperties", "StorageMeta",
        ),
        _DCP,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
}  # fmt: skip
_CLASSES = {
    **_STATEFUL,
    "_MEM_FORMAT_ENCODING": _DCP,
    "_get_layout": "torch.serialization",
    "Size": "torch",
    "OrderedDict": "collections",
}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "Path")
_MADE = "made by "  # precedes the class of an object; the text of a global is the class only
_HAVE_STATE = {f"{_MADE}{module} {name}" for name, module in _STATEFUL.items()}
_INTO = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # opcodes that change a value on the stack


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's metadata of a folder.  Nothing in it is executed; memory is a small multiple of its files.

    Raises: CheckpointError if it is anything but what DCP writes, or refers to files outside the folder.
    """
    what = f"{folder / NAME}: not the metadata of a DCP checkpoint"
    try:
        data = read_bytes(folder, NAME, MOST_BYTES)
        _scan(data)
        found = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{folder / NAME}: holds a {type(found).__name__}, expected DCP's Metadata")
        _check_storage(folder, found)
        _check_tensors(found)
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler can raise anything
        raise CheckpointError(f"{what}: {error}") from error
    found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
    return found


class _Item(NamedTuple):
    """A value on a pickle's stack: its nesting depth, and its text or its class."""

    depth: int = 0
    text: str = ""


def _scan(data: bytes) -> None:
    """Refuse a pickle that nests deeply, jumps in its memo, or sets attributes on objects of classes other than DCP's.

    Raises: UnpicklingError; ValueError and IndexError for what is not a pickle.
    """
    stack: list[_Item] = []
    marks: list[int] = []
    memo: dict[int, _Item] = {}
    for code, given, _ in pickletools.genops(data):
        argument: Any = given
        if code.name == "MARK":
            marks.append(len(stack))
        elif code.name == "MEMOIZE" or code.name.endswith("PUT"):
            index = len(memo) if argument is None else int(argument)
            if index > len(memo):
                raise pickle.UnpicklingError(f"entry {index} of its memo follows entry {len(memo) - 1}")
            memo[index] = stack[-1]
        elif code.name.endswith("GET"):
            stack.append(memo[int(argument)])
        else:
            needs = [each.name for each in code.stack_before]
            begin = len(stack) - len(needs) if "mark" not in needs else marks.pop() - needs.index("mark")
            taken = stack[begin:]
            del stack[begin:]
            item = _result(code.name, argument, taken)
            if item.depth > _MOST_DEEP:
                raise pickle.UnpicklingError(f"it nests more than {_MOST_DEEP} deep")
            stack += [item] * len(code.stack_after)


def _result(name: str, argument: Any, taken: list[_Item]) -> _Item:
    if name == "BUILD" and taken[0].text not in _HAVE_STATE:
        raise pickle.UnpicklingError(f"it sets attributes of {taken[0].text or 'a value'!r}")
    if name in _INTO:
        return taken[0]._replace(depth=max(taken[0].depth, *(item.depth + 1 for item in taken[1:]), 0))
    text = argument if isinstance(argument, str) else ""
    if name == "STACK_GLOBAL":
        text = f"{taken[0].text} {taken[1].text}"
    elif name in ("NEWOBJ", "REDUCE"):
        text = f"{_MADE}{taken[0].text}"
    elif name == "DUP":
        return taken[0]
    return _Item(1 + max((item.depth for item in taken), default=-1), text)


def _check_storage(folder: Path, found: Metadata) -> None:
    sizes: dict[str, int] = {}
    for info in cast(Mapping[Any, Any], found.storage_data or {}).values():
        name = str(info.relative_path)
        if os.sep in name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder / NAME}: names a file {name!r} that is not in the folder")
        if name not in sizes:
            with opened(folder, name) as fd:
                sizes[name] = os.fstat(fd).st_size
        if not 0 <= int(info.offset) <= int(info.offset) + int(info.length) <= sizes[name]:
            raise CheckpointError(
                f"{folder / name}: has {sizes[name]} bytes, .metadata names {info.length} from {info.offset} on"
            )


def _check_tensors(found: Metadata) -> None:
    """Refuse other types, and tensors with more bytes than the files."""
    held: dict[str, int] = {}
    for index, info in cast(Mapping[MetadataIndex, Any], found.storage_data or {}).items():
        compressed = 1024 if getattr(info, "transform_descriptors", None) else 1
        held[index.fqn] = held.get(index.fqn, 0) + int(info.length) * compressed
    for key, kind in cast(Mapping[Any, Any], found.state_dict_metadata).items():
        if isinstance(key, str) and isinstance(kind, BytesStorageMetadata):
            continue
        is_tensor = isinstance(key, str) and isinstance(kind, TensorStorageMetadata)
        if not is_tensor or not isinstance(kind.properties.dtype, torch.dtype):
            raise CheckpointError(f"{NAME}: {str(key)[:80]!r} is a {type(kind).__name__}, expected a tensor or bytes")
        sizes = [*kind.size]
        for chunk in cast(list[ChunkStorageMetadata], kind.chunks):
            sizes += [*chunk.offsets, *chunk.sizes]
        if any(type(size) is not int or not 0 <= size <= MOST_SIZE for size in sizes):
            raise CheckpointError(f"{NAME}: {key[:80]!r} has sizes {str(sizes)[:80]}, expected whole numbers")
        if prod(max(size, 1) for size in kind.size) > MOST_SIZE or (
            prod(kind.size) * kind.properties.dtype.itemsize > held.get(key, 0)
        ):
            raise CheckpointError(
                f"{NAME}: {key[:80]!r} has sizes {str(list(kind.size))[:80]}, and {held.get(key, 0)} bytes in files"
            )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _CLASSES.get(name) == module:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return Path
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata does not")


_PLANNER = "$planner"  # the key of the data that DCP's planner wants back


@dataclass(frozen=True, slots=True)
class _DcpPlace:
    """The save that a rank's plan belongs to, and the number of its file."""

    save_id: str
    number: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's report of one item: the part of a tensor, or the encoded value of anything else."""

    write: Write | None
    value: Any
    file: FileRecord | None


class _AtPath:
    """A folder of this machine, which DCP may change later."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._files = Files()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See DCP."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See DCP."""
        return "://" not in str(checkpoint_id)


class DcpWriter(_AtPath, StorageWriter):
    """Write what ``dcp.save`` gets as one committed checkpoint with checksums at ``path``; nothing is pickled.

    Example:
        >>> dcp.save(state, storage_writer=DcpWriter("run/step-00000100"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._save_id = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See DCP."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See DCP."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, on the coordinator."""
        self._save_id = secrets.token_hex(16)
        folder = self._path.parent
        self._files.make_folder(folder)
        take(folder)
        clean(self._files, folder)
        self._files.make_folder(self._pending(self._save_id))
        return [replace(plan, storage_data=_DcpPlace(self._save_id, number)) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's file."""
        place = cast(_DcpPlace, plan.storage_data)
        tensors: list[tuple[WriteItem, Write, torch.Tensor]] = []
        results: list[WriteResult] = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = encode(_looked_up(planner, item), item.index.fqn)
                results.append(WriteResult(item.index, 0, _Written(None, value, None)))
            else:
                tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                tensors.append((item, _write_of(item, tensor, place.number), tensor))
        tensors.sort(key=lambda each: (-DTYPE_BYTES[each[1].dtype], each[1].name, each[1].window))
        if tensors:
            save = SaveId(place.save_id, step_of(self._path.name) or 0)
            writes = [write for _, write, _ in tensors]
            path = self._pending(place.save_id) / part_file(place.number)
            record = write_part(self._files, path, writes, [bytes_of(tensor) for _, _, tensor in tensors], save)
            results += [
                WriteResult(item.index, write.num_bytes, _Written(write, None, record if not i else None))
                for i, (item, write, _) in enumerate(tensors)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator, after all ranks have written."""
        written = [cast(_Written, result.storage_data) for rank in results for result in rank]
        names = [result.index.fqn for rank in results for result in rank]
        files = {each.write.rank: each.file for each in written if each.file is not None and each.write is not None}
        writes = [each.write for each in written if each.write is not None]  # of each rank, in the order of its file
        values = {name: each.value for name, each in zip(names, written, strict=True) if each.write is None}
        if isinstance(metadata.planner_data, Mapping):
            values[_PLANNER] = encode(dict(cast(Mapping[str, Any], metadata.planner_data)), _PLANNER)
        save = SaveId(self._save_id, step_of(self._path.name) or 0)
        pending = self._pending(self._save_id)
        manifest = make_manifest(save, writes, files, len(results), ({}, values))
        write_all(self._files, pending / MANIFEST, to_bytes(manifest))
        self._files.sync_folder(pending)
        commit(self._files, pending, self._path)
        give_back(self._path.parent)

    def storage_meta(self) -> StorageMeta | None:
        """See DCP."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def _pending(self, save_id: str) -> Path:
        return self._path.parent / SaveId(save_id, 0).pending


class DcpReader(_AtPath, StorageReader):
    """Read what :class:`DcpWriter` wrote and verify every block; a rank's tensors change only after everything is read.

    Example:
        >>> dcp.load(state, storage_reader=DcpReader("run/step-00000100"))  # doctest: +SKIP
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP's metadata.  Raises: DamagedCheckpointError."""
        manifest = read_manifest(self._files, self._path)
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in manifest.values if name != _PLANNER}
        for name, tensor in manifest.tensors.items():
            properties = TensorProperties(dtype=dtype_of(tensor.dtype, name))
            chunks = [
                ChunkStorageMetadata(torch.Size(p.window.offsets), torch.Size(p.window.sizes)) for p in tensor.parts
            ]
            state[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        planner = manifest.values.get(_PLANNER)
        return Metadata(
            state,
            planner_data=None if planner is None else decode(planner, _PLANNER),
            storage_meta=StorageMeta(checkpoint_id=self._path, save_id=manifest.save_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See DCP."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See DCP."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See DCP."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify what the plan requests, then deliver it."""
        manifest = read_manifest(self._files, self._path)
        requests = [(item, _request(item, manifest)) for item in plan.items if item.type == LoadItemType.TENSOR]
        read_requests(self._files, self._path, manifest, [request for _, request in requests])
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                # DCP's planner unpickles what it gets: these bytes are pickled here, from a value that was read as
                # JSON.
                buffer = io.BytesIO()
                torch.save(decode(manifest.values[name], name), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
        for item, request in requests:
            target = planner.resolve_tensor(item).detach()
            target.copy_(request.target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TorchDcpReader(FileSystemReader):
    """Read torch's own DCP folders without executing anything in them: metadata may refer to DCP's classes only.

    Example:
        >>> dcp.load(state, storage_reader=TorchDcpReader("old/step-100"))  # doctest: +SKIP
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.  Raises: CheckpointError if it contains anything but what DCP writes."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan requests; objects other than tensors may only be plain values."""
        return super().read_data(plan, cast(LoadPlanner, _PlainValues(planner)))


class _PlainValues:
    """A planner whose bytes are checked first: DCP's own unpickles whatever they contain."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{read_item.storage_index.fqn}: contains more than plain values: {error}") from error
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        self._planner.load_bytes(read_item, buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def _looked_up(planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise CheckpointError(
            f"{item.index.fqn}: a {type(planner).__name__} does not show values; use DefaultSavePlanner"
        )
    return lookup(item.index)


def _write_of(item: WriteItem, tensor: torch.Tensor, rank: int) -> Write:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    shape = tuple(data.size)
    if item.type == WriteItemType.SHARD:
        window = Window(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    else:
        window = whole(shape)
    return Write(name, dtype_name(tensor.dtype, name), shape, window, rank)


def _request(item: ReadItem, manifest: Manifest) -> Request:
    index: MetadataIndex = item.storage_index
    record = manifest.tensors[index.fqn]
    offset = tuple(index.offset) if index.offset is not None else (0,) * len(record.shape)
    parts: Sequence[PartRecord] = [part for part in record.parts if part.window.offsets == offset]
    if not parts:
        raise CheckpointError(f"{index.fqn}: no part begins at {offset}")
    starts = tuple(o + s for o, s in zip(offset, item.storage_offsets, strict=True))
    target = torch.empty(item.lengths, dtype=dtype_of(record.dtype, index.fqn), device="cpu")
    return Request(index.fqn, replace(record, parts=tuple(parts)), Window(starts, tuple(item.lengths)), target)
