"""The rest of FSDP2's surface: precision, placement, communication settings, clipping, tied weights, logs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients, is_incomplete
from helpers.models import Block, batch_for, build
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import batch, build_sharded
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import (
    ConfigError,
    FSDPMeshInfo,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.mesh import names_of

ops = torch.ops.c10d


def assert_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, **tolerance, msg=lambda m, n=name: n + m)


@on_ranks(2)
def test_mixed_precision_computes_and_reduces_in_its_dtypes() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = build_sharded(mp_policy=policy)
    reference = build("plain").to(torch.bfloat16)
    seen: list[torch.dtype] = []
    model[1].up.register_forward_pre_hook(lambda module, args: seen.extend((module.weight.dtype, args[0].dtype)))
    out = model(batch())
    assert out.dtype == torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]
    out.square().sum().backward()
    reference(batch().to(torch.bfloat16)).float().square().sum().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = other.grad.float()
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        assert param.dtype == param.grad.dtype == torch.float32
        assert torch.equal(param.grad.full_tensor(), gradient)


@on_ranks(2)
def test_gradients_without_sync_are_held_in_the_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = build_sharded(mp_policy=policy)
    reference = build("plain").to(torch.bfloat16)
    total = {name: 0.0 for name, _ in reference.named_parameters()}
    for number in range(4):
        with shardwise.policy(model, sync=number == 3):
            model(batch(number)).float().sum().backward()
        reference(batch(number).to(torch.bfloat16)).float().sum().backward()
        for name, param in reference.named_parameters():
            total[name] = total[name] + param.grad.float()
            param.grad = None
    for name, param in model.named_parameters():
        dist.all_reduce(total[name], op=dist.ReduceOp.AVG)
        torch.testing.assert_close(param.grad.full_tensor(), total[name])


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = nn.Conv2d(3, 5, 2), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.conv(x).flatten(2).mean(-1))


@on_ranks(2, 4)
def test_any_dim_can_be_cut_unevenly() -> None:
    size = dist.get_world_size()
    for dim in (1, -1):
        torch.manual_seed(0)
        model = Conv()
        reference = copy.deepcopy(model)
        fully_shard(model, shard_placement_fn=lambda p, dim=dim: Shard(dim) if p.ndim > 1 else None)
        weight = model.conv.weight
        assert weight.placements == (Shard(dim % 4),)
        expected = distribute_tensor(reference.conv.weight, weight.device_mesh, weight.placements)
        assert torch.equal(weight.to_local(), expected.to_local())
        x = torch.randn(2 * size, 3, 4, 4, generator=torch.Generator().manual_seed(1)).chunk(size)[dist.get_rank()]
        assert torch.equal(model(x), reference(x))
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        average_gradients(reference)
        assert_gradients(model, reference)
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(1))


@on_ranks(4)
def test_parameters_of_one_unit_on_two_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    everyone, inner = init_device_mesh("cpu", (4,)), mesh["inner"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    reference = copy.deepcopy(model)
    experts = set(model[1].parameters())
    fully_shard(
        model,
        mesh=everyone,  # mesh infos of the same ranks need not be the same object
        shard_placement_fn=lambda p: ShardPlacementResult(
            Shard(0), FSDPMeshInfo(inner if p in experts else everyone, 0)
        ),
    )
    attachment = attachment_of(model)
    assert attachment is not None
    assert len(attachment.units) == 2
    assert model[0].weight.device_mesh.size() == 4
    assert model[1].weight.device_mesh.size() == 2
    with pytest.raises(ValueError, match="not supported with multiple param groups"):
        model.set_custom_all_gather(None)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    inputs = x.chunk(4)[dist.get_rank()]
    for each in (model, reference):
        each(inputs).square().sum().backward()
    for index, group in ((0, None), (1, mesh["inner"].get_group())):
        for param in reference[index].parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group)
    assert_gradients(model, reference)
    with pytest.raises(ConfigError, match="differ between ranks"):  # each half of the ranks has experts of its own
        clip_grad_norm_(model.parameters(), 0.01)
    clip_grad_norm_(model[0].parameters(), 0.01)


@on_ranks(2)
def test_gradient_divide_factor() -> None:
    reference = build("plain")
    for factor, force_sum in ((None, True), (3.0, False), (3.0, True), (float(dist.get_world_size()), False)):
        model = build_sharded()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(force_sum)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
        model(batch()).square().sum().backward()
        reference.zero_grad()
        reference(batch()).square().sum().backward()
        for param in reference.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(factor or dist.get_world_size())
        assert_gradients(model, reference)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build("plain"), mesh=mesh)
    with pytest.raises(ConfigError, match="the factor is 0; gradients cannot be divided by it"):
        model.set_gradient_divide_factor(0)
    model.set_gradient_divide_factor(3.0)
    model(batch()).square().sum().backward()
    reference.zero_grad()
    reference(batch()).square().sum().backward()
    for param in reference.parameters():
        dist.all_reduce(param.grad)
        param.grad.div_(3.0)
    assert_gradients(model, reference)


class CountingAllGather:
    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduceScatter(CountingAllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@on_ranks(2)
def test_custom_collectives_and_hooks_are_used() -> None:
    model, reference = build_sharded(), build("plain")
    gather, scatter = CountingAllGather(), CountingReduceScatter()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(scatter)
    seen: list[torch.Tensor] = []
    model[1].set_all_reduce_hook(seen.append)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(3)
    model[2].set_allocate_memory_from_process_group_for_comm(True)
    model._set_unshard_async_op(True)
    for each in (model, reference):
        each(batch()).square().sum().backward()
    average_gradients(reference)
    assert_gradients(model, reference)
    assert (gather.calls, scatter.calls, len(seen)) == (2, 1, 1)
    assert seen[0].numel() >= sum(param.to_local().numel() for param in model[1].parameters())
    with pytest.raises(AssertionError, match="custom"):
        model[0].set_allocate_memory_from_process_group_for_comm(True)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.end(self.left(x) if left else self.right(x))


@on_ranks(2)
def test_ranks_may_use_different_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model = Branches()
    reference = copy.deepcopy(model)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    for step in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        is_left = (dist.get_rank() + step) % 2 == 0
        for each in (model, reference):
            each(x, is_left).sum().backward()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average_gradients(reference)
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2, FOUR)
def test_meta_initialisation() -> None:
    for width in (7, 1):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 4))
        for module in (*model, model):
            fully_shard(module)
        assert all(param.device.type == "meta" for param in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        source = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 4))
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        for param, value in zip(model.parameters(), source.parameters(), strict=True):
            with torch.no_grad():
                param.copy_(distribute_tensor(value.detach(), param.device_mesh, param.placements))
        x = torch.randn(2, 5)
        assert torch.equal(model(x), source(x))
        model(x).sum().backward()
        before = model[0].weight.full_tensor()
        optim.step()
        assert not torch.equal(model[0].weight.full_tensor(), before)
        model[0].reset_parameters()


@on_ranks(2)
def test_policy_is_restored() -> None:
    model = build_sharded()
    with pytest.raises(ArithmeticError), shardwise.policy(model, sync=False):
        model(batch()).sum().backward()
        assert all(is_incomplete(param) for param in model.parameters())
        raise ArithmeticError
    model(batch()).sum().backward()
    reference = build("plain")
    for _ in range(2):
        reference(batch()).sum().backward()
    average_gradients(reference)
    assert_gradients(model, reference)


@on_ranks(2)
def test_clip_over_meshes_in_one_all_reduce() -> None:
    for norm_type in (1.0, 2.0, math.inf):
        for shards in (1, 2):
            mesh = init_device_mesh("cpu", (2 // shards, shards), mesh_dim_names=("replicate", "shard"))
            model, reference = build("plain"), build("plain")
            fully_shard(model[0], mesh=mesh)
            fully_shard(model[1])
            replicate(model[2])
            x = batch_for("plain", 0, 4)
            head = nn.Parameter(torch.ones(7))
            ref_head = nn.Parameter(torch.ones(7))
            (model[2](model[1](model[0](x))) * head).square().sum().backward()
            (reference(x) * ref_head).square().sum().backward()
            params, ref_params = [*model.parameters(), head], [*reference.parameters(), ref_head]
            with CommDebugMode() as counts:
                norm = clip_grad_norm_(params, 0.3, norm_type)
            assert counts.get_total_counts() == 1
            expected = torch.nn.utils.clip_grad_norm_(ref_params, 0.3, norm_type)
            torch.testing.assert_close(norm, expected)
            for left, right in zip(params, ref_params, strict=True):
                mine_ = left.grad.full_tensor() if isinstance(left.grad, DTensor) else left.grad
                torch.testing.assert_close(mine_, right.grad)
    head.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([head], 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([head], 1.0, norm_type=-1.0)


@on_ranks(2)
def test_grad_scaler() -> None:
    model = build_sharded()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(batch()).sum()).backward()
    scaler.unscale_(optim)
    reference = build("plain")
    reference(batch()).sum().backward()
    average_gradients(reference)
    assert_gradients(model, reference)
    if dist.get_rank() == 0:
        model[0].up.weight.grad.to_local().fill_(math.inf)
    before = model[0].up.weight.full_tensor()
    optim2 = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(optim2)
    scaler.update()
    assert torch.equal(model[0].up.weight.full_tensor(), before)


@on_ranks(2)
def test_requires_grad_may_change_between_steps() -> None:
    model, reference = build_sharded(), build("plain")
    for step in range(4):
        for each in (model, reference):
            each[1].requires_grad_(step % 2 == 0)
            each.zero_grad()
            each(batch(step)).sum().backward()
        average_gradients(reference)
        assert_gradients(model, reference)


@on_ranks(2)
def test_units_of_several_modules_and_several_graphs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(7, 15), Block(7, 9), Block(7, 3))
    reference = copy.deepcopy(model)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    assert fully_shard.state(model[0]) is fully_shard.state(model[1])
    assert fully_shard.state(model[0]) is not fully_shard.state(model)
    for each in (model, reference):
        losses = [each(batch(seed)).square().sum() for seed in range(2)]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    average_gradients(reference)
    assert_gradients(model, reference)
    partial = nn.Sequential(Block(7, 15), Block(7, 9), Block(7, 3))
    fully_shard([partial[1], partial[2]])
    fully_shard(partial)
    handle = partial[0].unshard if isinstance(partial[0], FSDPModule) else None
    assert handle is None
    group_root = [nn.Linear(2, 2), nn.Linear(2, 2)]
    fully_shard(group_root)
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        group_root[0](torch.randn(1, 2))


@on_ranks(2)
def test_weights_tied_across_units() -> None:
    for order in ("siblings", "nested"):
        model, reference = build("tied"), build("tied")
        if order == "siblings":
            fully_shard(model.embed)
            fully_shard(model.head)
        else:
            fully_shard(model.embed)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        assert model.head.weight is model.embed.weight
        optims = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, reference)]
        for step in range(4):
            tokens = batch(step, "tied")
            for each in (model, reference):
                each(tokens).square().sum().backward()
            average_gradients(reference)
            assert_gradients(model, reference, rtol=1e-4, atol=1e-5)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        twin = copy.deepcopy(model)
        assert twin.head.weight is twin.embed.weight
        with torch.no_grad():
            assert torch.equal(twin(tokens), model(tokens))


@on_ranks(2)
def test_policies_of_torch_are_understood() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=TorchPrecision(param_dtype=torch.bfloat16), offload_policy=TorchOffload())
    assert model(torch.randn(2, 4)).dtype == torch.bfloat16


@on_ranks(4, fresh=True)
def test_named_axes_of_a_full_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = build("plain")
    for dims in (
        shardwise.DataParallelMeshDims(shard="dp"),
        shardwise.DataParallelMeshDims(replicate="dp"),
        shardwise.DataParallelMeshDims(shard=("dp", "tp")),
        shardwise.DataParallelMeshDims(shard="tp", replicate="dp"),
    ):
        model = build("plain")
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                value = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
                setattr(module, name, nn.Parameter(value))
        for block in model:
            fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), other)
        names = (*names_of(dims.shard), *names_of(dims.replicate))
        inputs = [Shard(0) if name in names else Replicate() for name in ("dp", "tp")]
        x = distribute_tensor(batch_for("plain", 0, 8), mesh, inputs)
        model(x).to_local().square().sum().backward()
        reference.zero_grad()
        num_parts = 4 if len(names) == 2 else 2
        (reference(batch_for("plain", 0, 8)).square().sum() / num_parts).backward()
        assert_gradients(model, reference, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_log_lines_and_profiler_ranges() -> None:
    import logging

    lines: list[str] = []
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    model = build_sharded()
    try:
        with torch.profiler.profile(acc_events=True) as profile:
            model(batch()).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for what in ("root_pre_forward", "pre_forward (0)", "post_forward (0)", "pre_backward (0)", "post_backward (0)"):
        assert f"FSDP::{what}" in lines, what
    assert "FSDP::root_post_backward" in lines
    assert {"FSDP::pre_forward (1)", "FSDP::pre_backward (1)"} <= {event.key for event in profile.key_averages()}
