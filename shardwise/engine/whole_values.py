"""``full_tensor()`` of a sharded parameter inside a loss: its gradient goes into the reduction of the parameter's unit.

To autograd a gathered tensor is the same on all ranks, and so is its gradient: each rank would give its shard the gradient of
its own part of the batch.  Losses that take a head's weight (fused cross entropies, contrastive heads) gather it so.
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
    "shardwise reduces the gradient of a parameter that is gathered, which no graph does: call full_tensor() outside of what "
    "is compiled with fullgraph=True, and give it the result"
)
_NUM_NEAR = 16  # nodes of a graph that are searched: casts, views and products of weights have fewer


def watch_gathers() -> None:
    """Let ``DTensor.redistribute``, and ``full_tensor`` with it, ask for the full form of sharded parameters.  Once."""
    torch_private.intercept_redistribute(_gather)


class _AsFull(torch.autograd.Function):
    """Returns ``values`` as what a graph has computed from ``full``, which need have no memory."""

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
    """Returns ``gathered``, whose gradient is then the mean over ranks, as the reduction of a unit is."""

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
    """Return what ``gather`` makes of a sharded parameter, as a function of the full form, or of what comes from shards.

    None: ``sharded`` is of neither kind.
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
    """Return the full form of ``param``, whose gradient ``unit`` reduces; made by a gather if there never was one."""
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
