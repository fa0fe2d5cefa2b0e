"""Which optimizers may see shards: every class of torch.optim has a rule, and nothing unknown is guessed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from shardwise import ConfigError
from shardwise.optim.slices import known_base, reason_for_refusal, step_cost, update_rule

CLASSES = [
    value
    for value in vars(torch.optim).values()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
]


class Renamed(torch.optim.AdamW):
    """Only the constructor differs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class Clipped(torch.optim.AdamW):
    """Another step: no longer what is known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Declared(Clipped):
    sharded_update = "whole_matrix"


@pytest.mark.parametrize("optimizer_class", CLASSES, ids=lambda c: c.__name__)
def test_every_class_of_torch_optim_has_a_rule(optimizer_class: type[Optimizer]) -> None:
    is_decided = known_base(optimizer_class) is not None or reason_for_refusal(optimizer_class) is not None
    assert is_decided, "decide whether it is element-wise, whole-matrix or refused"


def test_refusals_say_why() -> None:
    for optimizer_class, reason in (
        (torch.optim.LBFGS, "inner products"),
        (torch.optim.SparseAdam, "sparse gradients"),
    ):
        with pytest.raises(ConfigError, match=reason):
            update_rule(optimizer_class, "elementwise")


def test_subclasses_count_as_known_only_if_they_override_nothing() -> None:
    assert update_rule(Renamed) == "elementwise"
    Renamed([torch.nn.Parameter(torch.ones(1))])  # torch now wraps the class's step: still the same
    assert update_rule(Renamed) == "elementwise"
    with pytest.raises(ConfigError, match="Clipped is not a known class"):
        update_rule(Clipped)
    assert update_rule(Clipped, "elementwise") == "elementwise"
    assert update_rule(Declared) == "whole_matrix"


def test_declarations_are_checked() -> None:
    with pytest.raises(ConfigError, match="updates matrices as a whole"):
        update_rule(torch.optim.Muon, "elementwise")
    with pytest.raises(ConfigError, match="expected one of"):
        update_rule(Clipped, "rowwise")  # pyright: ignore[reportArgumentType]
    assert update_rule(torch.optim.AdamW, "whole_matrix") == "whole_matrix"


def test_cost_of_muon_grows_with_the_shorter_side() -> None:
    assert step_cost(torch.optim.Muon, (100, 10)) == 10 * 1000
    assert step_cost(torch.optim.Adafactor, (100, 10)) == 1000
    assert step_cost(torch.optim.Muon, ()) == 1
