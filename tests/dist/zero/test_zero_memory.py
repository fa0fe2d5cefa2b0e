"""Memory that somebody holds is not moved, on any rank; aliases and other processes see new values."""

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import assert_equal
from helpers.ranks import FOUR, on_ranks

from shardwise import ZeroRedundancyOptimizer
from shardwise.collectives.owned import PACK_BELOW_BYTES
from shardwise.zero.optimizer import zero_backend

PARTITIONS = ("whole", "even")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    large = PACK_BELOW_BYTES // 4 // 64 + 3  # matrices with this many rows are sent by themselves
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 6, 3), torch.nn.Flatten(), torch.nn.Linear(216, 64)),
        *(torch.nn.Linear(64, large), torch.nn.Linear(large, 64), torch.nn.Linear(64, 5)),
    )
    model[0].to(memory_format=torch.channels_last)
    return model


def _backward(model: torch.nn.Module, step: int) -> None:
    """The same batch on all ranks, so that gradients agree without DDP."""
    noise = torch.Generator().manual_seed(step)
    model(torch.randn(2, 1, 8, 8, generator=noise)).square().mean().backward()


def _zero(model: torch.nn.Module, partition: str, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"parameters_as_bucket_view": True, "lr": 0.01} | options
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition, **options)


def _expected(num_steps: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()


@on_ranks(2, FOUR)
def test_aliases_of_parameters_stay_live() -> None:
    """Taken before the optimizer was made, or between any changes of what trains and where it lies."""
    ways = (
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.detach().permute(*range(p.dim())),
        lambda p: p.detach().numpy(),
    )
    for partition, way in product(PARTITIONS, ways if dist.get_world_size() == 2 else ways[:1]):
        model, plain = _model(), _model()
        aliases = [(p, way(p)) for p in list(model.parameters())[:3]]
        zero = _zero(model, partition)
        adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(8):
            for module, optimizer in ((model, zero), (plain, adam)):
                module[2].requires_grad_(step not in (2, 3))
                if step == 5:
                    module[3].weight.data = module[3].weight.data.clone()
                optimizer.zero_grad()
                _backward(module, step)
                optimizer.step()
            if step == 4 and not isinstance(
                aliases[0][1], numpy.ndarray
            ):  # arrays do not follow, of plain tensors neither
                torch.nn.Module.share_memory(model[0])
            held = {id(p) for p, _ in aliases}
            aliases += [(p, way(p)) for p in model.parameters() if step in (0, 2, 6) and id(p) not in held]
            for p, alias in aliases:
                if not (step >= 5 and p is model[3].weight):  # the test itself gave it other memory
                    assert torch.equal(torch.as_tensor(alias), p), (partition, step)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b), partition
        assert model[0].weight.untyped_storage().is_shared() or isinstance(aliases[0][1], numpy.ndarray)


@on_ranks(2, FOUR)
def test_what_other_processes_see_is_not_moved() -> None:
    for partition in PARTITIONS:
        model = _model()
        zero = _zero(model, partition)
        model[3].share_memory()
        addresses = [p.data_ptr() for p in model[3].parameters()]
        _train(model, zero, range(2))
        model[2].weight.data = model[2].weight.data.clone()
        _train(model, zero, range(2, 4))
        assert [p.data_ptr() for p in model[3].parameters()] == addresses
        assert all(p.is_shared() for p in model[3].parameters())
        assert_equal(model.parameters(), _expected(4))


@on_ranks(2, FOUR)
def test_ranks_may_hold_different_aliases() -> None:
    """A rank that keeps a state dict sends and receives the same messages as the others."""
    rank = dist.get_rank()
    for partition in PARTITIONS:
        model = _model()
        kept = {0: model.state_dict(), 1: list(model.state_dict().values())[1:4]}.get(rank)
        zero = _zero(model, partition)
        sizes = [
            (call.owner, sum(tensor.numel() for tensor in call.tensors))
            for call in zero_backend(zero).layout.broadcasts
        ]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sizes)
        assert all(other == sizes for other in every), every
        _train(model, zero, range(2))
        if rank == 1:
            model[2].weight.data = model[2].weight.data.clone()
        kept = model.state_dict() if rank == 1 else kept
        _train(model, zero, range(2, 4))
        model[3].bias.requires_grad_(False)
        model[3].bias.requires_grad_(True)
        _train(model, zero, range(4, 6))
        assert_equal(model.parameters(), _expected(6))
        for name, p in model.state_dict().items():
            assert kept is None or not isinstance(kept, dict) or torch.equal(kept[name], p)


@on_ranks(2, FOUR)
def test_frozen_parameters_with_gradients_move_on_all_ranks() -> None:
    """A plain optimizer updates them as long as a gradient is there; owners must not do so alone."""
    for partition, bucket_view in product(PARTITIONS, (False, True)):
        model, plain = _model(), _model()
        zero = _zero(model, partition, parameters_as_bucket_view=bucket_view)
        adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for module, optimizer in ((model, zero), (plain, adam)):
            _backward(module, 0)
            module[2].requires_grad_(False)
            optimizer.step()
            optimizer.step()
            _train(module, optimizer, range(1, 3))
        assert_equal(model.parameters(), [p.detach() for p in plain.parameters()])


@on_ranks(2)
def test_sharded_state_is_saved_in_the_background(tmp_path: Path) -> None:
    for partition in PARTITIONS:
        model = _model()
        zero = _zero(model, partition)
        _train(model, zero, range(2))
        names = dict(model.named_parameters())
        path = str(tmp_path / partition)
        state = zero.sharded(names).state_dict()
        dcp.async_save({"optimizer": state}, checkpoint_id=path).result()
        for other_state in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
            for name, values in state["state"].items():
                for key, value in values.items():
                    found = other_state["state"][name][key]
                    assert type(found) is type(value)
                    assert torch.equal(getattr(found, "local", found), getattr(value, "local", value))
                    assert getattr(found, "local", found).data_ptr() != getattr(value, "local", value).data_ptr()
        again = _model()
        other = _zero(again, "whole" if partition == "even" else "even")
        dcp.load({"optimizer": other.sharded(dict(again.named_parameters()), loading=True)}, checkpoint_id=path)
        again.load_state_dict(model.state_dict())
        _train(again, other, range(2, 4))
        assert_equal(again.parameters(), _expected(4))
