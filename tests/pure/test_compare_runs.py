"""What two recordings differ in is said in words that a comparison of sketches backs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.prove.compare import Comparison, Key, ProveOptions, Recording, compare_ranks, notes_of
from shardwise.prove.run import Verdict, judge
from shardwise.prove.sketch import sketches_of

W = 2
RATE, BACKWARDS = "the learning rate", "the number of backwards before the step"
Tensors = Mapping[tuple[str, int], torch.Tensor]
_RANDOM = torch.Generator().manual_seed(0)  # whatever other files have drawn
_DRAWN = {
    (what, rank): torch.randn(6, 70, generator=_RANDOM) for what in ("g0", "g1", "p", "other") for rank in range(W)
}
GIVEN = {**_DRAWN, ("p", 1): _DRAWN["p", 0]}


def sums(tensor: torch.Tensor) -> Any:
    return sketches_of({"": tensor})[""][0].numpy()


def key(stage: str, name: str = "w", microbatch: int = 0) -> Key:
    return Key(stage, microbatch, "", name)


def run(gradient: Any = None, after: torch.Tensor | None = None) -> Recording:
    """Return a recording of one step of ``w`` with two microbatches; ``gradient(rank)``: that of the step."""
    means = [(GIVEN[f"g{each}", 0] + GIVEN[f"g{each}", 1]) / W for each in range(2)]
    right = means[0] + means[1]
    begin = {key("parameter"): {rank: sums(GIVEN["p", rank]) for rank in range(W)}}
    row = {key("own", "w", each): {rank: sums(GIVEN[f"g{each}", rank]) for rank in range(W)} for each in range(2)}
    given = {rank: right if gradient is None else gradient(rank, right) for rank in range(W)}
    row[key("step gradient", "w", 2)] = {rank: sums(each) for rank, each in given.items()}
    row[key("parameter")] = dict.fromkeys(range(W), sums(GIVEN["p", 0] - right if after is None else after))
    for name, each in ((RATE, [0.1]), ("the number of microbatches", 2), (BACKWARDS, 2)):
        row[key("number", name)] = {rank: np.array(each) for rank in range(W)}
    return Recording((0, 1), {(-1, 0): begin, (0, 0): row})


def both(
    tested: Recording, plain: Recording | None = None, moved: Recording | None = None, **options: Any
) -> Comparison:
    return Comparison(tested, plain or run(), moved, ProveOptions(**options))


def verdict_on(tested: Recording, plain: Recording | None = None, **options: Any) -> Verdict:
    return judge(both(tested, plain, **options))


def test_equal_recordings_are_right() -> None:
    assert verdict_on(run()).code == 0
    assert verdict_on(run()).lines() == ["right: 1 of 1 gradients equal; 1 of 1 parameters equal"]


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (lambda rank, right: right / 2, "0.500 x the reference (1/2 = 1/ranks: averaged twice?; or"),
        (lambda rank, right: right * 2, "2.000 x the reference (2 = ranks: summed where it should be averaged?"),
        (lambda rank, right: right * 0, "0.000 x the reference (zero)"),
        (lambda rank, right: right * -1, "-1.000 x the reference (the sign is wrong)"),
        (lambda rank, right: right * 1.37, "1.370 x the reference"),
        (lambda rank, right: GIVEN["g0", rank] + GIVEN["g1", rank], "this rank's own part"),
        (lambda rank, right: (GIVEN["g1", 0] + GIVEN["g1", 1]) / 2, "the last microbatch alone"),
        (lambda rank, right: (GIVEN["g0", 0] + GIVEN["g0", 1]) / 2, "the first microbatch alone"),
        (lambda rank, right: right / 0, "is not finite, and the reference is"),
        (lambda rank, right: right + 1e-3 * GIVEN["other", 0], "differs by 0.00"),
    ],
)
def test_a_wrong_gradient_is_named_by_what_it_is(gradient: Any, words: str) -> None:
    found = verdict_on(run(gradient))
    assert found.code == 1
    assert found.lines()[0].startswith(f"step 1  gradient of w: {words}")
    # what both runs do is no fault of the wrapper
    assert verdict_on(run(gradient), run(gradient)).findings[:1] == [] or "differs between" in found.lines()[0]


def test_a_parameter_that_no_step_changes_is_named() -> None:
    (first,) = verdict_on(run(after=GIVEN["p", 0])).findings
    assert str(first) == "step 1  parameter of w: equal to the value before the step"


def test_a_difference_is_measured_in_multiples_of_rounding() -> None:
    moved = run(lambda rank, right: right + 1e-3 * GIVEN["other", 0])
    tested = run(lambda rank, right: right + 3e-3 * GIVEN["other", 1])
    loose, strict = both(tested, None, moved), both(tested, None, moved, rtol=1.0)
    assert not loose.findings()
    assert strict.findings()
    assert math.isfinite(loose.times["step gradient"]["w"])
    assert not math.isfinite(strict.times["step gradient"]["w"])


@pytest.mark.parametrize(
    ("gradient", "words", "is_refused"),
    [
        (lambda rank, right: right / 2, "0.500 x their mean over ranks (1/2 = 1/ranks", True),
        (lambda rank, right: GIVEN["g0", rank] + GIVEN["g1", rank], "this rank's own part", True),
        (lambda rank, right: (GIVEN["g1", 0] + GIVEN["g1", 1]) / 2, "the last microbatch alone", True),
        (lambda rank, right: right * 0.37, "scaled by 0.37 to a norm of", False),
        (lambda rank, right: GIVEN["other", 0], "are no multiple of what backward has computed", False),
    ],
)
def test_what_became_of_gradients_is_told(gradient: Any, words: str, is_refused: bool) -> None:
    ((note, found),) = notes_of(run(gradient))
    assert (note.text.startswith(words), found) == (True, is_refused)
    assert not [*notes_of(run())]
    assert verdict_on(run(gradient), run(gradient)).code == 0
    assert verdict_on(run(gradient), run(gradient), strict=True).code == is_refused


def test_each_rank_averages_with_the_ranks_of_its_own_unit() -> None:
    experts = run(lambda rank, right: GIVEN["g0", rank] + GIVEN["g1", rank])
    assert [note.text for note, _ in notes_of(experts)] == ["this rank's own part"]
    experts.units["w"] = {rank: {"unit": "w", "axes": ["ep"], "sizes": [1], "ranks": [rank]} for rank in range(W)}
    assert not [*notes_of(experts)]


def test_gradients_that_zero_grad_has_not_cleared_are_told() -> None:
    twice, other = run(), run(lambda rank, right: right * 2)
    twice.rows[1, 0] = other.rows[0, 0]
    assert [note.text for note, _ in notes_of(twice)] == [
        "gradients of earlier backwards are still in it (zero_grad() was not called after them)"
    ]


def test_buffers_that_differ_between_ranks_are_told() -> None:
    found = run()
    found.rows[0, 0][key("buffer", "mean")] = {rank: sums(GIVEN["other", rank]) for rank in range(W)}
    ((note, is_refused),) = notes_of(found)
    assert (str(note).startswith("step 1  buffer of mean: differs between ranks 0 and 1"), is_refused) == (True, True)
    found.facts["shares_buffers"] = True
    assert not [*notes_of(found)]


def test_ranks_that_differ_are_named() -> None:
    apart, rates, short = run(), run(), run()
    apart.rows[0, 0][key("parameter")][1] = sums(GIVEN["other", 0])
    rates.rows[0, 0][key("number", RATE)][1] = np.array([0.2])
    for each in short.rows[0, 0].values():
        each.pop(1)
    texts = ["; ".join(map(str, compare_ranks(each))) for each in (apart, rates, short, run())]
    assert texts == [
        "step 1  parameter of w: differs between ranks 0 and 1, which began with the same parameters",
        "step 1  the learning rate: [0.1] on rank 0; [0.2] on rank 1",
        "step 1  the number of steps: 1 on rank 0; 0 on rank 1",
        "",
    ]


def test_ranks_that_began_with_other_parameters_may_differ() -> None:
    experts = run()
    for row in experts.rows.values():
        row[key("parameter")][1] = sums(GIVEN["other", 0])
    assert not [*compare_ranks(experts)]


def test_other_data_cannot_be_proven() -> None:
    runs = [run(), run()]
    for each, data in zip(runs, ("p", "other"), strict=True):
        each.rows[0, 0] = {key("input", "the model"): {0: sums(GIVEN[data, 0])}, **each.rows[0, 0]}
    found = verdict_on(*runs)
    assert (found.code, "The data differ between the two runs" in found.reason) == (2, True)


def test_another_learning_rate_is_a_difference() -> None:
    other = run()
    other.rows[0, 0][key("number", RATE)] = dict.fromkeys(range(W), np.array([0.3]))
    (first,) = verdict_on(other).findings
    assert str(first) == "step 1  the learning rate: is [0.3], and [0.1] in the reference"


def test_a_recording_without_steps_cannot_be_proven() -> None:
    assert verdict_on(Recording((0, 1))).reason == "no optimizer made a step"
    other = Recording((0, 1), {(0, 0): {key("parameter", "v"): {0: np.ones(13)}}})
    assert verdict_on(other).reason == "no parameter has the same name in both runs"


def test_sketches_of_another_version_are_not_compared() -> None:
    lines = [{"step": 0, "optimizer": 0, "values": {}, **signs} for signs in ({}, {"signs": 2})]
    found = verdict_on(*(Recording.from_lines([(0, line)]) for line in lines))
    assert (found.code, found.reason.partition(" recorded")[0]) == (2, "two versions of shardwise")
