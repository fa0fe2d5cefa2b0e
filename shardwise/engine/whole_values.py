"""``full_tensor()`` of a sharded parameter inside a loss: its gradient is reduced with those of the parameter's unit.

DTensor assumes that a gathered tensor has the same gradient on all ranks, so each rank's shard would get the gradient of that
rank's batch alone.  Losses that take a head's weight (fused cross entropies, contrastive heads) gather it this way.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise import torch_private
from shardwise.engine.attachment import attachment_of
from shardwise.engine.roots import provisional_engine
from shardwise.engine.take_over import all_units
from shardwise.units.param import UnitParam
from shardwise.units.unit import Unit

_WHY_NO_GRAPH = (
    "shardwise reduces the gradient of a gathered parameter, which a compiled graph cannot: call full_tensor() outside of the "
    "function that is compiled with fullgraph=True, and pass it the result"
)
_NUM_NEAR = 16  # nodes of the graph that are searched; casts, views and products of weights have fewer


def watch_gathers() -> None:
    """Intercept ``DTensor.redistribute``, and with it ``full_tensor``, for sharded parameters; further calls do nothing."""
    torch_private.intercept_redistribute(_gather)


class _AsFull(torch.autograd.Function):
    """Returns ``values`` as a function of ``full`` in the autograd graph; ``full`` needs no memory."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.full = full if isinstance(full, DTensor) else None
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, full = gradients[0], ctx.full
        if full is not None:  # beside tensor parallelism
            mesh = full.device_mesh
            gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
            gradient = gradient.redistribute(placements=full.placements)
        return gradient, None


class _Averaged(torch.autograd.Function):
    """Returns ``gathered`` and averages its gradient over ranks, as the reduction of a unit does."""

    @staticmethod
    def forward(ctx: Any, gathered: DTensor) -> torch.Tensor:
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient: DTensor = gradients[0]
        mesh = gradient.device_mesh
        summands = DTensor.from_local(gradient.to_local(), mesh, [Partial("avg")] * mesh.ndim, run_check=False)
        return summands.redistribute(placements=gradient.placements)


def _gather(sharded: DTensor, gather: Any) -> DTensor | None:
    """Return the result of ``gather`` as a function of the unsharded parameter, or of the shards behind ``sharded``.

    None: ``sharded`` is neither a sharded parameter nor computed from one.
    """
    if torch.compiler.is_compiling():
        if any(
            getattr(param.sharded, "device_mesh", None) == sharded.device_mesh
            for unit in all_units()
            for param in unit.params
        ):
            torch_private.end_graph(_WHY_NO_GRAPH)
        return None
    if not sharded.is_leaf:
        return cast(Any, _Averaged.apply(gather())) if _comes_from_shards(sharded) else None
    found = _managed(sharded)
    if found is None:
        return None
    with torch.no_grad():
        values: DTensor = gather()
    whole = _AsFull.apply(_full_form(*found), torch_private.wait_tensor(values.to_local()))
    return DTensor.from_local(
        whole, values.device_mesh, values.placements, run_check=False, shape=values.shape, stride=values.stride()
    )


def _managed(tensor: torch.Tensor) -> tuple[Unit, UnitParam] | None:
    return next(((unit, param) for unit in all_units() for param in unit.params if param.sharded is tensor), None)


def _comes_from_shards(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` was computed, in few steps, from a sharded parameter, as ``weight.bfloat16()`` is."""
    nodes: list[Any] = [tensor.grad_fn]
    for _ in range(_NUM_NEAR):
        if not nodes:
            break
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, DTensor) and _managed(leaf) is not None:
            return True
        if node is not None and node.name() != "_FromTorchTensorBackward":  # activations that users distribute
            nodes += [each for each, _ in node.next_functions]
    return False


def _full_form(unit: Unit, param: UnitParam) -> torch.Tensor:
    """Return the unsharded parameter of ``param``, whose gradient ``unit`` reduces; the first time an all-gather makes it."""
    attachment = attachment_of(unit.modules[0])
    assert attachment is not None
    provisional_engine(attachment)
    if param.full is None:
        unit.wait()
        unit.reshard()
    group = next(group for group in unit.groups if param in group.members)
    assert param.full is not None
    group.sync_requires_grad(param, param.full, unit.backward.hook)
    return param.full
