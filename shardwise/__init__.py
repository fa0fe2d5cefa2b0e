"""Sharded data parallelism for PyTorch, as a library you call from your own training loop."""

from shardwise.api.compression_report import CodedTraffic, CompressionState, UnitCompression
from shardwise.api.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.api.describe import describe_units
from shardwise.api.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.api.handles import GradientReductionHandle, UnshardHandle
from shardwise.api.init_parameters import init_parameters
from shardwise.api.module import (
    FSDPModule,
    get_cls_to_fsdp_cls,
)
from shardwise.api.replicate import ReplicateModule, replicate
from shardwise.api.shard_model import shard_model
from shardwise.api.sharded_optimizer import ShardedOptimizer
from shardwise.api.temporary import policy
from shardwise.api.trace import Span, Trace, trace
from shardwise.api.transaction import transaction
from shardwise.api.use_in import use_in
from shardwise.api.zero import ZeroRedundancyOptimizer
from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.comm.cables import set_host_timeout
from shardwise.comm.links.link import set_default_transport
from shardwise.comm.wait_watch import set_wait_report
from shardwise.doctor.recorder import record
from shardwise.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DesyncError,
    LayoutError,
    RejectedStep,
    ShardwiseError,
    StateError,
    StepError,
    TransportError,
    UsageError,
)
from shardwise.optim.clip import clip_grad_norm_
from shardwise.plan.table import UnitRow, UnitTable
from shardwise.planner.advice import Plan, plan
from shardwise.planner.hardware import Hardware, Wire
from shardwise.planner.search import Choices
from shardwise.units.axes import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from shardwise.units.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.version import __version__ as __version__

__all__ = [
    "ArgumentTypeError",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Choices",
    "CodedTraffic",
    "CompressionPolicy",
    "CompressionState",
    "ConfigError",
    "DDPMeshInfo",
    "DamagedCheckpointError",
    "DataParallelMeshDims",
    "DesyncError",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "Hardware",
    "LayoutError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "RejectedStep",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedOptimizer",
    "ShardwiseError",
    "Span",
    "StateError",
    "StepError",
    "Trace",
    "TransportError",
    "UnitCompression",
    "UnitRow",
    "UnitTable",
    "UnshardHandle",
    "UsageError",
    "Wire",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "describe_units",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "init_parameters",
    "plan",
    "policy",
    "record",
    "register_fsdp_forward_method",
    "replicate",
    "set_default_transport",
    "set_host_timeout",
    "set_wait_report",
    "shard_model",
    "share_comm_ctx",
    "trace",
    "transaction",
    "use_in",
]
