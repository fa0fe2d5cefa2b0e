"""What the fuzzer calls a difference, and what it calls a failure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fuzz.case import Settings
from fuzz.draw import draw
from fuzz.judge import Verdict, bound_of, first_difference, is_chaotic, judge
from fuzz.phases import Play
from fuzz.record import WRITTEN, Part, Raised, Record, Tale
from fuzz.reference import run_reference
from fuzz.render import render

from shardwise import StateError


def part(
    values: list[float] | list[list[float]], start: int = 0, rows: int | None = None, dtype: str = "float32"
) -> Part:
    array = np.asarray(values, dtype=np.float64)
    shape = (rows if rows is not None else len(array), *array.shape[1:])
    return Part(shape, (start,) + (0,) * (array.ndim - 1), array, dtype)


def whole(*values: float, name: str = "param:w", label: str = "step", dtype: str = "float32") -> Record:
    return Record(label, {name: part(list(values), dtype=dtype)}, {})


def halves(left: list[float], right: list[float]) -> list[Tale]:
    rows = len(left) + len(right)
    records = [
        Record("step", {"param:w": part(values, start, rows)}, {}) for values, start in ((left, 0), (right, len(left)))
    ]
    return [Tale([record]) for record in records]


def tales(*records: Record, ranks: int = 2) -> list[Tale]:
    return [Tale(list(records)) for _ in range(ranks)]


def raised(error: Exception) -> Raised:
    return Raised.of(error)


NAMED = raised(StateError("unit 'a' is not ready; call b() first"))
ROUGH = raised(RuntimeError("storage of size 0"))


def test_rows_of_ranks_are_joined() -> None:
    reference = tales(whole(1.0, 2.0, 3.0))
    assert judge(reference, halves([1.0, 2.0], [3.0]), None, 0.0) == Verdict("equal")
    verdict = judge(reference, halves([1.0, 2.0], [4.0]), None, 0.0)
    assert (verdict.kind, verdict.what) == ("numbers", "param")
    assert "param:w: rank 1: 1 of 1 elements differ, first at [0]: found 4.0, expected 3.0" in verdict.text


def test_rows_that_no_rank_holds_are_a_difference() -> None:
    found = [Tale([Record("step", {"param:w": part([1.0], 0, 3)}, {})]) for _ in range(2)]
    verdict = judge(tales(whole(1.0, 2.0, 3.0)), found, None, 0.0)
    assert verdict.kind == "numbers"
    assert "2 elements are held by no rank" in verdict.text


def test_replicas_that_differ_are_a_difference() -> None:
    found = [Tale([whole(1.0, 2.0)]), Tale([whole(1.0, 2.5)])]
    assert "rank 1" in judge(tales(whole(1.0, 2.0)), found, None, 0.0).text


@pytest.mark.parametrize(
    ("found", "expected"), [(None, part([1.0])), (part([1.0]), None), (part([1.0], dtype="float64"), part([1.0]))]
)
def test_missing_values_and_other_dtypes_are_differences(found: Part | None, expected: Part | None) -> None:
    theirs, ours = (Record("backward", {"grad:w": each}, {}) for each in (expected, found))
    assert judge(tales(theirs), tales(ours), None, 0.0).what == "grad"
    assert judge(tales(theirs), tales(replace(ours, hidden=frozenset({"grad"}))), None, 0.0).kind == "equal"


def test_what_one_process_does_not_have_is_a_difference() -> None:
    extra = Record("step", {"param:w": part([1.0]), "param:again": part([1.0])}, {})
    assert "param:again is not there in one process" in judge(tales(whole(1.0)), tales(extra), None, 0.0).text


def test_what_ranks_have_for_themselves_is_compared_rank_by_rank() -> None:
    theirs = [Tale([Record("forward", {}, {"loss:": part([float(rank)])})]) for rank in range(2)]
    assert judge(theirs, theirs, None, 0.0).kind == "equal"
    assert "loss: of rank 0" in judge(theirs, theirs[::-1], None, 0.0).text
    shared = [theirs[0], theirs[0], theirs[1], theirs[1]]  # pairs of ranks share a batch
    assert judge(theirs, shared, None, 0.0).kind == "equal"


def test_bounds_are_relative_to_the_largest_value() -> None:
    reference = tales(whole(1000.0, 1.0, dtype="float64"))
    assert judge(reference, tales(whole(1000.0, 1.0 + 1e-7, dtype="float64")), None, 1e-9).kind == "equal"
    assert judge(reference, tales(whole(1000.0, 1.0 + 1e-5, dtype="float64")), None, 1e-9).kind == "numbers"
    assert judge(reference, tales(whole(1000.0, 1.0 + 1e-12, dtype="float64")), None, 0.0).kind == "numbers"
    single = tales(whole(1000.0, 1.0))  # a parameter in single precision, whatever the others are in
    assert judge(single, tales(whole(1000.0, 1.0 + 1e-5)), None, 1e-9).kind == "equal"
    assert judge(single, tales(whole(1000.0, 1.0 + 1e-12)), None, 0.0).kind == "numbers"
    assert judge(tales(whole(float("nan"))), tales(whole(float("nan"))), None, 0.0).kind == "equal"
    assert judge(tales(whole(1.0)), tales(whole(float("nan"))), None, 1e-2).kind == "numbers"


def test_whole_numbers_are_compared_to_the_bit_where_averages_are_exact() -> None:
    assert [bound_of(Settings(), ranks) for ranks in (1, 2, 4)] == [0.0, 0.0, 0.0]
    assert bound_of(Settings(), 3) > 0
    assert bound_of(Settings(arithmetic="reals", dtype="float64"), 2) == 1e-7
    assert bound_of(Settings(compute="bfloat16"), 2) == 0.0
    assert bound_of(Settings(arithmetic="reals"), 2) == 1e-4
    assert bound_of(Settings(arithmetic="reals", dtype="float64", reduce="float32"), 3) == 1e-4


def test_a_named_error_on_every_rank_is_a_refusal() -> None:
    reference = tales(whole(1.0), whole(2.0))
    assert judge(reference, [Tale([whole(1.0)], NAMED)] * 2, None, 0.0).kind == "refused"
    assert judge(reference, [Tale([whole(1.0)], NAMED), Tale([whole(1.0), whole(2.0)])], None, 0.0).kind == "some ranks"
    assert judge(reference, [Tale([whole(1.0)], NAMED), Tale([whole(1.0)], ROUGH)], None, 0.0).kind == "raw error"
    assert judge(reference, [Tale([whole(3.0)], NAMED)] * 2, None, 0.0).kind == "numbers"  # too late


def test_a_named_error_that_is_true_of_no_program_is_a_failure() -> None:
    untrue = replace(NAMED, text="c0.weight was added to the module tree after its units were made and belongs to none")
    verdict = judge(tales(whole(1.0)), [Tale([], untrue)] * 2, None, 0.0)
    assert verdict.is_failure
    assert verdict.text.startswith("untrue: c0.weight")


def test_errors_without_words_or_of_the_interpreter_are_not_named() -> None:
    assert NAMED.is_named
    assert not ROUGH.is_named
    assert not raised(AssertionError()).is_named
    assert not raised(AttributeError("'NoneType' object has no attribute 'wait'")).is_named


def test_where_one_process_raises_ours_may_too_or_does_as_torch() -> None:
    reference = [Tale([whole(1.0)], ROUGH)] * 2
    on = [Tale([whole(1.0), whole(2.0)])] * 2
    assert judge(reference, [Tale([whole(1.0)], NAMED)] * 2, None, 0.0).kind == "excused"
    assert judge(reference, on, on, 0.0).kind == "as torch"
    assert judge(reference, on, [Tale([whole(1.0), whole(3.0)])] * 2, 0.0).kind == "numbers"
    assert judge(reference, on, None, 0.0).kind == "excused"  # nothing to compare with
    written = raised(RuntimeError(f"{WRITTEN} an inplace operation: is at version 3; expected version 2"))
    other = [Tale([whole(1.0), whole(3.0)])] * 2
    assert judge([Tale([whole(1.0)], written)] * 2, on, other, 0.0).kind == "excused"  # it gathers again


def test_unlike_one_process_but_like_torch_is_told_apart() -> None:
    reference, ours = tales(whole(1.0), whole(2.0)), tales(whole(1.0), whole(3.0))
    assert judge(reference, ours, ours, 0.0).kind == "as torch"
    assert judge(reference, ours, tales(whole(1.0), whole(4.0)), 0.0).kind == "numbers"
    assert judge(reference, ours, [Tale([whole(1.0)], ROUGH)] * 2, 0.0).kind == "numbers"
    longer = tales(whole(1.0), whole(2.0), whole(5.0))
    ours, theirs = (tales(whole(1.0), whole(3.0), whole(last)) for last in (6.0, 7.0))
    assert judge(longer, ours, ours, 0.0).kind == "as torch"
    assert judge(longer, ours, theirs, 0.0).kind == "numbers"  # what comes after the first difference counts too


def test_like_torch_it_may_be_cut_in_another_way() -> None:
    reference, halved = tales(whole(1.0, 2.0)), halves([1.0], [3.0])
    assert judge(reference, tales(whole(1.0, 3.0)), halved, 0.0).kind == "as torch"
    assert judge(reference, tales(whole(1.0, 4.0)), halved, 0.0).kind == "numbers"
    shown = Record("step", {"param:w": part([1.0, 3.0]), "full:w": part([1.0, 2.0])}, {})
    assert judge(reference, tales(whole(1.0, 3.0)), tales(shown), 0.0).kind == "as torch"


def test_more_full_parameters_than_planned_are_a_failure() -> None:
    ours = [Tale([whole(1.0)], notes=["8 bytes of full parameters were registered at once, planned are 4"])]
    verdict = judge(tales(whole(1.0), ranks=1), ours, None, 0.0)
    assert verdict.is_failure
    assert verdict.kind == "memory"


def test_the_first_difference_is_the_earliest_moment() -> None:
    reference = tales(whole(1.0), whole(2.0), whole(3.0), ranks=1)
    found = first_difference(reference, tales(whole(1.0), whole(5.0), whole(6.0), ranks=1), 0.0)
    assert found is not None
    assert (found.moment, found.what) == (1, "param")


def test_of_a_whole_parameter_and_its_shards_one_may_lag_behind() -> None:
    def record(shard: float, full: float) -> Record:
        return Record("step", {"param:w": part([shard]), "full:w": part([full], dtype="")}, {})

    reference = tales(whole(1.0), whole(2.0), ranks=1)
    assert judge(reference, tales(record(1.0, 1.0), record(2.0, 2.0), ranks=1), None, 0.0).kind == "equal"
    for lagging in (record(2.0, 1.0), record(1.0, 2.0)):
        verdict = judge(reference, tales(record(1.0, 1.0), lagging, ranks=1), None, 0.0)
        assert (verdict.kind, verdict.what) == ("numbers", "full")
    verdict = judge(reference, tales(record(1.0, 0.0), record(3.0, 3.0), ranks=1), None, 0.0)
    assert (verdict.kind, verdict.what) == ("numbers", "param")  # the later one, but what counts


def test_writes_that_torch_does_not_count_show_after_the_next_forward_or_step() -> None:
    def told(*moments: tuple[str, float, float]) -> list[Tale]:
        shown = [{"param:w": part([shard]), "full:w": part([full], dtype="")} for _, shard, full in moments]
        return [Tale([Record(label, names, {}) for (label, _, _), names in zip(moments, shown, strict=True)])]

    reference = told(("change data_copy", 2.0, 2.0), ("backward", 2.0, 2.0), ("step", 3.0, 3.0))
    late = told(("change data_copy", 1.0, 2.0), ("backward", 1.0, 2.0), ("step", 3.0, 3.0))
    never = told(("change data_copy", 1.0, 2.0), ("backward", 1.0, 2.0), ("step", 2.0, 3.0))
    assert judge(reference, late, None, 0.0).kind == "equal"
    assert judge(reference, never, None, 0.0).what == "full"
    counted = [told(("change copy", 2.0, 2.0)), told(("change copy", 1.0, 2.0))]
    assert judge(*counted, None, 0.0).what == "full"


def test_what_one_process_makes_of_its_own_last_bits_is_chaos() -> None:
    reference, ours = tales(whole(1.0), whole(2.0)), tales(whole(1.0), whole(3.0))
    assert is_chaotic(reference, tales(whole(1.0), whole(2.5)), ours, 1e-7)
    assert not is_chaotic(reference, tales(whole(1.0), whole(2.0)), ours, 1e-7)
    assert not is_chaotic(
        tales(whole(1.0), whole(2.0), whole(4.0)), tales(whole(1.0), whole(2.0), whole(5.0)), ours, 1e-7
    )
    assert not is_chaotic(reference, tales(whole(1.5), whole(2.0)), reference, 1e-7)  # ours is equal
    little = tales(whole(1.0), whole(2.001))
    assert is_chaotic(reference, little, ours, 1e-7)
    assert not is_chaotic(reference, little, tales(whole(1.0), whole(200.0)), 1e-7)  # not what a last bit makes
    assert not is_chaotic(reference, tales(whole(1.0), whole(9.0)), tales(whole(1.0), whole(2.0, 2.0)), 1e-7)


def test_a_nudged_process_shows_which_programs_are_chaotic() -> None:
    """Two batch norms over two rows, one of the other's outputs, found by a campaign; and programs that are not."""
    for area, seed, drifts in (("structure", 1201000100, True), ("optimizers", 2, False), ("structure", 1, False)):
        case = draw(seed, area, max_ranks=2)
        assert case.settings.arithmetic == "reals", case.settings
        play = Play.load(render(case))
        found = [
            first_difference(*pair, 1e-7) for pair in zip(run_reference(play), run_reference(play, True), strict=True)
        ]
        assert any(found) == drifts, found
