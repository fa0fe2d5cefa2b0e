"""Sharded data parallelism for PyTorch, as a library you call from your own training loop."""

from shardwise.api.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.api.describe import describe_units
from shardwise.api.fully_shard import fully_shard
from shardwise.api.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.api.replicate import ReplicateModule, replicate
from shardwise.api.shard_model import shard_model
from shardwise.api.sharded_optimizer import ShardedOptimizer
from shardwise.api.temporary import policy
from shardwise.api.use_in import use_in
from shardwise.api.zero import ZeroRedundancyOptimizer
from shardwise.comm.links.link import set_default_transport
from shardwise.doctor.recorder import record
from shardwise.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DesyncError,
    LayoutError,
    ShardwiseError,
    StateError,
    TransportError,
)
from shardwise.optim.clip import clip_grad_norm_
from shardwise.plan.table import UnitRow, UnitTable
from shardwise.units.axes import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from shardwise.units.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "ConfigError",
    "DDPMeshInfo",
    "DamagedCheckpointError",
    "DataParallelMeshDims",
    "DesyncError",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LayoutError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedOptimizer",
    "ShardwiseError",
    "StateError",
    "TransportError",
    "UnitRow",
    "UnitTable",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "describe_units",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "policy",
    "record",
    "register_fsdp_forward_method",
    "replicate",
    "set_default_transport",
    "shard_model",
    "share_comm_ctx",
    "use_in",
]
