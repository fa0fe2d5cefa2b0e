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
from fuzz.zoo import Codes, Mlp, Quant, Stack, wrap
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


@pytest.mark.parametrize("area", few(zip(AREAS, strict=True), 3))
def test_it_says_the_same_twice(area: str) -> None:
    for seed in range(2):
        play = Play.load(render(draw(seed, area)))
        for left, right in zip(run_reference(play), run_reference(play), strict=True):
            assert first_difference(left, right, 0.0) is None
            assert len(left[0].records) == len(right[0].records)


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


def test_codes_compute_as_their_values_do() -> None:
    torch.manual_seed(0)
    module = Quant(6, 4, wrap)
    fill(module, 3, exact=True, dtype=torch.float32)
    weight = module.weight
    assert isinstance(weight, Codes)
    whole = weight.dequantize()
    assert whole.abs().sum() > 0
    x = torch.randint(-3, 4, (2, 6)).float()
    torch.testing.assert_close(module(x), wrap(x * module.scale + wrap(x @ whole.t()) @ whole))


def test_codes_are_cut_by_split_and_lose_in_a_clone() -> None:
    codes = Codes(torch.arange(12, dtype=torch.int8).view(4, 3))
    assert [part.dequantize().tolist() for part in codes.split(3)] == [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        [[9, 10, 11]],
    ]
    assert codes.clone().dequantize().flatten().tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    with pytest.raises(NotImplementedError, match="cannot be sliced to 1:2 along 0"):
        codes[1:2]
    with pytest.raises(NotImplementedError, match=r"Codes does not support aten\.add"):
        codes + 1
