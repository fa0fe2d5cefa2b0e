"""Checkpoints for other tools: Hugging Face's layout, and one file of ``torch.save``; a tensor at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint.dtypes import bytes_of, dtype_of
from shardwise.checkpoint.files import DiskFiles, Files
from shardwise.checkpoint.folder import list_checkpoints
from shardwise.checkpoint.foreign import INDEX, SINGLE
from shardwise.checkpoint.header import make_header
from shardwise.checkpoint.manifest import Manifest, TensorRecord
from shardwise.checkpoint.names import MANIFEST, split
from shardwise.checkpoint.order import Request
from shardwise.checkpoint.plan import Write, whole
from shardwise.checkpoint.reader import read_manifest, read_requests
from shardwise.checkpoint.values import decode, groups_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.safe_files import create_file, replace_file

Progress = Callable[[int], None]  # is told bytes as they are written


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint to be read tensor by tensor."""

    files: Files
    path: Path
    manifest: Manifest

    def read(self, name: str, record: TensorRecord, target: torch.Tensor) -> None:
        """Fill ``target`` with a whole tensor, verified."""
        read_requests(self.files, self.path, self.manifest, [Request(name, record, whole(record.shape), target)])


def open_source(folder: str | Path, step: int | None = None) -> CheckpointSource:
    """Return the checkpoint at ``folder``, or the newest one in it (or that of ``step``).

    Raises: CheckpointError if there is none, DamagedCheckpointError if its manifest is not the one that was written.
    """
    files, path = DiskFiles(), Path(folder).absolute()
    if MANIFEST not in files.names(path):
        found = [each for each in list_checkpoints(files, path) if step in (None, each.step)]
        if not found:
            raise CheckpointError(f"{path}: no checkpoint{'' if step is None else f' of step {step}'} is there")
        path = found[-1].path
    return CheckpointSource(files, path, read_manifest(files, path))


def export_model(
    folder: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    key: str = "model",
    most_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model called ``key`` of a checkpoint as Hugging Face has models; return the files, the index last.

    Files hold up to ``most_bytes``: ``model.safetensors``, or ``model-0000n-of-0000m.safetensors`` and an index.  Tied
    weights are written once, under their first name.  Memory: the largest tensor.  Not collective.
    Raises: CheckpointError, DamagedCheckpointError; FileExistsError for a file that is there.

    Example:
        >>> export_model("run", "exported")  # doctest: +SKIP
    """
    source, target = open_source(folder, step), Path(to)
    if target.is_file():
        raise ConfigError(f"{target} is a file; name a folder to export into")
    tensors = {split(name)[1]: (name, t) for name, t in source.manifest.tensors.items() if split(name)[0] == key}
    if not tensors:
        there = sorted({split(name)[0] for name in source.manifest.tensors})
        raise ConfigError(f"{source.path} has no tensors of {key!r}; it has those of {', '.join(there) or 'nothing'}")
    source.files.make_folder(target)
    batches = _batches({plain: record.num_bytes for plain, (_, record) in tensors.items()}, most_bytes)
    paths: list[Path] = []
    where: dict[str, str] = {}
    for number, batch in enumerate(batches, 1):
        one = SINGLE if len(batches) == 1 else f"model-{number:05d}-of-{len(batches):05d}.safetensors"
        _write_file(source, target / one, [(plain, *tensors[plain]) for plain in batch], progress)
        where |= dict.fromkeys(batch, one)
        paths.append(target / one)
    if len(batches) > 1:
        total = sum(record.num_bytes for _, record in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        replace_file(target, INDEX, json.dumps(index, indent=2) + "\n")
        paths.append(target / INDEX)
    return paths


def _batches(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    batches: list[list[str]] = []
    room = -1
    for name, num_bytes in sizes.items():
        if num_bytes > room or not batches:
            batches.append([])
            room = most_bytes
        batches[-1].append(name)
        room -= num_bytes
    return batches


def _write_file(
    source: CheckpointSource, path: Path, tensors: Sequence[tuple[str, str, TensorRecord]], progress: Progress | None
) -> None:
    writes = [Write(plain, record.dtype, record.shape, whole(record.shape), 0) for plain, _, record in tensors]
    header, _ = make_header(writes, {"format": "pt"})
    file = source.files.create(path)
    try:
        file.write(header)
        for _, name, record in tensors:
            tensor = torch.empty(record.shape, dtype=dtype_of(record.dtype, name), device="cpu")
            source.read(name, record, tensor)
            file.write(bytes_of(tensor))
            if progress is not None:
                progress(record.num_bytes)
        file.sync()
    finally:
        file.close()


def export_torch(
    folder: str | Path, to: str | Path, *, step: int | None = None, progress: Progress | None = None
) -> Path:
    """Write a whole checkpoint as one file of ``torch.save``: a dict with the state dicts of plain objects by name.

    Optimizers are in the form of ``torch.optim``, parameters by their numbers.  Tensors lie in a temporary file beside
    ``to`` until they are written, so memory does not grow with them.  Not collective.
    Raises: CheckpointError, DamagedCheckpointError.

    Example:
        >>> path = export_torch("run", "all.pt")  # doctest: +SKIP
        >>> model.load_state_dict(torch.load(path, weights_only=True)["model"])  # doctest: +SKIP
    """
    source, target = open_source(folder, step), Path(to)
    manifest = source.manifest
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as place:
        loaded: dict[str, torch.Tensor] = {}
        for number, (name, record) in enumerate(manifest.tensors.items()):
            loaded[name] = _on_disk(Path(place) / str(number), record)
            source.read(name, record, loaded[name])
            if progress is not None:
                progress(record.num_bytes)
        found: dict[str, Any] = {}
        for name, tensor in (*loaded.items(), *((tie, loaded[first]) for tie, first in manifest.ties.items())):
            parts = split(name)
            if len(parts) == 2:
                found.setdefault(parts[0], {})[parts[1]] = tensor
        for name, value in manifest.values.items():
            parts = split(name)
            if len(parts) == 1:
                found[name] = decode(value, name, loaded.__getitem__)
            elif parts[1:] == ["groups"]:
                found[parts[0]] = _plain_optimizer(parts[0], groups_of(decode(value, name), name), manifest, loaded)
        with create_file(target.absolute().parent, target.name) as file:
            torch.save(found, file)
        found.clear()
        loaded.clear()
    return target


def _on_disk(path: Path, record: TensorRecord) -> torch.Tensor:
    dtype = dtype_of(record.dtype, str(path))
    if not record.num_bytes:
        return torch.empty(record.shape, dtype=dtype, device="cpu")
    flat = torch.from_file(str(path), shared=True, size=record.num_bytes, dtype=torch.uint8)
    return flat.view(dtype).view(record.shape)


def _plain_optimizer(
    key: str, groups: Sequence[Mapping[str, Any]], manifest: Manifest, loaded: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    names = [str(name) for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for full in (*manifest.tensors, *manifest.values):
        parts = split(full)
        if parts[:2] == [key, "state"] and len(parts) == 4 and parts[2] in number:
            value = loaded[full] if full in loaded else decode(manifest.values[full], full, loaded.__getitem__)
            state.setdefault(number[parts[2]], {})[parts[3]] = value
    packed = [
        {**cast(dict[str, Any], group["options"]), "params": [number[str(name)] for name in group["params"]]}
        for group in groups
    ]
    return {"state": state, "param_groups": packed}
