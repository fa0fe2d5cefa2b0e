"""``use_in`` changes names in the modules that it is given, and nothing else."""

from __future__ import annotations

import copy
import importlib
import sys
import types

import pytest
import torch
import torch.distributed.fsdp as torchs
from helpers.one_process import standing_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import ConfigError, StateError, use_in


def trainer() -> types.ModuleType:
    module = types.ModuleType("trainer")
    module.shard, module.FSDPModule, module.other = torchs.fully_shard, torchs.FSDPModule, nn.Linear  # type: ignore[attr-defined]
    return module


def test_a_name_of_torchs_function_is_ours_within_the_context() -> None:
    module = trainer()
    with use_in(module) as used:
        use_in(module)  # a cell that runs again
        assert module.shard is shardwise.fully_shard
        assert used.replaced == [(module, "shard")]
        assert (module.FSDPModule, module.other) == (torchs.FSDPModule, nn.Linear)
        assert torchs.fully_shard is not shardwise.fully_shard
    assert module.shard is torchs.fully_shard


def test_a_module_that_calls_nothing_of_torchs_is_refused() -> None:
    with pytest.raises(ConfigError, match="math has no name for torch's fully_shard"):
        import math

        use_in(math)


@pytest.mark.parametrize("is_early", [True, False])
def test_torchs_older_path_is_replaced_too_and_put_back(is_early: bool) -> None:
    names = [name for name in sys.modules if name.startswith("torch.distributed._composable.fsdp")]
    before = {name: sys.modules.pop(name) for name in names}
    try:
        if is_early:
            importlib.import_module("torch.distributed._composable.fsdp")
        with use_in(torchs):
            older = importlib.import_module("torch.distributed._composable.fsdp")
            oldest = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
            for module in (older, oldest):
                assert module.fully_shard is shardwise.fully_shard
                assert module.register_fsdp_forward_method is shardwise.register_fsdp_forward_method
        for module in (older, oldest):
            assert module.fully_shard is torchs.fully_shard
    finally:
        sys.modules.update(before)


def test_modules_that_have_imported_torchs_function_before_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType("early_trainer")
    module.shard = torchs.fully_shard  # type: ignore[attr-defined]
    sys.modules["early_trainer"] = module
    try:
        with use_in(torchs):
            assert "early_trainer imported torch's function before use_in" in caplog.text
        caplog.clear()
        with use_in(torchs, module):
            assert "early_trainer" not in caplog.text
        with use_in(trainer()):  # also where a module of a user's own is named
            assert "early_trainer imported torch's function before use_in" in caplog.text
    finally:
        del sys.modules["early_trainer"]


def test_what_was_sharded_within_is_what_torchs_tools_know() -> None:
    with standing_for(0, 4), use_in(torchs):
        model = torchs.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
    assert isinstance(model, shardwise.FSDPModule)
    assert isinstance(model, torchs.FSDPModule)
    assert torchs.fully_shard.state(model) is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_the_state_that_torchs_tests_read_is_as_that_of_torchs_class(reshard: bool | int) -> None:
    policy = torchs.MixedPrecisionPolicy(torch.bfloat16)
    read: list[object] = []
    with standing_for(0, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        for shard in (torchs.fully_shard, shardwise.fully_shard):
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
            shard(model[0], mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            shard(model, mesh=mesh)
            root, inner = (each._get_fsdp_state() for each in (model, model[0]))
            assert root == model._get_fsdp_state() != inner
            assert root._is_root is inner._is_root is None
            root._lazy_init()
            assert inner._state_ctx.all_states == [root, inner]
            for state in (root, inner):
                group = state._fsdp_param_group
                assert [each._module_fqn for each in state._fsdp_param_groups] == [group._module_fqn]
                kept = group.post_forward_mesh_info
                read += [state._is_root, state._mp_policy.param_dtype, group._module_fqn, group._reshard_after_forward]
                read += [group.mesh_info.mesh, None if kept is None else kept.mesh.size(kept.shard_mesh_dim)]
                read += [(each._param_fqn, each.sharded_param.shape) for each in group.fsdp_params]
                assert {each.sharded_param for each in group.fsdp_params} <= {*model.parameters()}
        with pytest.raises(StateError, match="_pre_forward: a tool asks for the private state"):
            copy.copy(root)._pre_forward()
        plain = shardwise.fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh)
        assert plain._get_fsdp_state()._fsdp_param_group is None
    assert read[: len(read) // 2] == read[len(read) // 2 :]


# Public names of torch's FSDPModule in 2.15; the installed one's are looked up.
NAMES_OF_2_15 = {
    "finalize_backward",
    "reset_iter_state",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_symm_mem_for_comm",
}
CLASS_AND_TOOLS = {"_apply", "_get_fsdp_state", "_set_unshard_async_op", "__new__"}


def test_no_method_of_torchs_class_is_reached_through_a_sharded_module() -> None:
    names = {name for name in dir(torchs.FSDPModule) if not name.startswith("_")} | NAMES_OF_2_15 | CLASS_AND_TOOLS
    with standing_for(0, 4):
        apis = (shardwise.fully_shard, shardwise.replicate)
        kinds = [type(api(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))) for api in apis]
    for kind in kinds:
        assert torchs.FSDPModule in kind.__mro__
        for name in names:
            owner = next((base for base in kind.__mro__ if name in vars(base)), None)
            assert owner is not None, name
            assert owner.__module__.startswith(("shardwise.", "torch.nn.")), f"{name} is found in {owner}"


def test_symmetric_memory_is_refused_by_name() -> None:
    with standing_for(0, 4):
        model = shardwise.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ConfigError, match=r"set_symm_mem_for_comm\('NCCL'\).*set_allocate_memory"):
        model.set_symm_mem_for_comm()
