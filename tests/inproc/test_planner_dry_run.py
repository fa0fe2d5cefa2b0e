"""A dry run writes down what a model does, and leaves the model as it was."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.models import Block, build
from helpers.one_process import alone, standing_for
from torch import nn
from torch.distributed import device_mesh

import shardwise
from shardwise import ConfigError, fully_shard
from shardwise.cli import train
from shardwise.cli.main import main
from shardwise.elastic.memory import copied_bytes
from shardwise.formatting import format_bytes
from shardwise.plan.schedule import StepEvent
from shardwise.planner.hardware import HARDWARE, UNIT_STRATEGIES, Profile, Setting, StepMark, dry_run
from shardwise.recipes.config import PRESETS
from shardwise.recipes.gpt import GPT
from shardwise.reproducible.tree import BatchPlace


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


class Rotary(nn.Linear):
    """Stores a table in its first forward."""

    table: Any = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(input.shape[-1])
        return super().forward(input) * self.table + self.bias.shift  # pyright: ignore


def test_a_model_that_stores_tensors_in_a_forward_has_none_of_a_dry_run() -> None:
    model = Rotary(8, 8)
    model.bias.shift = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    dry_run(model, [torch.empty(2, 8)])
    assert model.table is None


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
    with standing_for(0, 2):
        model = fully_shard(blocks())
        with pytest.raises(ConfigError, match="plan the model before fully_shard"):
            dry_run(model, [torch.empty(8, 32)])


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
    names: dict[str, Any] = {**vars(shardwise), **vars(torch.nn.parallel), **vars(device_mesh), "torch": torch}
    names["model"] = blocks()
    with standing_for(0, ranks) if ranks > 1 else alone():
        try:
            exec(compile(found.code(), "plan", "exec"), names)
            names.get("ddp", names["model"])(torch.zeros(4, 32)).sum().backward()
        finally:
            # DDP goes before the group: its reducer ends the threads of a group that nobody else holds with the GIL in hand,
            # for which such a thread may wait, to let go of what it kept of the backward.
            names.clear()
            gc.collect()


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
    words = ["train", "--plan", "--nproc", "8", "--device", "cpu", "--shard", "hsdp", "--replicas"]
    for replicas, label in (("2", "hsdp 2x4"), ("4", "hsdp 4x2")):
        assert main([*words, replicas]) == 0
        assert label in capsys.readouterr().out
    vocabularies = []
    for vocabulary in (None, mock.Mock(size=5000)):
        with mock.patch.object(train, "open_vocabulary", return_value=vocabulary) if vocabulary else nullcontext():
            assert main(["train", "--plan", "--nproc", "2", "--device", "cpu"]) == 0
        vocabularies.append(capsys.readouterr().out)
    assert vocabularies[0] != vocabularies[1]
    assert main(["plan", "--model-from", "nowhere", "--ranks", "2"]) == 2
    assert "expected MODULE:FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp"])
def test_a_plan_says_what_reproducible_sums_cost(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seq", "64", "--hardware", "cpu", "--hosts", "2", "--precision", "fp32", "--reproducible", "12"]
    assert main(["plan", "--preset", "gpt-tiny", "--ranks", "4", "--shard", strategy, *options]) == 0
    shards = {"zero3": 4, "hsdp": 2, "ddp": 1}[strategy]
    place = BatchPlace(
        12, shards, 4 // shards, int(shards > 1), int(shards == 1)
    )  # it holds most: microbatches 3, 4 and 5
    params = [*GPT(replace(PRESETS["tiny"], context=64)).parameters()]
    num_bytes = sum(4 * -(-len(param) // shards) * (param.numel() // len(param)) for param in params)
    sent, held = map(format_bytes, (place.sent(num_bytes), place.held(num_bytes)))
    text = f"--reproducible 12: a rank sends {sent} of gradients per step; partial sums hold {held}, "
    assert text in capsys.readouterr().out
    assert main(["train", "--plan", "--nproc", "4", "--device", "cpu", "--reproducible", "4", "--batch", "8"]) == 0
    assert "--reproducible 4: a rank sends " in capsys.readouterr().out


class SmallState(torch.optim.Optimizer):
    """Keeps a byte per element, and a number per row of 256; draws random numbers, as rounding does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            codes = torch.randint(255, param.shape, dtype=torch.uint8)
            self.state[param] = {"codes": codes, "scales": torch.ones(param.numel() // 256), "step": torch.ones(())}


def test_only_an_optimizer_that_is_asked_for_has_less_state_than_fp32(tmp_path: Path) -> None:
    def state_bytes(model: nn.Module, **asked: Any) -> set[float]:
        found = shardwise.plan(model, (torch.empty(8, 32),), 2, hardware=tight, choices=shardwise.Choices(**asked))
        each = [*found.candidates, *(change.best for change in found.changes)]
        return {candidate.setting.state_bytes for candidate in each}

    tight = replace(HARDWARE["cpu"], memory_bytes=1 << 10)  # so that all changes are tried, too
    model = blocks()
    assert state_bytes(model) == state_bytes(model, optimizer=torch.optim.AdamW) == {8}
    before = torch.get_rng_state()
    assert state_bytes(model, optimizer=SmallState) == {1 + 4 / 256}
    assert torch.equal(torch.get_rng_state(), before)
    assert state_bytes(model.bfloat16(), optimizer=torch.optim.AdamW) == {4}
    words = ["plan", "--preset", "gpt-tiny", "--ranks", "2", "--seq", "64", "--out", str(tmp_path), "--optimizer"]
    assert main([*words, f"{__name__}:SmallState"]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["candidates"][0]["state_bytes"] == 1 + 4 / 256
    assert main([*words, "torch.optim:NoSuch"]) == 2


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
