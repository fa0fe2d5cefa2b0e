"""Backwards whose end the user says, and full parameters whose memory stays: ours and, where it has them, torch's own class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import REORDERED, assert_same, average_gradients, is_incomplete
from helpers.inside import Recorder, engine_of
from helpers.models import build
from helpers.ranks import on_ranks
from helpers.sharded import batch, loss_of
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import init_device_mesh

from shardwise import FSDPModule, StateError, fully_shard, replicate
from shardwise.observe import Op


def older(model: nn.Module, **_: Any) -> nn.Module:
    """Shard nothing: parameters stay plain tensors, their gradients are averaged."""
    return replicate(model, device_ids=None) if isinstance(model, nn.Sequential) else model


APIS: dict[str, Callable[..., Any]] = {"fully_shard": fully_shard, "replicate": replicate, "older": older}
BY_HAND = {**APIS, **({"torch": torch_fully_shard} if hasattr(TorchModule, "finalize_backward") else {})}
KEEPS = {"fully_shard": fully_shard}
if hasattr(TorchModule, "set_keep_unsharded_storage"):
    KEEPS["torch"] = torch_fully_shard


def sharded(api: str, model: nn.Module, is_hybrid: bool = False) -> Any:
    size = dist.get_world_size()
    arguments: dict[str, Any] = {}
    if is_hybrid:
        arguments["mesh"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    for child in model.children():
        BY_HAND[api](child, **arguments)
    return BY_HAND[api](model, **arguments)


def by_hand(api: str, model: nn.Module, is_hybrid: bool = False) -> Any:
    model = sharded(api, model, is_hybrid)
    model.set_manual_backward_finalization(True)  # pyright: ignore[reportCallIssue]
    return model


def step_alike(model: nn.Module, reference: nn.Module) -> None:
    """Compare gradients with the mean of the ranks' references; step both."""
    average_gradients(reference)
    assert_same(model, reference, REORDERED)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        each.zero_grad()
    assert_same(model, reference, REORDERED)


def run_accumulation(api: str, is_hybrid: bool, is_async: bool, syncs_last: bool) -> None:
    model, reference = by_hand(api, build("plain"), is_hybrid), build("plain")
    assert model.finalize_backward() is None, "nothing has run yet"
    for step in range(3):
        for number in range(3):
            model.set_requires_gradient_sync(syncs_last and number == 2)
            loss_of(model, 10 * step + number).backward()
            loss_of(reference, 10 * step + number).backward()
            if api in ("fully_shard", "replicate"):
                assert all(is_incomplete(param) for param in model.parameters()), (
                    "gradients show before they are complete"
                )
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=is_async)
        assert (handle is not None) is is_async
        if handle is not None:
            handle.wait()
            handle.wait()
        if isinstance(model, FSDPModule):
            assert not any(unit.has_copies for unit in engine_of(model).units)
        step_alike(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("api", BY_HAND)
@pytest.mark.parametrize("is_async", [False, True])
def test_several_backwards_are_reduced_by_one_call(api: str, is_async: bool) -> None:
    run_accumulation(api=api, is_hybrid=False, is_async=is_async, syncs_last=False)


@on_ranks(4)
@pytest.mark.parametrize("api", sorted({"fully_shard", "torch"} & {*BY_HAND}))
def test_several_backwards_are_reduced_by_one_call_over_replicas(api: str) -> None:
    run_accumulation(api=api, is_hybrid=True, is_async=True, syncs_last=True)


def run_every_backward_syncs(api: str, is_hybrid: bool) -> None:
    model, reference = by_hand(api, build("plain"), is_hybrid), build("plain")
    model.set_is_last_backward(True)
    for step in range(2):
        for number in range(2):
            if is_hybrid:
                model.set_requires_all_reduce(number == 1)
            for each in (model, reference):
                loss_of(each, 10 * step + number).backward()
            assert api == "older" or all(is_incomplete(param) for param in model.parameters())
        model.finalize_backward()
        step_alike(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("api", APIS)
def test_backwards_may_all_sync_before_one_call(api: str) -> None:
    run_every_backward_syncs(api=api, is_hybrid=False)


@on_ranks(4)
def test_sums_over_shards_alone_wait_for_the_replicas() -> None:
    run_every_backward_syncs(api="fully_shard", is_hybrid=True)


def older_unit(model: nn.Module) -> Any:
    return replicate(model, device_ids=None)


@on_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_unit_without_sync_keeps_its_gradients_for_a_later_call(is_async: bool) -> None:
    model, reference = build("plain"), build("plain")
    for child in model.children():
        older_unit(child)
    model: Any = older_unit(model)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        for number in range(2):
            model[0].set_requires_gradient_sync(number == 1)
            for each in (model, reference):
                loss_of(each, 10 * step + number).backward()
            handle = model.finalize_backward(async_op=is_async)
            if handle is not None:
                handle.wait()
        step_alike(model, reference)


class Heads(nn.Module):
    """Two losses, each of which needs half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x).square().mean(), self.right(x).square().mean()


@on_ranks(2)
def test_gradients_that_come_in_parts_are_reduced_together() -> None:
    torch.manual_seed(0)
    model, reference = Heads(), Heads()
    reference.load_state_dict(model.state_dict())
    fully_shard(model)
    model.set_manual_backward_finalization(True)
    for number in range(3):
        for each in (model, reference):
            left, right = each(batch(number))
            if number == 0 and each is model:
                recorder = Recorder(engine_of(model))
            left.backward()
            right.backward()
        assert is_incomplete(model.left.weight)
        model.finalize_backward()
        step_alike(model, reference)
    assert sum(call.op is Op.REDUCE for call in recorder.calls) == 3, "the halves were reduced apart"


class Chosen(nn.Module):
    """Rank 0 uses one layer, the others another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[min(dist.get_rank(), 1)](x)


@on_ranks(2)
def test_what_a_rank_does_not_use_is_reduced_by_the_call() -> None:
    torch.manual_seed(0)
    model, reference = Chosen(), Chosen()
    reference.load_state_dict(model.state_dict())
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model.set_manual_backward_finalization(True)
    for number in range(2):
        for each in (model, reference):
            loss_of(each, number).backward()
        model.finalize_backward()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        step_alike(model, reference)


@on_ranks(2)
def test_a_wrong_order_is_an_error_on_every_rank() -> None:
    model = sharded("fully_shard", build("plain"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(StateError, match="requires manual backward finalization"):
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    for call in (model[1].finalize_backward, lambda: model[1].set_manual_backward_finalization(True)):
        with pytest.raises(StateError, match="must be called on the root FSDP module; this is '1'"):
            call()
    model.finalize_backward()
    inside = batch(0).requires_grad_()
    for call in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
        handle = inside.register_hook(lambda _, call=call: call())
        with pytest.raises(StateError, match=r"after backward completes|cannot change mode during backward"):
            model(inside).sum().backward()
        handle.remove()
    optimizer.step()  # a backward that has raised leaves nothing to be completed
    loss_of(model, 0).backward()
    with pytest.raises(StateError, match=r"steps on 0\.\S+ \(unit '0'\) .* call finalize_backward\(\)"):
        optimizer.step()
    with pytest.raises(StateError, match="cannot change mode after backward starts"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    for call in (model.finalize_backward, optimizer.step, lambda: loss_of(model, 1)):
        with pytest.raises(StateError, match=r"wait\(\)"):
            call()
    handle.wait()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(StateError, match="invalidated"):
        handle.wait()
    assert all(is_incomplete(param) for param in model.parameters())
    model.set_manual_backward_finalization(False)
    loss_of(model, 2).backward()
    optimizer.step()


@on_ranks(2)
def test_the_mode_of_an_inner_module_is_an_error() -> None:
    model = build("plain")
    for child in model.children():
        fully_shard(child)
    model[1].set_manual_backward_finalization(True)
    fully_shard(model)
    with pytest.raises(StateError, match="must be called on the root FSDP module; it was called on 1"):
        model(batch(0))


@on_ranks(2)
def test_a_backward_that_raises_leaves_the_ones_before_it() -> None:
    model, reference = by_hand("fully_shard", build("plain")), build("plain")
    for step in range(2):
        for each in (model, reference):
            loss_of(each, step).backward()
        x = batch(7).requires_grad_()
        x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        model.finalize_backward()
        step_alike(model, reference)


# ---- memory that stays ----


def take_full(module: Any) -> list[nn.Parameter]:
    module.unshard()
    found = list(module.parameters())
    module.reshard()
    return found


@on_ranks(2)
@pytest.mark.parametrize("api", KEEPS)
def test_kept_memory_stays_where_it_is(api: str) -> None:
    model = build("plain")
    for child in model.children():
        KEEPS[api](child)
    KEEPS[api](model)
    reference = build("plain")
    seen: list[tuple[int, ...]] = []

    def note(module: nn.Module, _: Any) -> None:
        seen.append(tuple(param.data_ptr() for param in module.parameters()))

    model[1].register_forward_pre_hook(note)
    model.set_keep_unsharded_storage(True)
    fulls: list[nn.Parameter] = []
    for number in range(3):
        for each in (model, reference):
            loss_of(each, number).backward()
        fulls = fulls or take_full(model[1])
        storages = [param.untyped_storage() for param in fulls]
        assert all(storage.size() for storage in storages), "memory was given back"
        step_alike(model, reference)
    assert len(set(seen)) == 1
    assert seen[0] == tuple(param.data_ptr() for param in fulls)
    model.set_keep_unsharded_storage(False)
    for each in (model, reference):
        loss_of(each, 3).backward()
    assert not any(storage.size() for storage in storages)
    step_alike(model, reference)


@on_ranks(2)
def test_kept_memory_is_freed_with_the_setting_and_is_planned() -> None:
    model = sharded("fully_shard", build("plain"))
    model.set_keep_unsharded_storage(True)
    fulls = take_full(model[0])
    assert fulls[0].untyped_storage().size() > 0
    model.set_keep_unsharded_storage(False)
    with pytest.raises(RuntimeError, match="data pointer|was resharded"):
        fulls[0].sum()
    model.set_keep_unsharded_storage(True)
    for number in range(3):
        loss_of(model, number).backward()
    engine = engine_of(model)
    recorder = Recorder(engine)
    loss_of(model, 3).backward()
    assert tuple(recorder.calls) == engine.exec_order.plan.calls
    moved = [call for call in recorder.calls if call.op in (Op.WAIT, Op.RESHARD)]
    assert moved
    assert not any(call.num_bytes for call in moved), "memory that stays was counted as coming and going"
    leased = engine.comm_ctx.pool.used_bytes
    model.double()
    model(batch(4).double()).sum().backward()
    used = engine.comm_ctx.pool.used_bytes  # twice as much, but for what aligns parameters
    assert leased < used <= 2 * leased, "memory of the parameters before the conversion stays too"
