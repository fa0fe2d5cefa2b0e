"""Comparison of checkpoints, export for ``from_pretrained``, and conversion of DCP folders; nothing is executed."""

from __future__ import annotations

import json
import secrets
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoint import files as lock
from shardwise.checkpoint.contents import Request, encode, unlike_leaves
from shardwise.checkpoint.dcp import NAME, TorchDcpReader
from shardwise.checkpoint.files import Files, clean, list_checkpoints, read_manifest, read_requests
from shardwise.checkpoint.format import (
    MANIFEST,
    Manifest,
    Write,
    bytes_of,
    dtype_name,
    dtype_of,
    join,
    make_header,
    part_file,
    split,
    whole,
)
from shardwise.checkpoint.load import INDEX, SINGLE
from shardwise.checkpoint.save import SaveId, make_manifest, write_manifest, write_part
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout import batches
from shardwise.safe_files import replace_file


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that one process reads tensor by tensor."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, step: int | None = None) -> CheckpointSource:
        """Return the checkpoint at ``folder``, or the newest one in it (or that of ``step``).

        Raises: CheckpointError if there is none, DamagedCheckpointError if its manifest has changed since it was written.
        """
        files, path = Files(), Path(folder).absolute()
        if MANIFEST not in files.names(path):
            found = [each for each in list_checkpoints(files, path) if step in (None, each.step)]
            if not found:
                raise CheckpointError(f"{path}: no checkpoint{'' if step is None else f' of step {step}'} is there")
            path = found[-1].path
        return cls(path, read_manifest(files, path))

    @property
    def names(self) -> set[str]:
        """The names of all tensors, tied names included."""
        return {*self.manifest.tensors, *self.manifest.ties}

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor, verified.  Raises: DamagedCheckpointError with file, block and tensor."""
        record = self.manifest.record_of(name)
        assert record is not None, name
        tensor = torch.empty(record.shape, dtype=dtype_of(record.dtype, name), device="cpu")
        read_requests(Files(), self.path, self.manifest, [Request(name, record, whole(record.shape), tensor)])
        return tensor


# ---- Comparison of two checkpoints: which tensors and values differ, and by how much.


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not bitwise equal in both.

    Attributes:
        num_different: elements with different bits (with different values if dtypes differ); None if shapes differ.
        most: largest absolute difference; nan if one of the two is nan.  largest: largest absolute value in the first.
    """

    name: str
    first: str
    second: str
    num_different: int | None
    most: float
    largest: float


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that differs; None if it is missing."""

    name: str
    first: object | None
    second: object | None


def compare_tensors(first: CheckpointSource, second: CheckpointSource) -> Iterator[TensorDifference]:
    """Compare the tensors that both have, in the order of their names.

    Memory: some copies of the largest tensor.
    Raises: DamagedCheckpointError.
    """
    for name in sorted(first.names & second.names):
        records = [each.manifest.record_of(name) for each in (first, second)]
        mine, theirs = [f"{each.dtype} {list(each.shape)}" for each in records if each is not None]
        if mine.partition(" ")[2] != theirs.partition(" ")[2]:
            yield TensorDifference(name, mine, theirs, None, 0.0, 0.0)
            continue
        left, right = first.read(name), second.read(name)
        found = TensorDifference(name, mine, theirs, 0, 0.0, 0.0)
        if left.numel():
            found = _measured(found, left, right)
        if found.num_different or mine != theirs:
            yield found


def compare_values(first: Manifest, second: Manifest) -> list[ValueDifference]:
    """Return the values that differ, each by its path."""
    return [ValueDifference(name, *each) for name, each in unlike_leaves(first.values, second.values).items()]


def _measured(found: TensorDifference, mine: torch.Tensor, theirs: torch.Tensor) -> TensorDifference:
    bits = [each.view(-1).view(torch.uint8).view(mine.numel(), -1) for each in (mine, theirs)]
    wide = torch.complex128 if mine.is_complex() or theirs.is_complex() else torch.float64
    left, right = mine.to(wide), theirs.to(wide)
    number = int((bits[0] != bits[1]).any(1).sum() if mine.dtype == theirs.dtype else (left != right).sum())
    gap = torch.where(left == right, 0.0, (left - right).abs())  # two infinities of one sign are equal
    return replace(found, num_different=number, most=float(gap.max()), largest=float(left.abs().max()))


# ---- Export in Hugging Face's layout, one tensor at a time.


def export_model(
    folder: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    key: str = "model",
    most_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write the model called ``key`` of a checkpoint as Hugging Face has models; return its files, the index last.

    Args:
        folder: where checkpoints are, or one checkpoint; ``step``: which one (default: the newest).
        to: a folder; it is made.
        most_bytes: in one file: ``model.safetensors``, or ``model-0000n-of-0000m.safetensors`` and an index.

    ``from_pretrained`` needs a config and a tokenizer in the folder, too: ``model.config.save_pretrained(to)`` and
    ``tokenizer.save_pretrained(to)`` write them.
    Tied weights are written once, under their first name.  Memory: the largest tensor.  Not collective.
    Raises: CheckpointError, DamagedCheckpointError; FileExistsError for a file of weights that is there.

    Example:
        >>> export_model("run", "exported")  # doctest: +SKIP
    """
    source, target = CheckpointSource.open(folder, step), Path(to)
    if target.is_file():
        raise ConfigError(f"{target} is a file; name a folder to export into")
    tensors = {split(name)[1]: (name, t) for name, t in source.manifest.tensors.items() if split(name)[0] == key}
    if not tensors:
        there = sorted({split(name)[0] for name in source.manifest.tensors})
        raise ConfigError(f"{source.path} has no tensors of {key!r}; it has those of {', '.join(there) or 'nothing'}")
    Files().make_folder(target)
    parts = batches([record.num_bytes for _, record in tensors.values()], most_bytes)
    paths: list[Path] = []
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        one = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        batch = list(tensors)[part.start : part.stop]
        _write_file(source, target / one, {plain: tensors[plain][0] for plain in batch})
        where |= dict.fromkeys(batch, one)
        paths.append(target / one)
    if len(parts) > 1:
        total = sum(record.num_bytes for _, record in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        replace_file(target, INDEX, json.dumps(index, indent=2) + "\n")
        paths.append(target / INDEX)
    return paths


def _write_file(source: CheckpointSource, path: Path, names: Mapping[str, str]) -> None:
    """Write the tensors with the plain ``names`` (by these, their names in the checkpoint) as one safetensors file."""
    records = {name: source.manifest.tensors[full] for name, full in names.items()}
    writes = [Write(name, each.dtype, each.shape, whole(each.shape), 0) for name, each in records.items()]
    header, _ = make_header(writes, {"format": "pt"})
    file = Files().create(path)
    try:
        file.write(header)
        for full in names.values():
            file.write(bytes_of(source.read(full)))
        file.sync()
    finally:
        file.close()


# ---- Conversion of DCP folders.


def convert(source: str | Path, folder: str | Path, *, step: int) -> Path:
    """Write a DCP folder as the checkpoint after ``step`` steps in ``folder``; return where it is.

    ``source``: its state is ``{"model": ..., "optimizer": ...}`` under the names of parameters, as
    ``get_state_dict(..., flatten_optimizer_state_dict=True)`` gives them.  Tensors are in temporary files in ``folder``
    until they are written, so memory does not grow with them.  Not collective.
    Raises: ConfigError for anything else; CheckpointError, DamagedCheckpointError for files that cannot be read.
    """
    path, target, files = Path(source), Path(folder).absolute(), Files()
    if not (path / NAME).is_file():
        raise ConfigError(f"{path} is not a DCP folder (it has no {NAME}); load() reads safetensors files as they are")
    files.make_folder(target)
    lock.take(target)
    try:
        clean(files, target)
        with tempfile.TemporaryDirectory(dir=target, prefix=".converting-") as place:
            return _write(*_named(_read_dcp(path, Path(place))), target, step)
    finally:
        lock.give_back(target)


def _read_dcp(path: Path, place: Path) -> dict[str, Any]:
    """Return what a DCP folder contains, by its names; tensors are mapped from files in ``place``."""
    reader = TorchDcpReader(path)
    state: dict[str, Any] = {}
    for number, (key, kind) in enumerate(reader.read_metadata().state_dict_metadata.items()):
        is_tensor = isinstance(kind, TensorStorageMetadata)
        state[key] = _on_disk(place / str(number), kind.size, kind.properties.dtype) if is_tensor else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is intended
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path} cannot be read: {failure}") from error
    return state


def _named(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the encoded values of model and optimizer under our names.

    Raises: ConfigError for unknown keys.
    """
    tensors, values, groups = dict[str, torch.Tensor](), dict[str, Any](), dict[str, dict[str, Any]]()
    params = sorted((key.removeprefix("model.") for key in state if key.startswith("model.")), key=len, reverse=True)
    for key, value in state.items():
        kind, *rest = key.split(".", 2)
        # the longest name first: a name may be a prefix of another
        fqn = next((each for each in params if rest[-1].startswith(f"{each}.")), "") if kind == "optimizer" else ""
        entry = rest[-1][len(fqn) + 1 :] if rest else ""
        if kind == "model" and isinstance(value, torch.Tensor):
            tensors[join("model", key.removeprefix("model."))] = value
        elif fqn and rest[0] == "state":
            name = join("optimizer", "state", fqn, entry)
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                values[name] = encode(value, name)
        elif fqn and rest[0] == "param_groups":
            groups.setdefault(fqn, {})[entry] = value
        else:
            raise ConfigError(
                f"{key!r}: expected model.NAME, optimizer.state.NAME.KEY and optimizer.param_groups.NAME.OPTION; "
                "save with get_state_dict(..., options=StateDictOptions(flatten_optimizer_state_dict=True))"
            )
    if groups:
        full = join("optimizer", "groups")
        values[full] = encode([{"params": [fqn], "options": groups[fqn]} for fqn in groups], full)
    return tensors, values


def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], folder: Path, step: int) -> Path:
    files, save = Files(), SaveId(secrets.token_hex(16), step)
    writes: list[Write] = []
    for name, tensor in sorted(tensors.items()):
        shape = tuple(tensor.shape)
        writes.append(Write(name, dtype_name(tensor.dtype, name), shape, whole(shape), 0))
    files.make_folder(folder / save.pending)
    data = [bytes_of(tensors[write.name]) for write in writes]
    record = write_part(files, folder / save.pending / part_file(0), writes, data, save)
    # A checkpoint of zero ranks has no per-rank state.
    return write_manifest(files, folder, make_manifest(save, writes, {0: record}, 0, ({}, values)))


def _on_disk(path: Path, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    sizes = tuple(shape)
    if not prod(sizes):
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_file(str(path), shared=True, size=prod(sizes) * dtype.itemsize, dtype=torch.uint8)
    return flat.view(dtype).view(sizes)
