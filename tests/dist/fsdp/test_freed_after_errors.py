"""A model whose last step has failed can be given up: once another backward has run, nothing keeps it, as with torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import Block
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from torch import nn

from shardwise import fully_shard, replicate, shard_model


class Blown(Exception):
    pass


def _blow(*_: Any) -> None:
    raise Blown


class BlowsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Blown


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.place = Block(6, 10), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "forward":
            raise Blown
        y = self.block(x)
        return BlowsInBackward.apply(y) if self.place == "backward" else y


def _by_blocks(api: Callable[..., Any], **options: Any) -> Callable[[nn.Sequential], Any]:
    return lambda model: [api(each, **options) for each in (*model, model)]


APIS: dict[str, Callable[[Any], Any]] = {
    "fully_shard": _by_blocks(fully_shard),
    "keeps": _by_blocks(fully_shard, reshard_after_forward=False),
    "shard_model": shard_model,
    "replicate": _by_blocks(replicate),
    "replicate_older": lambda model: replicate(model, device_ids=None),
}
FAILURES: dict[str, Callable[[Fails, nn.Parameter], Any]] = {
    "forward": lambda module, _: setattr(module, "place", "forward"),
    "backward": lambda module, _: setattr(module, "place", "backward"),
    "hook": lambda _, weight: weight.register_hook(_blow),
    "hook that returns something else": lambda _, weight: weight.register_hook(lambda _: torch.zeros(1)),
    "hook after accumulation": lambda _, weight: weight.register_post_accumulate_grad_hook(_blow),
    "hook before a module's backward": lambda module, _: module.register_full_backward_pre_hook(_blow),
    "hook before a module's forward": lambda module, _: module.register_forward_pre_hook(_blow),
}


def _try(api: str, failure: str, warm: bool) -> weakref.ref[nn.Module]:
    model = nn.Sequential(Fails(), Fails())
    APIS[api](model)
    if warm:
        model(torch.ones(3, 6)).sum().backward()
    FAILURES[failure](model[0], model[0].block.up.weight)
    with pytest.raises((Blown, RuntimeError)):
        model(torch.ones(3, 6)).sum().backward()
    return weakref.ref(model)


@on_ranks(2)
@pytest.mark.parametrize(("api", "warm"), checkered(APIS, [False, True]))
def test_a_model_whose_step_failed_is_freed_with_all_it_holds(api: str, warm: bool) -> None:
    for failure in FAILURES:
        freed = _try(api, failure, warm)
        nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()  # until then torch keeps the last error of this thread
        gc.collect()
        assert freed() is None, failure


@pytest.mark.parametrize("api", [fully_shard, replicate, shard_model])
@on_ranks(2)
def test_parameters_of_a_deleted_model_are_freed_without_the_collector(api: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # one unit, whose hooks are on the inner modules, too
    api(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    kept = [weakref.ref(each) for each in (*model.parameters(), *model.modules())]
    gc.disable()
    try:
        del model
        assert not [each() for each in kept if each() is not None]
    finally:
        gc.enable()
