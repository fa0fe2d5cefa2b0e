"""What a trace says happened is what happened, and costs nothing while nobody traces."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.models import Block
from helpers.plans import planned_calls
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import (
    ConfigError,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    fully_shard,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    observe,
    replicate,
)
from shardwise.observe import Call, Op
from shardwise.planner.hardware import SHARED, Profile, Setting, dry_run
from shardwise.planner.rank_step import rank_units, steps_of


def hooked_transfers(profile: Profile, bucket_bytes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Return the calls of ``hook_with_zero_step``, bucket by bucket of DDP, once that has seen in which order gradients come.

    ``bucket_bytes``: of DDP's first bucket and of the later ones.
    """
    arrivals = [stretch.mark.param for stretch in profile.stretches if stretch.mark.event is None]
    sizes = _buckets([profile.params[number].num_bytes for number in arrivals], bucket_bytes)
    return (("all-gather", size) for size in sizes)


def _buckets(sizes: Iterable[int], limits: Sequence[int]) -> Iterator[int]:
    filled, number = 0, 0
    for size in sizes:
        filled += size
        if filled >= limits[min(number, len(limits) - 1)]:
            yield filled
            filled, number = 0, number + 1
    if filled:
        yield filled


def sharded(api: object, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width, 4 * width) for _ in range(3)])
    assert callable(api)
    for block in model:
        api(block)
    api(model)
    return model


def step(model: nn.Module, width: int = 16) -> None:
    model(torch.ones(4, width)).sum().backward()


@on_ranks(2)
def test_the_trace_of_a_step_is_its_plan_with_times() -> None:
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = functools.partial(fully_shard, mesh=replicas)
    for api in (fully_shard, hybrid, functools.partial(fully_shard, reshard_after_forward=False), replicate):
        model = sharded(api)
        for _ in range(2):
            step(model)
        with shardwise.trace(model) as trace:
            for _ in range(2):
                step(model)
        assert trace.calls == 2 * planned_calls(model)
        counts = Counter(each.what for each in trace.spans)
        planned = Counter(call.op for call in planned_calls(model))
        assert counts["unshard"] == 2 * planned[Op.UNSHARD]
        assert counts["wait"] == 2 * planned[Op.WAIT]
        assert counts["all-gather on its way"] in (counts["wait"], 0)
        assert counts["reduce"] == 2 * planned[Op.REDUCE]
        assert counts["reduction on its way"] == counts["reduce"]
        assert counts["forward"] == counts["backward"] == 2 * 4
        assert all(each.begin_s <= each.end_s for each in trace.spans)
        found = json.loads(trace.to_json())["traceEvents"]
        assert len([each for each in found if each["ph"] == "X"]) == len(trace.spans)
        assert {each["args"]["unit"] for each in found if each["ph"] == "X"} == {"", "0", "1", "2"}


@on_ranks(2)
@pytest.mark.parametrize("traced", ["root", "inner", "gathered by hand"])
def test_a_trace_that_begins_with_the_first_step_has_the_planned_calls_of_those_after_it(traced: str) -> None:
    for api in (fully_shard, replicate):
        model = sharded(api)
        if traced == "gathered by hand":  # by an engine of its own, which the root's takes the place of
            model.unshard()
        with shardwise.trace(model[1] if traced == "inner" else model) as trace:
            step(model)
            num_unplanned = len(trace.calls)
            for _ in range(2):
                step(model)
        assert num_unplanned > 0
        assert trace.calls[num_unplanned:] == 2 * planned_calls(model)
        assert {each.unit for each in trace.spans} == {"", "0", "1", "2"}


@on_ranks(2)
def test_waits_are_named_by_unit_and_computation_holds_them() -> None:
    model = sharded(fully_shard)
    step(model)
    with shardwise.trace(model) as trace:
        step(model)
    assert set(trace.exposed_s()) == {"", "0", "1", "2"}
    gathered = {each.unit: each.num_bytes for each in trace.spans if each.what == "wait"}
    assert all(gathered[unit] > 0 for unit in ("0", "1", "2"))
    root = next(each for each in trace.spans if each.what == "forward" and not each.unit)
    inner = [each for each in trace.spans if each.what == "forward" and each.unit]
    assert all(root.begin_s <= each.begin_s and each.end_s <= root.end_s for each in inner)


@on_ranks(2)
def test_collectives_of_optimizers_are_in_the_trace() -> None:
    plain = nn.Linear(64, 64)
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.AdamW, partition="even", lr=0.1)
    model = sharded(fully_shard)
    whole = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adafactor, lr=0.1)
    with shardwise.trace() as trace:
        plain(torch.ones(1, 64)).sum().backward()
        zero.step()
        step(model)
        whole.step()
    of_zero = [each for each in trace.spans if "step" in each.unit]
    counts = Counter((each.what, each.lane) for each in of_zero)
    assert counts["all-gather", "calls"] == counts["all-gather on its way", "all-gathers"] == 1
    assert {each.num_bytes for each in of_zero if each.lane == "calls"} == {4 * (64 * 64 + 64)}
    assert sum(each.what == "exchange" for each in trace.spans) >= 2


@on_ranks(2)
def test_nothing_is_said_while_nobody_listens() -> None:
    model = sharded(fully_shard)
    step(model)
    others = observe.listeners[:]  # of models of earlier tests that are still alive
    observe.listeners.clear()
    try:
        with shardwise.trace(model):
            pass
        places = ("fsdp.unit", "fsdp.reductions", "fsdp.execution_order")
        with mock.patch.object(observe, "begin", side_effect=AssertionError):
            for place in places:
                module = __import__(f"shardwise.{place}", fromlist=["begin"])
                assert module.listeners is observe.listeners
                assert not module.listeners
            patches = [mock.patch(f"shardwise.{place}.begin", side_effect=AssertionError) for place in places]
            for patch in patches:
                patch.start()
            step(model)
            for patch in patches:
                patch.stop()
    finally:
        observe.listeners.extend(others)


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no unit"), shardwise.trace(nn.Linear(2, 2)):
        pass


def predicted_calls(setting: Setting, width: int = 16) -> list[Call]:
    plain, inputs = sharded(lambda _: None, width), [torch.empty(4, width)]
    profile = dry_run(plain, inputs, lambda model, x: model(x).sum())
    return list(steps_of(profile, rank_units(profile, setting, "cpu"), setting.depth).plan.calls)


@on_ranks(2)
def test_what_units_call_was_planned_before_any_of_them_was_there() -> None:
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = functools.partial(fully_shard, mesh=replicas)
    zero2 = functools.partial(fully_shard, strategy="zero2")
    full = Setting(ranks=2, min_unit_bytes=0)
    for api, transport, setting, width in (
        (fully_shard, "auto", replace(full, transport=SHARED), 16),
        (fully_shard, "collective", full, 16),
        (hybrid, "auto", replace(full, strategy="hsdp", replicas=2), 16),
        (zero2, "auto", replace(full, strategy="zero2", transport=SHARED), 16),
        (replicate, "auto", replace(full, strategy="ddp"), 16),
        (None, "auto", replace(full, transport=SHARED), 16),
    ):
        model = sharded(api or (lambda _: None), width)
        if api is None:
            shardwise.shard_model(model, min_unit_bytes=0)
        elif api is not replicate:
            model.set_transport(transport)  # pyright: ignore[reportCallIssue]
        for _ in range(2):
            step(model, width)
        with shardwise.trace(model) as trace:
            step(model, width)
        planned = predicted_calls(setting, width)
        assert trace.calls == planned, (setting.strategy, transport, width)
        assert any(call.in_place for call in planned) == (width == 300)


def transfers_in(trace: shardwise.Trace) -> list[tuple[str, int]]:
    names = {"exchange", "reduction", "all-gather"}
    return [(each.what, each.num_bytes) for each in trace.spans if each.what in names]


@on_ranks(2)
def test_what_optimizers_call_was_planned_before_any_of_them_was_there() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Block(300, 1201) for _ in range(3)])

    profile = dry_run(make(), [torch.empty(4, 300)], lambda model, x: model(x).sum())
    inputs = torch.ones(4, 300)
    model = make()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition="even", lr=0.1)
    with shardwise.trace() as trace:
        model(inputs).sum().backward()
        zero.step()
    assert transfers_in(trace) == [("all-gather", sum(param.num_bytes for param in profile.params))]
    for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = nn.parallel.DistributedDataParallel(make(), bucket_cap_mb=1)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition="even", overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero))
        for _ in range(2):
            ddp(inputs).sum().backward()
            zero.zero_grad()
        with shardwise.trace() as trace:
            ddp(inputs).sum().backward()
        planned = list(hooked_transfers(profile, (1 << 20, 1 << 20)))
        assert Counter(transfers_in(trace)) == Counter(planned)
        assert len(planned) >= 5
