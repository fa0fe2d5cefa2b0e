"""Tensor parallelism in plans: what a rank of a split holds, sends and computes is what DTensor makes of the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.models import Block
from helpers.one_process import standing_for
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import ConfigError
from shardwise.plan.schedule import StepEvent
from shardwise.planner.advice import Choices, evaluate
from shardwise.planner.hardware import HARDWARE, Setting, StepMark, TensorSplit, dry_run

WIDTH, INNER, BATCH, COUNT = 32, 128, 16, 3
HALVES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
GPU = HARDWARE["h100"]
OUTPUT_BYTES = 4 * BATCH * WIDTH


def blocks() -> nn.Module:
    return nn.Sequential(*[Block(WIDTH, INNER) for _ in range(COUNT)])


def profile(ranks: int, **how: Any) -> Any:
    return dry_run(
        blocks(), [torch.empty(BATCH, WIDTH)], split=TensorSplit(ranks, HALVES) if ranks > 1 else None, **how
    )


def test_a_rank_of_a_split_holds_its_part_of_the_modules_that_are_split() -> None:
    shapes = {param.name: param.shape for param in profile(4).params if param.name.startswith("1.")}
    assert shapes == {
        "1.norm.weight": (WIDTH,),
        "1.norm.bias": (WIDTH,),
        "1.up.weight": (INNER // 4, WIDTH),
        "1.up.bias": (INNER // 4,),
        "1.down.weight": (WIDTH, INNER // 4),
    }


def test_activations_between_split_modules_are_cut_and_the_others_are_not() -> None:
    last = (StepEvent.POST_FORWARD, StepEvent.PRE_FORWARD)
    kept: dict[int, int] = {}
    for ranks in (1, 2, 4):
        left = {each.mark: before.left_bytes for before, each in pairwise(profile(ranks).stretches)}
        after, before = (left[StepMark(event, 2)] for event in last)
        kept[ranks] = after - before
    inner = 2 * 4 * BATCH * INNER  # what GELU was given, and what it made
    assert kept[1] - kept[2] == inner // 2
    assert kept[1] - kept[4] == 3 * inner // 4


def test_a_split_block_sums_its_output_in_forward_and_the_gradient_of_its_input_in_backward() -> None:
    found = profile(2)
    rings = [each.work.num_rings for each in found.stretches]
    assert sum(rings) == 2 * 2 * COUNT  # an all-reduce is two rings
    assert sum(each.work.ring_bytes for each in found.stretches) == 2 * 2 * COUNT * OUTPUT_BYTES


def test_work_of_split_modules_is_divided() -> None:
    assert profile(4).flops == profile(1).flops / 4


def test_nothing_hides_the_collectives_of_a_split_and_shards_are_those_of_its_part() -> None:
    found = profile(4)
    setting = Setting(ranks=8, tensor=4)
    candidate = evaluate(found, setting, GPU)
    assert dict(candidate.time.waits)["split blocks"] > 0
    assert candidate.peak.held[0] < evaluate(profile(1), Setting(ranks=8), GPU).peak.held[0]
    # A host has eight: with four in a split two are left for data, which then cross hosts.
    assert candidate.time.between_bytes > 0
    assert evaluate(found, Setting(ranks=2, tensor=4), GPU).time.between_bytes == 0


def test_ways_are_compared_by_what_a_step_is_worth() -> None:
    choices = Choices(strategies=("zero3",), recompute=(False,), precision="fp32", tensor=(1, 2), tensor_plan=HALVES)
    found = shardwise.plan(blocks, (torch.empty(BATCH, WIDTH),), 8, choices=choices)
    assert {each.setting.tensor for each in found.candidates} == {1, 2}
    values = [each.time.step_s / each.setting.ranks for each in found.candidates]
    assert values == sorted(values)


def test_the_code_of_a_split_runs() -> None:
    for strategy in ("zero3", "ddp"):
        choices = Choices(strategies=(strategy,), precision="fp32", tensor=(2,), tensor_plan=HALVES)
        found = shardwise.plan(blocks, (torch.empty(4, WIDTH),), 4, hardware="cpu", choices=choices)
        first, mesh, call = [line for line in found.code().splitlines() if "checkpoint" not in line]
        assert "parallelize_module" in first
        names: dict[str, Any] = {**vars(shardwise), **vars(device_mesh), "model": blocks()}
        with standing_for(0, 4):
            exec(mesh, names)
            for block in names["model"]:
                parallelize_module(block, names["mesh"]["tp"], HALVES)
            exec(call, names)
            names["model"](torch.zeros(4, WIDTH)).sum().backward()
            sizes = [names["model"].get_parameter("1.up.weight").device_mesh.size(axis) for axis in (0, 1)]
        assert sizes == [2, 2]


def test_a_split_is_not_planned_beside_a_process_group() -> None:
    with standing_for(0, 4), pytest.raises(ConfigError, match="is planned in a process group of its own"):
        profile(2)


def test_a_split_that_cannot_be_is_refused() -> None:
    for choices, message in (
        ({"tensor": (2,)}, "without a tensor_plan"),
        ({"tensor": ()}, "expected numbers of ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            Choices(**choices)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="takes no tensors that are split"):
        Setting(strategy="zero1", ranks=2, tensor=2)
    with pytest.raises(ConfigError, match="tensor_plan names mlp.up, which 0 .Block. has not"):
        dry_run(blocks(), [torch.empty(4, WIDTH)], split=TensorSplit(2, {"mlp.up": ColwiseParallel()}))


def test_what_fits_nowhere_may_fit_when_it_is_split() -> None:
    choices = Choices(strategies=("zero3",), recompute=(True,), offload=(False,), precision="fp32", tensor_plan=HALVES)
    peaks = [
        evaluate(
            profile(tensor, recompute=True), Setting(ranks=8 // tensor, tensor=tensor, recompute=True), GPU
        ).peak.total
        for tensor in (1, 2)
    ]
    tight = replace(GPU, memory_bytes=sum(peaks) // 2, usable=1.0)
    found = shardwise.plan(blocks, (torch.empty(BATCH, WIDTH),), 8, hardware=tight, choices=choices)
    assert found.best is None
    assert "split every block over 2 ranks (tensor parallelism)" in [change.words for change in found.changes]


def test_a_split_that_does_not_divide_the_ranks_is_left_out() -> None:
    choices = Choices(strategies=("zero3",), recompute=(False,), precision="fp32", tensor=(1, 3), tensor_plan=HALVES)
    found = shardwise.plan(blocks, (torch.empty(BATCH, WIDTH),), 8, choices=choices)
    assert "left out: tp 3: it does not divide 8 ranks" in found.table()


def test_apis_that_no_number_of_ranks_suits_are_no_error_but_have_no_code() -> None:
    choices = Choices(strategies=("hsdp",), precision="fp32")
    found = shardwise.plan(blocks, (torch.empty(BATCH, WIDTH),), 1, choices=choices)
    with pytest.raises(ConfigError, match="no way to train was looked at"):
        found.code()
