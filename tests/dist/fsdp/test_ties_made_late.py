"""Parameters that are tied after they were sharded, as by ``from_pretrained(distributed_config=)`` of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from helpers.compare import REORDERED, average_gradients, comparable
from helpers.ranks import on_ranks
from torch import nn

from shardwise import StateError, fully_shard, replicate

_STEPS = 3


class _Tokens(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Embedding(rows, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head, self.other = nn.Linear(6, rows, bias=False), nn.Linear(6, rows, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + torch.tanh(self.block(x)))
        return self.head(x) + self.other(x)


def _built(rows: int = 11) -> _Tokens:
    torch.manual_seed(0)
    return _Tokens(rows)


def _tie(model: _Tokens) -> None:
    model.head.weight = model.embed.weight


def _tie_three(model: _Tokens) -> None:
    model.embed.weight = model.head.weight
    model.other.weight = model.embed.weight


def _several(model: nn.Module, api: Callable[..., object]) -> None:
    api(model.block)
    api([model.norm, model.embed], reshard_after_forward=False)
    api(model)


def _each(model: nn.Module, api: Callable[..., object]) -> None:
    for module in [*model.children(), model]:
        api(module)


def _one(model: nn.Module, api: Callable[..., object]) -> None:
    api(model)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return F.cross_entropy(model(tokens), tokens)


def _train(model: nn.Module, *, averages: bool = False) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 if step else 0.0  # as a warm-up: nothing has changed then
        _loss(model, step).backward()
        if averages:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def _assert_alike(model: nn.Module, plain: nn.Module) -> None:
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for (name, right), left in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(*comparable(right, left), **REORDERED, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("checks", ["always", "off"])
@pytest.mark.parametrize(("shard", "tie"), [(_several, _tie), (_each, _tie_three), (_one, _tie_three)])
@on_ranks(2)
def test_a_tie_after_sharding_trains_as_one_process_and_as_torchs_class(
    shard: Callable[..., None], tie: Callable[[nn.Module], None], checks: str
) -> None:
    apis = [
        (11, fully_shard),
        (12, fully_shard),
        (12, torch_fsdp.fully_shard),
    ]  # torch's trains other weights with 11 rows
    for rows, api in apis if checks == "off" else apis[:1]:
        plain, model = _built(rows), _built(rows)
        tie(plain)
        _train(plain, averages=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDWISE_CHECKS", checks)
            shard(model, api)
            tie(model)
            _train(model)
        _assert_alike(model, plain)


@on_ranks(2)
def test_a_tie_between_two_calls_of_fully_shard_or_among_replicas_is_one_too() -> None:
    plain = _built()
    _tie(plain)
    _train(plain, averages=True)
    between = _built()
    fully_shard(between.embed)
    _tie(between)
    fully_shard(between)
    replicas, plain_replicas = replicate(_built()), replicate(_built(), process_group=None)
    for model in (between, replicas, plain_replicas):
        _tie(model)
        _train(model)
        _assert_alike(model, plain)


@on_ranks(2)
def test_state_dicts_copies_and_evaluations_between_tying_and_training_change_nothing() -> None:
    plain = _built()
    _tie(plain)
    _train(plain, averages=True)
    model = _built()
    _several(model, fully_shard)
    _tie(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(state["embed.weight"].full_tensor(), state["head.weight"].full_tensor())
    model.head.load_state_dict({"weight": state["embed.weight"]})
    copied = copy.deepcopy(model)
    with torch.no_grad():
        _loss(model, 0)
    for each in (model, copied):
        _train(each)
        _assert_alike(each, plain)
    model.unshard()
    assert model.head.weight is model.embed.weight
    model.head.state_dict()  # of a module that uses another unit's parameter: it shows shards
    assert torch.equal(model.head.weight.full_tensor(), plain.embed.weight)


@on_ranks(2)
def test_a_tie_after_the_first_forward_or_to_another_model_is_named_without_checks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", "off")
        model, other = _built(), _built()
        _several(model, fully_shard)
        fully_shard(other)
        _loss(model, 0).backward()
        _tie(model)
        with pytest.raises(StateError, match=r"head.weight was tied to embed.weight after the first forward"):
            _loss(model, 1)
        late = _built()
        fully_shard(late)
        late.head.weight = other.embed.weight
        with pytest.raises(StateError, match=r"head.weight of this .* is shared with .*Embedding, which was sharded"):
            _loss(late, 0)
