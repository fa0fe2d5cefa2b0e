"""The rest of FSDP2's surface: precision, placement, communication settings, clipping, tied weights, logs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients, full, is_incomplete
from helpers.models import Block, batch_for, build
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import batch, build_sharded
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import (
    ConfigError,
    FSDPModule,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from shardwise.fsdp.mesh import names_of


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = nn.Conv2d(3, 5, 2), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.conv(x).flatten(2).mean(-1))


@on_ranks(2, FOUR)
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
                mine_ = full(left.grad)
                torch.testing.assert_close(mine_, right.grad)
    head.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([head], 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([head], 1.0, norm_type=-1.0)


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
