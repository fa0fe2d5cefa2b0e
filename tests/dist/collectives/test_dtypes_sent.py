"""Tensors of dtypes that a backend does not send travel as bits; what it refuses is not taken for ranks out of step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import shardwise
from shardwise.collectives.owned import broadcast_from_first, broadcast_tensor
from shardwise.consistency.agreement import open_agreement
from shardwise.errors import TransportError

DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.int16, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.uint8).flatten().tolist()


class Frozen(nn.Module):
    """A layer beside a frozen weight, as of a quantized base, and a buffer, both of any dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 2 if dtype is torch.bool else 250, (5, 6, dtype.itemsize), generator=noise)
        values = raw.to(torch.uint8).view(dtype).squeeze(-1)
        self.frozen = nn.Parameter(values, requires_grad=False)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("kept", values.clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.frozen.view(torch.uint8)[..., 0].float().sum() * 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_frozen_weights_of_any_dtype_come_whole_and_are_synchronized(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Frozen(dtype), Frozen(dtype, 1))
    torch.manual_seed(0)
    model = nn.Sequential(*(Frozen(dtype, 1 + i if dist.get_rank() else i) for i in range(2)))
    shardwise.fully_shard(model[0], sync_module_states=True)
    shardwise.fully_shard(model, sync_module_states=True)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    wanted = {name: _bits(tensor) for name, tensor in plain.state_dict().items()}
    found = {name: _bits(tensor) for name, tensor in shardwise.full_tensors(model)}
    assert found == wanted
    state = shardwise.full_state_dict(model)
    assert {name: _bits(tensor) for name, tensor in state.items()} == ({} if dist.get_rank() else wanted)
    dist.barrier()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_optimizer_state_and_messages_of_any_dtype_arrive(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = (torch.arange(20) % 2 if dtype is torch.bool else torch.arange(20)).to(dtype).view(5, 4)
    weight = nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))
    optimizer = shardwise.ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.1, momentum=0.9)
    local = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    state = DTensor.from_local(values.chunk(2)[dist.get_rank()], mesh, [Shard(0)], shape=local.shape, stride=(4, 1))
    saved = {"state": {"weight": {"momentum_buffer": state}}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(saved)
    loaded = optimizer.full_state_dict()["state"]["weight"]["momentum_buffer"]
    assert _bits(loaded.to(dtype)) == _bits(values)
    world = dist.group.WORLD
    assert world is not None
    target = values.clone() if dist.get_rank() == 0 else torch.zeros_like(values)
    broadcast_from_first([target.t()], world)
    assert _bits(target) == _bits(values)


@on_ranks(2)
def test_what_a_backend_refuses_on_every_rank_is_its_error_and_the_group_goes_on() -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    agreement = open_agreement(None, "refused")
    for _ in range(2):
        dist.barrier()
        with pytest.raises(TransportError, match="a message: the backend refused the call on every rank: "):
            broadcast_tensor(torch.ones(4).to_sparse(), 0, agreement, "a message")
        assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), torch.ones(4))
