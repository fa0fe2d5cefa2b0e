"""The state that users hand over, as carriers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.carriers import Carrier, ObjectCarrier, PerRank, PerRankCarrier, RandomState, own_state
from shardwise.checkpoint.contents import Contents, Known
from shardwise.checkpoint.modules import ModuleCarrier
from shardwise.checkpoint.names import join
from shardwise.checkpoint.optimizers import OptimizerCarrier
from shardwise.errors import ArgumentTypeError, ConfigError

logger = logging.getLogger(__name__)


def carriers_of(state: Mapping[str, Any], rank: int, size: int) -> list[Carrier]:
    """Return a carrier for each entry of ``state``, in its order.

    Raises: ConfigError for an entry that cannot be saved.
    """
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ArgumentTypeError(
            f'the state is a {type(state).__name__}; give what is to be saved by name, such as {{"model": model}}'
        )
    if not state:
        raise ConfigError(
            'the state is empty; give what is to be saved by name, as {"model": model, "optimizer": optimizer}'
        )
    modules = {
        key: ModuleCarrier(join(_checked(key)), thing, rank, size)
        for key, thing in state.items()
        if isinstance(thing, nn.Module)
    }
    found: list[Carrier] = []
    for key, thing in state.items():
        prefix = join(_checked(key))
        if key in modules:
            found.append(modules[key])
        elif isinstance(thing, Optimizer):
            found.append(OptimizerCarrier(prefix, thing, _names_for(thing, modules)))
        elif isinstance(thing, (PerRank, RandomState)):
            found.append(PerRankCarrier(key, own_state(thing), rank, size, logger.warning))
        else:
            found.append(ObjectCarrier(prefix, thing))
    return found


def contents_of(state: Mapping[str, Any], rank: int, size: int, known: Known) -> Contents:
    """Return what this rank holds of ``state``; collective where an optimizer's state is with owners of matrices.

    ``known``: see :func:`~shardwise.checkpoint.contents.parts_of`.  Raises: ConfigError for what cannot be saved.
    """
    contents = Contents(known=known)
    for carrier in carriers_of(state, rank, size):
        carrier.put(contents)
    return contents


def _names_for(optimizer: Optimizer, modules: Mapping[str, ModuleCarrier]) -> dict[int, str]:
    """Return what an optimizer calls its parameters: their names, after that of the module if it has those of several."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found: dict[int, tuple[str, str]] = {}
    for key, module in modules.items():
        for number, name in module.names.items():
            if number in params:
                found.setdefault(number, (key, name))
    several = len({key for key, _ in found.values()}) > 1
    return {number: f"{key}:{name}" if several else name for number, (key, name) in found.items()}


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key or key == "rank":
        raise ConfigError(f"{key!r} cannot be the name of an entry of the state: expected a text, and not 'rank'")
    return key
