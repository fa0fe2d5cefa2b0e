"""Training over meshes of several dimensions, as torch's own tests ask, under their names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.pairs import pairwise
from helpers.ranks import on_ranks
from helpers.torchs_tests import check, check_sharded_parity, same_losses, train_beside
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from shardwise import CPUOffloadPolicy, fully_shard

TWO: Any = pytest.param(2, marks=pytest.mark.exhaustive)  # one axis of a mesh has one rank then
c10d_ops, funcol = torch.ops.c10d, torch.ops.c10d_functional


@contextlib.contextmanager
def our_api() -> Iterator[None]:
    """Let torch's test models shard themselves with our function."""
    original = common_fsdp.fully_shard
    common_fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        common_fsdp.fully_shard = original


def run_2d_mlp(with_pipeline_axis: bool) -> None:
    size = dist.get_world_size()
    dp = 2 if size > 2 else 1
    if with_pipeline_axis:
        mesh = init_device_mesh("cpu", (1, dp, size // dp), mesh_dim_names=("pp", "dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    widths = (3, 16, 17) if size == 2 else (16, 17)
    cases = pairwise((False, True), (False, True), widths)
    for reshard, recomputes, width in cases[-1:] if with_pipeline_axis else cases:
        torch.manual_seed(42)
        model = MLPStack(width)
        reference = DistributedDataParallel(copy.deepcopy(model), process_group=mesh["dp"].get_group())
        with our_api():
            model.parallelize(mesh["tp"], mesh["dp"], recomputes, reshard_after_forward=reshard)
        torch.manual_seed(42 + mesh["dp"].get_local_rank() + 1)
        train_beside(reference, model, lambda width=width: torch.randn(8, width), steps=2, foreach=False)
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.device_mesh.mesh_dim_names == ("dp", "tp")
            assert len(param.placements) == 2


@on_ranks(TWO, 4, fresh=True)
def test_train_parity_2d_mlp() -> None:
    run_2d_mlp(with_pipeline_axis=False)


@on_ranks(4, fresh=True)
def test_2d_mlp_with_nd_mesh() -> None:
    run_2d_mlp(with_pipeline_axis=True)


@on_ranks(2, fresh=True)
def test_tp_with_fsdp_offloading() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    model = MLPStack(16)
    reference = copy.deepcopy(model)
    ref_optim = torch.optim.Adam(reference.parameters(), lr=1e-2, foreach=False)
    with our_api():
        model.parallelize(mesh["tp"], mesh["dp"], False, reshard_after_forward=True, offload_policy=CPUOffloadPolicy())
    assert all(param.device.type == "cpu" for param in model.parameters())
    num_mlps = sum(isinstance(module, MLP) for module in model.modules())
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    inp = torch.randn((4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        ref_optim.zero_grad()
        optim.zero_grad()
        with CommDebugMode() as forward:
            loss = model(inp).sum()
        expected = {funcol.all_reduce: num_mlps, c10d_ops._allgather_base_: num_mlps}
        check.assertEqual(dict(forward.get_comm_counts()), expected)
        ref_loss = reference(inp).sum()
        check.assertEqual(loss, ref_loss)
        ref_loss.backward()
        with CommDebugMode() as backward:
            loss.backward()
        expected = {funcol.all_reduce: num_mlps - 1, c10d_ops._allgather_base_: num_mlps}
        expected[c10d_ops._reduce_scatter_base_] = num_mlps
        check.assertEqual(dict(backward.get_comm_counts()), expected)
        optim.step()
        ref_optim.step()


def parallel_transformer(args: ModelArgs, mesh: DeviceMesh, sequence_parallel: bool) -> Transformer:
    torch.manual_seed(42)
    model = Transformer.parallelize(Transformer(args), mesh["tp"], sequence_parallel, local_output_for_attn=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@on_ranks(TWO, 4, fresh=True)
def test_train_parity_2d_transformer_checkpoint_resume(tmp_path: Path) -> None:
    size = dist.get_world_size()
    dp = 2 if size > 2 else 1
    mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    args = ModelArgs(n_layers=1, dropout_p=0.0)
    cases = pairwise((False, True), (False, True), (torch.optim.Adam, torch.optim.AdamW))
    for number, (sequence_parallel, reuse, optimizer_class) in enumerate(cases[size // 4 :: 2]):
        model = parallel_transformer(args, mesh, sequence_parallel)
        optim = optimizer_class(model.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(42 + mesh["dp"].get_local_rank() + 1)
        batches = [torch.randint(0, args.vocab_size, (3, 16)) for _ in range(3)]

        def step(model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            return loss.detach()

        step(model, optim, batches[0])
        path = str(tmp_path / str(number))
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
        dcp.save(state, checkpoint_id=path)
        expected = [step(model, optim, batch) for batch in batches[1:]]
        expected_values = [param.to_local().clone() for param in model.parameters()]
        if not reuse:
            model = parallel_transformer(args, mesh, sequence_parallel)
            optim = optimizer_class(model.parameters(), lr=1e-2, foreach=False)
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optim, state["optim"])
        resumed = [step(model, optim, batch) for batch in batches[1:]]
        assert all(torch.equal(left, right) for left, right in zip(expected, resumed, strict=True))
        values = [param.to_local() for param in model.parameters()]
        assert all(torch.equal(left, right) for left, right in zip(expected_values, values, strict=True))


@on_ranks(TWO, 4)
def test_train_parity_hsdp() -> None:
    size = dist.get_world_size()
    shards = 2 if size > 2 else 1
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    widths = (17, 17) if size == 2 else (3, 16)
    cases = (False, True, widths[0], True), (True, False, widths[0], False), (False, True, widths[1], False)
    for reshard, recomputes, width, sync_last in cases:
        torch.manual_seed(42)
        model = nn.Sequential(
            nn.LayerNorm(width, bias=False), MLP(width, dim_multiplier=3), MLP(width), MLP(width, dim_multiplier=3)
        )
        reference = copy.deepcopy(model)
        ddp = DistributedDataParallel(reference)
        for mlp in model:
            if recomputes:
                checkpoint(mlp)
            fully_shard(mlp, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (reference, model)]
        check_sharded_parity(reference, model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        for iter_idx in range(2):
            for microbatch in range(2):
                if sync_last:
                    model.set_requires_gradient_sync(microbatch == 1)
                inp = torch.randn((8, width))
                losses = [each(inp).sum() for each in (ddp, model)]
                for loss in losses:
                    loss.backward()
                same_losses(losses)
            check_sharded_parity(reference, model)
            for each in optims:
                each.step()
                each.zero_grad(set_to_none=iter_idx % 2 == 0)
            check_sharded_parity(reference, model)
