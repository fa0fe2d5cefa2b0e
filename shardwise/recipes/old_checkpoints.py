"""Checkpoints of run folders from before ``shardwise.checkpoint``: torch DCP folders, read without running what they hold.

DCP pickles its ``.metadata``, and the values that are no tensors.  ``TorchDcpReader`` admits the classes such folders are
made of and nothing else, and no rank asks another, which would unpickle what it sends.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
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
from shardwise.checkpoint.dcp import TorchDcpReader
from shardwise.errors import CheckpointError, ConfigError
from shardwise.safe_files import read_json

STATE = "state.json"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


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
    """Return what state.json says.  Raises: UnsafeFileError, KeyError."""
    values = read_json(checkpoint, STATE)
    if values["format"] != 1:
        raise KeyError("format")
    return values


def load_old_checkpoint(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load parameters, optimizer state and random state into any number of ranks and any door.

    Raises: ConfigError if the checkpoint is damaged or holds other parameters; maybe on this rank alone.
    """
    state = _collect_state(model, optimizer)
    reader = TorchDcpReader(checkpoint)
    try:
        reader.read_metadata()  # DCP of torch 2.11 keeps the reason to itself if this fails inside of it
        dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, CheckpointError, OSError) as error:
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


def _first_reason(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return str(error)
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
