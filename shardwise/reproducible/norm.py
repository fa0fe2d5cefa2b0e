"""Norms of sharded gradients whose bits do not depend on how the gradients are cut.

Shards are cut between rows, so each rank computes the norms of its rows; one kernel then sums the rows of all parameters, in
the order of the parameters, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import torch_private
from shardwise.collectives.owned import sum_bytes
from shardwise.errors import ConfigError
from shardwise.fsdp.clip import Limit
from shardwise.fsdp.mesh import MeshAxes
from shardwise.layout import ChunkShard


def clip_by_rows(params: Sequence[torch.Tensor], limit: Limit, axes: MeshAxes) -> torch.Tensor:
    """Scale the gradients of ``params``, sharded along ``axes``, to ``limit``; return their norm before.  Collective.

    Raises: ConfigError for a gradient that is not cut along one dimension.
    """
    gradients = [param.grad.detach() for param in params if param.grad is not None]
    if not gradients:
        return torch.tensor(0.0, device=axes.device)
    cuts = [cut_of(gradient) for gradient in gradients]
    found: list[torch.Tensor] = []
    for gradient, cut in zip(gradients, cuts, strict=True):
        rows = torch.zeros(cut.size, dtype=torch.float64, device=axes.device)
        if cut.num_shards > 1 or axes.shard_rank == 0:  # of what all ranks have, as scalars, one gives the norms
            own = cut.rows(axes.shard_rank)
            rows[own.start : own.stop] = _norms_of_rows(torch_private.local_of(gradient), cut.dim, limit)
        found.append(rows)
    whole = torch.cat(found)
    if axes.shard_mesh_dim is not None:
        sum_bytes(whole, axes.mesh.get_group(axes.shard_mesh_dim))
    power = whole.max() if limit.is_max else (whole**limit.norm_type).sum()
    return limit.hold(power, [*map(torch_private.local_of, gradients)], [gradient.dtype for gradient in gradients])


def cut_of(gradient: torch.Tensor) -> ChunkShard:
    """Return how ``gradient``, or a parameter, is cut.  Raises: ConfigError unless it is cut along one dimension at most."""
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True) if isinstance(gradient, DTensor) else ()
    cuts = [(size, each) for size, each in axes if not isinstance(each, Replicate)]
    shape = tuple(gradient.shape) or (1,)
    if not cuts:
        return ChunkShard(shape, 0, 1)
    size, placement = cuts[0]
    if len(cuts) > 1 or type(placement) is not Shard:
        raise ConfigError(
            f"Reproducible: a parameter or gradient has placements {[each for _, each in cuts]}; norms and digests do not "
            "depend on the number of ranks only if it is cut along one dimension. Clip or compare it outside, from its full "
            "tensor"
        )
    return ChunkShard(shape, placement.dim, size)


def _norms_of_rows(local: torch.Tensor, dim: int, limit: Limit) -> torch.Tensor:
    """Return the norm of each slice of ``local`` along ``dim``.  A row has the same bits, whatever rows are beside it."""
    values = local.abs() if local.is_complex() else local
    if values.ndim <= 1:
        return values.abs().reshape(-1).double()
    rows = values.movedim(dim, 0).flatten(1).contiguous()
    precise = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(rows, limit.norm_type, dim=1, dtype=precise).double()
