"""What a step does: calls as planned, memory as planned, collectives as torch counts them, a clean state after exceptions."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.inside import Recorder, engine_of, start_peak
from helpers.models import Block, batch_for
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import build_sharded, loss_of, share
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import DesyncError, FSDPModule, StateError, fully_shard, replicate, set_default_transport
from shardwise.collectives.routes import Transport
from shardwise.consistency.agreement import StoreExchange
from shardwise.observe import Op
from shardwise.plan.schedule import peak_bytes


@on_ranks()
@pytest.mark.parametrize(
    ("transport", "num_ranks"),
    [("auto", 2), ("gloo", 2), ("collective", 2), pytest.param("auto", 4, marks=pytest.mark.exhaustive)],
)
def test_trace_and_memory_equal_the_plan(transport: Transport) -> None:
    set_default_transport(transport)
    for number, name in enumerate(("plain", "tied", "matrices")):
        reshards = (None, True, False)
        for reshard in reshards if transport == "auto" else reshards[number : number + 1]:
            model = build_sharded(name, reshard_after_forward=reshard)
            loss_of(model, name=name).backward()
            loss_of(model, name=name).backward()
            engine = engine_of(model)
            plan = engine.exec_order.plan
            assert plan is not None
            recorder = Recorder(engine)
            start_peak(engine)
            before = engine.comm_ctx.pool.num_allocations
            loss_of(model, name=name).backward()
            assert tuple(recorder.calls) == plan.calls, (name, reshard)
            assert engine.exec_order.plan is plan
            assert engine.comm_ctx.pool.peak_used_bytes == peak_bytes(plan.calls)
            assert engine.comm_ctx.pool.num_allocations == before, "a warm step allocated"
            assert engine.comm_ctx.pool.used_bytes == 0
            expected = "shared memory" if transport == "auto" else "collectives"
            assert {unit.route for unit in engine.units if unit.route} == {expected}
    set_default_transport("auto")


@on_ranks(2)
def test_gathers_ahead_by_bytes_go_as_planned_and_hold_no_more() -> None:
    for transport in ("gloo", "collective"):
        results: list[torch.Tensor] = []
        for num_bytes in (None, 0, 1 << 30):
            model = build_sharded("plain")
            model.set_transport(transport)
            model.set_gather_ahead_bytes(num_bytes)
            for _ in range(2):
                loss_of(model, name="plain").backward()
            engine = engine_of(model)
            plan = engine.exec_order.plan
            assert plan is not None
            assert plan.made_from[0].num_bytes == num_bytes
            recorder = Recorder(engine)
            start_peak(engine)
            loss = loss_of(model, name="plain")
            loss.backward()
            results.append(loss.detach())
            assert tuple(recorder.calls) == plan.calls
            assert engine.comm_ctx.pool.peak_used_bytes == peak_bytes(plan.calls) <= 1 << 30
            most = max(len(units) for units in plan.prefetches)
            assert most == 1 if num_bytes is None else most >= 1 if num_bytes == 0 else most > 2
            model.set_gather_ahead_bytes(None)  # the next plan is that of one unit
            loss_of(model, name="plain").backward()
            assert engine.exec_order.plan.made_from[0].num_bytes is None
        assert results[0] == results[1] == results[2]


@on_ranks(2)
@pytest.mark.parametrize(("transport", "num_units"), [("auto", 1), ("collective", 2)])
def test_forward_holds_two_units_with_prefetch(transport: Transport, num_units: int) -> None:
    """In shared memory a unit is read at once when it is needed: there the next one takes no memory ahead."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_transport(transport)
    batch = torch.randn(2, 64)
    for _ in range(3):
        model(batch).sum().backward()
    with torch.no_grad():
        model(batch)
        start_peak(engine_of(model))
        model(batch)
    assert engine_of(model).comm_ctx.pool.peak_used_bytes == num_units * 64 * 64 * 4


@on_ranks(2)
def test_collective_counts() -> None:
    ops = torch.ops.c10d
    blocks = 3
    for reshard, gathers_in_backward in ((None, blocks), (True, blocks + 1), (False, 0)):
        model = nn.Sequential(*(Block(8, 12) for _ in range(blocks)), nn.Linear(8, 4))
        for layer in list(model)[:blocks]:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        for _ in range(3):
            with CommDebugMode() as forward:
                loss = model(torch.randn(2, 8)).sum()
            with CommDebugMode() as backward:
                loss.backward()
            assert dict(forward.get_comm_counts()) == {ops._allgather_base_: blocks + 1}
            expected = {ops._reduce_scatter_base_: blocks + 1, ops._allgather_base_: gathers_in_backward}
            assert {k: v for k, v in backward.get_comm_counts().items() if v} == {
                k: v for k, v in expected.items() if v
            }


@on_ranks(1)
def test_one_rank_makes_no_collective() -> None:
    model = build_sharded()
    with CommDebugMode() as counts:
        loss_of(model).backward()
    assert counts.get_total_counts() == 0


@on_ranks(1, backend="none")
def test_works_without_a_process_group() -> None:
    model = nn.Linear(3, 3)
    fully_shard(model)
    model(torch.randn(2, 3)).sum().backward()
    assert dist.get_world_size() == 1


def registered(module: nn.Module) -> bool:
    (kind,) = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    return kind


@on_ranks(2, FOUR)
def test_registered_parameters() -> None:
    for reshard in (True, False, 2):
        model = build_sharded(reshard_after_forward=reshard)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model(torch.randn(2, 7))
        assert registered(model[0].up) == (reshard is not False)
        if reshard == 2 and dist.get_world_size() == 4:
            assert model[0].up.weight.device_mesh.shape == (2, 2)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        assert all(isinstance(param, DTensor) and param.device_mesh.ndim == 1 for param in model.parameters())
        loss_of(model).backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:2]).__name__ == "Sequential"


class Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Bomb.armed:
            raise ArithmeticError("boom in backward")
        return grad


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(7, 15), Block(7, 9), Block(7, 3)
        self.fails_forward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Bomb.apply(self.second(self.first(x)))
        if self.fails_forward:
            raise ArithmeticError("boom in forward")
        return self.third(x)


def fragile() -> Fragile:
    torch.manual_seed(3)
    model = Fragile()
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model


def assert_clean(model: nn.Module) -> None:
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert engine_of(model).comm_ctx.pool.used_bytes == 0


@on_ranks(2)
@pytest.mark.parametrize("sync_first", [True, False])
def test_an_exception_leaves_nothing_behind(sync_first: bool) -> None:
    size = dist.get_world_size()
    models = [fragile(), fragile()]
    for index, model in enumerate(models):
        for number in range(4):
            batch = share(batch_for("plain", number, 4 * size))
            model.set_requires_gradient_sync(sync_first or number == 3)
            if index == 0 and number in (1, 2):
                for fails_forward in (True, False):
                    model.fails_forward, Bomb.armed = fails_forward, not fails_forward
                    with pytest.raises(ArithmeticError, match="boom"):
                        model(batch).square().mean().backward()
                    model.fails_forward = Bomb.armed = False
                    assert_clean(model)
            model(batch).square().mean().backward()
        assert_clean(model)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left.grad.to_local(), right.grad.to_local())


@on_ranks(2)
def test_an_error_while_gradients_are_set_says_that_they_are_set_in_part() -> None:
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    with torch.inference_mode():
        model[0].weight.grad = model[0].weight.grad * 2
    before = full(model[1].weight.grad).clone()
    with pytest.raises(StateError, match=r"\.grad could not be set \(RuntimeError: Inplace update to inference tensor"):
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(full(model[1].weight.grad), 2 * before)
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(full(model[1].weight.grad), before)


@on_ranks(2)
@pytest.mark.parametrize("shape", ["one unit", "blocks", "replicate"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_no_step_follows_an_interrupted_forward_before_a_reset(shape: str, kind: type[BaseException]) -> None:
    """The parameters that were gathered for it would be used for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    plain = copy.deepcopy(model)
    api = replicate if shape == "replicate" else fully_shard
    if shape == "blocks":
        api(model[0])
    api(model)

    def interrupt(*_: object) -> None:
        raise kind

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(kind):
        model(batch(0))
    handle.remove()
    with pytest.raises(StateError, match=r"was given the full form of .* after an interrupt call reset_iter_state\(\)"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.reset_iter_state()
    assert_trains_alike(model, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(batch(1)).square().mean()
    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(kind):
        model(batch(0))
    handle.remove()
    loss.backward()
    model(batch(1)).square().mean().backward()
    before = model.state_dict()["0.weight"].clone()
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"optimizer steps inside a forward of .* call reset_iter_state\(\) on the root"
        ):
            optimizer.step()
    assert torch.equal(model.state_dict()["0.weight"], before)
    model.reset_iter_state()
    optimizer.zero_grad()
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_another_order_unshards_on_demand_and_plans_again() -> None:
    model = build_sharded()
    loss_of(model).backward()
    loss_of(model).backward()
    recorder = Recorder(engine_of(model))
    x = torch.randn(2, 7)
    model[1](x).sum().backward()
    model[0](x)
    loss_of(model).backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    recorder.calls.clear()
    loss_of(model).backward()
    loss_of(model).backward()
    calls = recorder.calls[-len(engine_of(model).exec_order.plan.calls) :]
    assert tuple(calls) == engine_of(model).exec_order.plan.calls
    assert any(call.op is Op.UNSHARD for call in calls)


class Heads(nn.Module):
    """A trunk, and two heads that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, data: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(data))


@contextmanager
def counted_rounds() -> Generator[list[str]]:
    """Yield the topics of what this rank asks the others over the store."""
    asked: list[str] = []
    gather = StoreExchange.gather

    def counted(self: StoreExchange, topic: str, *given: Any) -> dict[int, str]:
        asked.append(topic)
        return gather(self, topic, *given)

    with mock.patch.object(StoreExchange, "gather", counted):
        yield asked


@on_ranks(2)
def test_two_heads_in_turn_are_prefetched_and_ask_no_other_rank() -> None:
    model = Heads()
    for module in (model.trunk, *model.heads[0], *model.heads[1], model):
        fully_shard(module)
    with counted_rounds() as asked:
        for number in range(8):
            engine, before = engine_of(model) if number else None, len(asked)
            plan, recorder = (None, None) if engine is None else (engine.exec_order.plan, Recorder(engine))
            model(torch.ones(2, 8), number % 2).sum().backward()
            if number > 3:
                assert plan is not None
                assert recorder is not None
                assert len(asked) == before
                assert tuple(recorder.calls) == plan.calls, "gathered ahead as planned"


class Depths(nn.Module):
    """Blocks, of which each forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])

    def forward(self, data: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        for depth in depths:
            data = data + self.blocks[depth](data)
        return data


@on_ranks(2)
def test_a_new_order_of_units_asks_other_ranks_twice_a_step_however_often_it_leaves_a_plan() -> None:
    model, plain = Depths(), Depths()
    plain.load_state_dict(model.state_dict())
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    generator, data = random.Random(0), torch.linspace(-1, 1, 16).view(2, 8)
    with counted_rounds() as asked:
        for number in range(24):
            depths, before = [each for each in range(8) if generator.random() < 0.7], len(asked)
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                each(data, depths).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert number < 2 or len(asked) <= before + 2, asked[before:]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs)


@on_ranks(2)
def test_ranks_that_leave_two_plans_of_which_only_the_first_alike_are_told_so_in_that_step() -> None:
    model = Depths()
    for module in (*model.blocks, model):
        fully_shard(module)
    data = torch.linspace(-1, 1, 16).view(2, 8)
    known = [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 4, 3], [0, 2, 3, 4], [0, 2, 4, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    for depths in known:
        model(data, depths).sum().backward()
    with pytest.raises(DesyncError):
        model(data, [0, 2, 3, 4] if dist.get_rank() else [0, 2, 4, 3]).sum().backward()
