"""Optimizers that torch does not have, over shards: one line each, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.compare import CLOSE, EXACT, assert_same, full
from helpers.models import batch_for, build
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import shard_units, step_on_drawn_gradients

from shardwise import ConfigError, ShardedOptimizer, ZeroRedundancyOptimizer


class Small(torch.optim.Optimizer):
    """What the optimizers below have in common."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "is_training": not hasattr(self, "train")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)


class ScheduleFree(Small):
    """Trains at one point and evaluates at an average: ``eval`` and ``train`` write to parameters."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not group["is_training"]:
            raise RuntimeError("call train() before step()")
        state.setdefault("z", p.clone())
        state["z"].sub_(g, alpha=group["lr"])
        p.lerp_(state["z"], 0.3)

    @torch.no_grad()
    def eval(self) -> str:
        self._move(False, -0.5)
        return "evaluates"

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, 1 / 3)

    def _move(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["is_training"] is not is_training:
                group["is_training"] = is_training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)


class Adan(Small):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        old = state.get("old", g)
        m, v, n = (state.setdefault(key, torch.zeros_like(p)) for key in ("m", "v", "n"))
        m.lerp_(g, 0.1)
        v.lerp_(g - old, 0.1)
        n.lerp_((g + 0.9 * (g - old)).square(), 0.1)
        p.sub_((m + 0.9 * v) / (n.sqrt() + 1e-8), alpha=group["lr"])
        state["old"] = g.clone()


class Lamb(Small):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m, v = (state.setdefault(key, torch.zeros_like(p)) for key in ("m", "v"))
        m.lerp_(g, 0.1)
        v.lerp_(g.square(), 0.1)
        step = m / (v.sqrt() + 1e-6)
        p.sub_(step * (p.norm() / (step.norm() + 1e-6)), alpha=group["lr"])


class Shampoo(Small):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.ndim != 2:
            p.sub_(g, alpha=group["lr"])
            return
        for dim, key in enumerate(("left", "right")):
            statistics = state.setdefault(key, torch.eye(p.shape[dim]))
            statistics.add_(g @ g.T if dim == 0 else g.T @ g)
            values, vectors = torch.linalg.eigh(statistics)
            root = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
            g = root @ g if dim == 0 else g @ root
        p.sub_(g, alpha=group["lr"])


class Came(Small):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.ndim == 2:
            rows, columns = g.square().mean(1, keepdim=True), g.square().mean(0, keepdim=True)
            g = g * (rows.mean() / (rows * columns + 1e-12)).sqrt()
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(g / g.square().mean().sqrt().clamp_min(1.0), 0.1)
        p.sub_(m, alpha=group["lr"])


class Prodigy(torch.optim.Optimizer):
    """Finds its step size, one for all tensors together, from sums over all elements of them."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        above, below = torch.zeros(()), torch.zeros(())
        d = self.param_groups[0]["d"]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                start, s = state.setdefault("start", p.clone()), state.setdefault("s", torch.zeros_like(p))
                above.add_(torch.dot(p.grad.flatten(), (start - p).flatten()))
                s.add_(p.grad, alpha=0.2)
                below.add_(s.abs().sum() + 1e-3 * s.norm())
        for group in self.param_groups:
            group["d"] = max(d, (above / below).item())
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.abs() + 0.01), alpha=group["d"] * group["lr"])


class Middling(Small):
    """Takes a number over all elements that shards do not tell."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        self.defaults["spread"] = g.mean()
        p.sub_(g, alpha=group["lr"])


RULES: dict[type[Small], Any] = {
    ScheduleFree: "elementwise",
    Adan: "elementwise",
    Lamb: "whole_matrix",
    Shampoo: "whole_matrix",
    Came: "whole_matrix",
}


@on_ranks(2)
def test_one_line_runs_an_optimizer_over_shards_as_one_process_does() -> None:
    for kind, update in RULES.items():
        plain = build("plain")
        model = shard_units(copy.deepcopy(plain))
        ours: Any = ShardedOptimizer(dict(model.named_parameters()), kind, lr=0.02, update=update)
        theirs: Any = kind(plain.parameters(), lr=0.02)
        if kind is ScheduleFree:
            for each in (ours, theirs):
                each.train()
        for step in range(3):
            step_on_drawn_gradients(model, ours, step)
            step_on_drawn_gradients(plain, theirs, step)
        assert_same(model, plain, EXACT, kind.__name__)


@on_ranks(2)
def test_methods_of_the_inner_optimizer_write_to_the_parameters_that_are_used() -> None:
    plain = build("plain")
    model = shard_units(copy.deepcopy(plain))
    ours: Any = ShardedOptimizer(dict(model.named_parameters()), ScheduleFree, lr=0.02, update="elementwise")
    theirs = ScheduleFree(plain.parameters(), lr=0.02)
    x = batch_for("plain", 0, 8)
    ours.train()
    theirs.train()
    for step in range(2):
        assert torch.equal(model(x), plain(x))  # the root's parameters stay full
        step_on_drawn_gradients(model, ours, step)
        step_on_drawn_gradients(plain, theirs, step)
        assert (ours.eval(), theirs.eval()) == ("evaluates", "evaluates")
        assert [group["is_training"] for group in ours.param_groups] == [False]
        torch.testing.assert_close(model(x), plain(x), **CLOSE)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(mine), other)
        ours.train()
        theirs.train()


@on_ranks(2)
def test_methods_of_a_whole_matrix_optimizer_and_unknown_names_are_refused() -> None:
    model = shard_units(build("plain"))
    optimizer: Any = ShardedOptimizer(dict(model.named_parameters()), ScheduleFree, update="whole_matrix")
    with pytest.raises(ConfigError, match=r"ScheduleFree.eval\(\) needs full parameters.*update='elementwise'"):
        optimizer.eval()
    with pytest.raises(AttributeError, match="'ScheduleFree' object has no attribute 'evil'"):
        optimizer.evil()


@on_ranks(2, FOUR)
def test_sums_over_all_elements_are_those_of_all_ranks() -> None:
    plain = build("plain")
    model = shard_units(copy.deepcopy(plain))
    ours = ShardedOptimizer(dict(model.named_parameters()), Prodigy, update="elementwise")
    theirs = Prodigy(plain.parameters())
    for step in range(4):
        for each, optimizer in ((model, ours), (plain, theirs)):
            each(batch_for("plain", 0, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = ours.param_groups[0]["d"]
        assert (found > 1e-3) is (step > 0), f"it found no step size in step {step}: {found}"
        assert found == pytest.approx(theirs.param_groups[0]["d"], rel=1e-4)
    assert_same(model, plain, CLOSE, "Prodigy")


@on_ranks(2)
def test_numbers_over_all_elements_that_shards_do_not_tell_are_refused() -> None:
    model = shard_units(build("plain"))
    named = dict(model.named_parameters())
    with pytest.raises(ConfigError, match="computes mean over all elements"):
        ShardedOptimizer(named, Middling, update="elementwise")
    named["plain"] = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="Prodigy sums.*sharded over the same ranks"):
        ShardedOptimizer(named, Prodigy, update="elementwise")
    with pytest.raises(ConfigError, match="Prodigy sums over all elements"):  # it would sum its own slices
        ZeroRedundancyOptimizer(build("plain").parameters(), Prodigy, partition="even")
