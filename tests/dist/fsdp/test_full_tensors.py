"""Full tensors of live models: the plain model's values under its names, one unit at a time, or a named error."""

from __future__ import annotations

import gc
import os
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import APIS, Net
from helpers.live_bytes import LiveBytes
from helpers.models import MODELS, build
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import build_sharded, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import ConfigError, DesyncError, full_state_dict, full_tensors, fully_shard, replicate, shard_model

NAMES = ("replicate", "shard")
WRAPS: dict[str, Any] = {
    **{name: api.wrap for name, api in APIS.items()},
    "shard_model": lambda model: shard_model(model, min_unit_bytes=0),
    "replicated as DDP": lambda model: replicate(model, process_group=None),
    "DDP": nn.parallel.DistributedDataParallel,
}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("api", WRAPS)
@on_ranks(2, FOUR)
def test_every_api_yields_the_tensors_of_the_plain_model(api: str) -> None:
    assert_same(dict(full_tensors(WRAPS[api](Net(3)))), Net(3).state_dict())


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, FOUR)
def test_floating_point_tensors_come_in_the_dtype_that_is_wanted(name: str) -> None:
    model, plain = build_sharded(name), build(name)
    model.register_buffer("count", torch.tensor(7))
    plain.register_buffer("count", torch.tensor(7))
    expected = {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in plain.state_dict().items()
    }
    assert_same(dict(full_tensors(model, dtype=torch.bfloat16)), expected)
    assert_same(dict(full_tensors(model)), plain.state_dict())


@on_ranks(2)
def test_a_model_yields_between_any_two_calls_of_a_step_and_trains_on_to_the_bit() -> None:
    models = [build_sharded("mixed"), build_sharded("mixed")]
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=False) for model in models]
    for seed in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, seed)
            taken = [dict(full_tensors(model))] if model is models[0] else []
            loss.backward()
            if taken:
                taken.append(dict(full_tensors(model)))
            optimizer.step()
            optimizer.zero_grad()
            if taken:
                assert_same(*taken)  # the caller's own: a step does not change them
    assert_same(dict(full_tensors(models[0])), dict(full_tensors(models[1])))


@on_ranks(2)
def test_one_rank_has_the_full_state_dict_and_it_can_be_any() -> None:
    found = full_state_dict(WRAPS["hybrid"](Net(3)), rank=1)
    assert_same(found, Net(3).state_dict() if dist.get_rank() == 1 else {})
    if found:
        assert found["tied.weight"] is found["second.weight"]


def test_a_plain_module_needs_no_process_group() -> None:
    model = Net(0)
    assert_same(full_state_dict(model), model.state_dict())
    assert all(tensor.data_ptr() != model.scale.data_ptr() for _, tensor in full_tensors(model))


@on_ranks(2)
def test_tied_parameters_are_gathered_once_and_come_under_both_names() -> None:
    model = build_sharded("tied")
    with CommDebugMode() as counts:
        found = dict(full_tensors(model))
    assert found["embed.weight"] is found["head.weight"]
    assert counts.get_total_counts() == len(list(model.parameters()))


@on_ranks(2)
def test_names_that_are_not_wanted_are_not_gathered() -> None:
    model = build_sharded("mixed")
    with CommDebugMode() as counts:
        found = dict(full_tensors(model, only=lambda name: name.startswith("1.") and "strided" in name))
    assert list(found) == ["1.strided"]
    assert counts.get_total_counts() == 1


WIDTH, NUM_BLOCKS = 64, 6


@on_ranks(2, FOUR)
def test_no_more_than_one_unit_is_unsharded_at_a_time() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    unit_bytes = sum(param.numel() * param.element_size() for param in model[0].parameters())
    with LiveBytes() as live:
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in full_tensors(model))
    assert num_bytes == NUM_BLOCKS * unit_bytes
    assert unit_bytes <= live.peak <= 1.5 * unit_bytes


@on_ranks(2, FOUR)
def test_a_rank_that_stops_early_is_named_on_all_that_go_on() -> None:
    model = build_sharded("plain")
    if dist.get_rank() == 1:
        for _ in full_tensors(model):
            break
    else:
        with pytest.raises(DesyncError, match=r"rank 1 stopped full_tensors\(\) at '0.norm.weight', tensor 1 of 15"):
            list(full_tensors(model))


@on_ranks(2)
def test_a_rank_that_drops_the_iterator_before_the_first_tensor_is_named() -> None:
    found = full_tensors(build_sharded("plain"))
    if dist.get_rank() == 1:
        del found
    else:
        with pytest.raises(DesyncError, match=r"rank 1 stopped full_tensors\(\) before the first of 15 tensors"):
            list(found)


@on_ranks(2)
def test_inference_mode_of_the_caller_changes_nothing() -> None:
    model = build_sharded("mixed")
    with torch.inference_mode():
        found = full_state_dict(model)
    assert_same(found, {} if dist.get_rank() else build("mixed").state_dict())


@on_ranks(2)
def test_a_rank_that_the_job_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="full_state_dict: rank is 2, expected one of 0 to 1"):
        full_state_dict(build_sharded("plain"), rank=2)


@on_ranks(2)
def test_a_rank_that_raises_in_between_is_named_too() -> None:
    model = build_sharded("plain")

    def send() -> None:
        for number, _ in enumerate(full_tensors(model)):
            if number == 7 and not dist.get_rank():
                raise ConnectionError("the engine is gone")

    with pytest.raises(DesyncError if dist.get_rank() else ConnectionError, match="rank 0 stopped|is gone"):
        send()


@on_ranks(2)
def test_ranks_that_stop_at_the_same_tensor_go_on_together() -> None:
    model = build_sharded("plain")
    assert len(list(islice(full_tensors(model), 4))) == 4
    loss_of(model).backward()
    assert_same(dict(full_tensors(model)), build("plain").state_dict())


@on_ranks(2)
def test_ranks_that_want_other_tensors_are_told_before_anything_is_gathered() -> None:
    model = build_sharded("plain")
    with pytest.raises(DesyncError, match=r"full_tensors: ranks disagree.*0\.norm\.bias"):
        full_tensors(model, only=lambda name: name != "0.norm.bias" or not dist.get_rank())
    with pytest.raises(DesyncError, match="ranks disagree.*dtype=torch.float16"):
        full_tensors(model, dtype=torch.float16 if dist.get_rank() else None)


@on_ranks(2)
def test_a_parameter_without_values_on_one_rank_is_named_on_all() -> None:
    model = build_sharded("plain")
    if dist.get_rank():
        model[1].up.register_buffer("extra", torch.empty(3, device="meta"))
    kind = ConfigError if dist.get_rank() else DesyncError
    with pytest.raises(kind, match=r"1\.up\.extra is on the meta device"):
        full_tensors(model)


@on_ranks(4)
def test_models_on_a_part_of_the_ranks_need_those_alone() -> None:
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = fully_shard(build("plain", seed=rows.get_local_rank("stage")), mesh=rows["shard"])
    if rows.get_local_rank("stage"):
        assert_same(dict(full_tensors(model)), build("plain", seed=1).state_dict())


@on_ranks(4)
def test_weights_that_are_published_again_and_again_take_no_more_descriptors() -> None:
    """Of a mesh of two axes that does not span the world: its ranks have a group of their own."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [[0, 1]], mesh_dim_names=NAMES), DeviceMesh("cpu", [[2, 3]], mesh_dim_names=NAMES)]
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=meshes[rank // 2])
    full_state_dict(model)
    gc.collect()  # descriptors of earlier tests
    counts: list[int] = []
    for _ in range(3):
        full_state_dict(model)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]
