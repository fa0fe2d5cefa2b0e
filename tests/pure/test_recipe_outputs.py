"""The GPT, the byte counts and the figures."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwise import Microbatches, StepMeter
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.data import TextFacts, Windows
from shardwise.recipes.gpt import build_gpt, generate
from shardwise.recipes.report import HtmlReport, memory_table
from shardwise.recipes.run_folder import TrainRun
from shardwise.recipes.sharding import (
    HeldBytes,
    RunRanks,
)
from shardwise.recipes.train import Trainer, _train_step

SHAPE = ModelShape(layers=2, width=16, heads=2, context=12)


def test_a_position_never_sees_later_bytes() -> None:
    model = build_gpt(SHAPE, 0)
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 7:] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_generation_keeps_the_prompt_and_the_mode_and_calls_forward_once_per_byte() -> None:
    model = build_gpt(SHAPE, 0).train()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _module, args: calls.append(args[0].shape[1]))
    text = bytes(generate(model, b"def ", 20, SHAPE.context, 0, torch.device("cpu")))
    assert text[:4] == b"def "
    assert len(text) == 24
    assert calls == [min(4 + n, 12) for n in range(20)]
    assert model.training
    assert text == bytes(generate(model, b"def ", 20, SHAPE.context, 0, torch.device("cpu")))


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_the_table_sets_ranks_beside_unsharded(num_ranks: int) -> None:
    held = [HeldBytes(4_000 + rank, 4_000, 8_000, 300_000_000) for rank in range(num_ranks)]
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    console.print(memory_table(held, HeldBytes(8_000, 8_000, 16_000), "peak"))
    text = console.export_text()
    assert ("largest rank" in text) == (num_ranks > 2)
    assert "31.25 KiB" in text
    assert "50%" in text
    assert "286.1 MiB" in text


@pytest.mark.parametrize(("clip", "is_scaled"), [(0.0, False), (1e9, False), (1e-3, True)])
def test_clip_0_scales_no_gradient(
    clip: float, is_scaled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(model=SHAPE, shard="none", batch=2, clip=clip, warmup=0)
    model = build_gpt(SHAPE, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monkeypatch.setattr("shardwise.recipes.train.syncing", lambda model, on: nullcontext())  # there is no process group
    windows = Windows(np.arange(600, dtype=np.uint8), SHAPE.context)
    run = TrainRun(tmp_path, config, TextFacts("", 1, 1, 1, 1.0, ""), None, None)
    ranks = RunRanks(0, 1, torch.device("cpu"))
    unsharded = HeldBytes(4, 4, 8)
    numbers = 1, unsharded, HtmlReport(run, unsharded, "peak"), ()
    data = Microbatches(windows, num_microbatches=1, microbatch_size=2, collate_fn=lambda both: both)
    trainer = Trainer(run, ranks, model, optimizer, data, windows, *numbers)
    figures, _ = _train_step(trainer, 0, StepMeter(model))
    left = float(torch.stack([param.grad.norm() for param in model.parameters()]).norm())
    assert left == pytest.approx(1e-3 if is_scaled else figures.grad_norm, rel=1e-4)
    assert figures.grad_norm > 0.1
