"""Wrong use of fully_shard is told at once, on every rank: what was found, what was expected, what to do."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.sharded import build_sharded
from torch import nn
from torch.distributed.tensor import init_device_mesh

import shardwise
from shardwise import DataParallelMeshDims, StateError, fully_shard


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def sharded_encoders() -> nn.Sequential:
    model = nn.Sequential(Encoder(), Encoder())
    for each in (*model, model):
        fully_shard(each)
    return model


# ---- the order of calls ----


@on_ranks(2)
def test_a_full_parameter_that_is_kept_has_a_shape_and_no_values() -> None:
    model, x, kept = sharded_encoders(), torch.randn(2, 4), []
    model[0].inner.register_forward_hook(lambda module, *_: kept.append(module.weight))
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="data pointer|was resharded"):
        kept[0].sum()
    assert kept[0].shape == (4, 4)
    model.zero_grad()
    model(x).sum().backward()


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


@on_ranks(2)
def test_a_module_is_sharded_once() -> None:
    model = build_sharded()
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(model)


@on_ranks(2)
def test_a_root_that_has_run_takes_no_other_root() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    fully_shard(inner)
    fully_shard(outer)
    inner(torch.randn(1, 2))
    with pytest.raises(RuntimeError, match="already been lazily initialized"):
        outer(torch.randn(1, 2))


@on_ranks(2)
def test_parameters_without_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    fully_shard(model)
    with pytest.raises(StateError, match=r"still on meta device: \['weight', 'bias'\]"):
        model(torch.randn(1, 2))


# ---- arguments ----


@on_ranks(2)
def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="should be a factor of 2, not 3"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    with pytest.raises(ValueError, match="expected a MixedPrecisionPolicy"):
        fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)
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


@on_ranks(2)
def test_a_policy_names_what_it_does_not_know() -> None:
    model = build_sharded()
    with pytest.raises(ValueError, match="has no field"), shardwise.policy(model, synch=False):
        pass
    with pytest.raises(ValueError, match="contains no sharded module"), shardwise.policy(nn.Linear(1, 1), sync=False):
        pass
