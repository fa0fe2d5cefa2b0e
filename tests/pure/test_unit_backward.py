"""How far a unit's backward has come: legal steps alone, and when gradients end it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.fsdp import unit as module
from shardwise.fsdp.unit import Ending, Stage, UnitBackward

MOVES: dict[str, Callable[[UnitBackward], object]] = {
    "enter": lambda each: each.enter(7),
    "arrive 0": lambda each: each.hook(_param(0))(torch.zeros(())),
    "arrive 1": lambda each: each.hook(_param(1))(torch.zeros(())),
    "leave": lambda each: each.leave(),
    "forget": lambda each: each.leave(learns=False),
}


def _param(ordinal: int) -> Any:
    return SimpleNamespace(ordinal=ordinal)


@pytest.fixture(autouse=True)
def _in_task_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch_private, "graph_task_id", lambda: 7)


@given(st.lists(st.sampled_from(list(MOVES)), max_size=12))
def test_whatever_happens_the_stage_tells_what_has_come(moves: list[str]) -> None:
    backward = UnitBackward(lambda: None)
    backward.counted = (2, 2)
    for move in moves:
        MOVES[move](backward)
        if move in ("leave", "forget"):
            assert backward.stage is Stage.IDLE
        assert (backward.stage is Stage.IDLE) <= (not backward.arrived)
        assert (backward.stage is Stage.ARRIVING) <= bool(backward.arrived)
        assert backward.is_complete == (
            backward.learned is backward.ending is Ending.LAST_GRADIENT and backward.arrived == {0, 1}
        )


def test_who_listens_hears_of_what_nobody_knew_and_of_the_last_gradient() -> None:
    heard: list[Stage] = []
    backward = UnitBackward(lambda: cast(Any, backward))
    host = SimpleNamespace(gradient_arrived=lambda _: heard.append(backward.stage))
    backward.callbacks = lambda: cast(Any, host)
    backward.counted = (2, 2)
    MOVES["arrive 0"](backward)
    assert heard == [Stage.ARRIVING]
    backward.leave(learns=False)
    backward.enter(7)
    MOVES["arrive 0"](backward)
    assert heard == [Stage.ARRIVING]
    MOVES["arrive 1"](backward)
    assert heard == [Stage.ARRIVING, Stage.RUNNING]


def test_gradients_of_a_backward_within_end_nothing_until_one_has_shown_that_they_do() -> None:
    backward = UnitBackward(lambda: None)
    backward.counted = (1, 1)
    backward.enter(3)  # another task than the one that runs
    MOVES["arrive 0"](backward)
    assert not backward.is_complete
    backward.leave()
    assert backward.learned is Ending.NESTED
    backward.enter(7)
    MOVES["arrive 0"](backward)
    assert not backward.is_complete
    backward.leave()
    assert backward.learned is Ending.LAST_GRADIENT


def test_a_nested_backward_ends_a_unit_unless_one_has_come_to_it_again() -> None:
    backward = UnitBackward(lambda: None)
    backward.counted = (2, 2)
    for whole, comes_again in ((3, False), (4, True), (5, False)):
        backward.enter(7, whole=whole)
        MOVES["arrive 0"](backward)
        assert not backward.ends_with(7, is_one_module=False)
        assert not backward.ends_with(whole, is_one_module=True)
        MOVES["arrive 1"](backward)
        assert backward.ends_with(7, is_one_module=False)
        backward.ended_in = whole if comes_again else -1
        backward.leave()
        backward.enter(7, whole=whole)
        MOVES["arrive 0"](backward)
        assert backward.ends_with(7, is_one_module=True) is not comes_again
        backward.leave()
        assert (backward.learned is Ending.LAST_GRADIENT) is not comes_again
        if comes_again:
            backward.enter(7, whole=whole + 4)
            assert not backward.ends_with(7, is_one_module=True)
            MOVES["arrive 0"](backward)
            backward.leave()


def test_a_frozen_parameter_may_be_read_after_the_last_gradient() -> None:
    backward = UnitBackward(lambda: None)
    backward.counted = (1, 2)
    backward.enter(7)
    MOVES["arrive 0"](backward)
    assert not backward.is_complete
