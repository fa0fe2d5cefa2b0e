"""Sources of data of every kind, and what a run that nothing happens to reads of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise import Microbatches, Mixture, Packed

V, LENGTH, NUM_STEPS = 12, 29, 9  # three epochs and a remainder


class Saved:
    """Numbers from ``first`` on, with a state."""

    def __init__(self, first: int) -> None:
        self._first = self._next = first

    def __iter__(self) -> Iterator[int]:
        while True:
            self._next += 1
            yield self._next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "noise": torch.tensor([self._next])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["noise"].tolist() == [state["next"]]
        self._next = state["next"]


def saved(microbatch: int) -> Saved:
    return Saved(1000 * microbatch)


def counted(microbatch: int) -> Iterator[int]:
    return itertools.count(1000 * microbatch)


@dataclass
class Sequences:
    """Sequences of up to seven tokens, over the numbers of another stream."""

    numbers: Any
    state_dict: Callable[[], Any] = field(init=False)
    load_state_dict: Callable[[Any], None] = field(init=False)

    def __post_init__(self) -> None:
        self.state_dict, self.load_state_dict = self.numbers.state_dict, self.numbers.load_state_dict

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] * (1 + number % 7) for number in self.numbers)


def packed(microbatch: int) -> Packed:
    return Packed(Sequences(saved(microbatch)), 3)


def collated(samples: list[Any]) -> Any:
    """Return values that compare."""
    return [
        each["tokens"].tolist() + each["positions"].tolist() if isinstance(each, dict) else each for each in samples
    ]


MAKES: dict[str, tuple[Callable[[], Any], int]] = {
    "map": (lambda: range(LENGTH), 1),
    "mixture": (lambda: Mixture({"a": (range(LENGTH), 0.6), "b": (range(5), 0.4)}), 1),
    "saved": (lambda: saved, 2),
    "counted": (lambda: counted, 2),
    "packed": (lambda: packed, 2),
}


def make(kind: str, **options: Any) -> Microbatches:
    dataset, size = MAKES[kind]
    data = Microbatches(dataset(), num_microbatches=V, microbatch_size=size, seed=3, collate_fn=collated, **options)
    if kind == "mixture":
        data.set_weights(4, {"a": 0.25, "b": 0.75})
    return data


Seen = dict[tuple[int, int], Any]


def undisturbed(kind: str) -> Seen:
    data = make(kind)
    return {(step, k): batch for step in range(NUM_STEPS) for k, batch in enumerate(data.of_step(step))}
