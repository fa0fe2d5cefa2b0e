"""Refuses sharded parameters as ``inputs`` of a backward: shards are not in the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise import torch_private
from shardwise.engine.engine import live_engines
from shardwise.errors import StateError

_UNUSED = "appears to not have been used in the graph"


def check_backward_inputs() -> None:
    """Check the inputs of all backwards from now on; call it once."""
    torch_private.check_backward_inputs(_backward_of_shards)


def _backward_of_shards(inputs: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run a backward with ``inputs``, some of them DTensors.

    Raises: StateError if a sharded parameter among them gets no gradient.
    """
    names = {id(param.sharded): param.fqn for engine in live_engines for unit in engine.units for param in unit.params}
    asked = [(index, each) for index, each in enumerate(inputs) if id(each) in names]
    before = [_grad_of(each) for _, each in asked]
    try:
        results = run()
    except RuntimeError as error:
        if asked and _UNUSED in str(error):
            raise _not_in_graph([names[id(each)] for _, each in asked]) from error
        raise
    got_none = [
        names[id(each)]
        for (index, each), was in zip(asked, before, strict=True)
        if (results[index] is None if results else _grad_of(each) == was)
    ]
    if got_none:
        raise _not_in_graph(got_none)
    return results


def _grad_of(param: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes when ``param`` gets a gradient."""
    return id(param.grad), -1 if param.grad is None else param.grad._version


def _not_in_graph(names: Sequence[str]) -> StateError:
    more = f" and {len(names) - 1} more sharded parameters" if len(names) > 1 else ", a sharded parameter"
    return StateError(
        f"autograd was asked for the gradient of {names[0]}{more}, but shards are not in the graph: forward uses the "
        "unsharded parameters, and shards get .grad when gradients are reduced. Call loss.backward() without inputs, then read "
        ".grad; for one gradient per loss, clone .grad and call zero_grad() between the losses"
    )
