"""Sharded data parallelism for PyTorch, as a library you call from your own training loop."""

from shardwise.checkpoint.convert import full_state_dict, full_tensors
from shardwise.checks.optimizers import register as _watch_optimizers
from shardwise.checks.root import register as _register_checks
from shardwise.collectives.compressed import CompressionPolicy
from shardwise.collectives.routes import set_default_transport
from shardwise.collectives.shared_memory import register_transports as _register_transports
from shardwise.consistency.failure_report import set_wait_report
from shardwise.consistency.process_groups import set_host_timeout
from shardwise.consistency.recorder import record
from shardwise.data.microbatches import Microbatches
from shardwise.data.mixture import Mixture
from shardwise.data.streams import Packed
from shardwise.elastic.run import elastic
from shardwise.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DesyncError,
    LayoutError,
    RankError,
    RejectedStep,
    ShardwiseError,
    StateError,
    StepError,
    TransportError,
    UsageError,
)
from shardwise.fsdp.api import (
    ReplicateModule,
    describe_units,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    shard_model,
    share_comm_ctx,
    use_in,
)
from shardwise.fsdp.clip import clip_grad_norm_
from shardwise.fsdp.init_parameters import init_parameters
from shardwise.fsdp.mesh import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    Strategy,
)
from shardwise.fsdp.module import (
    CodedTraffic,
    CompressionState,
    FSDPModule,
    GradientReductionHandle,
    UnitCompression,
    UnshardHandle,
    get_cls_to_fsdp_cls,
    policy,
)
from shardwise.fsdp.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.loop.launch import notebook_launch
from shardwise.loop.meter import Span, StepMeter, Trace, trace
from shardwise.offload.activations import ActivationPolicy, apply_activations
from shardwise.offload.disk import DiskOffloadPolicy
from shardwise.offload.fit import MemoryLimit
from shardwise.offload.optimizer import OffloadReport, OptimizerOffload, offload_report
from shardwise.offload.sleep import Sleep, asleep
from shardwise.one_host import find_version as _find_version
from shardwise.optim.sharded_optimizer import ShardedOptimizer
from shardwise.plan.grouping import UnitRow, UnitTable
from shardwise.planner.advice import Choices, Plan, plan
from shardwise.planner.hardware import Hardware, Wire
from shardwise.prove.digests import RunDigests
from shardwise.prove.record import recorded
from shardwise.publish.publisher import WeightPublisher
from shardwise.publish.reader import WeightReader
from shardwise.reproducible.reproducible import Reproducible
from shardwise.transaction import transaction
from shardwise.zero.optimizer import ZeroRedundancyOptimizer
from shardwise.zero.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__version__: str = _find_version()  # from the metadata of the package: only pyproject.toml has it
_register_transports()
_register_checks()
_watch_optimizers()

__all__ = [
    "ActivationPolicy",
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
    "DiskOffloadPolicy",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "Hardware",
    "LayoutError",
    "MemoryLimit",
    "Microbatches",
    "MixedPrecisionPolicy",
    "Mixture",
    "OffloadPolicy",
    "OffloadReport",
    "OptimizerOffload",
    "Packed",
    "Plan",
    "RankError",
    "RejectedStep",
    "ReplicateModule",
    "Reproducible",
    "RunDigests",
    "ShardPlacementResult",
    "ShardedOptimizer",
    "ShardwiseError",
    "Sleep",
    "Span",
    "StateError",
    "StepError",
    "StepMeter",
    "Strategy",
    "Trace",
    "TransportError",
    "UnitCompression",
    "UnitRow",
    "UnitTable",
    "UnshardHandle",
    "UsageError",
    "WeightPublisher",
    "WeightReader",
    "Wire",
    "ZeroRedundancyOptimizer",
    "apply_activations",
    "asleep",
    "clip_grad_norm_",
    "describe_units",
    "elastic",
    "full_state_dict",
    "full_tensors",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "init_parameters",
    "notebook_launch",
    "offload_report",
    "plan",
    "policy",
    "record",
    "recorded",
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
