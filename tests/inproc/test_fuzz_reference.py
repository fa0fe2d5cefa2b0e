"""The fuzzer's reference: plain torch in threads is what one process on the whole batch computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuzz import actions as do
from fuzz.areas import AREAS
from fuzz.case import Case, Model, Node, Optim, Segment, Settings
from fuzz.draw import draw
from fuzz.initial_values import fill
from fuzz.judge import first_difference
from fuzz.phases import Phase, Play
from fuzz.reference import run_reference
from fuzz.render import render
from fuzz.zoo import Mlp, Stack, wrap
from helpers.pairs import few
from torch import nn

UNITS = (("c0",), ("",))


def build(act: Any = wrap) -> nn.Module:
    return fill(Stack([Mlp(6, 3, act), Mlp(6, 5, act)], [((0, 1), "")]), 1, exact=act is wrap, dtype=torch.float64)


def test_an_exception_of_one_rank_ends_all() -> None:
    def program(s: Any) -> Iterator[Any]:
        yield "begin"
        if s.rank == 1:
            raise ValueError("rank 1 is not well")
        s.backward(s.loss(s.model(s.batch(0))))
        yield "backward"

    play = Play(1, Settings(dtype="float64"), build, UNITS, (Phase(2, program, None),), ())
    (tales,) = run_reference(play)
    assert [len(tale.records) for tale in tales] == [1, 1]
    assert tales[1].raised is not None
    assert tales[1].raised.text == "rank 1 is not well"
    assert tales[0].raised is not None
    assert tales[0].raised.kind == "LeftBehind"


@pytest.mark.parametrize("area", few(zip(AREAS, strict=True), 2))
def test_a_script_computes_what_the_case_does(area: str) -> None:
    case = draw(1, area)
    short, whole = Play.load(render(case)), Play.load(render(case, inline=True, about="A case."))
    for left, right in zip(run_reference(short), run_reference(whole), strict=True):
        assert first_difference(left, right, 0.0) is None


def test_whole_numbers_stay_whole_in_any_precision() -> None:
    """So the sums of a case in integers do not depend on their order, nor on the dtype."""
    root = Node("Stack", children=(Node("Mlp", 7), Node("Lookup", 4), Node("Mlp", 5)), segments=(Segment((0, 1, 2)),))
    actions = (do.Forward(watched=True), do.Backward(), do.Step(), do.ZeroGrad()) * 4
    told = []
    for dtype in ("float32", "float64", "bfloat16"):
        case = Case(1, "structure", 2, Model(root), Settings(dtype=dtype, optim=Optim("modular")), actions)
        (tales,) = run_reference(Play.load(render(case)))
        told.append([[part and part.values.tolist() for part in r.shared.values()] for r in tales[0].records])
    assert told[0] == told[1] == told[2]


# ---- the tensor subclass of the zoo ----
