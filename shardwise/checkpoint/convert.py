"""Make checkpoints from what other tools wrote: DCP folders and safetensors files; nothing in them is executed."""

from __future__ import annotations

import copy
import json
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoint import files as lock
from shardwise.checkpoint.contents import Request, decode, encode, groups_of
from shardwise.checkpoint.dcp import TorchDcpReader
from shardwise.checkpoint.files import Files, clean, list_checkpoints, read_manifest, read_requests
from shardwise.checkpoint.format import (
    MANIFEST,
    Manifest,
    TensorRecord,
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
from shardwise.checkpoint.load import INDEX, MOST_NUMEL, SINGLE, find_foreign, foreign_manifest, real_name, stream
from shardwise.checkpoint.save import SaveId, make_manifest, write_manifest, write_part
from shardwise.errors import CheckpointError, ConfigError
from shardwise.fsdp.module import FSDPModule
from shardwise.safe_files import create_file, read_bytes, replace_file

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


@dataclass(frozen=True, slots=True)
class _Gap:
    """The number of elements that differ, the largest difference, and the largest absolute value of the first."""

    number: int = 0
    most: float = 0.0
    largest: float = 0.0

    def widened(self, other: _Gap) -> _Gap:
        return _Gap(self.number + other.number, _higher(self.most, other.most), _higher(self.largest, other.largest))


def names_in(manifest: Manifest) -> set[str]:
    """Return the names of all tensors, tied names included."""
    return {*manifest.tensors, *manifest.ties}


def compare_tensors(
    files: Files, first: tuple[Path, Manifest], second: tuple[Path, Manifest], seen: Callable[[int], None]
) -> Iterator[TensorDifference]:
    """Compare the tensors that both have, in the order of their names.

    ``seen`` gets the bytes of the first checkpoint as they are compared.  Memory: a few windows of
    :func:`~shardwise.checkpoint.load.stream`.  Raises: DamagedCheckpointError.
    """
    common = sorted(names_in(first[1]) & names_in(second[1]))
    same_shape: list[str] = []
    for name in common:
        mine, theirs = (_described(manifest, name) for _, manifest in (first, second))
        if mine[1] == theirs[1]:
            same_shape.append(name)
        else:
            yield TensorDifference(name, _text(mine), _text(theirs), None, 0.0, 0.0)
    left, right = (stream(files, path, manifest, same_shape, MOST_NUMEL) for path, manifest in (first, second))
    gap = _Gap()
    for mine, theirs in zip(left, right, strict=True):
        seen(mine.tensor.numel() * mine.tensor.element_size())
        gap = gap.widened(_measure(mine.tensor, theirs.tensor))
        if not mine.is_last:
            continue
        described = [_described(manifest, mine.name) for _, manifest in (first, second)]
        if gap.number or described[0] != described[1]:
            yield TensorDifference(
                mine.name, _text(described[0]), _text(described[1]), gap.number, gap.most, gap.largest
            )
        gap = _Gap()


def compare_values(first: Manifest, second: Manifest) -> list[ValueDifference]:
    """Return the values that differ, each by its path."""
    mine, theirs = (dict(_leaves(each.values, "")) for each in (first, second))
    return [
        ValueDifference(name, mine.get(name), theirs.get(name))
        for name in sorted({*mine, *theirs})
        if name not in mine or name not in theirs or mine[name] != theirs[name]
    ]


def _described(manifest: Manifest, name: str) -> tuple[str, tuple[int, ...]]:
    record = manifest.record_of(name)
    assert record is not None, name
    return record.dtype, record.shape


def _text(described: tuple[str, tuple[int, ...]]) -> str:
    return f"{described[0]} {list(described[1])}"


def _measure(mine: torch.Tensor, theirs: torch.Tensor) -> _Gap:
    if not mine.numel():
        return _Gap()
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs.to(mine.dtype))
    left, right = mine.double(), theirs.double()
    if mine.dtype == theirs.dtype:
        width = mine.element_size()
        bits = [each.contiguous().view(-1).view(torch.uint8).view(-1, width) for each in (mine, theirs)]
        number = int((bits[0] != bits[1]).any(1).sum())
    else:
        number = int((left != right).sum())
    if not number:
        return _Gap(largest=float(left.abs().max()))
    gap = torch.where(left == right, 0.0, (left - right).abs())  # two infinities of one sign are equal
    return _Gap(number, float(gap.max()), float(left.abs().max()))


def _higher(left: float, right: float) -> float:
    return max(left, right) if left == left and right == right else float("nan")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        for key in fields:
            yield from _leaves(fields[key], f"{path}/{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


# ---- Exports for other tools: Hugging Face's layout, and one file of ``torch.save``; one tensor at a time.

Progress = Callable[[int], None]  # gets bytes as they are written


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that is read tensor by tensor."""

    files: Files
    path: Path
    manifest: Manifest

    def read(self, name: str, record: TensorRecord, target: torch.Tensor) -> None:
        """Read a full tensor into ``target``, verified."""
        read_requests(self.files, self.path, self.manifest, [Request(name, record, whole(record.shape), target)])


def open_source(folder: str | Path, step: int | None = None) -> CheckpointSource:
    """Return the checkpoint at ``folder``, or the newest one in it (or that of ``step``).

    Raises: CheckpointError if there is none, DamagedCheckpointError if its manifest has changed since it was written.
    """
    files, path = Files(), Path(folder).absolute()
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
    beside: Sequence[object] = (),
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model called ``key`` of a checkpoint as Hugging Face has models; return its files, the index last.

    Args:
        folder: where checkpoints are, or one checkpoint; ``step``: which one (default: the newest).
        to: a folder; it is made.
        most_bytes: in one file: ``model.safetensors``, or ``model-0000n-of-0000m.safetensors`` and an index.
        beside: what ``from_pretrained`` needs too.  A model of transformers, sharded or not: its config and generation config
            are written.  The folder of one: its config and tokenizer files are copied.  Others, such as a tokenizer:
            ``save_pretrained`` is called.

    Tied weights are written once, under their first name.  Memory: the largest tensor.  Not collective.
    Raises: CheckpointError, DamagedCheckpointError; FileExistsError for a file of weights that is there.

    Example:
        >>> export_model("run", "exported", beside=[model, tokenizer])  # doctest: +SKIP
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
    for thing in beside:
        _save_beside(thing, target)
    return paths


# Files of a model's folder that are neither weights nor anything to run.
_BESIDE = ("*config.json", "*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template*")


def _save_beside(thing: Any, target: Path) -> None:
    if isinstance(thing, str | Path):
        folder = Path(thing)
        names = sorted({path.name for pattern in _BESIDE for path in folder.glob(pattern)})
        if not names:
            raise ConfigError(f"{folder} has no config.json and no tokenizer files; name the folder of a model")
        for name in names:
            replace_file(target, name, read_bytes(folder, real_name(folder, name)))
    elif isinstance(thing, nn.Module) and hasattr(thing, "config"):
        config: Any = copy.copy(thing.config)
        plain_class = next(each for each in type(thing).__mro__ if not issubclass(each, FSDPModule))
        config.architectures = config.architectures or [plain_class.__name__]
        config.save_pretrained(target)
        if getattr(thing, "generation_config", None) is not None:
            cast(Any, thing.generation_config).save_pretrained(target)
    elif hasattr(thing, "save_pretrained") and not isinstance(thing, nn.Module):
        thing.save_pretrained(target)
    else:
        raise ConfigError(
            f"beside holds {type(thing).__name__}, expected a model with a config, a folder, or an object with save_pretrained"
        )


def _batches(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    batches: list[list[str]] = []
    remaining = -1
    for name, num_bytes in sizes.items():
        if num_bytes > remaining or not batches:
            batches.append([])
            remaining = most_bytes
        batches[-1].append(name)
        remaining -= num_bytes
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
    """Write a full checkpoint as one file of ``torch.save``: a dict with the state dicts of plain objects by name.

    Optimizers have the form of ``torch.optim``, with parameter indices.  Tensors are in a temporary file next to ``to``
    until they are written, so memory does not grow with them.  Not collective.
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
            loaded[name] = _on_disk(Path(place) / str(number), record.shape, dtype_of(record.dtype, name))
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
        more: further values to save.

    Tensors are in temporary files in ``folder`` until they are written, so memory does not grow with them.  Random state
    is left out.  Not collective.
    Raises: ConfigError for anything else; CheckpointError, DamagedCheckpointError for files that cannot be read.
    """
    path, target, files = Path(source), Path(folder).absolute(), Files()
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
    files = Files()
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
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is intended
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path} cannot be read: {failure}") from error
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def _named(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> _FoundState:
    """Return the state of model and optimizer under our names.  Raises: ConfigError for unknown keys."""
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
    """Return the name of the parameter with which ``text`` begins, and the rest."""
    for fqn in params:  # the longest first: a name may be a prefix of another
        if text.startswith(f"{fqn}."):
            return fqn, text[len(fqn) + 1 :]
    raise ConfigError(f"{key!r} names no parameter of the saved model")


def _write(found: _FoundState, folder: Path, step: int) -> Path:
    files, save = Files(), SaveId(secrets.token_hex(16), step)
    writes: list[Write] = []
    remaining, number = _MOST_BYTES, 0
    for name, tensor in sorted(found.tensors.items()):
        shape = tuple(tensor.shape)
        write = Write(name, dtype_name(tensor.dtype, name), shape, whole(shape), number)
        if write.num_bytes > remaining and writes:
            number, remaining = number + 1, _MOST_BYTES
            write = Write(name, write.dtype, shape, whole(shape), number)
        remaining -= write.num_bytes
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
    # A checkpoint of zero ranks has no per-rank state.
    return write_manifest(files, folder, make_manifest(save, writes, records, 0, ({}, found.values)))


def _on_disk(path: Path, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    sizes = tuple(shape)
    if not prod(sizes):
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_file(str(path), shared=True, size=prod(sizes) * dtype.itemsize, dtype=torch.uint8)
    return flat.view(dtype).view(sizes)
