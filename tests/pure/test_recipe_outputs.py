"""The GPT, the byte counts and the figures."""

from __future__ import annotations

import io
import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwise import Microbatches, StepMeter
from shardwise.formatting import format_bytes
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.data import TextFacts, Windows
from shardwise.recipes.gpt import build_gpt, generate, next_byte_loss
from shardwise.recipes.report import HtmlReport, RunLog, TrainedStep, memory_table
from shardwise.recipes.run_folder import TrainRun
from shardwise.recipes.sharding import (
    HeldBytes,
    RunRanks,
    build_optimizer,
    local_bytes,
    measure_held,
    unsharded_of,
)
from shardwise.recipes.train import Trainer, _train_step

SHAPE = ModelShape(layers=2, width=16, heads=2, context=12)


def test_the_model_is_a_function_of_its_seed_and_starts_at_the_uniform_loss() -> None:
    first, again, other = build_gpt(SHAPE, 1), build_gpt(SHAPE, 1), build_gpt(SHAPE, 2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert a.equal(b)
    assert not first.token.weight.equal(other.token.weight)
    tokens = torch.arange(24).view(2, 12)
    assert next_byte_loss(first, tokens, tokens + 1).item() == pytest.approx(math.log(256), rel=0.02)


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


def test_measured_bytes_of_a_plain_model_are_the_unsharded_bytes() -> None:
    model = build_gpt(SHAPE, 0)
    optimizer = build_optimizer(model, TrainConfig())
    next_byte_loss(model, torch.ones(1, 12, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)).backward()
    optimizer.step()
    held, whole = measure_held(model, optimizer), unsharded_of(model)
    assert (held.parameter_bytes, held.gradient_bytes) == (whole.parameter_bytes, whole.gradient_bytes)
    steps = 4 * len(list(model.parameters()))  # AdamW keeps one fp32 step count per parameter
    assert held.optimizer_bytes == whole.optimizer_bytes + steps


def test_a_shared_tensor_counts_once() -> None:
    tensor = torch.zeros(10)
    assert local_bytes([tensor, tensor]) == 40


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20 - 9, "1 MiB"), (1_234_567, "1.177 MiB")]
)
def test_bytes_are_written_with_four_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


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


class _Scalars:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        return


def test_figures_of_a_step_are_of_that_step_alone() -> None:
    lines, scalars = io.StringIO(), _Scalars()
    run_log = RunLog(3, files=(lines, scalars))
    steps = [TrainedStep(n, 5.0 / n, 1.0, 0.1, tokens_per_s=100.0 * n, time=1000.0 + n) for n in (1, 2, 3)]
    speed = {"tokens_per_s": 12345.0, "step_s": 0.25, "data_s": 0.01, "mfu": None, "exposed_wait_s": 0.02}
    run_log.trained(steps, speed | {"peak_memory_bytes": 1.0}, 0.0)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["step"], line["tokens_per_s"], line["time"]) for line in found] == [
        (1, 100.0, 1001.0), (2, 200.0, 1002.0), (3, 300.0, 1003.0),
    ]  # fmt: skip
    assert [(value, step) for tag, value, step in scalars.seen if tag == "speed/tokens_per_s"] == [
        (100.0, 1), (200.0, 2), (300.0, 3),
    ]  # fmt: skip
    assert [line.get("step_s") for line in found] == [None, None, 0.25], "of all steps since the last line"
    assert ("speed/step_s", 0.25, 3) in scalars.seen
    assert ("speed/data_s", 0.01, 3) in scalars.seen
    assert "speed/mfu" not in [tag for tag, _, _ in scalars.seen], "it is not known"


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
