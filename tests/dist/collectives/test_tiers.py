"""Several ranks on each of several hosts exchange gradients; ranks of a group within a host share memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.inside import engine_of, link_name_of, parts_from
from helpers.models import batch_for
from helpers.ranks import on_ranks
from helpers.sharded import build_sharded
from helpers.store_exchanges import on_host
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import describe_units, fully_shard


def routes_of(model: nn.Module) -> set[str]:
    return {unit.route for unit in engine_of(model).units if unit.route}


def step(model: nn.Module, name: str, number: int) -> list[torch.Tensor]:
    """Return the loss, then whole gradients and parameters, of a step of plain descent."""
    batch = batch_for(name, number, 4 * dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(batch).square().mean()
    loss.backward()
    seen = [loss.detach()]
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                seen.append(full(param.grad).clone())
                param.sub_(param.grad, alpha=0.01)
                param.grad = None
    return seen + [full(param.detach()).clone() for param in model.parameters()]


@on_ranks(4)
def test_two_hosts_train_what_one_host_trains() -> None:
    for name in ("plain", "tied"):
        with parts_from(12):
            shared = build_sharded(name)
            expected = [step(shared, name, number) for number in range(2)]
            with on_host(f"host {dist.get_rank() // 2}"):
                model = build_sharded(name)
                found = [step(model, name, number) for number in range(2)]
        assert "collectives" in str(describe_units(model)), name
        assert link_name_of(model) == "all-to-all", name
        assert routes_of(shared) == {"shared memory"}, name
        for mine, other in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine, other)), name  # in rank order on either


@on_ranks(4)
def test_hosts_that_are_not_alike_exchange_gradients() -> None:
    with on_host("most" if dist.get_rank() < 3 else "one"), parts_from(12):
        model = build_sharded("plain")
        step(model, "plain", 0)
        assert link_name_of(model) == "all-to-all"


@on_ranks(4)
def test_shards_within_a_host_are_read_from_shared_memory() -> None:
    with on_host(f"host {dist.get_rank() // 2}"), parts_from(12):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        model(torch.randn(4, 16)).sum().backward()
        assert routes_of(model) == {"shared memory"}
