"""The fuzzer's reference: plain torch in threads is what one process on the whole batch computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from fuzz.record import Tale
from fuzz.reference import run_reference
from fuzz.render import render
from fuzz.zoo import Codes, Mlp, Quant, Stack, wrap
from helpers.pairs import few
from torch import Tensor, nn

UNITS = (("c0",), ("",))


def build(act: Any = wrap) -> nn.Module:
    return fill(Stack([Mlp(6, 3, act), Mlp(6, 5, act)], [((0, 1), "")]), 1, exact=act is wrap, dtype=torch.float64)


def build_smooth() -> nn.Module:
    return build(torch.sin)


def tell(program: Any, num_ranks: int = 2, **changes: Any) -> list[Tale]:
    settings = replace(Settings(dtype="float64", optim=Optim("modular")), **changes)
    make = build if settings.arithmetic == "integers" else build_smooth
    play = Play(1, settings, make, UNITS, (Phase(num_ranks, program, None),), ())
    (tales,) = run_reference(play)
    for tale in tales:
        assert tale.raised is None, tale.raised.trace
    return tales


def value(tale: Tale, moment: int, name: str) -> Any:
    part = tale.records[moment].shared[name]
    return None if part is None else part.values.tolist()


def step(s: Any, number: int) -> Iterator[Any]:
    loss = s.loss(s.model(s.batch(number)))
    s.backward(loss)
    yield "backward", loss
    s.step()
    yield "step"
    s.zero_grad()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_trains_as_one_process_on_the_whole_batch(num_ranks: int) -> None:
    seen: list[list[Tensor]] = []

    def program(s: Any) -> Iterator[Any]:
        if s.rank == 0:
            seen.append([s.batch(number) for number in range(3)])
        for number in range(3):
            yield from step(s, number)

    tales = tell(program, num_ranks, batch=4 // num_ranks, arithmetic="reals", optim=Optim("adamw"))
    model = build_smooth()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
    for number in range(3):
        generator = torch.Generator().manual_seed(1000 + number)
        whole = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        model(whole).square().mean().backward()
        for name, param in model.named_parameters():
            for tale in tales:
                found = torch.tensor(value(tale, 2 * number, f"grad:{name}"), dtype=torch.float64)
                torch.testing.assert_close(found, param.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            found = torch.tensor(value(tales[-1], 2 * number + 1, f"param:{name}"), dtype=torch.float64)
            torch.testing.assert_close(found, param.detach())


def test_a_unit_that_does_not_sync_holds_its_gradients() -> None:
    def program(s: Any) -> Iterator[Any]:
        s.unit("").set_requires_gradient_sync(False)
        s.unit("c0").set_requires_gradient_sync(True)
        for number in range(2):
            s.backward(s.loss(s.model(s.batch(number))))
            yield "backward"
        s.unit("").set_requires_gradient_sync(True)
        s.backward(s.loss(s.model(s.batch(2))))
        yield "backward"

    def all_at_once(s: Any) -> Iterator[Any]:
        for number in range(3):
            s.backward(s.loss(s.model(s.batch(number))))
        yield "backward"

    held, whole = tell(program), tell(all_at_once)
    for moment in range(2):
        assert value(held[0], moment, "grad:c1.up.weight") is None
        assert value(held[0], moment, "grad:c0.up.weight") is not None
    for name in ("grad:c0.up.weight", "grad:c1.up.weight"):
        assert value(held[0], 2, name) == value(whole[0], 0, name)


def test_gradients_of_a_step_that_has_not_ended_are_hidden() -> None:
    def program(s: Any) -> Iterator[Any]:
        for is_last in (False, True):
            s.unit("").set_is_last_backward(is_last)
            s.backward(s.loss(s.model(s.batch(int(is_last)))))
            yield "backward"

    tales = tell(program)
    assert [record.hidden for record in tales[0].records] == [{"grad"}, frozenset()]


def test_divide_factors_hold_for_one_unit() -> None:
    def program(s: Any) -> Iterator[Any]:
        s.backward(s.loss(s.model(s.batch(0))))
        yield "backward"
        s.zero_grad()
        s.unit("").set_gradient_divide_factor(1.0)
        s.backward(s.loss(s.model(s.batch(0))))
        yield "backward"

    (tale, _) = tell(program)
    double = [[2 * each for each in row] for row in value(tale, 0, "grad:c1.up.weight")]
    assert value(tale, 1, "grad:c1.up.weight") == double
    assert value(tale, 1, "grad:c0.up.weight") == value(tale, 0, "grad:c0.up.weight")


def test_buffers_are_of_each_rank_alone_unless_they_are_synced() -> None:
    root = Node("Stack", children=(Node("Tally"),), segments=(Segment((0,)),))
    actions = (do.Forward(), do.Backward(), do.Step(), do.ZeroGrad()) * 2

    def totals(sync_buffers: bool) -> list[list[float]]:
        case = Case(1, "doors", 2, Model(root), Settings(sync_buffers=sync_buffers), actions)
        (tales,) = run_reference(Play.load(render(case)))
        return [tale.records[-1].own["buffer:c0.calls"].values.tolist() for tale in tales], [
            tale.records[4].own["buffer:c0.total"].values.tolist() for tale in tales
        ]

    (calls, apart), (_, _) = totals(False), totals(True)
    assert calls == [2.0, 2.0]
    assert apart[0] != apart[1]


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
