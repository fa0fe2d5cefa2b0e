"""Checkpoints of a run: torch DCP folders that appear whole or not at all.

A checkpoint is written into ``.writing-step-N`` and renamed to ``step-N`` when every rank is done; the small state.json
inside is written last.  A folder named ``step-N`` is therefore always complete, whenever a run was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
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
from shardwise.errors import ConfigError, StateError
from shardwise.recipes.config import ModelShape
from shardwise.recipes.ranks import RunRanks

_FORMAT = 1
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: ``step`` steps and ``windows`` windows of the text are done, by a model of shape ``model``."""

    step: int
    windows: int
    model: ModelShape
    num_parameters: int


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` steps lies."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def read_progress(checkpoint: Path) -> Progress:
    """Read state.json.  Raises: ConfigError if it is not one of ours."""
    try:
        values = json.loads((checkpoint / "state.json").read_text())
        if values["format"] != _FORMAT:
            raise KeyError("format")
        return progress_from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint} is not a checkpoint of this version of shardwise ({error!r}).") from error


def progress_from_json(values: Mapping[str, Any]) -> Progress:
    """Return what ``asdict`` made of a Progress.  Raises: KeyError, TypeError, ValueError."""
    shape = ModelShape(**values["model"])
    return Progress(int(values["step"]), int(values["windows"]), shape, int(values["num_parameters"]))


def save_checkpoint(
    folder: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, ranks: RunRanks, keep: int
) -> None:
    """Write a checkpoint together with all ranks, then delete all but the last ``keep``.

    Raises: StateError on every rank if one cannot write, OSError on rank 0; earlier checkpoints stay as they are.
    """
    final = checkpoint_path(folder, progress.step)
    writing = folder / f".writing-{final.name}"
    if ranks.is_first:
        remove_unfinished(folder)
        writing.mkdir(parents=True)
    ranks.wait_for_all()
    try:
        dcp.save(_collect_state(model, optimizer, loading=False), storage_writer=dcp.FileSystemWriter(writing))
    except CheckpointException as error:
        if ranks.is_first:
            remove_unfinished(folder)
        _raise_interrupt(error)
        raise StateError(
            f"{final} could not be written: {_first_reason(error)}. Earlier checkpoints are whole: "
            f"free space or fix the folder, then continue with --resume {folder.parent}."
        ) from error
    if ranks.is_first:
        values = {"format": _FORMAT, **asdict(progress)}
        (writing / "state.json").write_text(json.dumps(values, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.wait_for_all()


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed run left half written."""
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load parameters, optimizer state and random state into any number of ranks and any door.

    Raises: ConfigError on every rank if the checkpoint is damaged or holds other parameters.
    """
    state = _collect_state(model, optimizer, loading=True)
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
    except CheckpointException as error:
        _raise_interrupt(error)
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


def _raise_interrupt(error: CheckpointException) -> None:
    """Go on with a Ctrl-C or an exit that DCP has wrapped as a failure of this rank."""
    for failure, _stack in error.failures.values():
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure


def _first_reason(error: CheckpointException) -> str:
    """Return one line: the operating system's reason if any rank has one, else the lowest rank's."""
    causes = {rank: _os_error(failure) for rank, (failure, _stack) in error.failures.items()}
    for rank, cause in sorted(causes.items()):
        if cause is not None:
            return f"rank {rank}: {cause.strerror or cause}"
    rank, (failure, _stack) = min(error.failures.items())
    return f"rank {rank}: {failure}"


def _os_error(failure: BaseException | None) -> OSError | None:
    while failure is not None and not isinstance(failure, OSError):
        failure = failure.__cause__ or failure.__context__
    return failure


def _collect_state(model: nn.Module, optimizer: Optimizer, *, loading: bool) -> dict[str, Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        share = _zero_share(model, optimizer, loading=loading)
        model_state, optimizer_state = get_model_state_dict(model), share.state_dict()
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state, "random": {"cpu": torch.get_rng_state()}}


def _zero_share(model: nn.Module, zero: ZeroRedundancyOptimizer, *, loading: bool = False) -> Stateful:
    """Return the state under the keys of torch's flattened state dicts: a checkpoint does not tell doors apart."""
    names = {name.removeprefix("module."): param for name, param in model.named_parameters()}  # DDP adds the prefix
    return zero.sharded(names, loading=loading, flat=True)
