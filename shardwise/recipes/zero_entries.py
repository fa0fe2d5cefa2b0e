"""The state of a ZeroRedundancyOptimizer under the keys that torch's flattened optimizer state dicts have.

With them a checkpoint says nothing about the door or the number of ranks that wrote it: ``state.NAME.exp_avg`` is the
whole tensor, of which every rank reads and writes the elements it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwise import ZeroRedundancyOptimizer


def zero_entries(model: nn.Module, zero: ZeroRedundancyOptimizer, *, loading: bool) -> dict[str, Any]:
    """Return {"state.NAME.KEY": ..., "param_groups.NAME.OPTION": ...} of this rank's share."""
    found = zero.sharded(_named(model), loading=loading).state_dict()
    entries = {f"state.{name}.{key}": value for name, state in found["state"].items() for key, value in state.items()}
    for group, local in zip(found["param_groups"], zero.optim.param_groups, strict=True):
        options = {option: value for option, value in local.items() if option != "params"}
        entries |= {f"param_groups.{name}.{option}": options[option] for name in group["params"] for option in options}
    return entries


def load_zero_entries(model: nn.Module, zero: ZeroRedundancyOptimizer, entries: Mapping[str, Any]) -> None:
    """Adopt what a checkpoint has filled into ``zero_entries(..., loading=True)``."""
    named = _named(model)
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for entry, value in entries.items():
        kind, _, rest = entry.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[key] = value
    names = {id(param): name for name, param in named.items()}
    members = [[names[id(param)] for param in group["params"]] for group in zero.param_groups]
    groups = [{**options[group[0]], "params": group} for group in members]
    zero.sharded(named).load_state_dict({"state": state, "param_groups": groups})


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): param for name, param in model.named_parameters()}  # DDP adds the prefix
