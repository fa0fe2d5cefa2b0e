"""torch.compile before and after sharding, of blocks and of the whole: the numbers of the same model uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import assert_equal, full
from helpers.models import Block
from helpers.ranks import on_ranks
from helpers.trains_alike import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import fully_shard, replicate

Api = Callable[..., Any]
WAYS = (  # scope, compiled before it is sharded
    ("blocks by their method", True),
    ("blocks by the function", False),
    ("whole", True),
    ("whole by its method", False),
)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(6, 9), Block(6, 7))


def shard(model: nn.Sequential, api: Api) -> None:
    for block in model:
        api(block)
    api(model)


def compile_in(model: nn.Sequential, scope: str, **options: Any) -> nn.Module:
    """Compile ``model`` or its blocks, in place where that can be; return what to call."""
    if scope == "whole":
        return torch.compile(model, **options)  # type: ignore[return-value]
    if scope == "whole by its method":
        model.compile(**options)
    for index, block in enumerate(model if scope.startswith("blocks") else ()):
        if scope == "blocks by their method":
            block.compile(**options)
        else:
            model[index] = torch.compile(block, **options)  # type: ignore[assignment]
    return model


def train(model: nn.Module, called: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        called(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param).detach().clone() for param in model.parameters()]


def compiled(api: Api, scope: str, is_before: bool, **options: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    model = make()
    called = compile_in(model, scope, **options) if is_before else model
    shard(model, api)
    return train(model, called if is_before else compile_in(model, scope, **options))


@pytest.mark.parametrize("ways", [WAYS[::3], pytest.param(WAYS[1:3], marks=pytest.mark.exhaustive)])
@on_ranks(2, fresh=True)
def test_a_compiled_model_trains_as_uncompiled_whether_it_was_compiled_before_or_after_it_was_sharded(
    ways: tuple[tuple[str, bool], ...],
) -> None:
    plain = make()
    shard(plain, fully_shard)
    expected = train(plain, plain)
    for scope, is_before in ways:
        # A graph of the whole ends where units begin and end; one of a block need not end at all.
        backend = "aot_eager" if is_before else "eager"
        options = {"backend": backend, "fullgraph": scope.startswith("blocks")}
        assert_equal(compiled(fully_shard, scope, is_before, **options), expected)
    assert_equal(compiled(torchs.fully_shard, "whole", True, backend="eager"), expected)


@on_ranks(1, fresh=True)
def test_one_graph_of_several_units_is_refused_with_the_way_to_compile_them() -> None:
    for api, words in (
        (fully_shard, r"shardwise gathers.*block\.compile\(fullgraph=True\)"),
        (torchs.fully_shard, "skipped|disable"),
    ):
        with pytest.raises(Exception, match=f"(?s)(?:{words})"):  # of a private class of torch's
            compiled(api, "whole", is_before=False, backend="eager", fullgraph=True)


@on_ranks(2)
def test_a_replicated_model_with_buffers_compiles_as_ddp_does() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    plain, ours = net(), replicate(net(), process_group=None)
    models = [torch.compile(each, backend="eager") for each in (DistributedDataParallel(plain), ours)]
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses = [model(x).square().sum() for model in models]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, plain.buffers(), ours.buffers()))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
        plain.zero_grad()
        ours.zero_grad()
