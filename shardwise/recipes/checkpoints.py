"""Checkpoints of a run: ``shardwise.checkpoint`` folders that hold the model, the optimizer, and how far the run is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import CheckpointError, DamagedCheckpointError, RandomState, finish, load, save
from shardwise.checkpoint.files import DiskFiles
from shardwise.checkpoint.folder import list_checkpoints as list_new
from shardwise.checkpoint.reader import read_manifest
from shardwise.checkpoint.values import decode
from shardwise.errors import ConfigError
from shardwise.recipes.config import ModelShape, typed
from shardwise.recipes.old_checkpoints import (
    is_old,
    list_old_checkpoints,
    load_old_checkpoint,
    read_old_values,
    remove_unfinished,
)

_PROGRESS = "progress"
_FIELDS = ("step", "windows", "num_parameters")


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is: ``step`` steps and ``windows`` windows of the text are done, by a model of shape ``model``."""

    step: int
    windows: int
    model: ModelShape
    num_parameters: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.  ``skipped``: newer checkpoints that were damaged, and how."""

    checkpoint: Path
    done: RunProgress
    skipped: tuple[str, ...]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    new = [each.path for each in list_new(DiskFiles(), folder)] if folder.is_dir() else []
    return sorted({*new, *list_old_checkpoints(folder)}, key=lambda path: path.name)


def read_progress(checkpoint: Path) -> RunProgress:
    """Return how far the run was.  Raises: ConfigError if it is no checkpoint of a run, or a damaged one."""
    try:
        if is_old(checkpoint):
            return progress_from_json(read_old_values(checkpoint))
        manifest = read_manifest(DiskFiles(), checkpoint)
        return progress_from_json(decode(manifest.values[_PROGRESS], _PROGRESS))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{checkpoint} is not a checkpoint of this version of shardwise ({error!r}).") from error
    except CheckpointError as error:
        raise ConfigError(f"{error}.") from error


def progress_from_json(values: Mapping[str, Any]) -> RunProgress:
    """Return what ``asdict`` made of a Progress.  Raises: KeyError, TypeError, ConfigError."""
    shape = typed(ModelShape, values["model"], "the checkpoint's model")
    return typed(RunProgress, {name: values[name] for name in _FIELDS} | {"model": shape}, "the checkpoint's progress")


def start_saving(folder: Path, progress: RunProgress, model: nn.Module, optimizer: Optimizer, keep: int) -> None:
    """Begin a checkpoint together with all ranks; files are written while training goes on.  ``model``: the plain one.

    Raises: CheckpointError on every rank if this one cannot begin, or the one before was not written.
    """
    state = _state(model, optimizer) | {_PROGRESS: asdict(progress)}
    save(folder, state, step=progress.step, keep=keep, wait=False, buffers="rank0")


def finish_saving(folder: Path, keep: int, *, is_first: bool) -> None:
    """Return when the last checkpoint is there whole; those in the old form then go like other old ones.

    Raises: CheckpointError on every rank if it was not written; earlier ones are as they were.
    """
    finish(folder)
    if is_first:
        kept = list_checkpoints(folder)[-keep:]
        for old in list_old_checkpoints(folder):
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)


def load_newest(folder: Path, model: nn.Module, optimizer: Optimizer) -> Resumed:
    """Load the newest checkpoint that is whole to the byte on all ranks, into any number of ranks and any door.

    Raises: ConfigError on every rank if there is none, or it holds other parameters; nothing was changed then.
    """
    newest = list_checkpoints(folder)[-1]
    if is_old(newest):
        load_old_checkpoint(newest, model, optimizer)
        return Resumed(newest, read_progress(newest), ())
    progress: dict[str, Any] = {}
    try:
        loaded = load(folder, _state(model, optimizer) | {_PROGRESS: progress}, fallback=True)
    except DamagedCheckpointError as error:
        raise ConfigError(f"no checkpoint of the run is whole: {error}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return Resumed(loaded.path, progress_from_json(progress), loaded.skipped)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "random": RandomState()}


__all__ = [
    "RunProgress", "Resumed", "finish_saving", "list_checkpoints", "load_newest", "progress_from_json", "read_progress",
    "remove_unfinished", "start_saving",
]  # fmt: skip
