"""What only a GPU shows: streams, buffer lifetimes, inputs moved to the device.  One or two ranks, who may share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.inside import engine_of, start_peak
from helpers.models import Block
from helpers.ranks import on_ranks
from torch import nn

from shardwise import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimizer,
    WeightPublisher,
    WeightReader,
    asleep,
    checkpoint,
    full_tensors,
    fully_shard,
    replicate,
)
from shardwise.plan.schedule import peak_bytes

pytestmark = pytest.mark.gpu


def on_gpu() -> torch.device:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def build(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256, 512) for _ in range(4)))
    for block in model:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, ...], **more: dict[str, torch.Tensor]) -> torch.Tensor:
        assert x.is_cuda
        assert all(y.is_cuda for y in ys)
        assert more["z"]["w"].is_cuda
        return self.lin(x + ys[0] + ys[1])


@on_ranks(1, backend="nccl", fresh=True)
def test_root_moves_inputs_to_the_device() -> None:
    on_gpu()
    model = fully_shard(Nested())
    model(torch.randn(3), (torch.randn(3), torch.randn(3)), z={"w": torch.randn(1)}).sum().backward()


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: dict[str, Any], losses: list[torch.Tensor]) -> dict[str, Any]:
        assert batch["y"].is_cuda
        batch["out"] = self.linear(batch["x"])
        losses.append(batch["out"].square().mean())
        return batch


@on_ranks(1, backend="nccl", fresh=True)
def test_what_is_put_into_moved_containers_reaches_the_caller() -> None:
    on_gpu()
    batch, losses = {"x": torch.randn(2, 3), "y": torch.arange(2)}, list[torch.Tensor]()
    own = batch["x"], batch["y"]
    model = fully_shard(Fills(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert model(batch, losses) is batch
    assert batch["x"] is own[0]
    assert batch["y"] is own[1]
    assert (batch["out"].device.type, batch["out"].dtype) == ("cuda", torch.bfloat16)
    losses[0].backward()
    assert model.linear.weight.grad is not None


@on_ranks(1, 2, backend="nccl", fresh=True)
@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy()])
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_equals_torch_fsdp2(offload: OffloadPolicy, precision: MixedPrecisionPolicy) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
    from torch.distributed.fsdp import OffloadPolicy as TorchNoOffload
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    device = on_gpu()
    ours = build(mp_policy=precision, offload_policy=offload)
    torch.manual_seed(0)
    theirs = nn.Sequential(*(Block(256, 512) for _ in range(4)))
    policy = TorchPrecision(precision.param_dtype, precision.reduce_dtype)
    torch_offload = TorchOffload() if isinstance(offload, CPUOffloadPolicy) else TorchNoOffload()
    for module in (*theirs, theirs):
        torch_fully_shard(module, mp_policy=policy, offload_policy=torch_offload)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for step in range(10):
        x = torch.randn(8, 256, device=device, generator=torch.Generator(device).manual_seed(step))
        losses = []
        for model, optim in zip((ours, theirs), optims, strict=True):
            loss = model(x).float().square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(losses[0], losses[1]), step


@on_ranks(1, 2, backend="nccl", fresh=True)
def test_buffers_outlive_slow_streams() -> None:
    device = on_gpu()
    model, reference = build(), build()
    x = torch.randn(8, 256, device=device)
    for _ in range(5):
        loss = model(x).square().mean()
        torch.cuda._sleep(10_000_000)  # the host runs ahead: buffers that are freed too early are overwritten
        loss.backward()
        torch.cuda.synchronize()
        reference(x).square().mean().backward()
        torch.cuda.synchronize()
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left.grad.to_local(), right.grad.to_local())


@on_ranks(1, backend="nccl", fresh=True)
def test_peak_is_the_plan_s() -> None:
    device = on_gpu()
    model = build()
    x = torch.randn(8, 256, device=device)
    for _ in range(3):
        model(x).sum().backward()
    engine = engine_of(model)
    assert engine.exec_order.plan is not None
    start_peak(engine)
    model(x).sum().backward()
    assert engine.comm_ctx.pool.peak_used_bytes == peak_bytes(engine.exec_order.plan.calls)


def build_behind(api: str, device: torch.device, **kwargs: object) -> nn.Module:
    if api == "fully_shard":
        return build(**kwargs)
    torch.manual_seed(0)
    return replicate(nn.Sequential(*(Block(256, 512) for _ in range(4))).to(device), **kwargs)


@on_ranks(1, 2, backend="nccl", fresh=True)
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_the_host_waits_for_nothing_in_a_step(api: str) -> None:
    device = on_gpu()
    model = build_behind(api, device)
    x = torch.randn(8, 256, device=device)
    for _ in range(3):
        model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_ranks(1, 2, backend="nccl", fresh=True)
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_a_step_leaves_no_memory_behind(api: str, precision: MixedPrecisionPolicy) -> None:
    device = on_gpu()
    model = build_behind(api, device, mp_policy=precision)
    x = torch.randn(8, 256, device=device)
    held = []
    for _ in range(6):
        model(x).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[-2] == held[-3]


@pytest.mark.parametrize("to", ["host", "disk"])
@on_ranks(1, 2, backend="nccl", fresh=True)
def test_memory_is_free_while_a_run_sleeps_and_its_bits_stay(to: str, tmp_path: Path) -> None:
    device, losses = on_gpu(), list[list[float]]()
    for sleeps in (False, True):
        model = build().to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), list[float]()
        for number in range(6):
            loss = model(torch.full((8, 256), number / 7, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            del loss
            if sleeps:
                before = torch.cuda.memory_allocated(device)
                with asleep(model, optimizer, to="host" if to == "host" else tmp_path) as slept:
                    left = torch.cuda.memory_allocated(device)
                    assert left < 0.1 * before, (left, before, slept)
        losses.append(found)
        del model, optimizer
    assert losses[0] == losses[1]


@on_ranks(1, 2, backend="nccl", fresh=True)
def test_replicas_reduce_what_has_been_packed() -> None:
    device = on_gpu()
    model, reference = build_behind("replicate", device), build_behind("replicate", device)
    x = torch.randn(8, 256, device=device)
    for _ in range(5):
        loss = model(x).square().mean()
        torch.cuda._sleep(
            10_000_000
        )  # the host runs ahead: an all-reduce that does not wait reads what is not there yet
        loss.backward()
        torch.cuda.synchronize()
        reference(x).square().mean().backward()
        torch.cuda.synchronize()
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left.grad.to_local(), right.grad.to_local())


class Normed(torch.optim.Optimizer):
    """Divides by a sum over all elements of all parameters."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            total = torch.zeros((), device=group["params"][0].device)
            for param in group["params"]:
                total.add_(param.grad.square().sum())
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] / (1 + total.item()))


@on_ranks(1, 2, backend="nccl", fresh=True)
@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_an_optimizer_that_takes_sums_is_tried_where_parameters_are(default: str) -> None:
    device = on_gpu()
    model = build()
    with torch.device(default):  # as torch.set_default_device has it
        ours = ShardedOptimizer(dict(model.named_parameters()), Normed, update="elementwise", lr=0.1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(256, 512) for _ in range(4))).to(device)
    theirs = Normed(plain.parameters(), lr=0.1)
    x = torch.ones(4, 256, device=device)
    for _ in range(3):
        for each, optimizer in ((model, ours), (plain, theirs)):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-4, atol=1e-6)


class Codebook(nn.Module):
    """Changes its frozen parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(5, 256), requires_grad=False)
        self.block = Block(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9)
        return self.block(x + self.codes.sum(0))


@on_ranks(1, 2, backend="nccl", fresh=True)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_what_forward_writes_reaches_the_shards(api: Callable[[nn.Module], object]) -> None:
    device = on_gpu()
    model = nn.Sequential(Codebook(), nn.Linear(256, 8)).to(device)
    api(model)
    for _ in range(4):
        model(torch.ones(2, 256, device=device)).sum().backward()
    codes = model.state_dict()["0.codes"].full_tensor()
    torch.testing.assert_close(codes, torch.full_like(codes, 0.9**4))


@on_ranks(1, 2, backend="cpu:gloo,cuda:nccl", fresh=True)
def test_checkpoints_are_of_the_step_they_were_begun_after_whatever_the_default_device(tmp_path: Path) -> None:
    device = on_gpu()
    torch.set_default_device(device)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wanted: list[torch.Tensor] = []
    for step in range(3):
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            wanted = [param.to_local().clone() for param in model.parameters()]
            checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2, wait=False)
    checkpoint.finish(tmp_path)
    assert checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}).step == 2
    assert all(torch.equal(param.to_local(), old) for param, old in zip(model.parameters(), wanted, strict=True))


@on_ranks(1, 2, backend="cpu:gloo,cuda:nccl", fresh=True)
def test_an_engine_on_the_device_follows_what_is_published(tmp_path: Path) -> None:
    device = on_gpu()
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    publisher = WeightPublisher(model, tmp_path, dtype=torch.bfloat16)
    reader = WeightReader(tmp_path)
    weights = {name: torch.zeros_like(each) for name, each in full_tensors(model, dtype=torch.bfloat16)}
    for step in range(4):
        publisher.publish(wait=step % 2 == 0)
        model(torch.randn(4, 256, device=device)).square().mean().backward()
        wanted = {name: each.clone() for name, each in full_tensors(model, dtype=torch.bfloat16)}
        publisher.wait_for(0, 0)
        reader.advance(weights)
        assert reader.version == step + 1
        assert all(weights[name].is_cuda and torch.equal(weights[name], each) for name, each in wanted.items())
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, backend="nccl", fresh=True)
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_a_captured_step_is_the_step(precision: MixedPrecisionPolicy) -> None:
    device = on_gpu()
    losses: list[list[torch.Tensor]] = []
    for is_captured in (False, True):
        model = build(mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        batches = [
            torch.randn(8, 256, device=device, generator=torch.Generator(device).manual_seed(i)) for i in range(8)
        ]
        losses.append([step(x).clone() for x in batches[:4]])
        if not is_captured:
            losses[-1] += [step(x).clone() for x in batches[4:]]
            continue
        static, graph = batches[0].clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = step(static)
        for x in batches[4:]:
            static.copy_(x)
            graph.replay()
            losses[-1].append(loss.clone())
    assert all(torch.equal(eager, replayed) for eager, replayed in zip(*losses, strict=True))
