"""A dry run writes down what a model does, and leaves the model as it was."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import Block, build
from torch import nn
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import ConfigError, fully_shard
from shardwise.cli.main import main
from shardwise.elastic.memory import copied_bytes
from shardwise.formatting import format_bytes
from shardwise.plan.schedule import StepEvent
from shardwise.planner.hardware import UNIT_STRATEGIES, Profile, Setting, StepMark, dry_run
from shardwise.recipes.config import PRESETS
from shardwise.recipes.gpt import GPT


def blocks(width: int = 32) -> nn.Module:
    return nn.Sequential(*[Block(width, 4 * width) for _ in range(3)])


def kept(profile: Profile) -> list[int]:
    """Return the bytes that autograd keeps of the forward of each block."""
    left = {each.mark: before.left_bytes for before, each in pairwise(profile.stretches)}
    events = (StepEvent.PRE_FORWARD, StepEvent.POST_FORWARD)
    ends = [[left[StepMark(event, block)] for event in events] for block in range(1, len(profile.blocks))]
    return [after - before for before, after in ends]


def test_what_is_kept_for_backward_is_what_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    profile = dry_run(model, [torch.empty(100, 64)], lambda m, x: m(x).sum())
    end = next(each for each in profile.stretches if each.mark == StepMark(StepEvent.POST_FORWARD))
    hidden, output = 4 * 6400, 4 * 6400  # of ReLU and what is before it one tensor stays
    assert profile.stretches[profile.stretches.index(end) - 1].left_bytes == hidden + output


def test_recomputation_keeps_the_inputs_of_blocks() -> None:
    plain, again = (dry_run(blocks(), [torch.empty(64, 32)], recompute=recompute) for recompute in (False, True))
    assert kept(again) == [64 * 32 * 4] * 3
    assert all(few < many / 8 for few, many in zip(kept(again), kept(plain), strict=True))
    assert again.flops > plain.flops
    some = dry_run(blocks(), [torch.empty(64, 32)], recompute=slice(1, -1))
    assert kept(some) == [*kept(again)[:2], kept(plain)[2]]


def test_gradients_come_once_for_each_parameter_and_blocks_in_reverse() -> None:
    model = blocks()
    profile = dry_run(model, [torch.empty(8, 32)])
    arrived = [each.mark.param for each in profile.stretches if each.mark.event is None]
    assert sorted(arrived) == list(range(len(list(model.parameters()))))
    entered = [each.mark.block for each in profile.stretches if each.mark.event is StepEvent.PRE_BACKWARD]
    assert [block for block in entered if block] == [3, 2, 1]


def test_a_tied_parameter_counts_once() -> None:
    profile = dry_run(build("tied"), [torch.zeros(4, dtype=torch.int64)])
    assert profile.numel == sum(param.numel() for param in build("tied").parameters())


def test_the_model_is_as_it_was() -> None:
    model = blocks()
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    dry_run(model, [torch.empty(8, 32)], recompute=True)
    for name, param in model.named_parameters():
        assert id(param) == before[name][0]
        assert torch.equal(param, before[name][1])
        assert param.grad is None
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_the_model_is_as_it_was_after_its_forward_has_raised() -> None:
    model = blocks()
    with pytest.raises(RuntimeError):
        dry_run(model, [torch.empty(8, 31)])
    assert all(type(param) is nn.Parameter and param.device.type == "cpu" for param in model.parameters())
    assert model(torch.zeros(1, 32)).shape == (1, 32)


def test_bytes_of_bf16_are_half() -> None:
    single, half = (dry_run(blocks(), [torch.empty(64, 32)], precision=each) for each in ("fp32", "bf16"))
    assert kept(half)[1] < 0.6 * kept(single)[1]


def test_a_sharded_model_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = fully_shard(blocks())
        with pytest.raises(ConfigError, match="plan the model before fully_shard"):
            dry_run(model, [torch.empty(8, 32)])
    finally:
        dist.destroy_process_group()


def test_the_plan_of_a_function_needs_no_memory_for_the_model() -> None:
    found = shardwise.plan(
        lambda: nn.Sequential(*[Block(8192, 65_536) for _ in range(16)]), (torch.empty(1, 8192),), 64
    )
    assert found.num_parameters > 16 * 2**30
    assert found.best is not None


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp", "zero2", "zero1", "none"])
def test_the_code_of_a_plan_runs(strategy: str) -> None:
    ranks = 4 if strategy in UNIT_STRATEGIES else 1  # DDP and ZeRO talk to the others when they are made
    choices = shardwise.Choices(strategies=(strategy,), recompute=(True,), precision="fp32")
    found = shardwise.plan(blocks, (torch.empty(4, 32),), ranks, hardware="cpu", choices=choices)
    backend, store = ("fake", FakeStore()) if ranks > 1 else ("gloo", dist.HashStore())
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    names: dict[str, Any] = {**vars(shardwise), **vars(torch.nn.parallel), **vars(device_mesh), "torch": torch}
    names["model"] = blocks()
    try:
        exec(compile(found.code(), "plan", "exec"), names)
        names.get("ddp", names["model"])(torch.zeros(4, 32)).sum().backward()
    finally:
        # DDP goes before the group: its reducer ends the threads of a group that nobody else holds with the GIL in hand,
        # for which such a thread may wait, to let go of what it kept of the backward.
        names.clear()
        gc.collect()
        dist.destroy_process_group()


def test_the_table_names_the_way_to_take_and_why() -> None:
    found = shardwise.plan(lambda: GPT(PRESETS["tiny"]), (2, 128), 8, hardware="h100")
    assert found.best is not None
    assert f"->  {found.best.setting.label}" in found.table()
    assert found.why() in str(found)
    assert f'"best": "{found.best.setting.label}"' in found.to_json()


def test_the_command_plans_and_train_plans_before_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--preset", "gpt-tiny", "--ranks", "16", "--seq", "64", "--hosts", "2", "--shard", "zero3"]) == 0
    )
    assert "_shard(model, mesh=mesh" in capsys.readouterr().out
    assert main(["train", "--plan", "--nproc", "2", "--device", "cpu"]) == 0
    assert "on 2 ranks" in capsys.readouterr().out
    assert main(["plan", "--model-from", "nowhere", "--ranks", "2"]) == 2
    assert "expected MODULE:FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp"])
def test_a_plan_says_what_reproducible_sums_cost(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seq", "64", "--hardware", "cpu", "--hosts", "2", "--precision", "fp32", "--reproducible", "12"]
    assert main(["plan", "--preset", "gpt-tiny", "--ranks", "4", "--shard", strategy, *options]) == 0
    model: Any = GPT(replace(PRESETS["tiny"], context=64))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)  # holds most: microbatches 3, 4 and 5
    try:
        sizes, names = ((2, 2), ("replicate", "shard")) if strategy == "hsdp" else ((4,), None)
        mesh = device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        shardwise.shard_model(model, strategy=strategy, mesh=mesh)
        costs = shardwise.Reproducible(model, num_microbatches=12).costs()
    finally:
        dist.destroy_process_group()
    sent, held = map(format_bytes, costs.values())
    text = f"--reproducible 12: a rank sends {sent} of gradients per step; partial sums hold {held}, "
    assert text in capsys.readouterr().out
    assert main(["train", "--plan", "--nproc", "4", "--device", "cpu", "--reproducible", "4", "--batch", "8"]) == 0
    assert "--reproducible 4: a rank sends " in capsys.readouterr().out


def test_a_plan_says_what_the_copies_of_an_elastic_run_hold(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.tied = model.weight
    assert copied_bytes(model, 8) == 2 * (110 * 4 + 8 + 100 * 8)
    tiny = ["--preset", "gpt-tiny", "--seq", "64", "--precision", "fp32", "--optimizer", "momentum"]
    assert main(["plan", *tiny, "--ranks", "4", "--elastic"]) == 0
    num_bytes = copied_bytes(GPT(replace(PRESETS["tiny"], context=64)), 4)
    assert f"--elastic: copies of two steps hold {format_bytes(num_bytes)} of" in capsys.readouterr().out
    assert main(["train", "--plan", "--nproc", "4", "--device", "cpu", "--elastic", "--batch", "8"]) == 0
    assert "--elastic: copies of two steps hold " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--tp", "1", "2"], "does not go with"), (["--ranks", "5"], "12 microbatches fit [1, 2, 3,")],
)
def test_a_plan_with_reproducible_sums_refuses_what_has_none(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--preset", "gpt-tiny", "--ranks", "4", "--reproducible", "12", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_setting_says_what_it_is_in_few_words() -> None:
    setting = Setting(strategy="hsdp", ranks=16, replicas=2, recompute=True, accumulate=2)
    assert setting.label == "hsdp 2x8, units >= 1.5 MiB, recompute, 2 microbatches"
