"""The worker pool itself: results by rank, failures with every rank's report, and life after a hang."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import PRELOAD
from torch.distributed.tensor import Replicate

from shardwise import fully_shard
from shardwise.testing import RankFailure, WorkerPool


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to fail")


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_call_gets_its_own_group(pool: WorkerPool, num_ranks: int) -> None:
    assert pool.run(_sum_of_ranks, num_ranks=num_ranks) == [num_ranks * (num_ranks - 1) / 2] * num_ranks


def _process() -> int:
    return os.getpid()


@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["replaced", "forked"])
def test_fresh_calls_run_in_new_processes_and_forked_ones_leave_the_workers(preload: tuple[str, ...]) -> None:
    with WorkerPool(max_ranks=1, preload=PRELOAD) as own:
        own._preload = preload  # processes that are not forked take seconds to start
        before = own.run(_process, num_ranks=1)
        fresh = own.run(_process, num_ranks=1, fresh=True)
        assert fresh != before
        assert own.run(_process, num_ranks=1) == (before if preload else fresh)


def test_an_interrupted_call_leaves_no_answers_to_the_next_one() -> None:
    def interrupt(value: object) -> bool:
        raise KeyboardInterrupt

    with WorkerPool(max_ranks=2, preload=PRELOAD) as own:
        with pytest.raises(KeyboardInterrupt):
            own.attempt(_process, is_failure=interrupt)
        assert own.run(_sum_of_ranks) == [1.0, 1.0]


def _frozen() -> int:
    return gc.get_freeze_count()


def test_collections_in_a_forked_process_leave_what_its_server_has_imported_alone() -> None:
    with WorkerPool(max_ranks=1, preload=PRELOAD) as own:
        assert own.run(_frozen, num_ranks=1)[0] > 100_000


def _shard_and_count_threads(rows: int) -> int:
    """Return the threads at the start, those of this call's group among them; leave cycles and DTensor's caches behind."""
    found = len(os.listdir("/proc/self/task"))
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, rows)))
    model.register_forward_hook(lambda *_, model=model: None)
    model(torch.ones(2, 3)).sum().backward()
    model[0].weight.full_tensor()
    (model[0].weight + 1).redistribute(placements=[Replicate()])
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are read from /proc")
def test_ended_groups_leave_no_threads() -> None:
    with WorkerPool(max_ranks=2, preload=PRELOAD) as own:
        counts = [own.run(_shard_and_count_threads, rows=rows)[0] for rows in range(2, 8)]
    assert len(set(counts[2:])) == 1, counts  # a module that a body imports may keep the group it finds


def test_more_ranks_than_the_pool_may_have_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="num_ranks is 9, but max_ranks is"):
        pool.run(_process, num_ranks=9)


def _returns_function() -> object:
    return lambda: None


def test_a_failure_names_its_rank(pool: WorkerPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2[\s\S]*rank 1 was told to fail"):
        pool.run(_fail_on, rank=1)
    with pytest.raises(RankFailure, match=r"rank 0 of 1[\s\S]*[Pp]ickl"):
        pool.run(_returns_function, num_ranks=1, backend="none")


def test_a_hang_gives_the_stack_and_the_pool_lives_on() -> None:
    with WorkerPool(max_ranks=2, preload=PRELOAD) as own:
        assert own.run(_sum_of_ranks) == [1.0, 1.0]  # all is imported
        with pytest.raises(RankFailure, match=r"did not return; its stack:[\s\S]*_hang_on"):
            own.run(_hang_on, rank=0, timeout_s=2.0)
        assert own.run(_sum_of_ranks) == [1.0, 1.0]


def _make_groups_so(on_rank_0: str) -> None:
    """From now on rank 0's process makes its group late, as seen by the others, or never."""
    make = dist.init_process_group

    def late(*args: object, **kwargs: object) -> None:
        make(*args, **kwargs)
        time.sleep(1.0)

    def never(*args: object, **kwargs: object) -> None:
        make(*args, **kwargs)
        raise RuntimeError("Connection closed by peer")

    if dist.get_rank() == 0:
        dist.init_process_group = {"late": late, "never": never}[on_rank_0]


def test_no_rank_begins_before_all_are_connected() -> None:
    """One that is done first closes its connections, also to a rank that is still waiting for them."""
    with WorkerPool(max_ranks=2, preload=PRELOAD) as own:
        own.run(_make_groups_so, on_rank_0="late")
        starts = own.run(time.monotonic)
    assert abs(starts[0] - starts[1]) < 0.75, starts


def test_a_rank_without_a_group_does_not_spoil_the_next_call() -> None:
    with WorkerPool(max_ranks=2, preload=PRELOAD) as own:
        own.run(_make_groups_so, on_rank_0="never")
        with pytest.raises(RankFailure, match="Connection closed by peer"):
            own.run(_process, group_timeout_s=2.0, timeout_s=10.0)
        assert own.run(_sum_of_ranks) == [1.0, 1.0]
