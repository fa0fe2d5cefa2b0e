"""Several ranks on each of several hosts: shared memory inside, messages between, every byte over the cable once per host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.inside import engine_of, parts_from
from helpers.models import batch_for
from helpers.ranks import on_ranks
from helpers.sharded import build_sharded
from helpers.undone import build, struck, train
from torch import nn

from shardwise import RejectedStep, describe_units, fully_shard
from shardwise.collectives.host.send_recv import TAG_GATHER, TAG_SCATTER, PeerLink
from shardwise.consistency.liveness import on_host

TIERS = "shared memory, send/recv between hosts"


def on_own_host(ranks_per_host: int) -> AbstractContextManager[None]:
    return on_host(f"host {dist.get_rank() // ranks_per_host}")


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
def test_two_hosts_train_what_messages_train_up_to_the_order_of_sums() -> None:
    with on_own_host(2), parts_from(12):
        for name in ("plain", "tied"):
            tiers, messages = build_sharded(name), build_sharded(name)
            messages.set_transport("gloo")
            for number in range(2):
                for one, other in zip(step(tiers, name, number), step(messages, name, number), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
            assert routes_of(tiers) == {TIERS}, name
            assert TIERS in str(describe_units(tiers))


@on_ranks(4)
def test_sums_of_a_host_come_first_to_the_bit() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Linear(16, 16)
    model = nn.Linear(16, 16)
    model.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    plain(batch).square().sum().backward()
    with on_own_host(2):
        fully_shard(model)
        model(batch).square().sum().backward()
    for mine, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        of = [torch.empty_like(mine.grad) for _ in range(4)]
        dist.all_gather(of, mine.grad)
        expected = ((of[0] + of[1]) + (of[2] + of[3])) / 4
        assert torch.equal(full(sharded.grad), expected)
        assert not torch.equal(expected, (((of[0] + of[1]) + of[2]) + of[3]) / 4), "the orders must differ"


@contextmanager
def counting_sends() -> Iterator[Counter[int]]:
    """Count bytes sent to other hosts, by tag."""
    found: Counter[int] = Counter()
    send: Callable[..., dist.Work] = PeerLink.send

    def counted(link: PeerLink, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        found[tag] += tensor.nbytes
        return send(link, tensor, peer, tag)

    PeerLink.send = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PeerLink.send = send  # type: ignore[method-assign]


@on_ranks(2, 4)
def test_bytes_between_hosts_do_not_depend_on_how_many_ranks_a_host_has() -> None:
    hosts, per_host = 2, dist.get_world_size() // 2
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256))
    model_bytes = sum(param.nbytes for param in model.parameters())
    with on_own_host(per_host), counting_sends() as sent:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            sent.clear()
            model(torch.randn(4, 256)).sum().backward()
    by_host = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(by_host, torch.tensor([float(sent[TAG_GATHER]), float(sent[TAG_SCATTER])]))
    for host in range(hosts):
        gathered, reduced = torch.stack(by_host[host * per_host : (host + 1) * per_host]).sum(0).tolist()
        once = model_bytes * (hosts - 1) / hosts
        marks = 3 * 4 * per_host  # of three reductions, an element each
        assert 0 < gathered <= 2 * once, (gathered, once)
        assert 0 < reduced <= once + marks, (reduced, once)


@on_ranks(4)
def test_hosts_that_are_not_alike_send_messages() -> None:
    with on_host("most" if dist.get_rank() < 3 else "one"), parts_from(12):
        model = build_sharded("plain")
        step(model, "plain", 0)
        assert routes_of(model) == {"send/recv"}


@on_ranks(4, group_timeout_s=600.0, timeout_s=60.0)
def test_a_step_that_a_rank_ends_is_made_again_on_all_hosts() -> None:
    with on_own_host(2), parts_from(8):
        found: list[dict[str, torch.Tensor]] = []
        for place in (None, "backward", "forward"):
            program = build("fully_shard", "auto")
            torch.manual_seed(8)
            if place is None:
                train(program, 3)
            else:
                struck(place, partial(train, program, 3, retry=(KeyError, RejectedStep)), rank=1, step=2)
                assert program.steps == ["committed", "again", "committed", "committed"]
            found.append(program.tensors())
        for name, value in found[0].items():
            assert all(torch.equal(value, each[name]) for each in found[1:]), name
