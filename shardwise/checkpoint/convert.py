"""Weights for other tools: full tensors of a live model, export for ``from_pretrained``, comparison, DCP folders."""

from __future__ import annotations

import json
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from shardwise import torch_private
from shardwise.arguments import explains_arguments
from shardwise.checkpoint import files as lock
from shardwise.checkpoint.contents import Request, check_plain, encode
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
    plain,
    split,
    whole,
)
from shardwise.checkpoint.load import INDEX, SINGLE
from shardwise.checkpoint.save import SaveId, make_manifest, write_manifest, write_part
from shardwise.checkpoint.state import ModuleCarrier
from shardwise.collectives.owned import as_sent, ranks_along
from shardwise.consistency.agreement import GroupAgreement, open_agreement
from shardwise.errors import ArgumentTypeError, CheckpointError, ConfigError, TransportError
from shardwise.fsdp.attachment import attachment_of
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
    tensors = {
        join(*split(name)[1:]): (name, t) for name, t in source.manifest.tensors.items() if split(name)[0] == key
    }
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
    with closing(Files().create(path)) as file:
        file.write(header)
        for full in names.values():
            file.write(bytes_of(source.read(full)))
        file.sync()


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
    is_ours = lock.take(target)  # else a save of this process is in flight, or was
    try:
        if is_ours:
            clean(files, target)
        with tempfile.TemporaryDirectory(dir=target, prefix=".converting-") as place:
            return _write(*_named(_read_dcp(path, Path(place))), target, step)
    finally:
        if is_ours:
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


# ---- Full tensors of a live model, unit by unit: for an inference engine, an adapter file, a state dict on one rank.

NamedTensors = dict[str, torch.Tensor]
_CALL = "full_tensors"


@explains_arguments
def full_tensors(
    model: nn.Module, *, dtype: torch.dtype | None = None, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the full tensor of every parameter and persistent buffer, one unit unsharded at a time.

    Collective: every rank calls it and consumes it to the end, or stops at the same tensor as all others.  A rank that stops
    earlier is named in a DesyncError on the ranks that go on.

    Args:
        model: of any API, or plain; it may be trained further at any time after.
        dtype: of floating-point tensors, which are converted before they are gathered.  None: their own.
        only: returns True for the names that are wanted; the same on every rank.  None: all.

    Names are those of the plain model.  Tied parameters come under each of their names, one after the other, gathered once.
    Tensors are on the device of the mesh, share no memory with the model, and belong to the caller: memory is bounded by one
    unit (one tensor outside of units) plus what the caller keeps.
    Raises: ConfigError for parameters on meta or in a form of their own (quantized); DesyncError.

    Example:
        >>> for name, tensor in full_tensors(model, dtype=torch.bfloat16):  # doctest: +SKIP
        ...     engine.load_weight(name, tensor)
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ArgumentTypeError(f"full_tensors takes a module, found {type(model).__name__}")
    tensors = ModuleCarrier(_CALL, model, 0, 1, only).named_tensors()
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    mesh = max((tensor.device_mesh for tensor in sharded.values()), key=DeviceMesh.size, default=None)
    agreement = None if mesh is None else open_agreement(ranks_along(mesh, range(mesh.ndim)).group, _CALL)
    error = _refusal(tensors)
    if agreement is not None:
        facts = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in sharded.items()]
        agreement.agree(_CALL, [*facts, f"dtype={dtype}"], error)
    elif error is not None:
        raise error
    found = _gathered(_by_unit(model, tensors), dtype, agreement)
    next(found)
    return found


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, only: Callable[[str], bool] | None = None, rank: int = 0
) -> NamedTensors:
    """Return the state dict of the plain model on global rank ``rank``, in host memory; an empty dict on all others.

    Collective; arguments and errors are those of :func:`full_tensors`.  No device and no other rank holds more than one unit.

    Example:
        >>> weights = full_state_dict(model)  # doctest: +SKIP
        >>> if dist.get_rank() == 0:  # doctest: +SKIP
        ...     torch.save(weights, "model.pt")
    """
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if rank not in range(size):
        raise ConfigError(f"full_state_dict: rank is {rank}, expected one of 0 to {size - 1}")
    is_target = not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
    found: NamedTensors = {}
    full = copy = torch.empty(0, device="cpu")
    for name, tensor in full_tensors(model, dtype=dtype, only=only):
        if is_target:
            if tensor is not full:  # tied names follow each other
                full, copy = tensor, tensor.cpu()
            found[name] = copy
    return found


def _refusal(tensors: Mapping[str, torch.Tensor]) -> ConfigError | None:
    try:
        for name, tensor in tensors.items():
            check_plain(name, torch_private.wait_tensor(torch_private.local_of(tensor)))
    except ConfigError as error:
        return error
    return None


def _by_unit(model: nn.Module, tensors: NamedTensors) -> list[list[tuple[list[str], torch.Tensor]]]:
    """Return for each unit its tensors with their names; a tensor outside of units is alone."""
    units = {
        plain(path): attachment.unit
        for path, module in model.named_modules(remove_duplicate=False)
        if (attachment := attachment_of(module)) is not None
    }
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[object, list[tuple[list[str], torch.Tensor]]] = {}
    for same in names.values():
        path = same[0]
        while path and path not in units:
            path = path.rpartition(".")[0]
        found.setdefault(units.get(path, same[0]), []).append((same, tensors[same[0]]))
    return list(found.values())


def _gathered(
    units: list[list[tuple[list[str], torch.Tensor]]], dtype: torch.dtype | None, agreement: GroupAgreement | None
) -> Iterator[tuple[str, torch.Tensor]]:
    total, num_done, name = sum(len(unit) for unit in units), 0, ""
    try:
        # For full_tensors(), which takes it: an iterator that never began would not report that it is dropped.
        yield "", torch.empty(0, device="cpu")
        for unit in units:
            what = f"{_CALL} at {unit[0][0][0]}"
            if agreement is not None:
                # Before the collective: one that some ranks leave out would be paired with another.
                agreement.agree(what)
            try:
                fulls = _gather([tensor for _, tensor in unit], dtype)
            except RuntimeError as error:
                raise error if agreement is None else agreement.explain(what, error) from error
            for names, _ in unit:
                full = fulls.pop(0)
                num_done += 1
                for name in names:
                    yield name, full
                del full
    except GeneratorExit:
        if agreement is not None:
            where = f"at {name!r}, tensor {num_done} of {total}" if num_done else f"before the first of {total} tensors"
            with suppress(TransportError):  # the job may have ended
                agreement.report_failure(
                    f"rank {agreement.name} stopped full_tensors() {where}; "
                    "every rank must consume it to the end, or stop at the same tensor"
                )
        raise


@torch.inference_mode(False)  # the caller may be in it, and collectives count versions
@torch.no_grad()
def _gather(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the full tensors of one unit, gathered one after the other: each input outlives its collective."""
    launched: list[tuple[torch.Tensor, torch.dtype]] = []
    for tensor in tensors:
        wanted = tensor.detach().to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        if isinstance(wanted, DTensor):
            mesh = wanted.device_mesh
            on_mesh = cast(DTensor, as_sent(wanted.to(mesh.device_type)))  # shards of CPUOffloadPolicy live on the host
            found = torch_private.local_of(on_mesh.redistribute(placements=[Replicate()] * mesh.ndim))
            launched.append((found, wanted.dtype))
        else:
            launched.append((wanted, wanted.dtype))
    fulls: list[torch.Tensor] = []
    for tensor, (found, kind) in zip(tensors, launched, strict=True):
        full = torch_private.wait_tensor(found).detach().view(kind)
        own = torch_private.wait_tensor(torch_private.local_of(tensor))
        is_own = full.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        fulls.append(full.clone() if is_own else full)
    return fulls
