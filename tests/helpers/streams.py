"""Programs that run on the fake accelerator in one process, as any rank of any world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator.accelerator import FakeAccelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from helpers.inside import engine_of, start_peak
from helpers.models import MODELS, batch_for, units_of
from helpers.one_process import standing_for
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, Reproducible, fully_shard, replicate, shard_model
from shardwise.plan.schedule import peak_bytes

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP16 = MixedPrecisionPolicy(torch.float16, torch.float16)
Step = Callable[[Any, Callable[[], torch.Tensor]], None]


def one_backward(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()


def accumulates_without_sync(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_requires_gradient_sync(False)
    loss().backward()
    model.set_requires_gradient_sync(True)
    loss().backward()


def defers_to_the_last_backward(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_is_last_backward(False)
    loss().backward()
    model.set_is_last_backward(True)
    loss().backward()


def sums_replicas_at_last(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    loss().backward()
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    loss().backward()


def evaluates_between(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    with torch.no_grad():
        loss()
        for param in model.parameters():
            param.mul_(0.5)


def unshards_by_hand(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    handle = model[0].unshard(async_op=True)
    handle.wait()
    model[1].unshard()
    model[1].reshard()
    loss().backward()


def says_when_the_optimizer_is_done(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_post_optim_event(current_stream().record_event())
    loss().backward()


def replaces_parameters(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss()  # without a backward, so that copies of shards may still be on their way
    model.double().float()  # the same parameters, in other memory
    says_when_the_optimizer_is_done(model, loss)
    model[0].unshard()
    loss().backward()


def raises_in_forward(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        loss()
    handle.remove()
    loss().backward()


def raises_in_backward(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    handle = model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        loss().backward()
    handle.remove()
    loss().backward()


def prefetches_as_told(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    loss().backward()


def lets_inputs_live_longer(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_reduce_scatter_max_input_buffers(2)
    loss().backward()


def hooks_the_sums(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    for module in (model, *model):
        module.set_all_reduce_hook(lambda section: section.mul_(2.0))
    loss().backward()


def keeps_its_storage(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_keep_unsharded_storage(True)
    loss().backward()


def says_when_backward_ends(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    model.set_manual_backward_finalization(True)
    loss().backward()
    loss().backward()
    handle = model.finalize_backward(async_op=True)
    assert handle is not None
    handle.wait()


def writes_to_full_parameters(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    def write(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.up.weight.mul_(0.5)

    handles = [module.register_forward_pre_hook(write) for module in model]
    loss().backward()
    for handle in handles:
        handle.remove()


def gathers_what_parameters_say(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    for param in model.parameters():
        local = param._local_tensor
        if param.ndim == 2 and not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather = functools.partial(_before_gather, param)
            local.fsdp_post_all_gather = _after_gather
    loss().backward()


def _before_gather(param: Any, mesh: Any, shape: Any, stride: Any, module: Any, precision: Any) -> Any:
    rows = -(-shape[0] // mesh.size())
    local = param.to_local().detach()
    return (nn.functional.pad(local * 1.0, (0, 0, 0, rows - local.shape[0])),), None


def _after_gather(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    return None if out is not None else (outputs[0], outputs)


def sums_along_the_tree(model: Any, loss: Callable[[], torch.Tensor]) -> None:
    for _ in Reproducible(model, num_microbatches=2 * dist.get_world_size()).microbatches():
        loss().backward()


def current_stream() -> Any:
    return _in_use[-1].current_stream()


_in_use: list[FakeAccelerator] = []  # innermost last


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        api: "fully_shard", "hybrid", "replicate", "replicate, blocks" or "shard_model".  options: of the API.
        recomputes: blocks are recomputed in backward.
        step: what happens between two optimizer steps.
    """

    name: str
    api: str = "fully_shard"
    model: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = False
    step: Step = one_backward
    num_steps: int = 3

    def build(self) -> Any:
        """Return the sharded model."""
        torch.manual_seed(0)
        model = MODELS[self.model]()
        options = dict(self.options)
        if self.recomputes:
            for module in units_of(self.model, model):
                _recompute(module)
        if self.api == "replicate":
            return replicate(model, **options)
        if self.api == "replicate, blocks":
            for module in units_of(self.model, model):
                replicate(module, **options)
            return replicate(model, **options)
        if self.api == "shard_model":
            return shard_model(model, **options)
        if self.api == "hybrid":
            options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "fs"))
        for module in units_of(self.model, model):
            fully_shard(module, **options)
        return fully_shard(model, **options)


def _recompute(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


@dataclass
class Seen:
    """What a run has shown.

    Attributes:
        live_bytes: of the device, after each step.
        peaks: bytes on loan in each step, as measured and as planned before it.
        host_waits, num_events: of each step, its optimizer left out.
    """

    fake: FakeAccelerator
    live_bytes: list[int] = field(default_factory=list)
    peaks: list[tuple[int, int | None]] = field(default_factory=list)
    host_waits: list[list[str]] = field(default_factory=list)
    num_events: list[dict[str, int]] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        return [str(violation) for violation in self.fake.violations]


def _loss_of(model: Any, name: str, seed: int) -> torch.Tensor:
    return model(batch_for(name, seed, 4)).float().sum()


def run(program: Program, rank: int = 1, world: int = 8, keeps_works: bool = False) -> Seen:
    """Train for some steps as ``rank`` of ``world``; return what was seen."""
    fake = FakeAccelerator(keeps_works)
    seen = Seen(fake)
    _in_use.append(fake)
    try:
        with standing_for(rank, world), fake.in_use():
            model = program.build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            for seed in range(program.num_steps):
                loss = functools.partial(_loss_of, model, program.model, seed)
                num_waits, num_events = len(fake.timeline.host_waits), dict(fake.timeline.num_events)
                engine = engine_of(model) if seed else None
                plan = engine.exec_order.plan if engine is not None else None
                if engine is not None:
                    start_peak(engine)
                program.step(model, loss)
                if engine is not None:
                    planned = None if plan is None else peak_bytes(plan.calls)
                    seen.peaks.append((engine.comm_ctx.pool.peak_used_bytes, planned))
                seen.host_waits.append(fake.timeline.host_waits[num_waits:])
                now = fake.timeline.num_events.items()
                seen.num_events.append({name: count - num_events.get(name, 0) for name, count in now})
                optimizer.step()
                optimizer.zero_grad()
                seen.live_bytes.append(fake.live_bytes)
            del model, optimizer, loss, engine
    finally:
        _in_use.pop()
    return seen


OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
PROGRAMS = [
    Program("plain"),
    Program("keeps full parameters", options={"reshard_after_forward": False}),
    Program("a smaller mesh after forward", options={"reshard_after_forward": 2}),
    Program("a smaller mesh, bf16", options={"reshard_after_forward": 4, "mp_policy": BF16}),
    Program("bf16", options={"mp_policy": BF16}),
    Program("fp16, divided twice", options={"mp_policy": FP16}),
    Program("mixed", model="mixed"),
    Program("mixed, bf16", model="mixed", options={"mp_policy": BF16}),
    Program("tied", model="tied"),
    Program("frozen", model="frozen"),
    Program("offload", options=OFFLOAD),
    Program("offload, bf16", options={**OFFLOAD, "mp_policy": BF16}),
    Program("offload, pageable", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    Program("offload, mixed", model="mixed", options=OFFLOAD),
    Program("offload, frozen", model="frozen", options=OFFLOAD),
    Program("offload, a smaller mesh", options={**OFFLOAD, "reshard_after_forward": 2}),
    Program("offload, evaluates", options=OFFLOAD, step=evaluates_between),
    Program("offload, accumulates", options=OFFLOAD, step=accumulates_without_sync),
    Program("offload, defers", options=OFFLOAD, step=defers_to_the_last_backward),
    Program("offload, recomputes", options=OFFLOAD, recomputes=True),
    Program("offload, raises in forward", options=OFFLOAD, step=raises_in_forward),
    Program("offload, raises in backward", options=OFFLOAD, step=raises_in_backward),
    Program("offload, prefetches as told", options=OFFLOAD, step=prefetches_as_told),
    Program("offload, replaces", options=OFFLOAD, step=replaces_parameters),
    Program("accumulates", step=accumulates_without_sync),
    Program("defers", step=defers_to_the_last_backward),
    Program("evaluates", step=evaluates_between),
    Program("unshards by hand", step=unshards_by_hand),
    Program("post-optimizer event", step=says_when_the_optimizer_is_done),
    Program("replaces", step=replaces_parameters),
    Program("recomputes", recomputes=True),
    Program("recomputes, keeps", recomputes=True, options={"reshard_after_forward": False, "mp_policy": BF16}),
    Program("raises in forward", step=raises_in_forward),
    Program("raises in backward", step=raises_in_backward),
    Program("prefetches as told", step=prefetches_as_told),
    Program("two inputs live", step=lets_inputs_live_longer),
    Program("hook on sums", step=hooks_the_sums),
    Program("keeps storage", step=keeps_its_storage),
    Program("says when backward ends", step=says_when_backward_ends),
    Program("offload, says when backward ends", options=OFFLOAD, step=says_when_backward_ends),
    Program("writes to full parameters", step=writes_to_full_parameters),
    Program("offload, writes to full parameters", options=OFFLOAD, step=writes_to_full_parameters),
    Program("extensions", step=gathers_what_parameters_say),
    Program("replicate", api="replicate"),
    Program("replicate, bf16", api="replicate", options={"mp_policy": BF16}),
    Program("replicate, accumulates", api="replicate", step=accumulates_without_sync),
    Program("replicate, raises", api="replicate", step=raises_in_backward),
    Program("replicate, blocks", api="replicate, blocks"),
    Program("replicate, blocks, offload", api="replicate, blocks", options=OFFLOAD),
    Program(
        "replicate, blocks, bf16, defers",
        api="replicate, blocks",
        options={"mp_policy": BF16},
        step=defers_to_the_last_backward,
    ),
    Program("replicate, blocks, raises", api="replicate, blocks", step=raises_in_backward),
    Program("hybrid", api="hybrid"),
    Program("hybrid, bf16", api="hybrid", options={"mp_policy": BF16}),
    Program("hybrid, fp16", api="hybrid", options={"mp_policy": FP16}),
    Program("hybrid, offload", api="hybrid", options=OFFLOAD),
    Program("hybrid, sums at last", api="hybrid", step=sums_replicas_at_last),
    Program("hybrid, offload, sums at last", api="hybrid", options=OFFLOAD, step=sums_replicas_at_last),
    Program("hybrid, hook", api="hybrid", step=hooks_the_sums),
    Program("hybrid, raises", api="hybrid", step=raises_in_backward),
    Program("hybrid, offload, raises", api="hybrid", options=OFFLOAD, step=raises_in_backward),
    Program("shard_model", api="shard_model", model="tied"),
    Program("matrices", model="matrices"),
    Program("matrices, offload, bf16", model="matrices", options={**OFFLOAD, "mp_policy": BF16}),
    Program("matrices, a smaller mesh", model="matrices", options={"reshard_after_forward": 2}),
    Program("matrices, hybrid, keep storage", api="hybrid", model="matrices", step=keeps_its_storage),
    Program("matrices, raise in backward", model="matrices", step=raises_in_backward),
    Program("along the tree", step=sums_along_the_tree),
    Program("along the tree, offload", options=OFFLOAD, step=sums_along_the_tree),
    Program("along the tree, hybrid", api="hybrid", step=sums_along_the_tree),
    Program("along the tree, hybrid, offload", api="hybrid", options=OFFLOAD, step=sums_along_the_tree),
]


def called(name: str) -> Program:
    """Return the program of that name."""
    return next(program for program in PROGRAMS if program.name == name)
