"""Programs with every API whose steps are transactions, with faults of one rank at named places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise import (
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    fully_shard,
    replicate,
    set_default_transport,
    shard_model,
    transaction,
)
from shardwise.testing import faults
from shardwise.torch_private import local_of

APIS = ("fully_shard", "hsdp", "replicate", "zero1", "zero2", "elementwise", "whole_matrix", "shard_model")
PLACES = ("data", "forward", "backward", "optimizer step", "stepped", "reject")


class Net(nn.Module):
    """Blocks with running statistics and random numbers."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 12, bias=has_bias), nn.BatchNorm1d(12, affine=has_bias), nn.Linear(12, 8, bias=has_bias)
            )
            for _ in range(2)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x


@dataclass
class Program:
    """A model behind ``api`` and what it has seen."""

    api: str
    model: nn.Module
    net: Net
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all that training changes, and of ``.grad``."""
        found = {name: local_of(param).detach().clone() for name, param in self.net.named_parameters()}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in self.net.named_buffers()}
        for name, param in self.net.named_parameters():
            if param.grad is not None:
                found[f"gradient {name}"] = local_of(param.grad).detach().clone()
        backend = getattr(self.optimizer, "backend", None)
        inner = self.optimizer
        if backend is not None:
            inner = backend.local.optim if self.api == "zero1" else backend.optimizer
        for number, state in enumerate(inner.state.values()):
            for key, value in state.items():
                found[f"state {number} {key}"] = local_of(torch.as_tensor(value)).detach().clone()
        return found


def build(api: str, transport: str) -> Program:
    """Build it.  Collective with most APIs."""
    set_default_transport(transport)  # type: ignore[arg-type]
    net = Net(api != "whole_matrix")
    model: nn.Module = net
    if api == "zero1":
        model = DistributedDataParallel(net)
        return Program(api, model, net, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05))
    if api == "replicate":
        for block in net.blocks:
            replicate(block)
        replicate(net)
    elif api in ("shard_model", "zero2"):
        shard_model(net, min_unit_bytes=1, strategy="zero2" if api == "zero2" else None)
    else:
        size = dist.get_world_size()
        names = ("replicate", "shard") if api == "hsdp" else ("shard",)
        mesh = init_device_mesh("cpu", (2, size // 2) if api == "hsdp" else (size,), mesh_dim_names=names)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    named = dict(net.named_parameters())
    if api == "elementwise":
        return Program(api, net, net, ShardedOptimizer(named, torch.optim.AdamW, lr=0.05))
    if api == "whole_matrix":
        return Program(api, net, net, ShardedOptimizer(named, torch.optim.Muon, lr=0.05))
    return Program(api, net, net, torch.optim.AdamW(net.parameters(), lr=0.05))


def train(program: Program, num_steps: int, microbatches: int = 1, **options: Any) -> None:
    """Make steps in transactions; a step that is undone is made again."""
    generator_of = [torch.Generator().manual_seed(100 * step + dist.get_rank()) for step in range(num_steps)]
    for step in range(num_steps):
        batch = torch.randn(6, 8, generator=generator_of[step])
        while True:
            with transaction(program.model, program.optimizer, also=["rng"], **options) as tx:
                program.losses.append(one_step(program, batch, microbatches, tx))
            program.steps.append(tx.outcome)
            if not tx.again:
                break


def one_step(program: Program, batch: torch.Tensor, microbatches: int, tx: Any) -> float:
    """Make one step; return its last loss."""
    loss = torch.zeros(())
    program.optimizer.zero_grad()
    for _ in range(microbatches):
        faults.reach("data")
        loss = program.model(batch).square().mean()
        loss.backward()
    if program.api != "zero1":
        clip_grad_norm_(program.net.parameters(), 1.0)
    try:
        faults.reach("reject")
    except ArithmeticError as error:
        tx.reject(str(error))
    program.optimizer.step()
    faults.reach("stepped")
    return loss.item()


def struck(place: str, body: Callable[[], object], **fields: Any) -> bool:
    """Run ``body`` with a fault at ``place``; return whether it struck this process."""
    kind = ArithmeticError if place == "reject" else KeyError
    with ExitStack() as stack:
        injected = stack.enter_context(faults.inject("raise", at=place, error=kind, **fields))
        body()
    return injected.num_struck > 0
