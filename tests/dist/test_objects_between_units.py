"""Units that hand objects of users' own classes to each other train as on one process."""

from __future__ import annotations

import torch
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike
from torch import nn

from shardwise import fully_shard, replicate


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
