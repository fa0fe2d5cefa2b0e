"""Wrong use of fully_shard is told at once, on every rank: what was found, what was expected, what to do."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.sharded import build_sharded
from torch import nn
from torch.distributed.tensor import init_device_mesh

from shardwise import DataParallelMeshDims, StateError, fully_shard

# ---- the order of calls ----


@on_ranks(2)
def test_an_optimizer_built_too_early_is_named() -> None:
    model = nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.step()
    fully_shard(model)
    for _ in range(2):
        model(torch.randn(1, 3)).sum().backward()
        with pytest.raises(StateError, match=r"built before fully_shard and holds the unsharded \['weight', 'bias'\]"):
            optim.step()


# ---- arguments ----


@on_ranks(2)
def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="should be a factor of 2, not 3"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: "dim 0")


@on_ranks(4)
def test_wrong_meshes_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        DataParallelMeshDims()
    with pytest.raises(ValueError, match="not found in mesh.mesh_dim_names"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="pp"))
    with pytest.raises(ValueError, match="must be DTensors on the full SPMD mesh"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh but got"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    with pytest.raises(AssertionError, match="with mesh_dim_names specified"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)))
    swapped = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(
        ValueError, match=r"Swap them: init_device_mesh\(device, \(1, 4\), .*\('dp_replicate', 'dp_shard'\)"
    ):
        fully_shard(nn.Linear(2, 2), mesh=swapped)


# ---- settings ----


@on_ranks(2)
def test_wrong_settings_are_refused() -> None:
    model = build_sharded()
    for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_input_buffers must be"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_reshard_after_forward(2)


@on_ranks(2)
def test_a_stream_of_an_all_reduce_hook_is_refused_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        hybrid.set_all_reduce_hook(print, stream=object())
