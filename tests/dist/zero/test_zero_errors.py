"""Mistakes of one rank become a clear error on every rank, in time, and never a hang."""

import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import FOUR, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    ConfigError,
    DesyncError,
    ShardwiseError,
    ZeroRedundancyOptimizer,
    fully_shard,
    hook_with_zero_step,
    replicate,
)
from shardwise.testing import WorkerPool
from shardwise.zero.optimizer import zero_backend

TIMEOUT_S = 3.0


def _group() -> dist.ProcessGroup:
    """A group with a short timeout, so that a hang would show and an absence is found soon."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert group is not None
    return group


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(n, 5)) for n in (4, 3, 2, 6)]


def _zero(group: Any, **options: Any) -> ZeroRedundancyOptimizer:
    params = _params()
    for p in params:
        p.grad = torch.ones_like(p)
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=group, lr=0.1, **options)


def _raises(call, kind=DesyncError) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - start < TIMEOUT_S + 8
    return str(caught.value)


def alone(check: Callable[[], None]) -> Callable[[], None]:
    """Run the check on warm ranks (the first optimizer of a process imports for seconds) and clean up after it.

    A gloo group with a broadcast that nobody answers ends only when the peers have gone or after its timeout: that wait
    belongs to this test, not to the next.
    """

    @functools.wraps(check)
    def test() -> None:
        torch.optim.SGD([torch.zeros(1)], lr=0.1).step()
        dist.barrier()
        try:
            check()
        finally:
            dist.destroy_process_group()
            gc.collect()

    return test


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_other_parameters_on_one_rank_are_named() -> None:
    group, rank = _group(), dist.get_rank()
    for params, facts in [
        ([torch.zeros(3), torch.zeros(2 + (rank == 1))], ["rank 1", "(3,)", "(2,)", "parameter 1"]),
        ([torch.zeros(2) for _ in range(2 + (rank == 1))], ["rank 1", "3 parameters", "2 parameters"]),
        ([torch.zeros(2, dtype=torch.double if rank == 1 else torch.float)], ["rank 1", "float64", "float32"]),
        ([torch.zeros(2, requires_grad=rank == 1)], ["rank 1", "frozen"]),
    ]:
        text = _raises(lambda params=params: ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1))
        assert [fact for fact in facts if fact not in text] == []
    options = {"partition": "even" if rank == 1 else "whole"}
    assert "partition='even'" in _raises(lambda: _zero(group, **options))
    _zero(group).step()  # nothing was left behind


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_nonsense_of_one_rank_is_an_error_on_all() -> None:
    group, rank = _group(), dist.get_rank()
    params: Any = _params() if rank != 1 else []
    kind = ValueError if rank == 1 else DesyncError
    text = _raises(lambda: ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1), kind)
    assert "empty parameter list" in text
    assert rank == 1 or "rank 1 raised ValueError" in text
    _zero(group).step()


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_another_group_on_one_rank_is_named() -> None:
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    text = _raises(lambda: zero.add_param_group({"params": [torch.zeros(2 + (rank == 1))]}))
    assert "rank 1: group 1 parameter 0 of shape (3,)" in text
    assert len(zero.param_groups) == 1
    zero.step()


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_group_that_some_ranks_add_is_an_error_on_all() -> None:
    """Rank 1 steps instead: everybody learns of it, rank 1 included."""
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    if rank == 1:
        text = _raises(zero.step)
    else:
        text = _raises(lambda: zero.add_param_group({"params": [torch.zeros(2)]}))
    assert "add_param_group: rank 1 of" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_sharded_parameters_are_refused() -> None:
    """State of shards is sharded already; every rank is told, in whichever way they are passed."""
    sharded = fully_shard(torch.nn.Linear(8, 8))
    whole = replicate(torch.nn.Linear(8, 8))
    for model, reason in ((sharded, "state is sharded already"), (whole, "holds it whole")):
        for options in ({}, {"partition": "even"}, {"overlap_with_ddp": True}, {"parameters_as_bucket_view": True}):
            text = _raises(
                lambda model=model, options=options: ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.SGD, lr=0.1, **options
                ),
                ConfigError,
            )
            assert [fact for fact in ("parameter 0", reason, "ShardedOptimizer", "plain") if fact not in text] == []
        zero = _zero(None)
        text = _raises(
            lambda zero=zero, model=model: zero.add_param_group({"params": list(model.parameters())}), ConfigError
        )
        assert reason in text
        zero.step()
    mixed = [*_params(), *sharded.parameters()]
    text = _raises(lambda: ZeroRedundancyOptimizer(mixed, torch.optim.SGD, lr=0.1, mixed_dtypes=True), ConfigError)
    assert "parameter 4" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_other_calls_on_one_rank_are_named() -> None:
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    if rank == 1:
        text = _raises(zero.consolidate_state_dict)
    else:
        text = _raises(lambda: zero.add_param_group({"params": [torch.zeros(2)]}))
    assert "rank 1: consolidate_state_dict(to=0)" in text
    assert "add_param_group" in text
    zero.step()
    for to in (-1, dist.get_world_size()):
        text = _raises(lambda to=to: zero.consolidate_state_dict(to), ConfigError)
        assert f"to is {to}, expected a rank of the group" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_step_that_some_ranks_make_is_an_error() -> None:
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    zero.step()
    if rank != 1:
        text = _raises(zero.step)
    else:
        time.sleep(TIMEOUT_S + 1)
        text = _raises(zero.consolidate_state_dict)
    assert "rank 1 reported nothing" in text
    assert "step() number 2" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_skipped_step_is_found_at_the_next_agreement() -> None:
    """Found at the next agreement even where nothing hangs: two ranks may step in turns by chance."""
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    if rank == 1:
        zero_backend(zero).mark_stepped()
    text = _raises(zero.consolidate_state_dict)
    assert "rank 1: 1 step(s) so far" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_closure_that_raises_is_an_error_on_all() -> None:
    for partition in ("whole", "even"):
        group, rank = _group(), dist.get_rank()
        zero = _zero(group, partition=partition)
        before = [p.detach().clone() for p in zero_backend(zero).rank_partition.params]

        def closure(rank=rank) -> float:
            if rank == 1:
                raise KeyError("no more data")
            return 0.0

        text = _raises(lambda zero=zero, closure=closure: zero.step(closure), KeyError if rank == 1 else DesyncError)
        assert "no more data" in text
        assert rank == 1 or "rank 1 raised KeyError" in text
        assert rank != 1 or all(
            torch.equal(a, b) for a, b in zip(zero_backend(zero).rank_partition.params, before, strict=True)
        )
        zero.step(lambda: 1.0)  # the group is as good as before
        zero.step()


class _FailsOnRankOne(torch.optim.SGD):
    def step(self, closure=None):
        if dist.get_rank() == 1:
            raise MemoryError("out of memory")
        return super().step(closure)


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_local_step_that_raises_is_an_error_on_all() -> None:
    """Nobody waits for the timeout: waiting ranks look at the board every second."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    params = _params()
    for p in params:
        p.grad = torch.ones_like(p)
    zero = ZeroRedundancyOptimizer(params, _FailsOnRankOne, process_group=group, lr=0.1)
    text = _raises(zero.step, MemoryError if rank == 1 else DesyncError)
    assert rank == 1 or "rank 1 raised MemoryError in step() number 1: out of memory" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_parameter_thawed_on_one_rank_is_named() -> None:
    group, rank = _group(), dist.get_rank()
    zero = _zero(group)
    zero.step()
    zero_backend(zero).rank_partition.params[0].requires_grad_(rank != 1)
    text = _raises(zero.step)
    assert "rank" in text
    assert "requires_grad changed" in text or "step() number 2" in text


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_a_rank_outside_the_group_is_told() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        _zero(group).step()
    else:
        with pytest.raises(ShardwiseError, match="not a member"):
            _zero(group)


@on_ranks(2, FOUR, timeout_s=60.0)
@alone
def test_no_thread_is_left() -> None:
    _zero(_group())  # the first one of a job begins to watch for waits
    before = threading.active_count()
    zero = _zero(_group())
    assert zero_backend(zero).agreement.exchange.timeout_s == TIMEOUT_S
    zero.step()
    assert threading.active_count() == before


def _lose_a_rank(who: int, when: str) -> str:
    """Rank ``who`` ends without a word; return what the other one is told, the seconds aside."""
    model = torch.nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    zero.step()
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if when == "consolidation":
            zero.consolidate_state_dict(to=1 - who)
        else:
            zero.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("when", ["consolidation", "step"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_has_ended_is_named_long_before_the_timeout(pool: WorkerPool, who: int, when: str) -> None:
    answers = pool.attempt(
        _lose_a_rank, num_ranks=2, timeout_s=60.0, group_timeout_s=600.0, fresh=True, who=who, when=when
    )
    message = answers[1 - who].value
    assert isinstance(message, str), answers
    assert message.startswith("DesyncError"), message
    assert f"rank {who} is gone" in message


@on_ranks(2)
def test_a_backward_through_a_graph_of_before_the_step_is_refused_on_every_rank() -> None:
    """The owner's step counts as a write; what the others receive must, too, or they go on with gradients of no model."""
    weight, other = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = ZeroRedundancyOptimizer([weight, other], torch.optim.SGD, lr=0.1)  # each rank owns one
    loss = (torch.ones(2, 4, requires_grad=True) @ weight).square().sum() + other.sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_group_given_as_an_iterator_is_trained() -> None:
    head = torch.nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(_params(), torch.optim.SGD, lr=0.1)
    zero.add_param_group({"params": head.parameters(), "lr": 0.2})
    assert [len(group["params"]) for group in zero.param_groups] == [4, 2]


@on_ranks(2)
def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS cannot be divided between ranks"):
        ZeroRedundancyOptimizer(_params(), torch.optim.LBFGS)


@on_ranks(2)
@alone
def test_a_consolidation_after_a_load_on_one_rank_is_named() -> None:
    zero = _zero(_group())
    zero.step()
    zero.consolidate_state_dict(to=0)
    state = [zero.state_dict() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:  # it consolidates again, for the other ranks the state is there
        zero.load_state_dict(state[0])
    assert "rank 0 has the state" in _raises(lambda: zero.consolidate_state_dict(to=0))


@on_ranks(2)
@alone
def test_an_overlapped_step_that_raises_on_one_rank_is_named_on_the_other() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1:
                raise MemoryError("no memory for the state")
            return super().step(closure)

    ddp = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), process_group=_group()
    )
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Full, lr=0.1, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

    def train() -> None:
        for _ in range(4):  # it overlaps from the third step on
            ddp(torch.ones(2, 4)).sum().backward()

    message = _raises(train, (MemoryError, DesyncError))
    assert "no memory for the state" in message
