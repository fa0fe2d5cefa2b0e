"""Checkpoints out of what other tools wrote: DCP folders and safetensors files; nothing in them runs."""

from __future__ import annotations

import secrets
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoint import lock
from shardwise.checkpoint.dcp import TorchDcpReader
from shardwise.checkpoint.dtypes import bytes_of, dtype_name, dtype_of
from shardwise.checkpoint.files import DiskFiles
from shardwise.checkpoint.folder import clean
from shardwise.checkpoint.foreign import find_foreign, foreign_manifest
from shardwise.checkpoint.names import join, part_file
from shardwise.checkpoint.order import Request
from shardwise.checkpoint.plan import Write, whole
from shardwise.checkpoint.reader import read_requests
from shardwise.checkpoint.values import encode
from shardwise.checkpoint.writer import SaveId, make_manifest, write_manifest, write_part
from shardwise.errors import CheckpointError, ConfigError

_MOST_BYTES = 5 * 10**9  # in one file


@dataclass
class _FoundState:
    """State under our names."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def convert(source: str | Path, folder: str | Path, *, step: int, more: Mapping[str, Any] | None = None) -> Path:
    """Write what other tools saved as the checkpoint after ``step`` steps in ``folder``; return where it is.

    Args:
        source: a DCP folder whose state is ``{"model": ..., "optimizer": ...}`` under the names of parameters, as
            ``get_state_dict(..., flatten_optimizer_state_dict=True)`` gives them; or safetensors files of a model.
        more: values to save beside.

    Tensors lie in temporary files beside ``folder`` until they are written, so memory does not grow with them.  Random state
    is left out.  Not collective.
    Raises: ConfigError for anything else; CheckpointError, DamagedCheckpointError for files that cannot be read.
    """
    path, target, files = Path(source), Path(folder).absolute(), DiskFiles()
    files.make_folder(target)
    lock.take(target)
    try:
        clean(files, target)
        with tempfile.TemporaryDirectory(dir=target, prefix=".converting-") as place:
            found = _read(path, Path(place))
            found.values |= {join(key): encode(value, join(key)) for key, value in (more or {}).items()}
            written = _write(found, target, step)
            found.tensors.clear()
        return written
    finally:
        lock.give_back(target)


def _read(path: Path, place: Path) -> _FoundState:
    files = DiskFiles()
    if (path / ".metadata").is_file():
        return _named(*_read_dcp(path, place))
    foreign = find_foreign(files, path)
    if foreign is None:
        raise ConfigError(
            f"{path} is neither a DCP folder (it has no .metadata) nor safetensors files of a model; name one of these"
        )
    manifest = foreign_manifest(files, *foreign, "model")
    found = _FoundState()
    for number, (name, record) in enumerate(manifest.tensors.items()):
        target = _on_disk(place / str(number), record.shape, dtype_of(record.dtype, name))
        read_requests(files, foreign[0], manifest, [Request(name, record, whole(record.shape), target)])
        found.tensors[name] = target
    return found


def _read_dcp(path: Path, place: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the values of a DCP folder, by its names."""
    reader = TorchDcpReader(path)
    state: dict[str, Any] = {}
    for number, (key, kind) in enumerate(reader.read_metadata().state_dict_metadata.items()):
        is_tensor = isinstance(kind, TensorStorageMetadata)
        state[key] = _on_disk(place / str(number), kind.size, kind.properties.dtype) if is_tensor else None
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path} cannot be read: {failure}") from error
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def _named(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> _FoundState:
    """Return the state of model and optimizer under our names.  Raises: ConfigError for keys of another form."""
    found, groups = _FoundState(), dict[str, dict[str, Any]]()
    params = sorted((key.removeprefix("model.") for key in tensors if key.startswith("model.")), key=len, reverse=True)
    for key, value in (*tensors.items(), *values.items()):
        kind, _, rest = key.partition(".")
        if kind == "model" and isinstance(value, torch.Tensor):
            found.tensors[join("model", rest)] = value
        elif kind == "optimizer" and rest.startswith("state."):
            fqn, entry = _cut(rest.removeprefix("state."), params, key)
            name = join("optimizer", "state", fqn, entry)
            if isinstance(value, torch.Tensor):
                found.tensors[name] = value
            else:
                found.values[name] = encode(value, name)
        elif kind == "optimizer" and rest.startswith("param_groups."):
            fqn, option = _cut(rest.removeprefix("param_groups."), params, key)
            groups.setdefault(fqn, {})[option] = value
        elif kind != "random":
            raise ConfigError(
                f"{key!r}: expected model.NAME, optimizer.state.NAME.KEY and optimizer.param_groups.NAME.OPTION; "
                "save with get_state_dict(..., options=StateDictOptions(flatten_optimizer_state_dict=True))"
            )
    if groups:
        full = join("optimizer", "groups")
        found.values[full] = encode([{"params": [fqn], "options": groups[fqn]} for fqn in groups], full)
    return found


def _cut(text: str, params: Iterable[str], key: str) -> tuple[str, str]:
    """Return the name of the parameter with which ``text`` begins, and what comes after."""
    for fqn in params:  # the longest first: a name may begin another
        if text.startswith(f"{fqn}."):
            return fqn, text[len(fqn) + 1 :]
    raise ConfigError(f"{key!r} names no parameter of the model that is saved beside it")


def _write(found: _FoundState, folder: Path, step: int) -> Path:
    files, save = DiskFiles(), SaveId(secrets.token_hex(16), step)
    writes: list[Write] = []
    room, number = _MOST_BYTES, 0
    for name, tensor in sorted(found.tensors.items()):
        shape = tuple(tensor.shape)
        write = Write(name, dtype_name(tensor.dtype, name), shape, whole(shape), number)
        if write.num_bytes > room and writes:
            number, room = number + 1, _MOST_BYTES
            write = Write(name, write.dtype, shape, whole(shape), number)
        room -= write.num_bytes
        writes.append(write)
    files.make_folder(folder / save.pending)
    records = {
        each: write_part(
            files,
            folder / save.pending / part_file(each),
            [write for write in writes if write.rank == each],
            [bytes_of(found.tensors[write.name]) for write in writes if write.rank == each],
            save,
        )
        for each in range(number + 1)
    }
    # No rank's own state is there: a number of ranks that nobody has says so to those who load it.
    return write_manifest(files, folder, make_manifest(save, writes, records, 0, ({}, found.values)))


def _on_disk(path: Path, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    sizes = tuple(shape)
    empty = torch.empty(sizes, dtype=dtype, device="meta")
    if not empty.numel():
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_file(str(path), shared=True, size=empty.numel() * empty.element_size(), dtype=torch.uint8)
    return flat.view(dtype).view(sizes)
