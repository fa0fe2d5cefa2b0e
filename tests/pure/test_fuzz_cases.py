"""The fuzzer's pure parts: cases are drawn by seed alone, survive JSON, are written as text, and shrink to their core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from fuzz import actions as do
from fuzz.areas import AREAS
from fuzz.case import Case, Contender, Model, Node, Optim, Segment, Settings, from_json, to_json
from fuzz.draw import draw
from fuzz.draw_model import MODULE_HOOKS
from fuzz.eligible import OFFLOADED, OURS, is_ours, peer_of, suits
from fuzz.nodes import places
from fuzz.optims import OPTIMIZERS
from fuzz.render import path_of, render
from fuzz.shrink import candidates, shrink
from helpers.each import of_each
from helpers.pairs import few

STEP = (do.Forward(), do.Backward(), do.Step(), do.ZeroGrad())


def small(*actions: do.Action, root: Node | None = None, **changes: object) -> Case:
    root = root or Node("Stack", children=(Node("Mlp"), Node("Mlp")), segments=(Segment((0, 1)),))
    return replace(Case(3, "structure", 2, Model(root), Settings(), actions or STEP), **changes)


@of_each(AREAS)
def test_a_seed_and_an_area_give_one_case_that_can_be_run_saved_and_written(area: str) -> None:
    cases = [draw(seed, area) for seed in range(5)]
    assert cases == [draw(seed, area) for seed in range(5)]
    assert len({to_json(case) for case in cases}) == 5
    for seed, case in enumerate(cases):
        assert from_json(to_json(case)) == case
        assert any(is_ours(each) for each in case.contenders), seed
        assert all(suits(case, each) for each in case.contenders), seed
        assert not [each for each in case.contenders if not is_ours(each) and each not in map(peer_of, OURS)]
        there = {place for place, _ in places(case.model.root)}
        assert there.issuperset(place for group in (*case.model.units, *case.model.ties) for place in group), seed
        for inline in (False, True) if seed < 4 else ():
            compile(render(case, inline, "found, with \"quotes\" and a 'stack'"), "case", "exec")
        for max_ranks in (1, 2, 4):
            case = draw(seed, area, max_ranks)
            restarts = [action.num_ranks for action in case.actions if isinstance(action, do.Restart)]
            assert max([case.num_ranks, *restarts]) <= max_ranks


def test_json_with_unknown_names_is_refused() -> None:
    text = to_json(small())
    with pytest.raises(ValueError, match="there is no action 'Dance'; known are"):
        from_json(text.replace('"do": "Step"', '"do": "Dance"'))
    with pytest.raises(ValueError, match=r"Settings has no field \['bach'\]"):
        from_json(text.replace('"batch"', '"bach"'))


def test_every_api_action_and_change_is_drawn() -> None:
    drawn = [draw(seed, area) for area in AREAS for seed in range(24)]
    assert {each.name for case in drawn for each in case.contenders if is_ours(each)} == {
        each.name for each in (*OURS, *OFFLOADED)
    }
    assert {type(action).__name__ for case in drawn for action in case.actions} == set(do.ACTIONS)
    assert {action.how for case in drawn for action in case.actions if isinstance(action, do.Change)} == set(do.CHANGES)
    assert {case.num_ranks for case in drawn} == {1, 2, 3, 4}


def test_half_precision_is_drawn_where_it_is_exact() -> None:
    halves = [case for seed in range(200) if (case := draw(seed, "precision")).settings.compute]
    assert {case.settings.compute for case in halves} == {"bfloat16", "float16"}
    assert all(case.settings.arithmetic == "integers" and case.num_ranks != 3 for case in halves)


def test_units_have_things_for_themselves_behind_apis_that_are_called_per_unit() -> None:
    drawn = [draw(seed, "mixed") for seed in range(200)]
    own = [each for case in drawn for each in case.settings.own]
    for name, values in {"other_api": 2, "flat": 2, "half": 2, "reshard": 3}.items():
        assert len({getattr(each, name) for each in own}) == values
    assert {each.api for case in drawn for each in case.contenders} == {
        "fully_shard",
        "replicate",
        "torch_fully_shard",
    }
    halves = [case.settings for case in drawn if any(each.half for each in case.settings.own)]
    assert all(settings.arithmetic == "integers" for settings in halves)


def test_every_hook_on_modules_is_drawn_before_and_after_sharding() -> None:
    drawn = [draw(seed, "hooks") for seed in range(200)]
    after = {action.form for case in drawn for action in case.actions if isinstance(action, do.HookModule)}
    before = {node.form for case in drawn for _, node in places(case.model.root) if node.kind == "Hooked"}
    assert before == after == set(MODULE_HOOKS)


def test_gradients_that_may_be_equal_by_chance_are_not_left_to_one_comparison() -> None:
    alone, oddments = Contender("zero_alone", update="whole"), Node("Oddments", form="scalar wide")
    assert suits(small(root=Node("Stack", children=(oddments, Node("Mlp")), segments=(Segment((0, 1)),))), alone)
    for others in ((), (Node("Mlp", frozen=True),)):
        assert not suits(small(root=Node("Stack", children=(oddments, *others), segments=(Segment((0,)),))), alone)


def test_closures_are_not_left_to_a_ddp_that_a_conversion_has_unhooked() -> None:
    converts, closes, zero = do.Change("convert"), do.Step(closure=True), Contender("zero1", update="even")
    assert not suits(small(converts, closes), zero)
    assert all(suits(small(*actions), zero) for actions in ((closes,), (converts, *STEP)))


def test_step_counts_that_are_copies_are_not_expected_to_follow_later_steps() -> None:
    adamw, keeps = Settings(optim=Optim("adamw")), (*STEP, do.Take("optim"), *STEP)
    for update in ("sharded", "offloaded"):
        assert not suits(small(*keeps, settings=adamw), Contender("fully_shard", update=update))
        assert suits(small(*keeps), Contender("fully_shard", update=update))  # an optimizer that counts nothing
    assert suits(small(*keeps, settings=adamw), Contender("fully_shard"))


def test_no_api_without_units_is_asked_for_methods_of_units() -> None:
    asks = small(*STEP, do.Unshard(0))
    assert suits(asks, Contender("fully_shard"))
    assert not any(suits(asks, Contender(api)) for api in ("shard_model", "zero1", "ddp", "overlap"))
    plain = small()
    assert all(suits(plain, Contender(api)) for api in ("fully_shard", "shard_model", "zero1", "overlap"))
    held = small(do.Set("requires_gradient_sync", 0.0), *STEP)
    assert suits(held, Contender("fully_shard"))
    synced = small(do.Set("requires_gradient_sync", 0.0), *STEP[:2], do.Set("requires_gradient_sync", 1.0), *STEP)
    for api in ("zero1", "replicate_older"):  # there, .grad shows what is held
        assert not suits(held, Contender(api))
        assert suits(synced, Contender(api))


# ---- text ----


def test_a_program_reads_like_one() -> None:
    text = render(small(do.Forward(watched=True), do.Backward(retain=True), do.Change("add", 1), do.Unshard(0)))
    assert "loss0 = s.loss(s.model(s.batch(0, watched=True)))" in text
    assert "s.backward(loss0, retain_graph=True)" in text
    assert "s.param('c0.up.bias').add_(1)" in text
    assert "s.unit('').unshard()" in text
    assert "SETTINGS = Settings()" in text


def test_what_an_action_refers_to_may_be_gone() -> None:
    text = render(small(do.Backward(), do.Load(), do.ChangeKept(0, 0), do.Switch(0), do.Wait()))
    assert "def program0(s):\n    return\n    yield 'nothing'" in text


def test_a_script_holds_the_classes_of_its_model_and_no_others() -> None:
    root = Node("Stack", children=(Node("Boxed", form="pair", children=(Node("Conv"),)),), segments=(Segment((0,)),))
    text = render(small(root=root), inline=True, about="Numbers differ.")
    assert text.startswith('"""Numbers differ."""')
    for name in ("Stack", "Boxed", "Conv", "Pair", "Wrap"):
        assert f"class {name}(" in text, name
    assert "class Mlp(" not in text
    assert 'if __name__ == "__main__":\n    main(__file__)' in text


# ---- shrinking ----


def weight(case: Case) -> tuple[int, ...]:
    """Return what shrinking makes smaller, lexicographically no matter in which order."""
    nodes = [node for _, node in places(case.model.root)]
    settings = sum(getattr(case.settings, field.name) != field.default for field in fields(Settings))
    numbers = [
        value
        for action in case.actions
        for field in fields(action)
        if isinstance(value := getattr(action, field.name), int)
    ]
    given = sum(getattr(action, field.name) != field.default for action in case.actions for field in fields(action))
    return (
        len(case.actions),
        len(nodes) + sum(node.kind not in ("Mlp", "Stack") for node in nodes),
        sum(len(each.children) + 1 + bool(each.recompute) for node in nodes for each in node.segments),
        sum(len(group) for group in case.model.units) + len(case.model.ties),
        sum(node.size + node.frozen + len(node.form.split()) for node in nodes),
        settings + case.num_ranks,
        given + sum(abs(number) for number in numbers),
    )


@pytest.mark.parametrize("area", few(zip(AREAS, strict=True), 3))
def test_every_smaller_case_is_smaller_and_can_be_written(area: str) -> None:
    for seed in range(2):
        case = draw(seed, area)
        for candidate in candidates(case):
            assert candidate != case
            assert sum(weight(candidate)) <= sum(weight(case)) + 2, candidate
            render(candidate)


def planted(predicate: Callable[[Case], bool]) -> Case:
    """Return the shrunk form of the first drawn case that satisfies ``predicate``."""
    found = next(case for seed in range(500) for area in AREAS if predicate(case := draw(seed, area)))
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return predicate(case)

    result = shrink(found, fails, max_tries=2000)
    assert len(asked) < 2000, "it ends by itself"
    return result


def test_a_failure_that_needs_two_actions_shrinks_to_them() -> None:
    def fails(case: Case) -> bool:
        names = [type(action).__name__ for action in case.actions]
        return "Take" in names and "Step" in names[names.index("Take") :]

    case = planted(fails)
    assert [type(action).__name__ for action in case.actions] == ["Take", "Step"]
    assert case.settings == Settings(arithmetic=case.settings.arithmetic)
    assert case.model.units == (((),),)


def test_shrinking_keeps_the_contender_that_fails() -> None:
    case = replace(
        small(*STEP, settings=Settings(optim=Optim("modular"))), contenders=(Contender("zero1"), Contender("ddp"))
    )
    result = shrink(case, lambda found: found.contenders[0].api == "zero1", max_tries=500)
    assert result.contenders[0] == Contender("zero1")
    assert path_of(()) == ""


def test_a_step_at_no_speed_leaves_parameters_as_they_are() -> None:
    # torch's state dicts make state by such a step; a program may have set values that the optimizer would bring back.
    param = torch.nn.Parameter(torch.tensor([4.0, -7.0]))
    param.grad = torch.zeros(2)
    OPTIMIZERS["modular"].make([param], lr=0.0).step()
    assert param.tolist() == [4.0, -7.0]
