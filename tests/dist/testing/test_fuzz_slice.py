"""A slice of the fuzzer with fixed seeds, and proof that it would see what it looks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from fuzz.areas import AREAS
from fuzz.case import Contender
from fuzz.draw import draw
from fuzz.engines import EngineSide
from fuzz.most_alive import most_full
from fuzz.phases import Play, Seat
from fuzz.proved import Prover
from fuzz.render import render
from fuzz.runner import Runner
from fuzz.selftest import find
from helpers.ranks import on_ranks

from shardwise.observe import Call, Op

SEEDS: dict[str, tuple[int, ...]] = {
    "structure": (0, 2, 6), "aliases": (1, 2, 3), "accumulation": (0, 3, 5), "checkpointing": (1, 3, 4),
    "changes": (0, 1, 4), "byhand": (0, 1, 2), "doors": (0, 1, 2), "optimizers": (0, 1, 3), "meshes": (0, 1, 2),
    "precision": (0, 1, 2), "compiled": (0,), "resume": (0, 2, 3), "hooks": (0, 1, 2), "mixed": (0, 1, 2),
    "zero": (0, 1, 2), "groups": (0, 1), "joins": (0, 1), "copies": (1, 3), "meta": (0, 1, 7, 10), "losses": (0, 1),
    "saves": (0, 1), "sizes": (0, 1), "beside": (0, 1), "around": (2, 4), "offload": (0, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(limit_s=60.0) as ranks:
        yield ranks


IN_MIXED = ("accumulation", "copies")  # the area "mixed" draws what they draw
# Tests beside one process have what their programs draw: test_compiled.py, test_meta_models.py, test_reference.py (precision),
# and the folders checkpoint, optim, zero and offload.
HAVE_TESTS = ("compiled", "meta", "precision", "resume", "optimizers", "zero", "offload")
FIRST = [(area, SEEDS[area][0]) for area in AREAS if area not in (*IN_MIXED, *HAVE_TESTS)]
OTHERS = [(area, seed) for area in AREAS for seed in SEEDS[area] if (area, seed) not in FIRST]


@pytest.mark.parametrize(
    ("area", "seed"), [*FIRST, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS)]
)
def test_drawn_programs_train_as_in_one_process(runner: Runner, area: str, seed: int) -> None:
    case = draw(seed, area, max_ranks=2)
    failures = runner.run(case).failures
    assert not failures, f"{failures}\n{render(case)}"


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    with Prover() as ranks:
        yield ranks


# Right programs that ``prove`` called wrong once, or could not prove: a hook that follows gradients; a copy of the model; other
# strides of parameters; isinstance of a wrapper; a save; recomputation in another dtype; a trial of an optimizer; a transform.
PROVED = [("hooks", 201), ("changes", 200), ("joins", 204), ("groups", 200), ("saves", 201), ("mixed", 203), ("mixed", 300),
    ("losses", 400)]  # fmt: skip


@pytest.mark.parametrize(("area", "seed"), PROVED)
def test_drawn_programs_are_proven_right(prover: Prover, area: str, seed: int) -> None:
    case = draw(seed, area, max_ranks=2)
    kind, lines = prover.prove(render(case), case.num_ranks)
    assert kind == "right", "\n".join([*lines, render(case)])


def test_a_planted_fault_is_found() -> None:
    """One of them: ``python -m fuzz --self-test`` plants them all."""
    assert find("gradients of a rank are dropped", 5, 2, print)


@on_ranks(2)
def test_full_parameters_alive_are_counted_beside_the_plan() -> None:
    counted = 0
    for seed in (0, 2, 3, 4):  # those that one process can run
        play = Play.load(render(draw(seed, "precision", max_ranks=2)))
        side = EngineSide(play, Seat.of(dist.get_rank(), 2, "flat"), Contender("fully_shard"), {})
        for moment in play.phases[0].program(side):
            side.record(moment)
        assert side.notes() == []
        assert side.watch is not None
        counted += side.watch.num_steps
    assert counted > 2, "steps that went as planned"


def test_the_most_full_parameters_of_calls() -> None:
    calls = [Call(Op.WAIT, "a", 8), Call(Op.WAIT, "b", 4), Call(Op.RESHARD, "a", 8), Call(Op.WAIT, "c", 2)]
    assert most_full(calls) == 12
    assert most_full([]) == 0
