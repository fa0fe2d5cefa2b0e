"""A program as one rank runs it."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from helpers.compare import local
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from chaos.program import Program
from shardwise import (
    FSDPModule,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    fully_shard,
    replicate,
    set_default_transport,
    transaction,
)
from shardwise.checkpoint import finish, load, save
from shardwise.torch_private import timeout_s_of

_SAVED_AFTER, _LOADED_AFTER = 1, 2  # before the step in which faults strike: what they change stays


class Net(nn.Module):
    """Blocks that run in a given order."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        dtype = getattr(torch, program.dtype)
        width = program.width
        has_bias = program.api != "whole_matrix"  # Muon takes matrices alone
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, width, bias=has_bias, dtype=dtype),
                nn.Tanh(),
                nn.Linear(width, 8, bias=has_bias, dtype=dtype),
            )
            for _ in range(program.num_blocks)
        )
        self.order = program.order
        self.left_out = -1
        if program.frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, 8) -> (batch, 8)."""
        for number in (each for each in self.order if each != self.left_out):
            x = x + self.blocks[number](x)
        return x


@dataclass(frozen=True, slots=True)
class Parts:
    """Model and optimizer behind an API; ``plain``: the module whose parameters have the plain names."""

    model: nn.Module
    plain: nn.Module
    optimizer: Optimizer


def build(program: Program) -> Parts:
    """Build model and optimizer.  Collective behind most APIs."""
    set_default_transport(program.transport)
    torch.manual_seed(0)
    net = Net(program)
    api = program.api
    if api == "zero1":
        wrapped = DistributedDataParallel(net)
        return Parts(wrapped, net, ZeroRedundancyOptimizer(wrapped.parameters(), Adam, lr=0.05))
    if api == "replicate":
        for block in net.blocks:
            replicate(block)
        replicate(net)
        return Parts(net, net, SGD(net.parameters(), lr=0.05, momentum=0.9))
    num_ranks = dist.get_world_size()
    mesh = None
    if api == "hsdp" and not program.mesh_is_flat:
        mesh = _two_axes(num_ranks)
    strategy = "zero2" if api == "zero2" else None
    for block in net.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(net, mesh=mesh, strategy=strategy)
    if api == "whole_matrix":
        return Parts(net, net, ShardedOptimizer(dict(net.named_parameters()), torch.optim.Muon, lr=0.05))
    return Parts(net, net, SGD(net.parameters(), lr=0.05, momentum=0.9))


def _two_axes(num_ranks: int) -> DeviceMesh:
    """Return a mesh of two replicas whose groups have the job's timeout: those of ``init_device_mesh`` have torch's own."""
    world = dist.group.WORLD
    assert world is not None
    timeout = timedelta(seconds=timeout_s_of(world))
    rows = torch.arange(num_ranks).view(2, -1)
    groups: list[dist.ProcessGroup] = []
    for lists in (rows.t().tolist(), rows.tolist()):
        for ranks in lists:
            group = dist.new_group(ranks, timeout=timeout)
            if isinstance(group, dist.ProcessGroup):  # of other ranks it is a number
                groups.append(group)
    return DeviceMesh.from_group(groups, "cpu", mesh=rows, mesh_dim_names=("replicas", "shards"))


def train(program: Program, folder: Path) -> str:
    """Run ``program``; return a digest of this rank's parameters at its end."""
    parts = build(program)
    if program.takes_ways:
        cast(FSDPModule, parts.model).set_allow_rank_divergence(True)
    for step in range(1, program.last_step + 1):
        if program.takes_ways:
            cast(Net, parts.plain).left_out = (dist.get_rank() + step) % program.num_blocks
        _make(program, parts, step)
        if not program.transacts:  # else its all-gathers would be taken for those of the next step
            _evaluate(program, parts)
        if step == _SAVED_AFTER:
            save(folder, {"model": parts.plain, "optimizer": parts.optimizer}, step=step)
            finish(folder)
        elif step == _LOADED_AFTER:
            load(folder, {"model": parts.plain, "optimizer": parts.optimizer})
    if isinstance(parts.optimizer, ZeroRedundancyOptimizer):
        parts.optimizer.consolidate_state_dict(to=0)
    elif isinstance(parts.optimizer, ShardedOptimizer):
        parts.optimizer.full_state_dict()
    return digest(parts.plain)


def digest(model: nn.Module) -> str:
    """Return a text that is the same for the same bits of this rank's parameters."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(local(param).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _inputs(program: Program, step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(getattr(torch, program.dtype))


def _make(program: Program, parts: Parts, step: int) -> None:
    if step == program.left_out_step:
        return
    if not program.transacts:
        _step(program, parts, step)
        return
    retry, skip = (Exception, ()) if program.transacts == "retry" else ((), Exception)
    is_due = True
    while is_due:
        with transaction(parts.model, parts.optimizer, retry=retry, skip=skip) as made:
            _step(program, parts, step)
        is_due = made.again


def _step(program: Program, parts: Parts, step: int) -> None:
    parts.model.train()
    for microbatch in range(program.num_microbatches):
        inputs = _inputs(program, step, microbatch)
        is_last = microbatch == program.num_microbatches - 1
        with _sync(parts.model, is_last or program.syncs_all):
            if step == program.graphless_step and microbatch == 0:
                with torch.no_grad():
                    parts.model(inputs)
                continue
            cast(torch.Tensor, parts.model(inputs).square().mean()).backward()
    if step != program.skipped_step:
        parts.optimizer.step()
    parts.optimizer.zero_grad()


def _sync(model: nn.Module, is_on: bool) -> AbstractContextManager[Any]:
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if is_on else model.no_sync()
    setter = getattr(model, "set_requires_gradient_sync", None)
    if setter is not None:
        setter(is_on)
    return nullcontext()


def _evaluate(program: Program, parts: Parts) -> None:
    parts.model.eval()
    with torch.no_grad():
        parts.model(_inputs(program, 0, 9))
