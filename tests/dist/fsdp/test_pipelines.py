"""Stages of ``torch.distributed.pipelining`` over sharded modules: torch's stages and schedules, unchanged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from helpers.compare import CLOSE, EXACT, comparable, is_incomplete
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shardwise import StateError, fully_shard, replicate

WIDTH, MICROBATCHES, ROWS, STEPS = 6, 4, 8, 2
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "bfs": (ScheduleLoopedBFS, 2),
    "zero bubbles": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
    "dual": (ScheduleDualPipeV, 2),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_stage_modules(count: int) -> list[nn.Sequential]:
    torch.manual_seed(5)
    return [nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch_of(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def my_stages(pp: int, pp_rank: int, per_rank: int, is_v: bool) -> list[int]:
    if is_v:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + pp * number for number in range(per_rank)]


def shard(module: nn.Sequential, api: Callable[..., Any], mesh: Any, **options: Any) -> Any:
    """Shard a stage in two units: its layer, and what is left."""
    api(module[0], mesh=mesh, **options)
    return api(module, mesh=mesh, **options)


def run(
    name: str, api: Callable[..., Any], mesh: Any, watch: Callable[[Any], None] = lambda _: None, **options: Any
) -> dict[int, nn.Module]:
    """Train for some steps; return this rank's stages by their numbers."""
    kind, per_rank = SCHEDULES[name]
    pp, pp_rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    count = pp * per_rank
    modules = make_stage_modules(count)
    mine = my_stages(pp, pp_rank, per_rank, kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV))
    for number in mine:
        shard(modules[number], api, mesh["dp"], **options)
        watch(modules[number])
    cpu, group = torch.device("cpu"), mesh["pp"].get_group()
    stages = [PipelineStage(modules[number], number, count, cpu, group=group) for number in mine]
    schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=mse)
    optimizers = [torch.optim.AdamW(modules[number].parameters(), lr=0.01) for number in mine]
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch_of(step, mesh["dp"].get_local_rank())
        inputs, target = ((x,) if 0 in mine else ()), (y if count - 1 in mine else None)
        schedule.step(*inputs, target=target, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
    return {number: modules[number] for number in mine}


@functools.cache
def one_process(count: int) -> list[nn.Sequential]:
    modules = make_stage_modules(count)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for dp_rank in range(2):
            x, y = batch_of(step, dp_rank)
            for each, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                for module in modules:
                    each = module(each)
                (mse(each, target) / MICROBATCHES / 2).backward()
        optimizer.step()
    return modules


def assert_alike(ours: nn.Module, theirs: nn.Module, where: str, tolerance: dict[str, float]) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        for left, right in ((mine, other), (mine.grad, other.grad)):
            assert left is not None, f"{where} {name}"
            assert right is not None, f"{where} {name}"
            torch.testing.assert_close(
                *comparable(left, right), **tolerance, msg=lambda text, name=name: f"{where} {name}: {text}"
            )


def two_by_two() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


LIKE_OTHERS = (
    "gpipe",
    "interleaved",
    "bfs",
    "dual",
)  # they ask units for nothing that "1f1b", "zero bubbles" and "zbv" do not


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name in LIKE_OTHERS else name for name in SCHEDULES],
)
@on_ranks(4)
def test_every_schedule_trains_stages_as_torchs_class_and_one_process(name: str) -> None:
    mesh = two_by_two()
    ours = run(name, fully_shard, mesh, reshard_after_forward=False)
    theirs, alone = (
        run(name, torchs.fully_shard, mesh, reshard_after_forward=False),
        one_process(2 * SCHEDULES[name][1]),
    )
    for number, module in ours.items():
        assert_alike(module, theirs[number], f"{name}, stage {number}, beside torch's class:", EXACT)
        assert_alike(module, alone[number], f"{name}, stage {number}, beside one process:", CLOSE)


@on_ranks(4)
def test_weights_that_forward_gives_back_are_there_between_input_and_weight_backward() -> None:
    # torch's own class loses gradients here without a word.
    mesh = two_by_two()
    for name in ("zero bubbles", "dual"):
        for number, module in run(name, fully_shard, mesh, reshard_after_forward=True).items():
            assert_alike(module, one_process(4)[number], f"{name}, stage {number}:", CLOSE)


@on_ranks(4)
def test_replicated_stages_train_as_one_process() -> None:
    for number, module in run("zbv", replicate, two_by_two()).items():
        assert_alike(module, one_process(4)[number], f"stage {number}:", CLOSE)


@on_ranks(4)
def test_a_stage_reduces_each_unit_once_per_step() -> None:
    reduced: list[int] = []

    def watch(module: Any) -> None:
        for unit in (module, module[0]):
            unit.set_all_reduce_hook(lambda flat, unit=unit: reduced.append(id(unit)))

    for name in ("1f1b", "zbv"):
        modules = run(name, fully_shard, two_by_two(), watch, reshard_after_forward=False)
        times = {id(unit): reduced.count(id(unit)) for module in modules.values() for unit in (module, module[0])}  # type: ignore[index]
        assert set(times.values()) == {STEPS}, f"{name}: {times}"
        reduced.clear()


@on_ranks(2)
def test_torchs_tracker_of_memory_is_refused_by_name() -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    model: Any = fully_shard(Layer())
    with pytest.raises(StateError, match=r"torch's own FSDP2.*describe_units"), FSDPMemTracker(model):
        pass


@on_ranks(2)
def test_a_copy_of_a_stage_ends_its_own_steps() -> None:
    stage: Any = fully_shard(nn.Sequential(Layer()))
    copied = copy.deepcopy(stage)
    for module in (stage, copied):
        assert isinstance(module, torchs.FSDPModule)
        module.set_requires_gradient_sync(False)
        module(torch.ones(2, WIDTH)).sum().backward()
        module.set_requires_gradient_sync(True)
    state: Any = torchs.fully_shard.state(copied)  # type: ignore[attr-defined]
    state._root_post_backward_final_callback()
    assert all(param.grad is not None for param in copied.parameters())
    assert all(is_incomplete(param) for param in stage.parameters())
