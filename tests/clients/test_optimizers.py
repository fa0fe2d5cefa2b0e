"""Optimizers of other packages over shards, a few steps each, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.compare import EXACT, REORDERED, assert_same
from helpers.ranks import on_ranks
from helpers.sharded import shard_units, step_on_drawn_gradients

from shardwise import ShardedOptimizer
from shardwise.testing.models import build

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
def test_whole_matrices() -> None:
    import pytorch_optimizer

    for name, options in WHOLE_MATRIX.items():
        run(getattr(pytorch_optimizer, name), "whole_matrix", options)
