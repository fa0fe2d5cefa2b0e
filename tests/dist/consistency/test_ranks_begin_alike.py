"""Ranks that shard different values get a warning, or an error where each would train a model of its own."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZero
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import (
    ConfigError,
    DesyncError,
    Reproducible,
    StateError,
    ZeroRedundancyOptimizer,
    fully_shard,
    shard_model,
)

Api = Callable[..., Any]


def layers(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module, **options: Any) -> nn.Module:
    return shard_model(model, **options)


def hybrid(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "shard"))
    return layers(model, mesh=mesh, **options)


class Net(nn.Sequential):
    """Uneven shards, a shard that all ranks but one have empty, a frozen matrix and buffers."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        with torch.device(device):
            super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))
        self[2].requires_grad_(False)
        if device != "meta":
            self[1].running_mean.uniform_()


def forward(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.linspace(-1, 1, 20, dtype=dtype).view(4, 5))


def named(model: nn.Module, match: str) -> None:
    for _ in range(2):  # also a second time
        with pytest.raises(
            DesyncError, match=f"ranks do not begin with the same values: {match}.*sync_module_states=True"
        ):
            forward(model)


@contextmanager
def warnings_of(name: str) -> Generator[list[str], None, None]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    yield told
    logging.getLogger(name).removeHandler(handler)


def warned(model: nn.Module, match: str) -> None:
    with warnings_of("shardwise.checks") as told:
        for _ in range(2):
            forward(model)
    if dist.get_rank() == 0:
        (text,) = told
        assert re.search(rf"ranks do not begin with the same values: {match}.*sync_module_states=True", text)
    else:
        assert not told


def mixture() -> Net:
    """Return the model of which each rank has its slice of what its own seed has drawn."""
    nets = [Net(rank) for rank in range(dist.get_world_size())]
    with torch.no_grad():
        for name, param in (result := Net()).named_parameters():
            chunks = [net.get_parameter(name).chunk(len(nets)) for net in nets]
            param.copy_(torch.cat([each[rank] for rank, each in enumerate(chunks) if rank < len(each)]))
    result[1].load_state_dict({**Net(dist.get_rank())[1].state_dict(), "weight": result[1].weight})
    return result


SAID = r"0.bias of shape \(7,\) is not the same on ranks? [1-3, and]+ as on rank 0, and \d more parameters differ"


@pytest.mark.parametrize("api", [layers, whole])
@on_ranks(2, FOUR)
def test_ranks_with_seeds_of_their_own_train_a_mixture_and_are_warned_once(api: Api) -> None:
    model, plain = api(Net(dist.get_rank())), mixture()
    warned(copy.deepcopy(model), SAID)
    warned(model, SAID)
    for _ in range(2):  # as often, for BatchNorm
        forward(plain)
    assert torch.equal(forward(model), forward(plain))
    forward(model).sum().backward()
    forward(plain).sum().backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            average = expected.grad.clone()
            dist.all_reduce(average)
            assert torch.allclose(found.grad.full_tensor(), average / dist.get_world_size()), name


@on_ranks(4)
def test_replicas_with_seeds_of_their_own_are_refused_in_the_first_forward() -> None:
    model = hybrid(Net(dist.get_rank()))
    with torch.no_grad():
        named(copy.deepcopy(model), SAID)
    named(model, SAID)


class Scaled(nn.Linear):
    """A scalar, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


@on_ranks(2)
def test_a_scalar_of_each_ranks_own_is_refused() -> None:
    torch.manual_seed(dist.get_rank())
    named(fully_shard(Scaled()), r"scale of shape \(\) is not the same on rank 1 as on rank 0\. ")


@on_ranks(2)
def test_a_reproducible_run_does_not_begin_with_a_mixture() -> None:
    model = layers(
        nn.Sequential(*[module for module in Net(dist.get_rank()) if not isinstance(module, nn.BatchNorm1d)])
    )
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    with pytest.raises(DesyncError, match="the same values: 0.bias .* one that depends on their number"):
        for _ in Reproducible(model, optimizer, num_microbatches=2).microbatches():
            forward(model).sum().backward()


@on_ranks(2)
def test_one_element_of_a_frozen_matrix_is_enough() -> None:
    model = Net()
    if dist.get_rank():
        model[2].weight[0, 0] += 0.1  # in the shard of the other rank
    warned(layers(model), r"2.weight of shape \(3, 7\) is not the same on rank 1 as on rank 0\. Each")


@on_ranks(2)
def test_conversions_do_not_hide_what_ranks_began_with() -> None:
    warned(layers(Net(dist.get_rank())).bfloat16(), r"0.bias of shape \(7,\) is")


def overwrite(model: nn.Module, way: str) -> None:
    expected = dict(Net(7).named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        shard = distribute_tensor(expected[name].detach(), param.device_mesh, param.placements)
        with torch.no_grad():
            if way == "copy":
                param.copy_(shard)
            elif way == "data":
                param.data.copy_(shard)
            else:
                param.to_local().copy_(shard.to_local())
    if way == "load":
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("way", ["copy", "data", "local", "load"])
@pytest.mark.parametrize("first_seed", [0, 7])
@on_ranks(2)
def test_values_that_are_written_after_sharding_are_all_that_counts(way: str, first_seed: int) -> None:
    """Also if the first rank had them before: it writes what it has."""
    model = layers(Net(first_seed if dist.get_rank() == 0 else 1))
    overwrite(model, way)
    plain = Net(7)
    plain[1].load_state_dict({**model[1].state_dict(), "weight": plain[1].weight, "bias": plain[1].bias})
    assert torch.equal(forward(model), forward(plain))


@pytest.mark.parametrize("api", [layers, whole, hybrid])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2, FOUR)
def test_sync_module_states_gives_all_ranks_the_values_of_the_first(api: Api, device: str) -> None:
    rank = dist.get_rank()
    model = api(Net(rank, "cpu" if rank == 0 else device), sync_module_states=True)
    plain = Net()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected), name
    for _ in range(2):
        assert torch.equal(forward(model), forward(plain))
    for (name, found), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name


@on_ranks(2, FOUR)
def test_a_first_rank_without_values_is_refused_on_every_rank() -> None:
    model = Net(device="meta" if dist.get_rank() == 0 else "cpu")
    error, match = (ConfigError, "") if dist.get_rank() == 0 else (DesyncError, "rank 0 raised ConfigError.*")
    with pytest.raises(error, match=f"{match}the first rank has 1.running_mean on meta|{match}the first rank has"):
        hybrid(model, sync_module_states=True)


@pytest.mark.parametrize("api", [layers, whole])
@on_ranks(2, FOUR)
def test_values_of_one_rank_that_torchs_function_broadcasts_after_to_empty_on_the_others(api: Api) -> None:
    """The others have materialized parameters, the first has not; all compare the same things."""
    is_first = dist.get_rank() == 0
    model = api(Net(3, "cpu" if is_first else "meta"))
    model = model.to("cpu") if is_first else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, Net(3).state_dict() if is_first else {}, options=options)
    assert torch.equal(forward(model), forward(Net(3)))


@on_ranks(2)
def test_a_tensor_without_values_on_one_rank_is_named_on_all() -> None:
    model = layers(Net(3, "cpu" if dist.get_rank() == 0 else "meta"))
    if dist.get_rank():
        model.to_empty(device="cpu")
    with pytest.raises(StateError, match=r"0\.weight.* have no values: nothing was written to them after to_empty"):
        forward(model)


@on_ranks(2)
def test_ranks_that_synchronize_models_of_other_shapes_are_named() -> None:
    with pytest.raises(DesyncError, match="sync_module_states"):
        fully_shard(nn.Linear(3, 4 + dist.get_rank()), sync_module_states=True)


def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, averages: bool) -> None:
    forward(model).sum().backward()
    if averages:
        average_gradients(model)
    optimizer.step()


def assert_alike(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, param.detach(), group=group)
        assert all(torch.equal(param, other) for other in others)


@pytest.mark.parametrize("partition", ["whole", "even"])
@pytest.mark.parametrize("averages", [False, True])
@on_ranks(2, FOUR)
def test_zero_warns_once_of_parameters_that_differ_and_its_first_step_makes_them_equal(
    partition: Any, averages: bool
) -> None:
    model = Net(dist.get_rank()).requires_grad_(True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, partition=partition)
    with warnings_of("shardwise.zero.optimizer") as told:
        for _ in range(2):
            if averages:
                step(model, optimizer, averages)
            else:
                optimizer.step(lambda: cast(float, forward(model).sum().backward()))
            model.zero_grad()
            assert_alike(model)
    (text,) = [text for text in told if "parameters differ" in text]
    assert "parameter 0 of shape (7, 5) is of norm" in text
    assert "becomes a mixture of them: build the model with one seed" in text


@on_ranks(2, FOUR)
def test_zero_names_frozen_parameters_that_no_step_makes_equal() -> None:
    model = Net(dist.get_rank())
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(DesyncError, match=r"differ between ranks before it: parameter 4 .* keep different models"):
            step(model, optimizer, averages=True)
        model.zero_grad()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@on_ranks(4)
def test_nondefault_process_group() -> None:
    """torch's own test of this name: ranks with seeds of their own, a group of the even ones, a closure without DDP."""
    even = [rank for rank in range(dist.get_world_size()) if rank % 2 == 0]
    group: Any = dist.new_group(even)
    if dist.get_rank() not in even:
        return
    torch.manual_seed(dist.get_rank())
    models = [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))]
    models.append(copy.deepcopy(models[0]))
    kinds: list[Any] = [ZeroRedundancyOptimizer, TorchsZero]
    optimizers = [
        kind(model.parameters(), torch.optim.SGD, process_group=group, lr=1e-3, momentum=0.99)
        for kind, model in zip(kinds, models, strict=True)
    ]

    def closure(model: nn.Module, optimizer: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(inputs), target) / len(even)
        loss.backward()
        dist.all_reduce(loss.detach(), group=group)
        return loss

    for _ in range(5):
        target, inputs = torch.rand(8, 2), torch.rand(8, 3)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step(closure=partial(closure, model, optimizer, inputs, target))
        assert_alike(models[0], group)
        assert all(map(torch.equal, *(model.parameters() for model in models)))


@on_ranks(2)
def test_zero_compares_what_ddp_or_the_user_has_made_equal_by_then() -> None:
    model = Net(dist.get_rank())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    ddp = DDP(model)
    step(ddp, optimizer, averages=False)
    model = Net(dist.get_rank())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)
    step(model, optimizer, averages=True)
