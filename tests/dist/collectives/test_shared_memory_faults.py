"""Shared memory when things go wrong: ranks that are killed or stopped, forked children, crowded hosts, foreign memory."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.inside import engine_of, parts_from
from helpers.jobs import SEGMENT, Job, segments_of, tell
from helpers.models import batch_for, build
from helpers.sharded import build_sharded, loss_of
from torch import nn

import shardwise
from shardwise import fully_shard
from shardwise.collectives.local_peers import Segment, SegmentAddress
from shardwise.collectives.shared_memory import HostLink

LIMIT_S = 30.0  # for survivors to end with an error, where a collective waits 60 s
POINTS = ("before meeting", "in meeting", "in forward", "in backward", "between reductions", "after step")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [full(param.detach()) for param in model.parameters()]


def reference(num_steps: int, num_ranks: int) -> list[torch.Tensor]:
    model = build("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(num_steps):
        model(batch_for("plain", number, 4 * num_ranks)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def train(num_steps: int) -> list[Any]:
    """Return the whole parameters as arrays: unlike tensors, they outlive the process that sends them."""
    model = build_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(num_steps):
        step(model, optimizer, number)
    assert link_of(model).name == "shared memory"
    return [tensor.numpy() for tensor in whole(model)]


def link_of(model: nn.Module) -> HostLink:
    link = engine_of(model).comm_ctx.pass_tracker.known_links.get(dist.group.WORLD.group_name)
    assert link is not None
    return link  # type: ignore[return-value]


def assert_close(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), other, rtol=1e-4, atol=1e-5)


# ---- a rank is killed ----


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(function: Callable[..., object], number: int, act: Callable[[], None]) -> Callable[..., object]:
    """Return ``function``, which does ``act`` at the end of call ``number``."""
    calls = iter(range(1 << 30))

    def wrapped(*args: object) -> object:
        result = function(*args)
        if next(calls) == number:
            act()
        return result

    return wrapped


def train_until_death(victim: int, point: str, unit: int, number: int) -> None:
    """Train for ever; rank ``victim`` dies at ``point``: of unit ``unit``, if that has a meaning, in step ``number``."""
    is_victim = dist.get_rank() == victim
    model = build_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()  # every rank has made its model
    if is_victim and point == "before meeting":
        die()
    if is_victim and point == "in meeting":
        Segment.create = on_call(Segment.create, 0, die)  # type: ignore[method-assign]
    if is_victim and point == "in forward":
        model[unit].register_forward_pre_hook(on_call(lambda *_: None, number, die))
    if is_victim and point == "in backward":
        in_backward = on_call(lambda _: None, number, die)
        model[unit].register_forward_pre_hook(
            lambda _, inputs: inputs[0].requires_grad_().register_hook(in_backward) and None
        )
    if is_victim and point == "between reductions":
        HostLink.reduce_scatter = on_call(HostLink.reduce_scatter, 4 * number + unit, die)  # type: ignore[method-assign]
    for done in range(1 << 20):
        step(model, optimizer, done)
        if done == number:
            tell(segments_of(os.getpid()))
            if is_victim and point == "after step":
                die()


def check_survivors(job: Job, victim: int) -> None:
    pids = job.pids
    with job:
        for rank in range(len(pids)):
            if rank != victim:
                outcome = job.outcome(rank, LIMIT_S)
                assert outcome.error is not None
                kind, text = outcome.error
                assert issubclass(kind, RuntimeError), outcome.trace
                assert f"rank {victim} is gone" in text, outcome.trace
    assert job.processes[victim].exitcode == -signal.SIGKILL
    assert [segments_of(pid) for pid in pids] == [0] * len(pids)


@pytest.fixture
def no_leak() -> object:
    before = _names_of_memory()
    yield None
    deadline = (
        time.monotonic() + 30
    )  # tests beside this one have names there for moments (torch's, for what they share)
    while _names_of_memory() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _names_of_memory() <= before
    assert segments_of(os.getpid()) == 0


def _names_of_memory() -> set[str]:
    """Return the names of shared memory but semaphores, which pools of processes beside this one make at any time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize(("point", "num_ranks"), [*zip(POINTS, (2, 4) * 3, strict=True), ("in backward", 2)])
def test_survivors_name_the_killed_rank_and_nothing_is_left(point: str, num_ranks: int, no_leak: object) -> None:
    chance = random.Random(f"{point} {num_ranks}")
    victim, unit, number = chance.randrange(num_ranks), chance.randrange(3), chance.randrange(3)
    job = Job(train_until_death, victim, point, unit, number, num_ranks=num_ranks)
    check_survivors(job, victim)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
def test_a_rank_killed_from_outside_at_any_instruction(seed: int, no_leak: object) -> None:
    chance = random.Random(seed)
    num_ranks = chance.choice((2, 4))
    victim = chance.randrange(num_ranks)
    job = Job(train_until_death, victim, "from outside", 0, 2, num_ranks=num_ranks)
    assert job.message(victim) > 0, "this test would not see a leak"
    time.sleep(chance.random() * 0.02)
    os.kill(job.pids[victim], signal.SIGKILL)
    check_survivors(job, victim)


def test_a_stopped_rank_is_named_after_the_timeout() -> None:
    num_ranks, victim = 4, 3
    with Job(train_until_death, victim, "from outside", 0, 2, num_ranks=num_ranks, group_timeout_s=3.0) as job:
        job.message(victim)
        os.kill(job.pids[victim], signal.SIGSTOP)
        try:
            for rank in range(victim):
                outcome = job.outcome(rank, LIMIT_S)
                assert outcome.error is not None
                assert issubclass(outcome.error[0], RuntimeError), outcome.trace
                assert f"waited 3 s for rank {victim}" in outcome.error[1], outcome.trace
        finally:
            os.kill(job.pids[victim], signal.SIGCONT)
        assert job.outcome(victim, LIMIT_S).error is not None, "the others have left"


# ---- crowded hosts ----


def test_eight_ranks_equal_one_process() -> None:
    with Job(train, 4, num_ranks=8) as job:
        for found in job.values():
            assert_close(found, reference(4, 8))


def test_two_jobs_side_by_side() -> None:
    def run(num_steps: int) -> list[list[Any]]:
        with Job(train, num_steps, num_ranks=2) as job:
            return job.values()

    with ThreadPoolExecutor(2) as threads:
        for num_steps, results in zip((12, 20), threads.map(run, (12, 20)), strict=True):
            for found in results:
                assert_close(found, reference(num_steps, 2))


def train_wide(num_steps: int) -> tuple[int, bool, int]:
    """Return the bytes of this rank's segment, whether it is mapped, and the bytes by which /dev/shm has grown."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    used = used_bytes("/dev/shm")
    for _ in range(num_steps):
        model(torch.ones(2, 2048)).sum().backward()
    assert all(param.grad.to_local().isfinite().all() for param in model.parameters())
    is_mapped = SEGMENT in Path("/proc/self/maps").read_text()
    return link_of(model).sections.host.segments[dist.get_rank()].num_bytes, is_mapped, used_bytes("/dev/shm") - used


def used_bytes(mount: str) -> int:
    stat = os.statvfs(mount)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def test_segments_do_not_live_in_dev_shm() -> None:
    with Job(train_wide, 2, num_ranks=2) as job:
        for num_bytes, is_mapped, grown in job.values():
            assert num_bytes > 16 << 20
            assert is_mapped
            assert grown < 1 << 20


TINY_SHM = """
import os
from helpers import jobs
from helpers.jobs import Job
from test_shared_memory_faults import train_wide
jobs.PRELOAD = (train_wide.__module__,)  # the server imports what this job needs, and no more
if __name__ == "__main__":
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 65536
    with Job(train_wide, 2, num_ranks=2) as job:
        assert all(num_bytes > 16 << 20 for num_bytes, _, _ in job.values())
    print("trained")
"""


@pytest.mark.exhaustive  # the test before says with fewer processes where segments live
def test_segments_larger_than_dev_shm(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*apart, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts without root rights here: {error}")
    script = tmp_path / "tiny.py"
    script.write_text(TINY_SHM)
    roots = [str(Path(__file__).parent), str(Path(__file__).parents[2]), str(Path(shardwise.__file__).parents[1])]
    done = subprocess.run(
        [*apart, f'{mount} && exec "$0" "$1"', sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "trained\n", done.stderr


# ---- forked children ----


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((7,), index / 32)


def run_forked_loaders() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, expected = build_sharded(), build("plain")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    for _ in range(3):  # later epochs fork workers while the segments are mapped
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        num_batches = 0
        for batch in loader:
            num_batches += 1
            model(batch.chunk(size)[rank]).square().mean().backward()
            expected(batch).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert num_batches == 4
    assert link_of(model).name == "shared memory"
    assert_close(whole(model), list(expected.parameters()))


def test_forked_data_loaders_feed_training() -> None:
    with Job(run_forked_loaders, num_ranks=2) as job:
        job.values()


def in_child(act: Callable[[], None], ends_early: bool) -> None:
    """Do ``act`` in a forked child, which ends by ``os._exit`` or runs everything that Python runs at its exit."""
    pid = os.fork()
    if not pid:
        try:
            act()
            if not ends_early:
                import atexit
                import gc

                gc.collect()
                atexit._run_exitfuncs()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def run_forked_child(ends_early: bool) -> None:
    model = build_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    link = link_of(model)
    before = whole(model)
    fds = sorted(os.listdir("/proc/self/fd"))
    words = [list(segment.words) for segment in link.sections.host.segments]
    dist.barrier()

    def overwrite() -> None:
        for param in model.parameters():
            param.detach().to_local().zero_()
        for segment in link.sections.host.segments:
            for index in range(len(segment.words)):
                segment.words[index] = 1 << 60
        engine_of(model).forget_step()  # leaves the spans, as a failure would

    in_child(overwrite, ends_early)
    dist.barrier()
    assert [list(segment.words) for segment in link.sections.host.segments] == words
    assert sorted(os.listdir("/proc/self/fd")) == fds
    for now, then in zip(whole(model), before, strict=True):
        assert torch.equal(now, then)
    for number in (1, 2):
        step(model, optimizer, number)
    assert link_of(model) is link
    assert_close(whole(model), reference(3, dist.get_world_size()))


@pytest.mark.parametrize("ends_early", [True, False], ids=["_exit", "exit"])
def test_a_forked_child_changes_nothing(ends_early: bool) -> None:
    with Job(run_forked_child, ends_early, num_ranks=2) as job:
        job.values()


def run_child_after_the_link() -> None:
    import gc

    model = build_sharded()
    model(batch_for("plain", 0, 4)).sum().backward()
    kept = [param.detach().to_local() for param in model.parameters()]
    before = [tensor.clone() for tensor in kept]
    assert segments_of(os.getpid()) > 0
    del model
    gc.collect()
    in_child(lambda: [tensor.zero_() for tensor in kept] and None, ends_early=True)
    for now, then in zip(kept, before, strict=True):
        assert torch.equal(now, then), "the child wrote to the memory of its parent"
    assert segments_of(os.getpid()) > 0
    kept.clear()
    del now
    gc.collect()
    assert segments_of(os.getpid()) == 0


def test_a_forked_child_changes_no_tensor_that_outlives_its_model() -> None:
    with Job(run_child_after_the_link, num_ranks=2) as job:
        job.values()


# ---- memory that cannot be opened ----


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def refuse(address: SegmentAddress) -> Segment:
    raise PermissionError(f"process {address.pid} is another user's")


def run_without_access() -> None:
    if dist.get_rank() == 1:
        Segment.open = refuse  # type: ignore[method-assign,assignment]
    use_the_network("rank 1 cannot open the memory of rank 0")


def run_without_pidfds() -> None:
    if dist.get_rank() == 1:
        os.pidfd_open = mock.Mock(side_effect=OSError(38, "Function not implemented"))  # as in some sandboxes
    use_the_network("no shared memory or no pidfds: .* Function not implemented")


def use_the_network(reason: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    log = Lines()
    logging.getLogger("shardwise").addHandler(log)
    model = build_sharded()
    of_shards = segments_of(os.getpid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parts_from(8):
        for number in range(3):
            step(model, optimizer, number)
    assert link_of(model).name == "all-to-all"
    assert segments_of(os.getpid()) == of_shards, "memory that nobody uses is kept"
    assert_close(whole(model), reference(3, size))
    assert len(log.lines) == (rank == 0), log.lines
    if rank == 0:
        assert re.search(rf"do not share memory \({reason}", log.lines[0])


@pytest.mark.parametrize(
    ("body", "num_ranks"), [(run_without_access, 2), (run_without_access, 3), (run_without_pidfds, 2)]
)
def test_all_to_alls_where_one_rank_cannot_share_memory(body: Callable[[], None], num_ranks: int) -> None:
    with Job(body, num_ranks=num_ranks) as job:
        job.values()
