"""A step on gradients that nobody has averaged is an error on every rank, and programs that are right notice nothing."""

import logging
import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients
from helpers.ranks import FOUR, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import DesyncError, ZeroRedundancyOptimizer
from shardwise.consistency.agreement import GroupAgreement
from shardwise.zero.optimizer import zero_backend

PARTITIONS = ("whole", "even")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))


def _zero(model: torch.nn.Module, partition: str = "whole", **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, partition=partition, lr=0.1, **options)


def _backward(model: torch.nn.Module, step: int = 0, rank: int | None = None) -> None:
    noise = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    model(torch.randn(4, 6, generator=noise)).square().mean().backward()


class _Gathers:
    """Counts comparisons of gradients, and keeps the warnings that they leave."""

    def __enter__(self) -> "_Gathers":
        self.whats: list[str] = []
        self.warnings: list[str] = []
        real = self._real = GroupAgreement.gather

        def counted(agreement: GroupAgreement, what: str, text: str) -> list[str]:
            if "gradients" in what:
                self.whats.append(what)
            return real(agreement, what, text)

        GroupAgreement.gather = counted  # type: ignore[method-assign]
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shardwise").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        GroupAgreement.gather = self._real  # type: ignore[method-assign]
        logging.getLogger("shardwise").removeHandler(self._handler)


@on_ranks(2, FOUR)
def test_a_step_without_averaging_is_refused() -> None:
    for partition, bucket_view, call in product(PARTITIONS, (False, True), ("step", "clip_grad_norm_")):
        model = _model()
        zero = _zero(model, partition, parameters_as_bucket_view=bucket_view)
        _backward(model)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(DesyncError) as caught:
            zero.step() if call == "step" else zero.clip_grad_norm_(1.0)
        text = str(caught.value)
        facts = (
            "parameter 0 of shape (40, 6)",
            "on rank 0",
            "on rank 1",
            "DistributedDataParallel",
            "average the gradients",
        )
        assert [fact for fact in facts if fact not in text] == [], text
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        zero.zero_grad()
        _backward(model)
        average_gradients(model)
        zero.step()  # as the message says


@on_ranks(2, FOUR)
def test_averaged_gradients_are_compared_once() -> None:
    for partition in PARTITIONS:
        ddp = DDP(_model())
        zero = _zero(ddp, partition)
        with _Gathers() as seen:
            for step in range(4):
                zero.zero_grad()
                _backward(ddp, step)
                zero.clip_grad_norm_(0.5)
                zero.step()
        assert len(seen.whats) == 1, seen.whats
        assert seen.warnings == []


@on_ranks(2, FOUR)
def test_hooks_of_ddp_give_the_same_bits() -> None:
    """Rings, compression, low-rank approximation: what a rank gets is what all get."""
    hooks: list[tuple[Any, Any]] = [
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    ]
    for state, hook in hooks:
        ddp = DDP(_model())
        ddp.register_comm_hook(state, hook)
        zero = _zero(ddp)
        with _Gathers() as seen:
            for step in range(4):
                zero.zero_grad()
                _backward(ddp, step)
                zero_backend(zero)._knows_gradients = False
                zero.step()
        assert len(seen.whats) == 4
        assert seen.warnings == []


@on_ranks(2, FOUR)
def test_nothing_is_known_before_there_are_gradients() -> None:
    model = _model()
    zero = _zero(model)
    zero.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    zero.step()
    _backward(model)
    with pytest.raises(DesyncError, match="gradients differ between ranks"):
        zero.step()


@on_ranks(2, FOUR)
def test_gradients_are_compared_again_after_a_change() -> None:
    """When the parameters change, or which of them train."""

    def add_group(zero: ZeroRedundancyOptimizer, model: torch.nn.Module) -> None:
        zero.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    def freeze(zero: ZeroRedundancyOptimizer, model: torch.nn.Module) -> None:
        model[0].weight.requires_grad_(False)

    for change in (add_group, freeze):
        model = _model()
        zero = _zero(model)
        _backward(model, rank=0)
        zero.step()
        zero.zero_grad()
        change(zero, model)
        zero.zero_grad()
        _backward(model)
        with pytest.raises(DesyncError, match="gradients differ between ranks"):
            zero.step()


@on_ranks(2, FOUR)
def test_an_owner_without_a_gradient_is_named() -> None:
    """It would leave its share as it is."""
    for partition in PARTITIONS:
        model = _model()
        zero = _zero(model, partition)
        _backward(model, rank=0)
        owner = zero_backend(zero).rank_partition.by_param[2][0].owner
        if dist.get_rank() == owner:
            model[2].weight.grad = None
        with pytest.raises(DesyncError, match=rf"none on rank {owner}.*\(rank {owner} owns it\)"):
            zero.step()


@on_ranks(2, FOUR)
def test_gradients_that_only_owners_have_are_stepped_on() -> None:
    """Averaged to owners by hand."""
    model = _model()
    plain = torch.optim.SGD(_model().parameters(), lr=0.1)
    zero = _zero(model)
    _backward(model, rank=0)
    for p, other in zip(model.parameters(), plain.param_groups[0]["params"], strict=True):
        other.grad = p.grad.clone()
    for local_index, slices in enumerate(zero_backend(zero).rank_partition.by_param):
        if slices[0].owner != dist.get_rank():
            zero_backend(zero).rank_partition.params[local_index].grad = None
    zero.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.param_groups[0]["params"], strict=True))


@on_ranks(2, FOUR)
def test_last_bits_may_differ() -> None:
    """Unlike processors round unlike; more than rounding is refused."""
    for factor, is_fine in ((1 + 2e-7, True), (1.001, False), (-1.0, False), (math.nan, False)):
        model = _model()
        zero = _zero(model)
        _backward(model, rank=0)
        if dist.get_rank() == 1:
            for p in model.parameters():
                p.grad.mul_(factor)
        with _Gathers() as seen:
            if is_fine:
                zero.step()
                assert len(seen.warnings) == 1
                assert "not the same to the bit" in seen.warnings[0]
            else:
                with pytest.raises(DesyncError, match="gradients differ between ranks"):
                    zero.step()
                assert seen.warnings == []
    model = _model()
    zero = _zero(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    zero.step()


@on_ranks(2, FOUR)
def test_other_dtypes_and_orders() -> None:
    """Whichever bits a gradient has, and in whichever order they lie: only values count."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        param = torch.nn.Parameter(torch.rand(5, 7).to(dtype))
        zero = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1)
        values = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
        param.grad = values if dist.get_rank() == 0 else values.t().contiguous().t()
        with _Gathers() as seen:
            zero.step()
        assert len(seen.whats) == 1
        zero_backend(zero)._knows_gradients = False
        param.grad = values * (1 + dist.get_rank())
        with pytest.raises(DesyncError, match="gradients differ"):
            zero.step()


@on_ranks(2, FOUR)
def test_closures_only_warn() -> None:
    """As torch's class does, a closure's gradients are taken as they are."""
    for partition in PARTITIONS:
        model = _model()
        zero = _zero(model, partition)

        def closure(zero: ZeroRedundancyOptimizer = zero, model: torch.nn.Module = model) -> float:
            zero.zero_grad()
            _backward(model)
            return 1.0

        with _Gathers() as seen:
            assert zero.step(closure) == 1.0
            zero.step(closure)
        assert len(seen.warnings) == 1
        assert "gradients differ between ranks" in seen.warnings[0]
