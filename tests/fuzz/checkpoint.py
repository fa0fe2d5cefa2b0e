"""Checkpoints between the phases of a case: written by one API on W ranks, read by another on others.

"full": whole tensors under the names of parameters, in one file, as a plain optimizer would keep them by name.  "dcp":
what each API documents for ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer

# Parameters that no loss has used have no state yet: not strict, as for a plain optimizer.
FULL = StateDictOptions(full_state_dict=True, strict=False)
SHARDED = StateDictOptions(strict=False)


def write(net: nn.Module, optimizer: Optimizer, folder: str, how: str) -> None:
    """Write model and optimizer state to ``folder``.  Collective."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if how == "full":
        found = _full(net, optimizer)
        if dist.get_rank() == 0:
            torch.save(found, path / "full.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(_sharded(net, optimizer), checkpoint_id=path / "dcp")
    dist.barrier()


def read(net: nn.Module, optimizer: Optimizer, folder: str, how: str) -> None:
    """Load what :func:`write` has written.  Collective."""
    path = Path(folder)
    if how == "full":
        _load_full(net, optimizer, torch.load(path / "full.pt", weights_only=False))
        return
    state = _sharded(net, optimizer, path / "dcp")
    is_ours = isinstance(optimizer, (ShardedOptimizer, ZeroRedundancyOptimizer))
    if is_ours:
        _leave_out_what_is_not_saved(state["optimizer"]["state"], path / "dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultLoadPlanner(allow_partial_load=not is_ours)
        dcp.load(state, checkpoint_id=path / "dcp", planner=planner)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        set_model_state_dict(net, state["model"])
        optimizer.sharded(dict(net.named_parameters())).load_state_dict(state["optimizer"])
    elif isinstance(optimizer, ShardedOptimizer):
        set_model_state_dict(net, state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        found, optim = state["model"], state["optimizer"]
        set_state_dict(net, optimizer, model_state_dict=found, optim_state_dict=optim, options=SHARDED)


def _leave_out_what_is_not_saved(state: dict[str, Any], path: Path) -> None:
    """Remove the entries of parameters that no loss had used when the checkpoint was written."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name in list(state):
        if not any(key.startswith(f"optimizer.state.{name}.") for key in saved):
            del state[name]


def _sharded(net: nn.Module, optimizer: Optimizer, source: Path | None = None) -> dict[str, Any]:
    """Return what is to be saved; ``source``: what is to be read into, from there."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        names: dict[str, Tensor] = dict(net.named_parameters())
        found = optimizer.sharded(names, loading=source is not None).state_dict()
        return {"model": get_model_state_dict(net), "optimizer": found}
    if isinstance(optimizer, ShardedOptimizer):
        state = optimizer.blank_state_dict() if source is not None else optimizer.state_dict()
        return {"model": get_model_state_dict(net), "optimizer": state}
    _make_state(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": optim}


def _full(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, ShardedOptimizer):
        return {"model": get_model_state_dict(net, options=FULL), "optimizer": optimizer.full_state_dict()}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict() if dist.get_rank() == 0 else None
        return {"model": net.state_dict(), "optimizer": state and _by_name(state, _names(net, optimizer))}
    _make_state(net, optimizer)
    model, optim = get_state_dict(net, optimizer, options=FULL)
    return {"model": model, "optimizer": optim}


def _load_full(net: nn.Module, optimizer: Optimizer, found: dict[str, Any]) -> None:
    if isinstance(optimizer, (ShardedOptimizer, ZeroRedundancyOptimizer)):
        set_model_state_dict(net, found["model"], options=FULL)
        is_sharded = isinstance(optimizer, ShardedOptimizer)
        state = found["optimizer"] if is_sharded else _by_index(found["optimizer"], _names(net, optimizer))
        optimizer.load_state_dict(state)
        return
    if not any(found["optimizer"]["state"].values()):  # torch cannot load whole state if there is none
        set_model_state_dict(net, found["model"], options=FULL)
        for group, saved in zip(optimizer.param_groups, found["optimizer"]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        return
    _make_state(net, optimizer)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=FULL)


def _make_state(net: nn.Module, optimizer: Optimizer) -> None:
    """Let torch make the state of an optimizer that has none: zeros.

    It does so by a step on gradients of zero, in which weight decay would go into momentum, and which it counts: with
    torch alone an AdamW that has never stepped comes out of a checkpoint as one that has stepped once.
    """
    if not optimizer.state:
        decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        get_state_dict(net, optimizer)
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for entry in optimizer.state.values():
            if isinstance(entry.get("step"), Tensor):
                entry["step"].zero_()


def _names(net: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order of its groups."""
    names: dict[Tensor, str] = {param: name for name, param in net.named_parameters()}
    return [names[param] for group in optimizer.param_groups for param in group["params"]]


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    entries = {names[cast(int, number)]: values for number, values in state["state"].items()}
    return {"state": entries, "param_groups": groups}


def _by_index(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    entries = {number[name]: values for name, values in state["state"].items()}
    return {"state": entries, "param_groups": groups}
