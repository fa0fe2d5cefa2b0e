"""Units that hand objects of users' own classes to each other train as on one process."""

from __future__ import annotations

import pytest
import torch
from helpers.inside import engine_of
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike
from torch import nn

from shardwise import fully_shard, replicate
from shardwise.fsdp.unit import HELD


class Boxed:
    """What a block returns: no container that anybody knows."""

    def __init__(self, values: torch.Tensor) -> None:
        self.parts = {"values": values, "itself": self}


class Slotted:
    """The same without a ``__dict__``."""

    __slots__ = ("inner",)

    def __init__(self, values: torch.Tensor) -> None:
        self.inner = Boxed(values)

    @property
    def parts(self) -> dict[str, object]:
        return self.inner.parts


class Packs(nn.Module):
    def __init__(self, kind: type[Boxed] | type[Slotted]) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 5), nn.Linear(5, 6), kind

    def forward(self, x: torch.Tensor | Boxed | Slotted) -> Boxed | Slotted:
        values = x if isinstance(x, torch.Tensor) else x.parts["values"]
        assert isinstance(values, torch.Tensor)
        return self.kind(self.second(torch.tanh(self.first(values))))


class Unpacks(nn.Module):
    def __init__(self, kind: type[Boxed] | type[Slotted]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Packs(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.parts["values"]  # pyright: ignore[reportAttributeAccessIssue]  a box by now


@on_ranks(2)
def test_blocks_that_return_objects_of_any_class_train_as_on_one_process() -> None:
    for kind in (Boxed, Slotted):
        for shard in (lambda each: fully_shard(each, reshard_after_forward=True), replicate):
            model = Unpacks(kind)
            for block in model.blocks:
                shard(block)
            shard(model)
            assert_trains_alike(model, Unpacks(kind))


class Leaves(nn.Module):
    """Returns its values in a way that nobody can look into."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(6, 5), nn.Linear(5, 6), way
        self.left: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> object:
        values = self.second(torch.tanh(self.first(x)))
        self.left = [values]
        return {"nothing": None, "closure": lambda: values, "iterator": iter([values])}[self.way]


class Takes(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Leaves(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            found = block(x)
            x = block.left[0] if found is None else found() if callable(found) else next(found)  # type: ignore[call-overload]
        return x


@pytest.mark.parametrize("way", ["nothing", "closure", "iterator"])
@on_ranks(2)
def test_blocks_whose_output_nobody_sees_stay_whole_until_their_gradients_have_come(way: str) -> None:
    model = Takes(way)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    assert_trains_alike(model, Takes(way))
    assert not any(unit.held is HELD for unit in engine_of(model).units)
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert not any(unit.held is HELD for unit in engine_of(model).units[1:])
