"""Parameters that are not row-major in memory train as with DDP and a local optimizer, to the bit, through every path."""

import copy
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import assert_equal
from helpers.pairs import pairwise
from helpers.ranks import FOUR, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import ShardwiseError, ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.testing import WorkerPool

NUM_STEPS = 4
# Fused optimizers pair a parameter with its gradient and state by memory alone, whatever their strides say.
OPTIONS = {"lr": 0.05, "weight_decay": 0.01, "fused": True}
PARTITIONS = ("whole", "even")
HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)
HOOK_CASES = pairwise((False, True), (False, True), HOOKS, PARTITIONS)  # views of buckets, a static graph, ...


class Net(torch.nn.Module):
    """Convolutions in channels_last (one with a single channel), a transposed matrix, sizes that divide by nothing, 0-d."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(1, 7, 3).to(memory_format=torch.channels_last)
        self.second = torch.nn.Conv2d(7, 5, 3).to(memory_format=torch.channels_last)
        self.turned = torch.nn.Parameter(torch.rand(11, 80).t())
        self.cube = torch.nn.Parameter(torch.rand(3, 11, 2).permute(1, 2, 0))
        self.plain = torch.nn.Linear(6, 3)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.wide = torch.nn.Parameter(torch.zeros(512, 513).t())  # fills DDP's first bucket, which holds 1 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x)))).flatten(1) @ self.turned
        x = torch.einsum("ni,ijk->njk", x, self.cube).flatten(1)
        return self.plain(x) * self.scale + self.wide[:3, :3].sum()


def _batches(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(1 + rank)
    return [torch.randn(3, 1, 8, 8) for _ in range(NUM_STEPS)]


def _ddp(**options: Any) -> DDP:
    return DDP(Net(), bucket_cap_mb=0.002, **options)  # several buckets


def _values(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def _train(module: torch.nn.Module, before_step: Callable[[], None], step: Callable[[], Any]) -> list[torch.Tensor]:
    for batch in _batches(dist.get_rank()):
        module.zero_grad()
        module(batch).square().mean().backward()
        before_step()
        step()
    return _values(module)


def _nothing() -> None:
    return None


def _with_ddp(**ddp_options: Any) -> list[torch.Tensor]:
    ddp = _ddp(**ddp_options)
    ddp.register_comm_hook(None, allreduce_hook)
    return _train(ddp, _nothing, torch.optim.AdamW(ddp.parameters(), **OPTIONS).step)


@on_ranks(2, FOUR)
def test_memory_order_changes_nothing_with_hooks_that_reduce_to_all() -> None:
    for bucket_view, static_graph, make_hook, partition in HOOK_CASES if dist.get_world_size() == 2 else HOOK_CASES[:3]:
        ddp_options = {"gradient_as_bucket_view": bucket_view, "static_graph": static_graph}
        expected = _with_ddp(**ddp_options)
        ddp = _ddp(**ddp_options)
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition=partition, **OPTIONS
        )
        ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
        found = _train(ddp, _nothing, _nothing)
        assert_equal(found, expected, (make_hook.__name__, partition, ddp_options))


@on_ranks(2, FOUR)
def test_a_hook_may_return_new_memory() -> None:
    def to_new_memory(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(state, bucket).then(lambda done: done.value().clone())

    expected = _with_ddp()
    for make_hook, partition in product(HOOKS, PARTITIONS):
        ddp = _ddp()
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition=partition, **OPTIONS
        )
        ddp.register_comm_hook(None, make_hook(to_new_memory, ddp, zero))
        assert_equal(_train(ddp, _nothing, _nothing), expected, (make_hook.__name__, partition))


@on_ranks(2, FOUR)
def test_memory_order_changes_nothing_in_steps_after_backward() -> None:
    expected = _with_ddp()
    for partition, bucket_view, views in pairwise(PARTITIONS, (False, True), (False, True)):
        ddp = _ddp(gradient_as_bucket_view=views)
        ddp.register_comm_hook(None, allreduce_hook)
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, partition=partition, parameters_as_bucket_view=bucket_view, **OPTIONS
        )
        strides = [p.stride() for p in ddp.parameters()]
        assert_equal(_train(ddp, _nothing, zero.step), expected, (partition, bucket_view, views))
        assert [p.stride() for p in ddp.parameters()] == strides


@on_ranks(2, FOUR)
def test_state_of_any_memory_order_is_consolidated_and_loaded() -> None:
    """State goes to a plain optimizer and back, and training goes on to the same bits."""
    expected = _with_ddp()
    ways = list(product(("plain", *PARTITIONS), repeat=2))
    for saver, loader in ways if dist.get_world_size() == 2 else ways[1::2]:
        ddp = _ddp()
        ddp.register_comm_hook(None, allreduce_hook)
        optimizer = _make(saver, ddp)
        for index, batch in enumerate(_batches(dist.get_rank())):
            if index == 2:
                optimizer = _passed_on(optimizer, _make(loader, ddp))
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
        assert_equal(_values(ddp), expected, (saver, loader))


def _make(kind: str, module: torch.nn.Module) -> Any:
    if kind == "plain":
        return torch.optim.AdamW(module.parameters(), **OPTIONS)
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, partition=kind, **OPTIONS)


def _passed_on(saver: Any, loader: Any) -> Any:
    if isinstance(saver, ZeroRedundancyOptimizer):
        saver.consolidate_state_dict(to=1)
        box = [saver.state_dict() if dist.get_rank() == 1 else None]
        dist.broadcast_object_list(box, src=1)
        loader.load_state_dict(box[0])
    else:
        loader.load_state_dict(copy.deepcopy(saver.state_dict()))
    return loader


@on_ranks(2, FOUR)
def test_a_changed_order_is_refused() -> None:
    """DDP has laid out its buckets by then."""
    for make_hook in HOOKS:
        ddp = _ddp()
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **OPTIONS)
        ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
        _train(ddp, _nothing, _nothing)
        ddp.module.second.to(memory_format=torch.contiguous_format)
        with pytest.raises(ShardwiseError, match="DDP and the hook"):
            _train(ddp, _nothing, _nothing)


def _same_batch_steps(model: torch.nn.Module, optimizer: Any, indices: range) -> None:
    for index in indices:
        model.zero_grad()
        model(torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(index))).square().mean().backward()
        optimizer.step()


def _save(path: str) -> None:
    for partition in PARTITIONS:
        model = Net()
        zero = _make(partition, model)
        _same_batch_steps(model, zero, range(2))
        content = {"optim": zero.sharded(dict(model.named_parameters())), "model": model.state_dict()}
        dcp.save(content, checkpoint_id=f"{path}/{partition}")


def _resume_all(path: str) -> list[list[torch.Tensor]]:
    return [_resume(f"{path}/{saver}", loader) for saver, loader in product(PARTITIONS, repeat=2)]


def _resume(path: str, partition: str) -> list[torch.Tensor]:
    model = Net()
    zero = _make(partition, model)
    weights = model.state_dict()
    dcp.load(
        {"optim": zero.sharded(dict(model.named_parameters()), loading=True), "model": weights}, checkpoint_id=path
    )
    model.load_state_dict(weights)
    _same_batch_steps(model, zero, range(2, 4))
    return _values(model)


def test_sharded_state_of_any_memory_order_resumes_anywhere(pool: WorkerPool, tmp_path: Path) -> None:
    model = Net()
    _same_batch_steps(model, torch.optim.AdamW(model.parameters(), **OPTIONS), range(4))
    pool.run(_save, num_ranks=4, path=str(tmp_path))
    for found in chain.from_iterable(pool.run(_resume_all, num_ranks=2, path=str(tmp_path))):
        for a, b in zip(found, _values(model), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
