"""Sharded data parallelism for PyTorch, as a library you call from your own training loop."""

from shardwise.api.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.api.fully_shard import fully_shard
from shardwise.api.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from shardwise.api.module import (
    FSDPModule,
    UnshardHandle,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.api.policy import policy
from shardwise.api.replicate import ReplicateModule, replicate
from shardwise.api.sharded_optimizer import ShardedOptimizer
from shardwise.api.zero import ZeroRedundancyOptimizer
from shardwise.comm.link import set_default_transport
from shardwise.errors import ConfigError, DesyncError, LayoutError, ShardwiseError, StateError
from shardwise.optim.clip import clip_grad_norm_
from shardwise.runtime.axes import DataParallelMeshDims
from shardwise.runtime.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "ConfigError",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DesyncError",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "LayoutError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedOptimizer",
    "ShardwiseError",
    "StateError",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "policy",
    "register_fsdp_forward_method",
    "replicate",
    "set_default_transport",
    "share_comm_ctx",
]
