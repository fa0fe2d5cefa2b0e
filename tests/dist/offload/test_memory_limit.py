"""A model is made to fit into the memory of a rank: it trains as the plain one, and all ranks refuse what cannot fit."""

from __future__ import annotations

import logging
import math
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, options
from helpers.folders import files_on_disk
from helpers.forked_commands import run_forked
from helpers.ranks import on_ranks
from helpers.runs import metrics_of, write_text
from torch import nn

from shardwise import (
    ConfigError,
    MemoryLimit,
    OptimizerOffload,
    ShardedOptimizer,
    clip_grad_norm_,
    shard_model,
)
from shardwise.formatting import parse_size
from shardwise.offload import fit
from shardwise.planner.hardware import Setting

WIDTH, BATCH, BLOCKS, STEPS = 128, 1024, 6, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.up(x).tanh())


def a_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def losses_of(model: nn.Module, offload: OptimizerOffload | None = None) -> list[float]:
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, fused=True, offload=offload)
    losses: list[float] = []
    for step in range(STEPS):
        data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(data).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PROCESS = 300_000_000  # bytes of the larger rank: those of a process which runs tests change from one to the next
LOADED = 10_000_000  # of these, by the first step, which a plan adds


def fitted(limit: int | str, folder: str | None = None) -> tuple[nn.Module, MemoryLimit, Setting]:
    memory, rank = MemoryLimit(limit, (torch.empty(BATCH, WIDTH),), folder=folder), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "measured", lambda *_: [-(PROCESS - LOADED) // (2 - rank), 1e11 / (1 + rank), 3e9, 1e9])
        model = shard_model(a_net(), memory=memory, min_unit_bytes=0)
    assert memory.plan is not None
    assert memory.plan.best is not None
    every: list[Any] = [None, None]
    dist.all_gather_object(every, memory.plan.best)
    assert every[0] == every[1]
    return model, memory, memory.plan.best.setting


@on_ranks(2)
def test_the_first_step_that_leaves_the_plan_is_warned_of_once() -> None:
    said: list[str] = []
    with mock.patch.object(
        logging.getLogger("shardwise.offload"), "warning", lambda text, *given: said.append(text % given)
    ):
        memory = MemoryLimit("64 GiB", (torch.empty(BATCH, WIDTH),), optimizer=torch.optim.SGD)
        model = shard_model(a_net(), memory=memory, min_unit_bytes=0)
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in (BATCH, 2 * BATCH, 2 * BATCH):
            with torch.no_grad():
                model(torch.ones(4 * BATCH, WIDTH))  # keeps no activations
            model(torch.ones(batch, WIDTH)).sum().backward()
            assert len(said) == (0 if batch == BATCH else 2)
            optimizer.step()
    assert re.search(r"planned are 0 bytes of optimizer state per parameter, and a step has 8.* in memory", said[0])
    assert f"inputs of {BATCH * WIDTH} elements, and a forward gets {2 * BATCH * WIDTH}. Plan" in said[1]


@on_ranks(2)
def test_a_model_that_is_made_to_fit_has_the_losses_of_the_plain_one() -> None:
    expected = losses_of(shard_model(a_net(), min_unit_bytes=0))
    model, memory, chosen = fitted("64 GiB")
    assert not chosen.recompute
    assert memory.offload is None
    assert losses_of(model) == expected
    folder, seen = tempfile.mkdtemp(), set[int]()
    assert memory.plan is not None
    above = memory.plan.candidates[0].peak.total - PROCESS
    for tenths in (7, 5):  # with four, nothing fits
        model, memory, chosen = fitted(PROCESS + above * tenths // 10, folder)
        assert bool(files_on_disk(folder)) == chosen.offload  # of parameters
        before = [block.calls for block in blocks_of(model)]  # of plans
        assert losses_of(model, memory.offload) == expected
        calls = [block.calls - calls for block, calls in zip(blocks_of(model), before, strict=True)]
        recomputed = BLOCKS - chosen.keep_blocks if chosen.recompute else 0
        assert calls == [2 * STEPS] * recomputed + [STEPS] * (BLOCKS - recomputed)
        assert (memory.offload is not None) == (chosen.disk_share > 0)
        seen.add(recomputed)
    assert any(0 < recomputed < BLOCKS for recomputed in seen)
    assert chosen.offload  # with the least memory that suffices
    memory.limit = "64 GiB"
    shard_model(a_net(), memory=memory, min_unit_bytes=0)
    assert memory.offload is None  # what an earlier model needed is not used for this one


@on_ranks(2)
def test_a_limit_alone_plans_for_the_inputs_of_the_first_training_forward() -> None:
    expected, above = losses_of(shard_model(a_net(), min_unit_bytes=0)), 0
    figures = [-(PROCESS - LOADED), 1e11, 3e9, 1e9]
    with mock.patch.object(fit, "measured", return_value=figures):
        for limit in ("64 GiB", 0):
            model = shard_model(a_net(), memory=limit or PROCESS + above * 7 // 10, min_unit_bytes=0)
            with torch.no_grad():
                model(torch.ones(2 * BATCH, WIDTH))
            before = [block.calls for block in blocks_of(model)]
            assert losses_of(model) == expected
            calls = {block.calls - calls for block, calls in zip(blocks_of(model), before, strict=True)}
            assert (2 * STEPS in calls) == (limit == 0), calls
            if limit:
                memory = MemoryLimit(limit, (torch.empty(BATCH, WIDTH),))
                shard_model(a_net(), memory=memory, min_unit_bytes=0)
                assert memory.plan is not None
                above = memory.plan.candidates[0].peak.total - PROCESS
        model = shard_model(a_net(), memory="1 MiB")
        with pytest.raises(ConfigError, match=r"MemoryLimit\(1 MiB\): Nothing fits"):
            model(torch.ones(BATCH, WIDTH))
        model = shard_model(a_net(), memory="64 GiB")
        with pytest.raises(ConfigError, match=r"by keyword \(input\).*memory=MemoryLimit\('64 GiB', inputs, loss=\)"):
            model(input=torch.ones(BATCH, WIDTH))


@on_ranks(2)
def test_a_plan_draws_no_random_numbers() -> None:
    model, inputs = a_net(), (torch.empty(BATCH, WIDTH),)
    before = torch.get_rng_state()
    memory = MemoryLimit("64 GiB", inputs, folder=tempfile.gettempdir(), optimizer=torch.optim.SGD)
    shard_model(model, memory=memory)
    assert memory.plan is not None
    assert {each.setting.state_bytes for each in memory.plan.candidates} == {0}  # as of the optimizer that is given
    assert torch.equal(torch.get_rng_state(), before)  # with dropout, the step would have other bits than a plain one


@on_ranks(2)
def test_what_cannot_fit_is_refused_by_all_ranks() -> None:
    for limit, message in (
        ("1 MiB", "Nothing fits in 1 MiB. The smallest change that makes it fit: devices with"),
        (PROCESS, "Nothing fits in 286.1 MiB"),  # of one rank; the other has the room
        ("much", "MemoryLimit.'much'.; expected bytes, or a text such as '8 GiB'"),
    ):
        with pytest.raises(ConfigError, match=message):
            fitted(limit)
    with pytest.raises(ConfigError, match="for zero1 on a mesh"):
        shard_model(a_net(), strategy="zero1", memory=MemoryLimit("1 GiB", (torch.empty(2, WIDTH),)))


def test_a_run_that_is_made_to_fit_has_the_losses_of_the_plain_one(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = write_text(tmp_path / "text")
    words = [*COMMAND, *options(data=text, nproc=2, shard="zero3", layers=2, width=64, context=128, batch=48, steps=1)]
    ended = run_forked([*words, "--out", str(tmp_path / "none"), "--memory", "1M"])
    assert ended.code == 2
    assert "MemoryLimit(1 MiB): Nothing fits" in ended.err
    assert not (tmp_path / "none").exists()
    least = parse_size(ended.err.split("devices with ")[1].split(",")[0])
    assert least is not None
    runs = {"plain": [], "fitted": ["--memory", str(math.ceil(1.05 * least))]}
    told = {name: run_forked([*words, "--out", str(tmp_path / name), *more]) for name, more in runs.items()}
    assert {ended.code for ended in told.values()} == {0}, told
    assert "recompute" not in told["plain"].out
    assert "recompute" in told["fitted"].out
    plain, fitted = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in runs)
    assert plain == fitted
