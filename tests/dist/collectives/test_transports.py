"""Shared memory, all-to-alls and collectives give the same training: to the bit between the first two, for every model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full, local
from helpers.inside import engine_of, link_name_of, parts_from
from helpers.models import MODELS, batch_for, units_of
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import build_sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import (
    ConfigError,
    DesyncError,
    MixedPrecisionPolicy,
    ShardedOptimizer,
    fully_shard,
    replicate,
    set_default_transport,
)
from shardwise.collectives.routes import TRANSPORTS, Transport


def build_over(name: str, transport: Transport, **arguments: object) -> nn.Module:
    model = build_sharded(name, **arguments)
    model.set_transport(transport)
    return model


def routes_of(model: nn.Module) -> set[str]:
    return {unit.route for unit in engine_of(model).units if unit.route}


def train(model: nn.Module, name: str, num_steps: int, flat: bool) -> list[torch.Tensor]:
    """Return losses, then this rank's parts of gradients and parameters, of every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if flat:
        optimizer: torch.optim.Optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[torch.Tensor] = []
    for step in range(num_steps):
        for microbatch in range(2):
            model.set_requires_gradient_sync(step % 2 == 0 or microbatch == 1)
            batch = batch_for(name, 2 * step + microbatch, 4 * size).chunk(size)[rank]
            loss = model(batch).square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [local(param.grad).clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(param.detach()).clone() for param in model.parameters()]
    return seen


def run_all_transports(large_numel: int, halves: bool) -> None:
    """Compare models, every second one with resharding: two ranks, and more, take the two of them."""
    arguments: dict[str, object] = {}
    if halves:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Larger worlds run what is cut unevenly or tied; two ranks run every model.
    names = ("mixed", "tied") if dist.get_world_size() > 2 else ("plain", "tied", "frozen") if halves else MODELS
    for number, name in enumerate(names):
        reshard = number % 2 == (dist.get_world_size() > 2)
        models = {t: build_over(name, t, reshard_after_forward=reshard, **arguments) for t in TRANSPORTS}
        with parts_from(large_numel):
            seen = {t: train(model, name, 2, flat=reshard) for t, model in models.items()}
            assert routes_of(models["auto"]) == {"shared memory"}
            assert routes_of(models["gloo"]) == {"collectives"}
            assert link_name_of(models["gloo"]) == "all-to-all"
            assert routes_of(models["collective"]) == {"collectives"}
        for index, (shared, sent, collected) in enumerate(zip(*seen.values(), strict=True)):
            assert torch.equal(shared, sent), f"{name}: shared memory and all-to-alls differ at {index}"
            if dist.get_world_size() == 2:  # with two ranks there is but one order of sums
                assert torch.equal(shared, collected), f"{name}: shared memory and collectives differ at {index}"
            else:
                torch.testing.assert_close(shared, collected, rtol=1e-3, atol=1e-5)


@on_ranks()
@pytest.mark.parametrize(
    ("num_ranks", "large_numel"),
    [
        pytest.param(2, 1, id="2-large", marks=pytest.mark.exhaustive),
        pytest.param(2, 12, id="2-mixed"),
        pytest.param(2, 16_384, id="2-small", marks=pytest.mark.exhaustive),
        pytest.param(3, 12, id="3-mixed", marks=pytest.mark.exhaustive),
        pytest.param(4, 1, id="4-large"),
    ],
)
def test_transports_agree_to_the_bit(large_numel: int) -> None:
    run_all_transports(large_numel=large_numel, halves=False)


@on_ranks(2)
def test_transports_agree_in_halves() -> None:
    run_all_transports(large_numel=12, halves=True)


@on_ranks(4)
def test_transports_agree_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with parts_from(12):
        seen = [train(build_over("plain", t, mesh=mesh), "plain", 2, flat=False) for t in TRANSPORTS]
    for shared, sent, collected in zip(*seen, strict=True):
        assert torch.equal(shared, sent)
        assert torch.equal(shared, collected)


class Counts(TorchDispatchMode):
    """Counts ops as CommDebugMode does, without its module hooks: those change the order of backward on their rank."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def watch_on_one_rank(transport: Transport) -> None:
    model = build_over("plain", transport)
    batch = batch_for("plain", dist.get_rank(), 4)
    model(batch).sum().backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    ops = torch.ops.c10d
    if dist.get_rank() == 0:
        with Counts() as counts:
            model(batch).sum().backward()
        num_units = len(units_of("plain", model))  # the root has no parameters of its own
        assert counts.of[ops._reduce_scatter_base_] == num_units
    else:
        model(batch).sum().backward()
    for param, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_local(), expected)
    model(batch).sum().backward()  # and back again


@on_ranks(2)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_all_ranks_use_collectives_when_one_counts_them(transport: Transport) -> None:
    with parts_from(12):
        watch_on_one_rank(transport)


@on_ranks(2)
def test_ranks_agree_on_what_all_of_them_allow() -> None:
    model = build_over("plain", "auto" if dist.get_rank() == 0 else "collective")
    model(batch_for("plain", 0, 4)).sum().backward()
    assert routes_of(model) == {"collectives"}
    with pytest.raises(ConfigError, match="expected one of 'auto', 'gloo', 'collective'"):
        set_default_transport("pigeon")  # type: ignore[arg-type]
    model = nn.Linear(8 + 8 * dist.get_rank(), 8, bias=False)
    fully_shard(model)
    with pytest.raises(DesyncError, match=r"rank [01] and rank [01] have shards of different sizes"):
        model(torch.randn(2, 8 + 8 * dist.get_rank()))


class Fuse(nn.Module):
    blows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.blows:
            raise ValueError("blown")
        return x


@on_ranks(2, group_timeout_s=7.0)
def test_an_exception_on_one_rank_reaches_the_others_with_its_reason_while_that_rank_goes_on() -> None:
    """It waits for them in its next forward until the timeout: they must not ask it for long what it will not say."""
    rank, fuse = dist.get_rank(), Fuse()
    model = nn.Sequential(nn.Linear(8, 8), fuse, nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer)
    fully_shard(model)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    model(batch).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        fuse.blows = rank == 1
        if rank == 1:
            with pytest.raises(ValueError, match="blown"):
                model(batch)
        else:
            with pytest.raises(DesyncError, match="rank 1 raised an exception while .*of rank 1: ValueError: blown"):
                model(batch).sum().backward()
        fuse.blows = False
        model.zero_grad()
        model(batch).sum().backward()
        for param, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad.to_local(), gradient)


@on_ranks(2)
def test_replaced_parameters_move_into_shared_memory() -> None:
    model, twin = build_over("plain", "auto"), build_over("plain", "collective")
    batch = batch_for("plain", dist.get_rank(), 4)
    state = {name: param.detach() for name, param in model.named_parameters()}
    for each in (model, twin):
        each(batch).sum().backward()
    for name, param in model.named_parameters():
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr(), "an alias was left behind"
    del state, param
    for each in (model, twin):
        each.load_state_dict({name: value * 2 for name, value in each.state_dict().items()}, assign=True)  # new memory
        each.zero_grad()
        each(batch).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())
    for each in (model, twin):
        each.double()
        each.zero_grad()
        each(batch.double()).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad.dtype is torch.float64
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())
    assert routes_of(model) == {"shared memory"}


@on_ranks(2)
def test_idle_memory_is_given_back_on_request() -> None:
    model = build_over("plain", "gloo")
    batch = batch_for("plain", 0, 4)
    for _ in range(2):
        model(batch).sum().backward()
    engine = engine_of(model)
    assert any(engine.comm_ctx.pool.free.values())
    model.release_memory()
    assert not any(engine.comm_ctx.pool.free.values())
    model(batch).sum().backward()


class Pair(nn.Module):
    """Two large weights, of which a forward may use but one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_right: bool) -> torch.Tensor:
        return (self.left(x) + self.right(x) if uses_right else self.left(x)).tanh()


class Branches(nn.Module):
    """A backward that breaks does so when the reductions of the pair are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(8, 8), Pair(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, uses_right: bool, breaks: bool = False) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.pair(Break.apply(x) if breaks else x, uses_right))


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


def run_in_place_all_reduces() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference, model = Branches(), Branches()
    model.load_state_dict(reference.state_dict())
    for layer in (model.first, model.pair, model.last):
        replicate(layer)
    replicate(model)
    for unit in (model, model.first, model.pair, model.last):
        unit.set_gradient_divide_factor(1.0)  # of a sum that is taken twice it can be told
    batches = [torch.randn(2 * size, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    mine = [batch.chunk(size)[rank] for batch in batches]
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(mine[0], uses_right=True).square().mean().backward()
        model.set_requires_gradient_sync(True)
        with pytest.raises(ValueError, match="broken"):
            model(mine[1], uses_right=False, breaks=True).square().mean().backward()
        model(mine[2], uses_right=False).square().mean().backward()
        for number, uses_right in ((0, True), (2, False)):
            reference(batches[number], uses_right=uses_right).square().mean().backward()
    for name, param in model.named_parameters():
        expected = size * reference.get_parameter(name).grad
        torch.testing.assert_close(full(param.grad), expected, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2, FOUR)
def test_large_gradients_are_all_reduced_where_they_are() -> None:
    """Held gradients of a backward that raises must not be overwritten by the sums of that backward."""
    with parts_from(60):  # the weights, not the biases
        run_in_place_all_reduces()
