"""Gradients that travel in backward and parameters that travel in the next forward: same bits, planned calls, nothing stale."""

import copy
import io
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.scripts import load_script
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import ConfigError, StateError, ZeroRedundancyOptimizer, hook_with_zero_step, transaction
from shardwise import layout as even
from shardwise.fsdp.clip import OwnedGradient
from shardwise.zero.optimizer import zero_backend

BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@contextmanager
def _short_runs() -> Generator[None, None, None]:
    """Let a small model have as many runs as a large one."""
    was = even.RUN_NUMEL, even.RUN_NUMEL_PER_RANK
    even.RUN_NUMEL, even.RUN_NUMEL_PER_RANK = 64, 1
    try:
        yield
    finally:
        even.RUN_NUMEL, even.RUN_NUMEL_PER_RANK = was


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8)) for _ in range(3)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(8, 3).double())


def _loss(model: Any, number: int, skips: int = -1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(100 * number + dist.get_rank())
    value = torch.randn(4, 8, generator=noise)
    for index in range(3):
        if index != skips:
            value = model[index](value)
    return model[3](value.double()).square().mean()


def _zero(model: torch.nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"partition": "even", "lr": 0.05} | options
    with _short_runs():
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, mixed_dtypes=True, **options)


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _train(model: torch.nn.Module, zero: ZeroRedundancyOptimizer) -> None:
    for step in range(5):
        with zero.no_sync() if step == 3 else nullcontext():
            _loss(model, 10 + step).backward()
        if step == 3:
            _loss(model, 20 + step).backward()
        elif step == 4:  # other parameters than in the steps before have gradients
            zero.zero_grad()
            _loss(model, step, skips=1).backward()
        zero.reduce_gradients()
        zero.clip_grad_norm_(0.5)
        zero.step()
        zero.zero_grad()


@on_ranks(2, 4)
def test_what_travels_early_and_late_has_the_same_bits() -> None:
    for partition in ("even", "whole"):
        for packs in (False, True):
            plain, model = _model(), _model()
            _train(plain, _zero(plain, partition=partition, parameters_as_bucket_view=packs))
            zero = _zero(model, partition=partition, parameters_as_bucket_view=packs, **BOTH)
            _train(model, zero)
            assert not zero_backend(zero).arrivals.are_all_here
            _assert_same(_values(model), _values(plain))
            assert zero_backend(zero).arrivals.are_all_here


class _Calls(load_script("benchmarks/zero_bytes.py").CountBytes):
    """Counts units of volume, and calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.split("::")[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(2)
def test_runs_are_sent_in_backward_and_bytes_are_those_of_one_reduction_and_one_gather() -> None:
    model = _model()
    zero = _zero(model, **BOTH)
    rank_partition = zero_backend(zero).rank_partition
    runs = sum(len({rank_partition.params[index].dtype for index in run}) for run in rank_partition.runs)
    assert len(rank_partition.runs) > 3
    counts: list[int] = []
    calls = _Calls()
    model[0][0].weight.register_hook(lambda gradient: counts.append(calls.names.count("alltoall_base_")))
    for step in range(3):
        with calls:  # autograd's hooks run on this thread
            calls.names.clear()
            calls.units.clear()
            _loss(model, step).backward()
            in_backward = calls.names.count("alltoall_base_")
            zero.reduce_gradients()
            assert calls.names.count("alltoall_base_") == runs
            zero.step()
            zero.zero_grad()
        num_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
        assert calls.units["alltoall_base_"] == calls.units["broadcast_"] == num_bytes
        assert in_backward == (runs if step else 0)  # in the first step nobody knows what the others have
    assert counts[0] == 0
    assert counts[1] == counts[2] >= runs - 2  # backward had not come to the first layer


@on_ranks(2)
def test_gradients_on_their_way_cannot_be_read_or_stepped_on() -> None:
    model = _model()
    zero = _zero(model, overlap_grad_reduce=True)
    _train(model, zero)
    _loss(model, 1).backward()
    zero.reduce_gradients()
    zero.step()
    zero.zero_grad()
    _loss(model, 1).backward()
    gradient = model[0][0].weight.grad
    assert isinstance(gradient, OwnedGradient)
    for call in (zero.step, lambda: zero.clip_grad_norm_(1.0), gradient.sum, gradient.usable_parts):
        with pytest.raises(StateError, match=r"call reduce_gradients\(\)|averaged to their owners"):
            call()
    zero.reduce_gradients()
    zero.step()


@on_ranks(2)
def test_gradients_dropped_on_their_way_are_dropped_and_later_ones_are_added() -> None:
    drops: tuple[Callable[[Any, torch.nn.Module], None], ...] = (
        lambda zero, _: zero.zero_grad(),
        lambda _, model: model.zero_grad(),
        lambda zero, _: zero.zero_grad(set_to_none=False),
    )
    for drop in drops:
        found: list[list[torch.Tensor]] = []
        for options in ({}, BOTH):
            model = _model()
            zero = _zero(model, **options)
            for step in range(4):
                _loss(model, step).backward()
                drop(zero, model)
                _loss(model, 50 + step).backward()
                zero.reduce_gradients()
                _loss(model, 60 + step).backward()  # added to averages
                zero.reduce_gradients()
                zero.step()
                zero.zero_grad()
            found.append(_values(model))
        _assert_same(*found)


@on_ranks(2)
def test_a_second_backward_without_no_sync_adds_the_means() -> None:
    found: list[list[torch.Tensor]] = []
    for options in ({}, BOTH):
        model = _model()
        zero = _zero(model, **options)
        for step in range(3):
            for micro in range(2):
                _loss(model, 10 * step + micro).backward()
            zero.reduce_gradients()
            zero.step()
            zero.zero_grad()
        found.append(_values(model))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


READS: tuple[Callable[[torch.nn.Module, torch.nn.Parameter], torch.Tensor], ...] = (
    lambda _, param: param.data,
    lambda _, param: param.detach(),
    lambda _, param: copy.deepcopy(param),
    lambda _, param: torch.from_numpy(param.detach().numpy()),
    lambda model, _: model.state_dict()["1.0.weight"],
    lambda model, _: copy.deepcopy(model)[1][0].weight,
    lambda _, param: torch.load(_saved(param), weights_only=False),
    lambda _, param: param.new_tensor(param.tolist()),
    lambda _, param: torch.stack([param])[0],
    lambda _, param: (
        torch.func.functional_call(torch.nn.Linear(12, 8, bias=False), {"weight": param.T}, torch.eye(12)).T
        if param.shape == (8, 12)
        else torch.nn.functional.linear(torch.eye(8), param).T
    ),
    lambda _, param: torch.vmap(lambda row: row)(param),
)


def _saved(param: torch.nn.Parameter) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(param, stream)
    stream.seek(0)
    return stream


@on_ranks(2)
def test_whoever_reads_a_parameter_finds_its_new_values() -> None:
    plain, model = _model(), _model()
    expected, zero = _zero(plain), _zero(model, **BOTH)
    param = model[1][0].weight
    for number, read in enumerate(READS):
        for net, optimizer in ((plain, expected), (model, zero)):
            _loss(net, number).backward()
            optimizer.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
            assert all(each.grad is None and each.requires_grad for each in net.parameters())
        assert type(param) is not torch.nn.Parameter
        assert isinstance(param, torch.nn.Parameter)
        value = read(model, param)
        assert type(param) is torch.nn.Parameter, number
        assert type(value) in (torch.Tensor, torch.nn.Parameter), number
        torch.testing.assert_close(value.detach(), plain[1][0].weight.detach(), rtol=0, atol=0)
        assert number > 3 or not zero_backend(zero).arrivals.are_all_here  # others are read by others
    zero.wait_for_params()
    _assert_same([each.data for each in model.parameters()], _values(plain))


@on_ranks(2)
def test_a_step_in_ddps_backward_lets_parameters_arrive_in_the_next_forward() -> None:
    found: list[list[torch.Tensor]] = []
    for late in (False, True):
        model = _model()[:3]
        ddp = DDP(model, bucket_cap_mb=0.0001)
        zero = _zero(model, overlap_with_ddp=True, overlap_param_gather=late)
        ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, zero, reduce="owner"))
        for step in range(4):
            ddp(
                torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            ).mean().backward()
            assert zero_backend(zero).arrivals.are_all_here != late
            ddp.zero_grad()
        found.append(_values(model))
    _assert_same(*found)


@on_ranks(2)
def test_overlaps_that_exclude_each_other_are_refused() -> None:
    model = _model()
    with pytest.raises(ConfigError, match="is for loops without DDP"):
        _zero(model, overlap_with_ddp=True, overlap_grad_reduce=True)
    for option in BOTH:
        with pytest.raises(ConfigError, match="in flight after backward"):
            transaction(model, _zero(model, **{option: True})).__enter__()
