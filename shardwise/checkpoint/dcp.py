"""For callers of ``torch.distributed.checkpoint`` (DCP): its saves committed and verified, its own folders read safely.

A trainer that calls ``dcp.save`` and ``dcp.load`` passes one more argument, ``storage_writer=DcpWriter(path)`` and
``storage_reader=DcpReader(path)``.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

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

from shardwise.checkpoint.dcp_metadata import read_metadata
from shardwise.checkpoint.dtypes import bytes_of, dtype_name, dtype_of
from shardwise.checkpoint.files import DiskFiles, write_all
from shardwise.checkpoint.folder import clean, commit
from shardwise.checkpoint.header import make_header
from shardwise.checkpoint.lock import give_back, take
from shardwise.checkpoint.manifest import FileRecord, Manifest, PartRecord, TensorRecord, to_bytes
from shardwise.checkpoint.names import MANIFEST, part_file, step_of
from shardwise.checkpoint.order import Request
from shardwise.checkpoint.plan import DTYPE_BYTES, Window, Write, whole
from shardwise.checkpoint.reader import read_manifest, read_requests
from shardwise.checkpoint.values import decode, encode
from shardwise.checkpoint.writer import SaveId, write_part
from shardwise.errors import CheckpointError

_PLANNER = "$planner"  # the value under which what DCP's planner wants back is kept


@dataclass(frozen=True, slots=True)
class _DcpPlace:
    """Which save a rank's plan belongs to, and the number of its file."""

    save_id: str
    number: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank tells of one item: of a tensor the part and its place, of anything else the encoded value."""

    write: Write | None
    begin: int
    value: Any
    file: FileRecord | None


class DcpWriter(StorageWriter):
    """Writes what ``dcp.save`` is given as one committed, checksummed checkpoint at ``path``; nothing is pickled.

    Example:
        >>> dcp.save(state, storage_writer=DcpWriter("run/step-00000100"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._files = DiskFiles()
        self._save_id = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See DCP."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See DCP."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See DCP."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save; on the coordinator."""
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
                results.append(WriteResult(item.index, 0, _Written(None, 0, value, None)))
            else:
                tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                tensors.append((item, _write_of(item, tensor, place.number), tensor))
        tensors.sort(key=lambda each: (-DTYPE_BYTES[each[1].dtype], each[1].name, each[1].window))
        if tensors:
            save = SaveId(place.save_id, step_of(self._path.name) or 0)
            writes = [write for _, write, _ in tensors]
            path = self._pending(place.save_id) / part_file(place.number)
            record = write_part(self._files, path, writes, [bytes_of(tensor) for _, _, tensor in tensors], save)
            begins = make_header(writes, save.metadata())[1]
            results += [
                WriteResult(item.index, write.num_bytes, _Written(write, begin, None, record if not i else None))
                for i, ((item, write, _), begin) in enumerate(zip(tensors, begins, strict=True))
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; on the coordinator, when all ranks have written."""
        written = [cast(_Written, result.storage_data) for rank in results for result in rank]
        names = [result.index.fqn for rank in results for result in rank]
        files = {each.write.rank: each.file for each in written if each.file is not None and each.write is not None}
        numbers = {rank: index for index, rank in enumerate(sorted(files))}
        parts: dict[str, tuple[Write, list[PartRecord]]] = {}
        for each in written:
            if (write := each.write) is not None:
                end = each.begin + write.num_bytes
                part = PartRecord(numbers[write.rank], write.key, write.window, each.begin, end)
                parts.setdefault(write.name, (write, []))[1].append(part)
        tensors = {name: TensorRecord(w.dtype, w.shape, tuple(found)) for name, (w, found) in sorted(parts.items())}
        values = {name: each.value for name, each in zip(names, written, strict=True) if each.write is None}
        if isinstance(metadata.planner_data, Mapping):
            values[_PLANNER] = encode(dict(cast(Mapping[str, Any], metadata.planner_data)), _PLANNER)
        step = step_of(self._path.name) or 0
        records = tuple(files[rank] for rank in sorted(files))
        pending = self._pending(self._save_id)
        manifest = Manifest(self._save_id, step, len(results), records, tensors, {}, values)
        write_all(self._files, pending / MANIFEST, to_bytes(manifest))
        self._files.sync_folder(pending)
        commit(self._files, pending, self._path)
        give_back(self._path.parent)

    def storage_meta(self) -> StorageMeta | None:
        """See DCP."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See DCP."""
        return "://" not in str(checkpoint_id)

    def _pending(self, save_id: str) -> Path:
        return self._path.parent / SaveId(save_id, 0).pending


class DcpReader(StorageReader):
    """Reads what :class:`DcpWriter` wrote, every block verified; a rank's tensors change when all it needs is read.

    Example:
        >>> dcp.load(state, storage_reader=DcpReader("run/step-00000100"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._files = DiskFiles()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See DCP."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the manifest says.  Raises: DamagedCheckpointError."""
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
        """Read and verify what the plan asks for, then hand it over."""
        manifest = read_manifest(self._files, self._path)
        requests = [(item, _request(item, manifest)) for item in plan.items if item.type == LoadItemType.TENSOR]
        read_requests(self._files, self._path, manifest, [request for _, request in requests])
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                # DCP's planner unpickles what it is given: these bytes were pickled here, of a value read as JSON.
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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See DCP."""
        return "://" not in str(checkpoint_id)


class TorchDcpReader(FileSystemReader):
    """Reads torch's own DCP folders and lets nothing in them run: metadata may name DCP's classes alone.

    Example:
        >>> dcp.load(state, storage_reader=TorchDcpReader("old/step-100"))  # doctest: +SKIP
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.  Raises: CheckpointError if it names anything but what DCP writes."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; what is no tensor may hold plain values alone."""
        return super().read_data(plan, cast(LoadPlanner, _PlainValues(planner)))


class _PlainValues:
    """A planner whose bytes were looked at first: DCP's own unpickles whatever is in them."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{read_item.storage_index.fqn}: holds more than plain values: {error}") from error
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
