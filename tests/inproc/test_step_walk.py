"""One step takes fewer calls, and enters files less often, than torch's FSDP2 on the same model."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from helpers.one_process import standing_for
from helpers.scripts import load_script
from torch import nn

from shardwise import fully_shard

MOST_CALLS = 115.0  # of Python functions, per unit and step, without the model's own
step_walk = load_script("benchmarks/step_walk.py")


@pytest.fixture(autouse=True)
def _without_what_other_tests_left() -> None:  # pyright: ignore[reportUnusedFunction]
    """Listeners of offloaded state cost calls until their owner is collected."""
    gc.collect()


def test_a_step_walks_no_further_than_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CHECKS", "first")
    with standing_for(0, 2):
        ours, torchs = (step_walk.walk(*step_walk.PACKAGES[name]) for name in ("shardwise", "fsdp2"))
    assert ours.calls.total() < torchs.calls.total()
    assert ours.entries.total() < 1.1 * torchs.entries.total()


class _Unit(nn.Module):
    """Eight parameters, of which each call is a step's and not the model's."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.register_parameter(f"w{number}", nn.Parameter(torch.ones(8, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self._parameters.values():
            assert weight is not None
            x = x + weight[0, 0]
        return x


def _calls_of_a_step(model: nn.Module) -> int:
    """Return how many functions of Python a warm step calls."""
    for _ in range(5):
        model(torch.zeros(())).backward()
        model.zero_grad()
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        model(torch.zeros(())).backward()
    finally:
        sys.setprofile(None)
    return calls


def test_a_unit_of_eight_parameters_costs_no_more_calls_than_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is exact: lower it with what a step calls."""
    monkeypatch.setenv("SHARDWISE_CHECKS", "first")
    with standing_for(0, 8):
        plain, model = (nn.Sequential(*[_Unit() for _ in range(16)]) for _ in range(2))
        for unit in model:
            fully_shard(unit)
        fully_shard(model)
        assert (_calls_of_a_step(model) - _calls_of_a_step(plain)) / 16 <= MOST_CALLS
