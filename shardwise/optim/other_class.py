"""Find out, before a load changes anything, that saved state is that of another optimizer class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.optim.slices import known_base
from shardwise.optim.state_dict import options_of
from shardwise.optim.sums import states_after_zeros

# Options that torch's schedulers add to param groups, whatever the class.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
# Options that change no name of state; some of their values need another device than the probe's.
_OF_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def why_other_class(
    optimizer: Optimizer,
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    states: Iterable[tuple[int, Collection[str]]],
    saved_class: str | None = None,
) -> str | None:
    """Return why ``optimizer`` cannot take over a saved param group; None if nothing speaks against it.

    Options of the class come from the checkpoint, so that SGD without momentum loads into SGD with momentum, as in torch.

    Args:
        own, saved: the options of the group here and there.
        states: per parameter with saved state, its number of dims and the names of its state.
        saved_class: the name of the class, where the checkpoint has it.
    """
    kind = type(optimizer)
    foreign = saved.keys() - own.keys() - _OF_SCHEDULERS
    lacking = optimizer.defaults.keys() - saved.keys() if saved else set[str]()
    there = [(dim, set(names)) for dim, names in states if names]
    here = _names_of_state(kind, {**own, **saved}, {dim for dim, _ in there})
    is_renamed = saved_class is not None and saved_class not in [base.__name__ for base in kind.__mro__]
    odd = [(here[dim], names) for dim, names in there if dim in here and here[dim] != names]
    if not (
        any(wanted - names for wanted, names in odd)
        or (foreign and (lacking or odd))
        or (is_renamed and (foreign or lacking))
    ):
        return None
    wanted, found = odd[0] if odd else (set[str](), there[0][1] if there else set[str]())
    return (
        f"it is the state of {saved_class or 'another optimizer class'} (state {_listed(found)}; options that "
        f"{kind.__name__} does not have: {_listed(foreign)}), and {kind.__name__} needs "
        f"{f'state {_listed(wanted)} and ' if odd else ''}options that are not there: {_listed(lacking)}. Load it into "
        "an optimizer of the class that was saved, or load the model without the optimizer"
    )


def _names_of_state(kind: type[Optimizer], options: Mapping[str, Any], dims: Collection[int]) -> dict[int, set[str]]:
    """Return the names of the state of a parameter by its number of dims; empty for a class that is not torch's."""
    base = known_base(kind)
    if base is None or not dims:
        return {}
    params = [torch.zeros([2] * dim, device="cpu") for dim in dims]
    wanted = {key: value for key, value in options_of(options).items() if key not in _OF_KERNELS}
    states = states_after_zeros(lambda groups: base(groups), [{**wanted, "params": params}])  # pyright: ignore
    return {dim: set(state) for dim, state in zip(dims, states, strict=True)}


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
