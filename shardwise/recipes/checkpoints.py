"""Checkpoints of a run: torch DCP folders that appear whole or not at all.

A checkpoint is written into ``.writing-step-N`` and renamed to ``step-N`` when every rank is done; the small state.json
inside is written last.  A folder named ``step-N`` is therefore always complete, whenever a run was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.recipes.config import ModelShape
from shardwise.recipes.ranks import Ranks

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
        if values.pop("format") != _FORMAT:
            raise KeyError("format")
        return Progress(**{**values, "model": ModelShape(**values["model"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint} is not a checkpoint of this version of shardwise ({error!r}).") from error


def save_checkpoint(
    folder: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, ranks: Ranks, keep: int
) -> None:
    """Write a checkpoint together with all ranks, then delete all but the last ``keep``.

    Raises: OSError or CheckpointException on every rank if one cannot write; earlier checkpoints stay as they are.
    """
    final = checkpoint_path(folder, progress.step)
    writing = folder / f".writing-{final.name}"
    if ranks.is_first:
        remove_unfinished(folder)
        writing.mkdir(parents=True)
    ranks.wait_for_all()
    dcp.save(_collect_state(model, optimizer), storage_writer=dcp.FileSystemWriter(writing), no_dist=False)
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
    """Load parameters, optimizer state and random state into any number of ranks and any door."""
    state = _collect_state(model, optimizer)
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
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


def _collect_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state, "random": {"cpu": torch.get_rng_state()}}
