"""Data by step and microbatch: whatever happens to a run, and however many ranks it has, each microbatch is that of a run
that nothing happened to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from helpers.microbatches import LENGTH, MAKES, NUM_STEPS, Seen, V, collated, counted, make, undisturbed
from helpers.one_process import standing_for

from shardwise import ArgumentTypeError, ConfigError, Microbatches, Mixture, Packed, StateError, UsageError

WORLDS = (1, 2, 3, 4, 6)


@dataclass
class Run:
    """A run whose ranks this process stands for, one after the other, and what is saved of it."""

    kind: str
    num_workers: int
    seen: Seen = field(default_factory=dict)
    state: dict[str, Any] | None = None

    def go_on(self, world: int, until: int, visit: Callable[[Microbatches, int], Iterable[Any]] | None = None) -> None:
        """Load the state at ``world`` ranks, make the steps ``until`` this one, and save."""
        states: list[dict[str, Any]] = []
        for rank in range(world):
            with standing_for(rank, world):
                data = make(self.kind, num_workers=self.num_workers)
                if self.state is not None:
                    data.load_state_dict(self.state)
                own = range(rank * V // world, (rank + 1) * V // world)
                for step in range(data.step, until):
                    batches = [*(visit or Microbatches.of_step)(data, step)]
                    assert len(batches) == len(own)
                    self.seen |= {(step, k): batch for k, batch in zip(own, batches, strict=True)}
                assert data.step == until
                states.append(data.state_dict())
        streams = dict(chain(*(state["streams"].items() for state in states)))
        assert len({str(state | {"streams": None}) for state in states}) == 1, (
            "what is not of a stream is alike on all ranks"
        )
        self.state = states[0] | {"streams": streams}


def test_an_undisturbed_run_has_every_sample_once_per_epoch() -> None:
    found = [*chain(*undisturbed("map").values())]
    assert all(sorted(found[LENGTH * n : LENGTH * (n + 1)]) == list(range(LENGTH)) for n in range(3))


@pytest.mark.parametrize("kind", MAKES)
def test_a_resume_after_every_step_at_another_number_of_ranks_changes_no_microbatch(kind: str) -> None:
    run = Run(kind, 0)
    for step, world in zip(range(NUM_STEPS), cycle(WORLDS)):
        run.go_on(world, step + 1)
    assert run.seen == undisturbed(kind)


def random_visit(noise: random.Random) -> Callable[[Microbatches, int], Iterable[Any]]:
    """Return how a rank reads a step to which something happens: all that is left of it are the last batches."""

    def visit(data: Microbatches, step: int) -> Iterable[Any]:
        before = data.state_dict()
        for event in noise.choices(("begun", "read", "undone", "early", "earlier", "other"), k=noise.randrange(3)):
            if event == "begun":  # and left in its middle
                next(iter(data.of_step(step)))
            else:
                list(data.of_step(step))
            if event == "undone":
                data.load_state_dict(before)
                assert data.step == step
            if event == "other":
                list(data.of_step(step + 1))
            if event == "earlier" and step:
                list(data.of_step(step - 1))
            if event == "early":
                list(data.of_step(noise.randrange(step + 1)))
        return data.of_step(step)

    return visit


@pytest.mark.parametrize(
    ("kind", "num_workers", "seed"),
    [
        *((kind, 0, seed) for kind in MAKES for seed in range(3)),
        ("packed", 2, 100),
        *(pytest.param(kind, 2, seed, marks=pytest.mark.exhaustive) for kind in MAKES for seed in range(101, 106)),
        *(pytest.param(kind, 0, seed, marks=pytest.mark.exhaustive) for kind in MAKES for seed in range(3, 40)),
    ],
)
def test_no_schedule_of_saves_resumes_and_undone_steps_changes_a_microbatch(
    kind: str, num_workers: int, seed: int
) -> None:
    noise, run, step = random.Random(f"{kind} {seed}"), Run(kind, num_workers), 0
    worlds = WORLDS if num_workers == 0 else (1, 2)
    while step < NUM_STEPS:
        step = min(NUM_STEPS, step + noise.choice((0, 1, 1, 2, 5) if num_workers == 0 else (4, 5)))
        before = run.state
        run.go_on(noise.choice(worlds), step, random_visit(noise))
        if noise.random() < 0.3:
            run.state = before  # a second resume from one state: what followed it was not saved
            run.go_on(noise.choice(worlds), step)
    assert run.seen == undisturbed(kind)


@pytest.mark.parametrize("kind", ["saved", "counted"])
def test_streams_without_a_state_at_the_step_are_read_again(kind: str) -> None:
    expected = undisturbed(kind)
    with standing_for(1, 3):
        data = make(kind)
        assert [*data.of_step(5)] == [expected[5, k] for k in range(4, 8)]
        assert [*data.of_step(2)] == [expected[2, k] for k in range(4, 8)]
    with standing_for(0, 2):  # other ranks, without a word
        assert [*data.of_step(3)] == [expected[3, k] for k in range(6)]


def test_a_stream_that_is_counted_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    data = make("counted")
    list(data.of_step(0))
    again = make("counted")
    again.load_state_dict(data.state_dict())
    list(again.of_step(1))
    assert "a count has no state_dict() and load_state_dict(): 2 samples were read again in 0.0 s" in caplog.text


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with random numbers, as augmentations have."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), torch.rand(()).item()


def test_random_numbers_of_workers_follow_from_the_microbatch() -> None:
    found: dict[tuple[int, int], list[Any]] = {}
    for world, num_workers in ((1, 1), (2, 2), (3, 1)):
        for rank in range(world):
            with standing_for(rank, world):
                options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": list}
                data = Microbatches(Noisy(), num_microbatches=6, microbatch_size=2, **options)
                for step in (0, 1, 0):
                    for k, batch in enumerate(data.of_step(step), rank * 6 // world):
                        assert found.setdefault((step, k), batch) == batch
    assert len({str(each) for each in found.values()}) == len(found) == 12


def test_reading_draws_no_random_numbers_of_the_process() -> None:
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        data = make("map", num_workers=num_workers)
        next(iter(data.of_step(0)))
        data.state_dict()
    assert before.equal(torch.get_rng_state())


# ---- Mistakes, by name.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_ends_is_named(num_workers: int) -> None:
    data = Microbatches(lambda k: range(5 + k), num_microbatches=2, microbatch_size=3, num_workers=num_workers)
    assert len([*data.of_step(0)]) == 2
    with pytest.raises(StateError, match="the stream of microbatch 0 ended in step 1; repeat it for ever"):
        list(data.of_step(1))


@pytest.mark.parametrize("length", [5, 10])
def test_a_dataset_that_changes_its_length_is_named(length: int) -> None:
    rows = [*range(9)]
    data = Microbatches(rows, num_microbatches=2, microbatch_size=2)
    list(data.of_step(0))
    rows[:] = range(length)
    message = f"the dataset has {length} samples, and had 9 when it was given"
    with pytest.raises(StateError, match=message):
        data.state_dict()
    with pytest.raises(StateError, match=message):  # numbers of two steps are computed at once
        for step in (1, 2):
            list(data.of_step(step))


def test_a_sample_that_a_dataset_has_lost_is_no_index_error() -> None:
    rows = [*range(9)]
    data = Microbatches(rows, num_microbatches=2, microbatch_size=2)
    list(data.of_step(0))
    del rows[1:]
    with pytest.raises(StateError, match="the dataset has 1 samples, and had 9 when it was given"):
        list(data.of_step(1))


class Deadly(Noisy):
    """A worker dies with the first sample, if it is told to."""

    is_deadly = True

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        if self.is_deadly and torch.utils.data.get_worker_info() is not None:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_is_named_and_the_step_can_be_read_again() -> None:
    dataset = Deadly()
    data = Microbatches(dataset, num_microbatches=2, microbatch_size=2, num_workers=1, collate_fn=len)
    with pytest.raises(
        StateError, match=r"a worker of the DataLoader has died in step 3: .*of_step\(\) reads it again"
    ):
        list(data.of_step(3))
    dataset.is_deadly = False
    assert [*data.of_step(3)] == [2, 2]


def test_a_state_of_other_data_is_refused_by_the_fact_that_differs() -> None:
    state = make("mixture").state_dict()
    with pytest.raises(ConfigError, match="the state is of other data: samples per step is 12 there and 24 here"):
        Microbatches(MAKES["mixture"][0](), num_microbatches=V, microbatch_size=2, seed=3).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed is 3 there and 4 here"):
        Microbatches(MAKES["mixture"][0](), num_microbatches=V, microbatch_size=1, seed=4).load_state_dict(state)
    others = [
        (
            {"a": (range(LENGTH), 0.5), "b": (range(5), 0.5)},
            "dataset a is 29 samples, .*, weight 3 there and 29 samples, .*, weight 1 here",
        ),
        (
            {"a": (range(LENGTH), 0.6), "b": (range(6), 0.4)},
            "dataset b is 5 samples, digest .* there and 6 samples, digest",
        ),
        ({"a": (range(LENGTH), 0.6), "b": (range(1, 6), 0.4)}, "dataset b is 5 samples, digest .* there and 5 samples"),
        ({"a": (range(LENGTH), 0.6), "c": (range(5), 0.4)}, "dataset c is None there and 5 samples"),
    ]
    for sources, message in others:
        with pytest.raises(ConfigError, match=message):
            Microbatches(Mixture(sources), num_microbatches=V, microbatch_size=1, seed=3).load_state_dict(state)
    with pytest.raises(ConfigError, match="num_microbatches is None there and 12 here"):
        make("saved").load_state_dict(state)


def test_microbatches_may_be_cut_otherwise_where_samples_stay_the_same() -> None:
    found = [*chain(*make("map").of_step(0))]
    data = Microbatches(range(LENGTH), num_microbatches=3, microbatch_size=4, seed=3, collate_fn=collated)
    data.load_state_dict(make("map").state_dict())
    assert [*chain(*data.of_step(0))] == found


def test_weights_that_were_changed_before_a_state_is_loaded_hold_from_its_step_on() -> None:
    data = make("mixture")
    list(data.of_step(0))
    list(data.of_step(1))
    state = data.state_dict()
    late, early = make("mixture"), make("mixture")
    late.set_weights(7, {"a": 1, "b": 0})
    late.load_state_dict(state)
    assert [*late.state_dict()["weights"]] == [4, 7]
    early.set_weights(1, {"a": 1, "b": 0})
    with pytest.raises(ConfigError, match=r"set_weights\(1, ...\) was called before a state of step 2 was loaded"):
        early.load_state_dict(state)
    data.set_weights(6, {"a": 1, "b": 0})
    data.load_state_dict(state)  # a step that is undone takes the change back
    assert [*data.state_dict()["weights"]] == [4]


class Crops(torch.utils.data.Dataset[float]):
    def __init__(self) -> None:
        self._random = random.Random(0)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return self._random.random()


def test_samples_are_compared_by_all_that_they_hold() -> None:
    class Image:
        mode = "L"

        def __init__(self, value: int) -> None:
            self._value = value

        def tobytes(self) -> bytes:
            return bytes([self._value])

    @dataclass
    class Row:
        value: int

    def digest(sample: Any) -> str:
        data = Microbatches([sample], num_microbatches=1, microbatch_size=1)
        return data.state_dict()["identity"]["dataset"]

    rows = [
        torch.tensor([1]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1]).numpy(),
        {"a": 1},
        (1,),
        "1",
        1,
        None,
    ]
    rows += [torch.tensor([each]).to(torch.float8_e4m3fn) for each in (1.0, 2.0)]
    rows += [torch.eye(2).to_sparse()]  # by its class
    loop: list[Any] = [3]
    loop.append(loop)
    rows += [
        loop,
        Image(1),
        Image(2),
        Row(1),
        Row(2),
        {"a": torch.tensor([2])},
        {"a": torch.tensor([[2]])},
        torch.tensor([True]),
        b"1",
    ]
    assert len({digest(each) for each in rows}) == len(rows)
    assert digest(Row(1)) == digest(Row(1))
    crops = [Microbatches(Crops(), num_microbatches=1, microbatch_size=1) for _ in range(2)]
    list(crops[0].of_step(0))
    crops[1].load_state_dict(crops[0].state_dict())  # a generator of its own, with one seed
    noisy = [Microbatches(Noisy(), num_microbatches=1, microbatch_size=1).state_dict() for _ in range(2)]
    assert noisy[0] == noisy[1]


def test_a_loop_that_was_left_for_another_does_not_go_on() -> None:
    data = make("map")
    left = data.of_step(0)
    next(left)
    list(data.of_step(1))
    with pytest.raises(UsageError, match=r"the loop over of_step\(0\) was left; end one .* before set_weights"):
        list(left)


def test_a_save_beside_a_loader_that_only_the_loop_follows_is_refused_without_its_step() -> None:
    data = make("map")
    loader = torch.utils.data.DataLoader(range(LENGTH), batch_sampler=data.batch_sampler(range(2, 5)))  # pyright: ignore
    assert data.state_dict()["step"] == 0
    for number, _ in enumerate(loader, 1):
        if number == V:
            break
    with pytest.raises(
        StateError, match="a DataLoader of your own reads steps 2 to 5, and the step is 0: set data.step"
    ):
        data.state_dict()
    data.step = 3
    assert data.state_dict()["step"] == 3


def test_a_step_that_is_no_number_is_refused_within_a_step_too() -> None:
    data = make("map")
    next(data.of_step(0))
    for wrong in (-1, None, 0.5):
        with pytest.raises((ConfigError, ArgumentTypeError)):
            next(data.of_step(wrong))  # pyright: ignore[reportArgumentType]


def test_arguments_are_checked_by_name() -> None:
    sizes: dict[str, Any] = {"num_microbatches": 2, "microbatch_size": 2}
    with pytest.raises(ArgumentTypeError, match=r"Microbatches\(\) has no argument 'shuffle'"):
        Microbatches(range(9), **sizes, shuffle=True)
    with pytest.raises(ArgumentTypeError, match="the dataset is a count, expected .* lambda number:"):
        Microbatches(counted(0), **sizes)
    with pytest.raises(ConfigError, match="the dataset has no samples"):
        Microbatches([], **sizes)
    with pytest.raises(ConfigError, match="num_microbatches must be at least 1, got 0"):
        Microbatches(range(9), num_microbatches=0, microbatch_size=2)
    with pytest.raises(UsageError, match="streams have no sample numbers"):
        make("saved").batch_sampler(range(3))
    packed = Packed([[1, 2, 3]], 2)
    with pytest.raises(ConfigError, match="windows of 3 tokens and this one 2"):
        packed.load_state_dict(Packed([[1]], 3).state_dict())
    with standing_for(0, 5), pytest.raises(ConfigError, match="which 5 data-parallel ranks cannot share equally"):
        next(make("map").of_step(0))


def test_a_second_pass_over_packed_sequences_begins_again() -> None:
    packed = Packed([[1, 2, 3], [4]], 3)
    next(windows := iter(packed))
    assert [*windows] == []
    assert [each["tokens"].tolist() for each in packed] == [[1, 2, 3]]
