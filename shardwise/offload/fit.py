"""``MemoryLimit``: the recomputation and the place of optimizer state with which a step fits into the memory of a rank."""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from shardwise import torch_private
from shardwise.arguments import check_kind, explains_fields
from shardwise.collectives.streams import limit_heap
from shardwise.consistency.agreement import open_store_gather
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes, parse_size
from shardwise.fsdp.api import blocks_of, memory_policies
from shardwise.fsdp.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.offload.activations import ActivationPolicy, apply_activations
from shardwise.offload.disk import DiskOffloadPolicy
from shardwise.offload.optimizer import OffloadedStep, OptimizerOffload
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.planner.advice import Choices, Plan, plan
from shardwise.planner.hardware import (
    UNIT_STRATEGIES,
    Hardware,
    Loss,
    MakeOptimizer,
    default_loss,
    empty_copy,
    measured,
    this_host,
)

_logger = logging.getLogger("shardwise.offload")
_LEFT = "MemoryLimit(%s): a step leaves the plan, and may need more memory: planned are %s. Plan with what you train"


@explains_fields
@dataclass(slots=True)
class MemoryLimit:
    """The memory that a rank may need, for ``shard_model(memory=)``, which then plans a step and makes it fit.

    As few blocks as possible are recomputed in backward, and as little optimizer state as possible is on a disk, with
    parameters and gradients where nothing else fits; on accelerators all of it is in host memory then.

    Args:
        limit: bytes of a rank, on CPU with those of its process, or a text: "8 GiB".
        inputs, loss: of one microbatch of a rank, as for :func:`plan`.  Without inputs, as ``shard_model(memory="8 GiB")`` has
            none, the first training forward plans for its own, and only blocks that recompute can be chosen.
        folder: on a local disk that may have them, on CPU ranks; None: they stay in memory.
        accumulate: microbatches of a step.
        optimizer: as in :class:`Choices`; a plan takes its state as it is, and never chooses a smaller one.

    Attributes:
        plan: set by ``shard_model``: what a step holds and takes, and why.
        offload: set by ``shard_model``: for :class:`ShardedOptimizer`; None where all state stays in memory.

    Example:
        >>> memory = shardwise.MemoryLimit("8 GiB", (4, 512), folder="/scratch")  # doctest: +SKIP
        >>> model = shardwise.shard_model(model, memory=memory)  # doctest: +SKIP
        >>> print(memory.plan.why())  # doctest: +SKIP
    """

    limit: int | str
    inputs: Sequence[object] | tuple[int, int] = ()
    loss: Loss = default_loss
    folder: str | None = None
    accumulate: int = 1
    optimizer: str | MakeOptimizer = "adamw"
    plan: Plan | None = field(default=None, init=False)
    offload: OptimizerOffload | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_kind("MemoryLimit: inputs", self.inputs, Sequence, "(batch, length), or a tuple of the model's arguments")
        if (self._num_bytes() or 0) < 1:
            raise ConfigError(f"MemoryLimit({self.limit!r}); expected bytes, or a text such as '8 GiB'")
        if self.folder is not None and not self.inputs:
            raise ConfigError("MemoryLimit: where state is on a disk is decided before the first forward: give inputs")

    def _num_bytes(self) -> int | None:
        return parse_size(self.limit) if isinstance(self.limit, str) else self.limit

    def fit(
        self, model: nn.Module, mesh: DeviceMesh, strategy: str, min_unit_bytes: int, precision: MixedPrecisionPolicy
    ) -> OffloadPolicy | None:
        """Plan a step, and let blocks of ``model`` recompute; return where shards are, if not in memory.  Collective.

        Raises: ConfigError on every rank if nothing fits.
        """
        if mesh.ndim > 1 or strategy not in UNIT_STRATEGIES:
            raise ConfigError(
                f"MemoryLimit({self.limit!r}) for {strategy} on a mesh of {mesh.ndim} axes; expected zero3, zero2 or ddp on "
                "one axis"
            )
        choices = Choices(
            strategies=(strategy,),
            unit_bytes=(min_unit_bytes,),
            keep_blocks=True,
            offload=(False,) if mesh.device_type == "cpu" or not self.inputs else (False, True),
            disk=self.folder is not None,
            precision="bf16" if precision.param_dtype == torch.bfloat16 else "fp32",
            accumulate=self.accumulate,
            optimizer=self.optimizer,
        )

        if mesh.device_type == "cpu":
            limit_heap()  # a plan counts no holes in the heap
        dtype = precision.param_dtype or torch.float32
        if self.inputs:
            return self._choose(model, model, mesh, choices, dtype)
        twin = empty_copy(model)

        def before_forward(module: nn.Module, given: tuple[object, ...], named: Mapping[str, object]) -> None:
            if not torch.is_grad_enabled():
                return
            if named or not given:
                raise ConfigError(
                    f"MemoryLimit({self.limit!r}): the first forward has arguments by keyword ({', '.join(named)}), and a plan "
                    f"takes them in order: memory=MemoryLimit({self.limit!r}, inputs, loss=)"
                )
            self.inputs = torch_private.map_tensors(lambda each: each.to("meta"), given)
            self._choose(twin, module, mesh, choices, dtype)
            in_forward.remove()

        torch_private.skip_frames(before_forward, "MemoryLimit plans")
        in_forward = model.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
        return None

    def _choose(
        self, planned: nn.Module, model: nn.Module, mesh: DeviceMesh, choices: Choices, dtype: torch.dtype
    ) -> OffloadPolicy | None:
        """Plan a step of ``planned``, and let blocks of ``model``, the same or sharded, recompute as the plan says."""

        def plan_for(hardware: Hardware | str) -> Plan:
            return plan(planned, self.inputs, mesh.size(), hardware=hardware, loss=self.loss, choices=choices)

        plan_for("cpu")  # so that this process has loaded what a step loads
        tensors = map(torch_private.local_of, [*model.parameters(), *model.buffers()])
        own = sum(each.numel() * each.element_size() for each in tensors if each.device.type == "cpu")
        gather = open_store_gather(mesh.get_group(), "memory of ranks")
        gather.call("")  # so that ranks measure at the same time
        texts = gather.call(json.dumps(measured(dtype, own, self.folder)))
        figures = [min(each) for each in zip(*map(json.loads, texts), strict=True)]
        limit = self._num_bytes() or 0
        self.plan = plan_for(this_host(mesh.device_type, mesh.size(), limit, figures))
        _logger.info("MemoryLimit(%s): %s", format_bytes(limit), self.plan.why())
        if self.plan.best is None:
            raise ConfigError(f"MemoryLimit({format_bytes(limit)}): {self.plan.why()}")
        best, self.offload = self.plan.best.setting, None
        if best.recompute:
            found = blocks_of(model)
            chosen = [path for path, _ in model.named_modules() if path in found][: len(found) - best.keep_blocks]
            apply_activations(model, ActivationPolicy(dict.fromkeys(chosen, "recompute")))
        if best.disk_share:
            self.offload = OptimizerOffload(best.disk_share, folder=self.folder)
        self._watch(model, best.state_bytes)
        if not best.offload:
            return None
        folder = self.folder if best.disk_share else None
        return CPUOffloadPolicy() if folder is None else DiskOffloadPolicy(folder=folder)

    def _watch(self, model: nn.Module, state_bytes: float) -> None:
        """Warn once of a forward of larger inputs, and once of a step with more optimizer state in memory, than planned."""
        most = math.prod(cast(Any, self.inputs)) if isinstance(self.inputs[0], int) else _largest(self.inputs)
        own, where = weakref.WeakSet([model]), "" if self.offload is None else " on disk (offload=memory.offload)"

        def before_forward(_: nn.Module, *given: Any) -> None:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled() and _largest(given) > most:
                in_forward.remove()
                _logger.warning(_LEFT, self.limit, f"inputs of {most} elements, and a forward gets {_largest(given)}")

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if {id(param) for each in own for param in each.parameters()}.isdisjoint(map(id, params)):
                return
            own.clear()
            backend = optimizer_backend(optimizer) if isinstance(optimizer, ShardedOptimizer) else None
            if not isinstance(backend, OffloadedStep):
                values = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
                found = sum(each.nbytes for each in values) / sum(each.numel() for each in params)
                if where or found > 1.1 * state_bytes:
                    text = f"{state_bytes:g} bytes of optimizer state per parameter{where}, and a step has {found:.3g}"
                    _logger.warning(_LEFT, self.limit, f"{text} in memory")

        in_forward = model.register_forward_pre_hook(before_forward, with_kwargs=True)
        weakref.finalize(model, register_optimizer_step_post_hook(after_step).remove)


def _largest(values: object) -> int:
    return max((each.numel() for each in tensors_in(values)), default=0)


memory_policies.append(MemoryLimit)
