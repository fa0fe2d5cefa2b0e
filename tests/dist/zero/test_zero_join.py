"""Uneven inputs: torch's Join around a ZeroRedundancyOptimizer, with DDP and with gradients set by the user."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import from_rank
from helpers.ranks import FOUR, on_ranks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import ZeroRedundancyOptimizer
from shardwise.zero.optimizer import zero_backend

CPU = torch.device("cpu")


class _SetGradients(JoinHook):
    def __init__(self, zero, grads) -> None:
        self.zero, self.grads = zero, iter(grads)

    def main_hook(self) -> None:
        for p, grad in zip(zero_backend(self.zero).rank_partition.params, next(self.grads), strict=True):
            p.grad = grad.detach().clone()


class _GradientSetter(Joinable):
    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        assert {"zero_optim", "grads"} <= set(kwargs)
        return _SetGradients(kwargs["zero_optim"], kwargs["grads"])

    @property
    def join_device(self) -> torch.device:
        return CPU

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def _uneven_inputs(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(100 + rank)
    return [torch.randn(20, 2) for _ in range(3 + rank)]


def _reference(num_epochs: int):
    """Train with DDP and a local Adam; return the gradients and parameters after each step of the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    ddp = DDP(_model())
    optim = torch.optim.Adam(ddp.parameters(), lr=0.01)
    steps: list[Any] = []
    with ddp.join():
        for _ in range(num_epochs):
            for batch in _uneven_inputs(rank):
                optim.zero_grad()
                ddp(batch).square().sum().backward()
                grads = [p.grad.detach().clone() for p in ddp.parameters()]
                optim.step()
                steps.append((grads, [p.detach().clone() for p in ddp.parameters()]))
    found: Any = from_rank(last, steps)
    return found


@on_ranks(2, FOUR)
@pytest.mark.parametrize("partition", ["whole", "even"])
def test_uneven_inputs_train_as_with_ddp_when_gradients_are_set(partition: str) -> None:
    rank, size, epochs = dist.get_rank(), dist.get_world_size(), 2
    steps = _reference(epochs)
    model = _model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, partition=partition)
    num_mine = epochs * (3 + rank)
    setter = _GradientSetter()
    index = 0
    with Join([setter, zero], zero_optim=zero, grads=[grads for grads, _ in steps[num_mine:]]):
        for _ in range(num_mine):
            Join.notify_join_context(setter)
            for p, grad in zip(model.parameters(), steps[index][0], strict=True):
                p.grad = grad.detach().clone()
            zero.step()
            for p, expected in zip(model.parameters(), steps[index][1], strict=True):
                torch.testing.assert_close(p, expected)
            index += 1
    assert not zero_backend(zero).is_joining
    assert len(steps) == epochs * (3 + size - 1)
    for p, expected in zip(model.parameters(), steps[-1][1], strict=True):
        torch.testing.assert_close(p, expected)


@on_ranks(2, FOUR)
@pytest.mark.parametrize("partition", ["whole", "even"])
def test_a_joined_rank_gets_the_gradients_of_its_share(partition: str) -> None:
    """Nobody sets gradients here: a joined rank gets those of its share from an active one."""
    rank = dist.get_rank()
    steps = _reference(1)
    ddp = DDP(_model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01, partition=partition)
    with Join([ddp, zero]):
        for batch in _uneven_inputs(rank):
            zero.zero_grad()
            ddp(batch).square().sum().backward()
            zero.step()
    for p, expected in zip(ddp.parameters(), steps[-1][1], strict=True):
        assert torch.equal(p, expected)


@on_ranks(2, FOUR)
def test_steps_after_a_join_are_as_ever() -> None:
    """After the Join, and in a second one, steps are as ever."""
    model = _model()
    plain = copy.deepcopy(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        with Join([zero]):
            for _ in range(1 + dist.get_rank()):
                _step(model, zero)
        for _ in range(dist.get_world_size()):
            _step(plain, sgd)
        _step(model, zero)
        _step(plain, sgd)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def _step(model, optim) -> None:
    optim.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    optim.step()


@on_ranks(2, FOUR)
def test_early_termination_raises_on_every_rank() -> None:
    """With ``throw_on_early_termination`` every rank raises torch's errors."""
    model = _model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    match = "Rank 0 exhausted all inputs" if dist.get_rank() == 0 else "at least one rank that exhausted inputs"
    with pytest.raises(RuntimeError, match=match), Join([zero], throw_on_early_termination=True):
        for _ in range(3 + dist.get_rank()):
            _step(model, zero)
