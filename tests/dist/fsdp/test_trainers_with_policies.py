"""Trainers that wrap by policy, as composer does: the numbers of one process, by torch's class, and by ours under ``use_in``.

Both contenders run the same functions, so a scenario that torch's class runs is one that ours runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import full
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwise

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may have one weight; ``within`` runs a block."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 10, bias=False)
        self.within: Callable[..., torch.Tensor] = lambda block, x: block(x)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.within(block, x)
        return self.head(x)


def net(seed: int = 0, device: str = "cpu", is_tied: bool = False) -> Net:
    torch.manual_seed(seed)
    with torch.device(device):
        return Net(is_tied)


Policy = Callable[[nn.Module], bool]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def prepare(model: nn.Module, policy: Policy = is_block, together: list[list[nn.Module]] | None = None) -> Any:
    """Shard what ``policy`` takes, the innermost first, and the root."""
    for modules in together or []:
        torchs.fully_shard(modules)
    for module in reversed([*model.modules()][1:]):
        if policy(module):
            torchs.fully_shard(module)
    return torchs.fully_shard(model)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(10, (4, 5), generator=torch.Generator().manual_seed(2 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: range = range(3)) -> list[float]:
    optimizer, losses = optimizer or adam(model), list[float]()
    for step in steps:
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: range = range(3)) -> None:
    """Train a plain model on what all ranks train on."""
    optimizer = optimizer or adam(model)
    for step in steps:
        (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def bare(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    mine, theirs = ({bare(name): each for name, each in one.named_parameters()} for one in (model, plain))
    assert mine.keys() == theirs.keys()
    for name, param in mine.items():
        assert isinstance(param, DTensor), name
        torch.testing.assert_close(full(param), theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def trains(model: nn.Module, plain: nn.Module) -> None:
    train(model)
    train_alone(plain)
    assert_same(model, plain)


def learns(model: nn.Module) -> None:
    optimizer = adam(model)
    losses = [train(model, optimizer, range(1))[0] for _ in range(12)]
    assert losses[-1] < losses[0], losses


# ---- Wrapping.


def wraps_blocks() -> None:
    trains(prepare(net()), net())


def keeps_the_optimizer_made_before() -> None:
    """composer moves a prepared optimizer's groups to the parameters that sharding has made."""
    model, plain = net(), net()
    optimizer = torch.optim.Adam([{"params": [*model.head.parameters()], "lr": 0.02}], lr=0.01)
    names = [
        [name for name, p in model.named_parameters() if any(p is q for q in g["params"])]
        for g in optimizer.param_groups
    ]
    prepare(model)
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [model.get_parameter(name) for name in of_group]
    rest = {"params": [p for name, p in model.named_parameters() if name not in names[0]]}
    optimizer.add_param_group(rest)
    other = torch.optim.Adam(
        [{"params": [plain.head.weight], "lr": 0.02}, {"params": [*plain.parameters()][:-1]}], lr=0.01
    )
    train(model, optimizer)
    train_alone(plain, other)
    assert_same(model, plain)


# ---- First values.


def mixes_values_and_meta() -> None:
    model = net(0, "cpu" if dist.get_rank() == 0 else "meta", is_tied=True)
    values = {name: each.clone() for name, each in model.state_dict().items()} if dist.get_rank() == 0 else {}
    prepare(model)
    model = model if dist.get_rank() == 0 else model.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    set_model_state_dict(model, values, options=BROADCAST)
    trains(model, net(is_tied=True))


def begins_on_meta() -> None:
    model = prepare(net(0, "meta")).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()
    learns(model)


# ---- Tied weights.


def ties_in_one_unit_of_several_modules() -> None:
    model = net(is_tied=True)
    trains(prepare(model, together=[[model.embed, model.head]]), net(is_tied=True))


# ---- Activations.


def wrapped(wrapper: Callable[..., Any]) -> Net:
    model = net()
    wrappers.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)
    return model


def recomputes_by_wrapper() -> None:
    trains(prepare(wrapped(wrappers.checkpoint_wrapper)), net())


def offloads_by_wrapper() -> None:
    trains(prepare(wrapped(wrappers.offload_wrapper)), net())


# ---- State.


def reads_the_state_of_modules() -> None:
    model = prepare(net())
    train(model)
    states = [model._get_fsdp_state(), *[block._get_fsdp_state() for block in model.blocks]]
    assert [each._is_root for each in states] == [True, False, False, False]
    assert [len(each._fsdp_param_group.fsdp_params) for each in states] == [2, 4, 4, 4]
    assert isinstance(model, torchs.FSDPModule)


# ---- Gradients.


def scales_gradients() -> None:
    model, plain = prepare(net()), net()
    optimizer, other, scaler = adam(model), adam(plain), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0  # then no rank may step
        scaler.scale(loss_of(model, step, dist.get_rank()) * bad).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        train_alone(plain, other, range(step, step + (step != 1)))
    assert scaler.get_scale() == 4.0
    assert_same(model, plain)


SCENARIOS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(wraps_blocks, keeps_the_optimizer_made_before, mixes_values_and_meta, begins_on_meta),
        *(ties_in_one_unit_of_several_modules, recomputes_by_wrapper, offloads_by_wrapper),
        *(reads_the_state_of_modules, scales_gradients),
    )
}


@pytest.mark.parametrize(
    ("contender", "scenario"),
    [
        *(("shardwise", each) for each in SCENARIOS),
        *(pytest.param("torch", each, marks=pytest.mark.exhaustive) for each in SCENARIOS),
    ],
)
@on_ranks(2)
def test_a_trainer_with_policies_trains_as_one_process(contender: str, scenario: str) -> None:
    with shardwise.use_in(torchs) if contender == "shardwise" else nullcontext():
        SCENARIOS[scenario]()
