"""What a unit keeps between forward and backward where it reshards to a smaller mesh: a piece of each full parameter."""

from __future__ import annotations

import torch

from shardwise.layout.bucket import build_bucket
from shardwise.layout.shard import ChunkShard
from shardwise.units.axes import MeshAxes
from shardwise.units.flat_bucket import FlatBucket, SubBucket
from shardwise.units.idle import mark_sub
from shardwise.units.place import ParamStorage
from shardwise.units.placement import sub_parameter


def cut_bucket(bucket: FlatBucket, full: torch.Tensor, axes: MeshAxes, place: ParamStorage) -> SubBucket:
    """Copy this rank's shards on the mesh of ``axes`` out of ``full``, the gathered bucket, and register them.

    Args:
        full: 1-d, with the sections of all ranks, as ``bucket.layout`` says.
    """
    cuts = [ChunkShard(shard.shape, shard.dim, axes.num_shards) for shard in bucket.layout.shards]
    dtype = bucket.full_dtype
    layout = build_bucket(cuts, place.alignment(dtype), place.alignment(dtype))
    sub = SubBucket(bucket.params, layout, dtype, torch.empty(layout.section_numel, dtype=dtype, device=full.device))
    for param, cut, begin, window in zip(
        bucket.params, cuts, bucket.layout.full_offsets, sub.windows(axes.shard_rank), strict=True
    ):
        whole = full.narrow(0, begin, cut.numel).view(cut.shape)
        rows = cut.rows(axes.shard_rank)
        window.copy_(whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows)))
        param.subsharded = sub_parameter(param, cut, window, axes)
        mark_sub(param)
        param.register(param.subsharded)
    return sub
