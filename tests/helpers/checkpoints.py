"""Models with every API, saved behind one and loaded behind another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers.sharded import step_on_drawn_gradients
from helpers.state_apis import Api, adamw, fully_sharded, itself, sharded, zero
from shardwise import fully_shard, replicate
from shardwise.checkpoint import load, save
from shardwise.checkpoint.contents import parts_of

NUM_SAVED, NUM_STEPS = 2, 4


class Net(nn.Module):
    """Uneven rows at any number of ranks, a buffer, a parameter of one dim, tied weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 6, bias=False)
        self.tied = nn.Linear(9, 6, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def _hybrid(model: Net) -> nn.Module:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (min(size, 2), max(size // 2, 1)), mesh_dim_names=("replicas", "shards"))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Net) -> nn.Module:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (max(size // 2, 1), min(size, 2)), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    model.tied.weight = model.second.weight
    fully_shard(model.first, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


APIS: dict[str, Api] = {
    "fully_shard": Api(fully_sharded, adamw),
    "hybrid": Api(_hybrid, adamw),
    "tensor parallel": Api(_tensor_parallel, adamw),
    "elementwise": Api(fully_sharded, sharded()),
    "whole matrix": Api(fully_sharded, sharded("whole_matrix")),
    "replicate": Api(lambda model: replicate(model), adamw),
    "zero whole": Api(itself, zero("whole")),
    "zero even": Api(itself, zero("even")),
    "plain": Api(itself, adamw),
}


def made(api: str, seed: int = 0) -> tuple[nn.Module, Any]:
    model = APIS[api].wrap(Net(seed))
    return model, APIS[api].make(model)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for seed in steps:
        step_on_drawn_gradients(model, optimizer, seed)
        model.count += 1


def expected() -> Net:
    """Return the model after all steps on one process."""
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, range(NUM_SAVED))
    optimizer.param_groups[0]["lr"] = 0.07
    train(model, optimizer, range(NUM_SAVED, NUM_STEPS))
    return model


def differences(model: nn.Module, whole: nn.Module) -> list[str]:
    """Return what this rank holds that ``whole``, a model of one process, has otherwise."""
    wrong: list[str] = []
    for (name, value), expected in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
        for part in parts_of(name, value):
            wanted = part.window.cut(expected)
            if not torch.equal(part.tensor, wanted):
                wrong.append(f"{name} differs by {(part.tensor - wanted).abs().max():.2e}")
    return wrong


def save_behind(apis: Iterable[str], folder: str) -> None:
    """Train behind each of ``apis`` and save into a folder of its name and the number of ranks."""
    for api in apis:
        model, optimizer = made(api)
        train(model, optimizer, range(NUM_SAVED))
        for group in optimizer.param_groups:
            group["lr"] = 0.07  # options travel too
        save(place(folder, api, dist.get_world_size()), state_of(model, optimizer), step=NUM_SAVED)


def place(folder: str, api: str, num_ranks: int) -> Path:
    return Path(folder) / f"{api} {num_ranks}"


def load_behind(pairs: Iterable[tuple[str, str, int]], folder: str) -> list[str]:
    """Go on from (saved API, API, ranks that saved); return what differs from one process."""
    wanted, wrong = expected(), list[str]()
    for saved, api, num_ranks in pairs:
        model, optimizer = made(api, seed=1)
        what = f"{saved} on {num_ranks} -> {api} on {dist.get_world_size()}"
        try:
            load(place(folder, saved, num_ranks), state_of(model, optimizer))
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        train(model, optimizer, range(NUM_SAVED, NUM_STEPS))
        wrong += [f"{what}: {text}" for text in differences(model, wanted)]
    return wrong
