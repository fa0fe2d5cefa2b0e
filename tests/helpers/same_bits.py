"""A training loop with ``Reproducible``, whose bits are compared over meshes of some of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise.checkpoint import finish, load, save
from shardwise.checkpoint.contents import unlike_leaves
from shardwise.checkpoint.convert import CheckpointSource, compare_tensors
from shardwise.testing import WorkerPool

NUM = 12
Shape = tuple[int, int]  # ranks, and of these replicas; 0: a mesh with one axis


class Net(nn.Module):
    """Odd widths, so that shards end within vectors; dropout, whose mask must follow the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(9, 13), nn.Dropout(0.2), nn.Linear(13, 9)) for _ in range(2))
        )
        self.head = nn.Linear(9, 5)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(data).tanh())


class Way(NamedTuple):
    """A row of the matrix: names of a strategy, of :data:`OPTIMIZERS`, and of a precision.

    Precisions: "fp32"; "mixed": computes and reduces in bfloat16; "bf16": parameters are bfloat16.
    """

    strategy: str
    optimizer: str
    precision: str = "fp32"


_SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)
_ADAMW, _FUSED = partial(torch.optim.AdamW), partial(torch.optim.AdamW, fused=True)


def _over(make: Any, model: nn.Module) -> torch.optim.Optimizer:
    return make(model.parameters(), lr=0.05)


def _zero(make: Any, partition: Any, model: nn.Module) -> torch.optim.Optimizer:
    return shardwise.ZeroRedundancyOptimizer(
        model.parameters(), make.func, partition=partition, lr=0.05, **make.keywords
    )  # fmt: skip


def _sharded(make: Any, model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    if make.func is torch.optim.Muon:
        named = {name: param for name, param in named.items() if param.ndim == 2}
    return shardwise.ShardedOptimizer(named, make.func, lr=0.05, **make.keywords)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": partial(_over, _SGD),
    "adamw": partial(_over, _ADAMW),
    "fused": partial(_over, _FUSED),
    "sharded sgd": partial(_sharded, _SGD),
    "sharded adamw": partial(_sharded, _ADAMW),
    "sharded fused": partial(_sharded, _FUSED),
    "muon": partial(_sharded, partial(torch.optim.Muon)),
    "zero sgd": partial(_zero, _SGD, "whole"),
    "zero adamw": partial(_zero, _ADAMW, "whole"),
    "zero even": partial(_zero, _FUSED, "even"),
}


def mesh_of(ranks: int, replicas: int) -> DeviceMesh:
    """Return a mesh of the first ``ranks`` ranks; without ``replicas`` it has one axis.  Collective over all ranks."""
    found = torch.arange(ranks)
    if not replicas:
        return DeviceMesh("cpu", found)
    return DeviceMesh("cpu", found.view(replicas, -1), mesh_dim_names=("replicate", "shard"))


class Run:
    """A model that trains over ``mesh``."""

    def __init__(self, way: Way, mesh: DeviceMesh, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Net().bfloat16() if way.precision == "bf16" else Net()
        dtype = None if way.precision == "fp32" else torch.bfloat16
        precision = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        self.model: Any = shardwise.shard_model(
            model, strategy=way.strategy, mesh=mesh, min_unit_bytes=0, mp_policy=precision
        )
        self.optimizer = OPTIMIZERS[way.optimizer](self.model)
        self.fixed = shardwise.Reproducible(self.model, self.optimizer, num_microbatches=NUM, seed=1)
        self.figures = list[float]()
        noise = torch.Generator("cpu").manual_seed(0)
        self._data = torch.randn(NUM, 4, 9, generator=noise).to(next(self.model.parameters()).dtype)

    def train(self, num_steps: int) -> None:
        """Train; microbatches of every other step take two backwards."""
        for _ in range(num_steps):
            losses: list[torch.Tensor] = []
            for number in self.fixed.microbatches():
                parts = self._data[number].split(4 if self.fixed.step % 2 else 2)
                loss = torch.zeros(())
                for index, part in enumerate(parts):
                    with shardwise.policy(self.model, sync=index == len(parts) - 1):
                        loss = self.model(part).float().square().mean() / NUM / len(parts)
                        loss.backward()
                losses.append(loss.detach())
            norm_type = 2.0 if self.fixed.step % 2 else torch.inf
            norm = self.fixed.clip_grad_norm_(0.05, norm_type=norm_type)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.zero_grad()  # also of parameters that Muon does not take: gradients are not in checkpoints
            self.figures += [float(norm), float(self.fixed.sum(losses))]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "fixed": self.fixed}

    def save(self, folder: Path) -> None:
        save(folder, self.state, step=self.fixed.step)
        finish(folder)

    def load(self, folder: Path) -> None:
        load(folder, self.state)


def train_once(way: Way, shape: Shape, num_steps: int, source: Path | None, target: Path) -> list[float]:
    """Train over all ranks, from the checkpoint in ``source``, up to step ``num_steps``; return losses and norms."""
    run = Run(way, mesh_of(*shape), seed=int(source is not None))
    if source is not None:
        run.load(source)
    run.train(num_steps - run.fixed.step)
    run.save(target)
    return run.figures


def differences(pool: WorkerPool, way: Way, shapes: Sequence[Shape], folder: Path, num_steps: int) -> list[str]:
    """Train over each of ``shapes``, and once over three of them in turn; return what differs from the first.

    Compared to the bit: losses and norms of all steps, parameters, and state of the optimizer.
    """
    found, figures = list[str](), dict[str, list[float]]()

    def train(shape: Shape, name: str, stop: int, source: str = "") -> list[float]:
        begin = folder / source if source else None
        return pool.run(
            train_once, num_ranks=shape[0], way=way, shape=shape, num_steps=stop, source=begin, target=folder / name,
            timeout_s=300.0,
        )[0]  # fmt: skip

    for shape in shapes:
        figures[f"{shape}"] = train(shape, f"{shape}", num_steps)
    first, *others = figures
    assert len(set(figures[first])) > num_steps, "it trains"
    parts = train(shapes[-1], "turn 0", num_steps // 3)
    parts += train(shapes[1], "turn 1", 2 * num_steps // 3, "turn 0")
    figures["turn 2"] = parts + train(shapes[len(shapes) // 2], "turn 2", num_steps, "turn 1")
    expected = CheckpointSource.open(folder / first)
    for name in [*others, "turn 2"]:
        pairs = zip(figures[name], figures[first], strict=True)
        found += [f"{name}: figure {number}" for number, pair in enumerate(pairs) if pair[0] != pair[1]][:1]
        other = CheckpointSource.open(folder / name)
        assert expected.names == other.names
        found += [f"{name}: {each.name}" for each in compare_tensors(expected, other)]
        found += [f"{name}: {each}" for each in unlike_leaves(expected.manifest.values, other.manifest.values)]
    return found
