"""Optimizers of other packages over shards, a few steps each, beside one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.compare import EXACT, REORDERED, assert_same
from helpers.models import batch_for, build
from helpers.ranks import on_ranks
from helpers.sharded import shard_units, step_on_drawn_gradients

from shardwise import ShardedOptimizer
from shardwise.planner.hardware import state_bytes_of

pytestmark = pytest.mark.clients

# What docs/optimizers.md says of each.
ELEMENTWISE = {"Adan": {}, "Lion": {}, "ScheduleFreeAdamW": {}, "AdEMAMix": {}, "AdaBelief": {}}
WHOLE_MATRIX = {"Lamb": {}, "CAME": {}, "SOAP": {}, "ScalableShampoo": {}, "LARS": {}}


def run(kind: Any, update: str, options: dict[str, Any]) -> None:
    plain = build("plain")
    model = shard_units(copy.deepcopy(plain))
    ours: Any = ShardedOptimizer(dict(model.named_parameters()), kind, lr=0.01, update=update, **options)  # type: ignore[arg-type]
    theirs = kind(plain.parameters(), lr=0.01, **options)
    for each in (ours, theirs):
        if update == "elementwise" and hasattr(each, "train"):
            each.train()
    for step in range(4):
        torch.manual_seed(step)
        step_on_drawn_gradients(model, ours, step)
        torch.manual_seed(step)
        step_on_drawn_gradients(plain, theirs, step)
    assert_same(model, plain, EXACT if update == "elementwise" else REORDERED, kind.__name__)


@on_ranks(2)
def test_element_by_element() -> None:
    import pytorch_optimizer
    import schedulefree

    for name, options in ELEMENTWISE.items():
        run(getattr(pytorch_optimizer, name), "elementwise", options)
    run(schedulefree.AdamWScheduleFree, "elementwise", {"foreach": False})


@on_ranks(2)
def test_one_step_size_for_all_tensors() -> None:
    import pytorch_optimizer

    for name, lr in (("Prodigy", 1.0), ("DAdaptAdam", 1.0), ("DAdaptLion", 1.0)):
        plain = build("plain")
        model = shard_units(copy.deepcopy(plain))
        kind = getattr(pytorch_optimizer, name)
        ours: Any = ShardedOptimizer(dict(model.named_parameters()), kind, lr=lr, update="elementwise")
        theirs = kind(plain.parameters(), lr=lr)
        before = theirs.param_groups[0].get("d0", theirs.param_groups[0].get("d"))
        for _ in range(12):
            for each, optimizer in ((model, ours), (plain, theirs)):
                each(batch_for("plain", 0, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found, expected = (float(optimizer.param_groups[0]["d"]) for optimizer in (ours, theirs))
        assert expected > 1.5 * before, f"{name} has found no step size: {expected}"
        assert found == pytest.approx(expected, rel=1e-4), name
        # Sums of ranks are rounded in another order, and the step size grows by what has come of it.
        assert_same(model, plain, {"rtol": 1e-3, "atol": 1e-4}, name)


@on_ranks(2)
def test_kron_is_the_plain_one_but_for_its_random_numbers() -> None:
    import numpy as np
    import pytorch_optimizer

    plain = build("plain")
    model = shard_units(copy.deepcopy(plain))
    ours: Any = ShardedOptimizer(dict(model.named_parameters()), pytorch_optimizer.Kron, lr=0.01, update="whole_matrix")
    theirs = pytorch_optimizer.Kron(plain.parameters(), lr=0.01)
    with mock.patch("torch.randn_like", lambda x, dtype=None: torch.linspace(-1, 1, x.numel()).view(x.shape).to(dtype)):
        for step in range(4):
            for each, optimizer in ((model, ours), (plain, theirs)):
                np.random.seed(step)  # whether factors are balanced in this step
                step_on_drawn_gradients(each, optimizer, step)
    assert_same(model, plain, EXACT, "Kron")


@on_ranks(2)
def test_whole_matrices() -> None:
    import pytorch_optimizer

    for name, options in WHOLE_MATRIX.items():
        run(getattr(pytorch_optimizer, name), "whole_matrix", options)


def test_a_plan_counts_the_8_bit_state_of_torchaos() -> None:
    from torchao.optim import AdamW8bit

    scales = 2 * 4 / 256  # a number per block, for both averages
    assert state_bytes_of(AdamW8bit) == pytest.approx(2 + scales, rel=0.01)
