"""``full_tensor()`` of a sharded parameter inside a loss: its gradient goes into the reduction of the parameter's unit.

To autograd a gathered tensor is the same on all ranks, and so is its gradient: each rank would give its shard the gradient of
its own part of the batch.  Losses that take a head's weight (fused cross entropies, contrastive heads) gather it so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private
from shardwise.engine.attachment import attachment_of
from shardwise.engine.roots import provisional_engine
from shardwise.engine.take_over import all_units
from shardwise.units.param import UnitParam
from shardwise.units.unit import Unit


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


def _gather(sharded: DTensor, gather: Any) -> DTensor | None:
    """Return what ``gather`` makes of a sharded parameter, as a function of the full form; None: it is no such parameter."""
    found = next(((unit, param) for unit in all_units() for param in unit.params if param.sharded is sharded), None)
    if found is None:
        return None
    with torch.no_grad():
        values: DTensor = gather()
    whole = _AsFull.apply(_full_form(*found), torch_private.wait_tensor(values.to_local()))
    return DTensor.from_local(
        whole, values.device_mesh, values.placements, run_check=False, shape=values.shape, stride=values.stride()
    )


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
