"""Checkpoints of run folders from before ``shardwise.checkpoint``: torch DCP folders, read without running what they hold.

DCP pickles its ``.metadata``, and the values that are no tensors.  Here both are read by unpicklers that admit the classes such
folders are made of and nothing else; names of files may not lead out of the folder; and no rank unpickles what another sends.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardwise import ZeroRedundancyOptimizer
from shardwise.errors import ConfigError

STATE, METADATA = "state.json", ".metadata"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_DCP = "torch.distributed.checkpoint."
_ADMITTED = {
    f"{_DCP}metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}filesystem": ("_StorageInfo",),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "collections": ("OrderedDict",),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Admits what DCP's metadata is made of; a dtype or layout of torch is no class, and is found by its name."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found: Any = getattr(torch, global_name, None) if module_name == "torch" else None
        if global_name in _ADMITTED.get(module_name, ()) or isinstance(found, (torch.dtype, torch.layout)):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{METADATA} names {module_name}.{global_name}, which is nothing of a checkpoint")


def read_metadata(path: Path) -> Metadata:
    """Return DCP's metadata in the file ``path``.

    Raises: pickle.UnpicklingError for one that would run anything, or leads to files elsewhere; what the unpickler raises for
    damaged ones.
    """
    found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError(f"{METADATA} holds a {type(found).__name__}, expected DCP's Metadata")
    for place in found.storage_data.values():
        name = str(place.relative_path)
        if Path(name).name != name:
            raise pickle.UnpicklingError(f"{METADATA} leads to {name!r}, expected the name of a file beside it")
        if place.transform_descriptors:
            raise pickle.UnpicklingError(f"{METADATA} names transforms, which run folders never had")
    return found


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        found = read_metadata(Path(self.path) / METADATA)
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As DCP's own, with torch's unpickler for plain values."""
        value = io.BytesIO(value.getvalue())
        checked = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(checked, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def is_old(checkpoint: Path) -> bool:
    """Return True for a complete checkpoint in the old form: this file was written last."""
    return (checkpoint / STATE).is_file()


def list_old_checkpoints(folder: Path) -> list[Path]:
    """Return the complete ones, oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_old(path))


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed run left half written."""
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_old_values(checkpoint: Path) -> Mapping[str, Any]:
    """Return what state.json says.  Raises: ValueError, KeyError."""
    values = json.loads((checkpoint / STATE).read_text())
    if values["format"] != 1:
        raise KeyError("format")
    return values


def load_old_checkpoint(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load parameters, optimizer state and random state into any number of ranks and any door.

    Raises: ConfigError if the checkpoint is damaged or holds other parameters; maybe on this rank alone.
    """
    state = _collect_state(model, optimizer)
    try:
        dcp.load(state, storage_reader=_Reader(checkpoint), planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        raise ConfigError(
            f"{checkpoint} is damaged or of another model: {_first_reason(error)}. "
            f"Delete it to resume from the one before, if there is one."
        ) from error
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        set_model_state_dict(model, state["model"])
        _zero_share(model, optimizer).load_state_dict(state["optimizer"])
    else:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
    random_state = state["random"]["cpu"]
    assert isinstance(random_state, Tensor)
    torch.set_rng_state(random_state)


def _first_reason(error: CheckpointException) -> str:
    for failure, _stack in error.failures.values():
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure  # DCP has wrapped it as a failure of this rank
    _, (failure, _stack) = min(error.failures.items())
    return str(failure)


def _collect_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        model_state, optimizer_state = get_model_state_dict(model), _zero_share(model, optimizer, True).state_dict()
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state, "random": {"cpu": torch.get_rng_state()}}


def _zero_share(model: nn.Module, zero: ZeroRedundancyOptimizer, loading: bool = False) -> Stateful:
    """Return the state under the keys of torch's flattened state dicts: a checkpoint does not tell doors apart."""
    names = {name.removeprefix("module."): param for name, param in model.named_parameters()}  # DDP adds the prefix
    return zero.sharded(names, loading=loading, flat=True)
