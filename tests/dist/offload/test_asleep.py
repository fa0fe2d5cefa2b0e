"""``asleep``: memory goes to the system, comes back to the bit under the same objects, and what needs it meanwhile is named."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.compare import local
from helpers.ranks import on_ranks
from torch import nn

import shardwise
from shardwise import ArgumentTypeError, DiskOffloadPolicy, MemoryLimit, OptimizerOffload, ShardedOptimizer, StateError
from shardwise.checkpoint import save
from shardwise.one_host import resident_bytes

Made = tuple[nn.Module, torch.optim.Optimizer]
WIDTH = 128  # a shard of a matrix has whole pages, which alone leave the memory of a process


def made(kind: str) -> Made:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)), nn.Linear(WIDTH, 3))
    if kind == "replicate":
        shardwise.replicate(model)
    elif kind == "memory limit":
        shardwise.shard_model(model, memory=MemoryLimit("64 GiB", (torch.empty(4, WIDTH),)), min_unit_bytes=0)
    elif kind == "files":
        shardwise.fully_shard(model, offload_policy=DiskOffloadPolicy(folder=tempfile.gettempdir()))
    elif kind != "zero1":
        for module in model[:2]:
            shardwise.fully_shard(module, reshard_after_forward=kind != "kept")
        shardwise.fully_shard(model)
    if kind == "zero1":
        model = nn.parallel.DistributedDataParallel(model)
        return model, shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    if kind == "sharded optimizer":
        return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


KINDS = ("plain", "kept", "sharded optimizer", "replicate", "zero1", "memory limit")


def batch_of(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def microbatch(model: nn.Module, number: int) -> None:
    model(batch_of(10 * number + dist.get_rank())).square().mean().backward()


def step(made: Made, number: int) -> None:
    model, optimizer = made
    microbatch(model, number)
    optimizer.step()
    optimizer.zero_grad()


def sleep(*things: Any, to: Path | str) -> None:
    with shardwise.asleep(*things, to=to):
        pass


def bits_of(made: Made) -> list[torch.Tensor]:
    model, optimizer = made
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [local(each).detach().clone() for each in (*model.parameters(), *state)]


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    assert all(a.equal(b) for a, b in zip(left, right, strict=True))


def train_and_sleep(kind: str, num_cycles: int, folder: Path) -> None:
    noise, sleeper, awake = random.Random(kind), made(kind), made(kind)
    model, optimizer = sleeper
    params, number = [*model.parameters()], 0
    for _ in range(num_cycles):
        for _ in range(noise.randrange(3)):
            for each in (sleeper, awake):
                step(each, number)
            number += 1
        things = noise.choice([(model, optimizer), (model,), (optimizer,), (model, optimizer)])
        earlier = {name: local(each) for name, each in model.state_dict().items()}
        before, with_grad = bits_of(sleeper), noise.random() < 0.5
        if with_grad and kind != "zero1":
            for each in (sleeper, awake):
                microbatch(each[0], number)  # a gradient sleeps, too
        with shardwise.asleep(*things, to=folder) as slept:
            assert slept.num_bytes > 0
        assert_same_bits(bits_of(sleeper), before)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert_same_bits([*earlier.values()], [local(each) for each in model.state_dict().values()])
        if with_grad and kind != "zero1":
            for each in (sleeper, awake):
                step(each, number)  # accumulates
    for each in (sleeper, awake):
        step(each, number)
    assert_same_bits(bits_of(sleeper), bits_of(awake))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_run_that_sleeps_between_steps_has_the_bits_of_one_that_does_not(kind: str, tmp_path: Path) -> None:
    train_and_sleep(kind, 6, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 3)
def test_a_run_that_sleeps_a_hundred_times_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    train_and_sleep(kind, 100, tmp_path)


@on_ranks(2)
def test_parameters_that_are_in_files_stay_there_while_optimizer_state_sleeps(tmp_path: Path) -> None:
    sleeper, awake = made("files"), made("files")
    for number in range(3):
        for each in (sleeper, awake):
            step(each, number)
        with shardwise.asleep(*sleeper, to=tmp_path) as slept:
            assert (
                slept.num_bytes > WIDTH * WIDTH * 4
            )  # the state of two matrices on two ranks, but for the ends of pages
            with pytest.raises(StateError, match="the forward of .* was called while it is asleep"):
                microbatch(sleeper[0], number)
        assert_same_bits(bits_of(sleeper), bits_of(awake))


@on_ranks(2)
def test_gradients_that_wait_sleep_too(tmp_path: Path) -> None:
    sleeper, awake = made("plain"), made("plain")
    for each in (sleeper, awake):
        each[0].set_requires_gradient_sync(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        microbatch(each[0], 0)
        each[0].set_requires_gradient_sync(True)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        if each is sleeper:
            with shardwise.asleep(*each, to=tmp_path):
                pass
        step(each, 1)
    assert_same_bits(bits_of(sleeper), bits_of(awake))


def large() -> Made:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))
    for block in model:
        shardwise.fully_shard(block)
    shardwise.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def step_large(made: Made) -> None:
    made[0](torch.ones(2, 512)).mean().backward()
    made[1].step()
    made[1].zero_grad()


@on_ranks(2)
def test_memory_goes_to_the_system_and_does_not_grow(tmp_path: Path) -> None:
    model = large()
    step_large(model)
    after, num_bytes = list[int](), 3 * 4 * 512 * 512 * 4
    for _ in range(8):
        awake = resident_bytes()
        with shardwise.asleep(*model, to=tmp_path) as slept:
            left = awake - resident_bytes()
        assert not slept.held
        assert slept.num_bytes > 0.98 * num_bytes  # all but pages that are not whole
        assert left > 0.9 * slept.num_bytes
        step_large(model)
        after.append(resident_bytes())
    assert after[-1] - after[2] < num_bytes / 10
    assert not [*tmp_path.iterdir()]


@on_ranks(2)
def test_what_needs_values_is_named_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = sleeper = made("plain")
    other = torch.optim.SGD(model.parameters())
    step(sleeper, 0)
    loss = model(batch_of(0)).sum()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    loss.backward()
    before = bits_of(sleeper)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: model(batch_of(0)), "the forward of .* was called while it is asleep"),
        (lambda: next(model.children())(batch_of(0)), "the forward of .* was called"),
        (optimizer.step, "AdamW.step.. was called while it is asleep"),
        (other.step, "SGD.step.. was called while it is asleep"),
        (model.state_dict, "state_dict.. was called while it is asleep"),
        (optimizer.state_dict, "state_dict.. was called while it is asleep"),
        (lambda: save(tmp_path / "run", state, step=1), "state_dict.. was called while it is asleep"),
        (lambda: dict(shardwise.full_tensors(model)), "while it is asleep"),
        (lambda: shardwise.asleep(model, to=tmp_path).__enter__(), "it is asleep already"),
        (lambda: shardwise.asleep(optimizer, to=tmp_path).__enter__(), "it is asleep already"),
    ]
    with shardwise.asleep(model, optimizer, to=tmp_path):
        for call, message in calls:
            with pytest.raises((StateError, shardwise.CheckpointError), match=message):
                call()
        with pytest.raises(RuntimeError):  # of torch, which names no tensor
            local(next(model.parameters())).sum().item()
    assert_same_bits(bits_of(sleeper), before)
    step(sleeper, 1)


@pytest.mark.parametrize("kind", ["plain", "kept"])
@on_ranks(2)
def test_a_graph_that_holds_parameters_is_named_with_its_size(kind: str, tmp_path: Path) -> None:
    model, optimizer = made(kind)
    loss = model(batch_of(0)).sum()
    if kind == "plain":
        model.set_reshard_after_forward(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        loss = model(batch_of(0)).sum()
    with (
        pytest.raises(
            StateError, match=r"no rank does: the graph of a forward holds .* of full parameters of .*backward"
        ),
        shardwise.asleep(model, optimizer, to=tmp_path),
    ):
        pass
    loss.backward()
    with shardwise.asleep(model, optimizer, to=tmp_path):
        pass


@on_ranks(2)
def test_a_backward_of_a_graph_from_before_is_named(tmp_path: Path) -> None:
    model, optimizer = made("plain")
    model.set_reshard_after_forward(True)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    loss = model(batch_of(0)).sum()
    message = "a forward or backward began while it is asleep"
    with shardwise.asleep(model, optimizer, to=tmp_path), pytest.raises(StateError, match=message):
        loss.backward()
    step((model, optimizer), 1)


@on_ranks(2)
def test_where_a_rank_cannot_sleep_all_stay_awake(tmp_path: Path) -> None:
    model, optimizer = sleeper = made("plain")
    step(sleeper, 0)
    before, rank = bits_of(sleeper), dist.get_rank()
    with pytest.raises(StateError, match="rank 1 cannot sleep, so that no rank does: No such file or directory"):
        sleep(model, optimizer, to=tmp_path / "absent" if rank == 1 else tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name in ("posix_fallocate", "pwrite"):
        failing = mock.patch.object(os, name, side_effect=full) if rank == 0 else nullcontext()
        message = "rank 0 cannot sleep, so that no rank does: No space left on device"
        with failing, pytest.raises(StateError, match=message):
            sleep(model, optimizer, to=tmp_path)
    assert_same_bits(bits_of(sleeper), before)
    step(sleeper, 1)


class Interrupt(BaseException):
    """What a user presses."""


@on_ranks(2)
def test_an_exception_inside_wakes(tmp_path: Path) -> None:
    sleeper, awake = made("plain"), made("plain")
    for number in range(3):
        try:
            with shardwise.asleep(*sleeper, to=tmp_path):
                raise (ValueError, Interrupt, KeyError)[number]
        except (ValueError, Interrupt, KeyError):
            pass
        for each in (sleeper, awake):
            step(each, number)
    assert_same_bits(bits_of(sleeper), bits_of(awake))


@on_ranks(2)
def test_what_comes_back_otherwise_than_it_left_is_named(tmp_path: Path) -> None:
    model, optimizer = made("plain")
    read = os.preadv

    def damaged(fd: int, buffers: Any, offset: int) -> int:
        found = read(fd, buffers, offset)
        buffers[0][17] ^= 1
        return found

    with (
        pytest.raises(
            StateError, match="cannot wake: the block at byte 0 is not the one that was written. Resume from a"
        ),
        shardwise.asleep(model, optimizer, to=tmp_path),
    ):
        mock.patch.object(os, "preadv", damaged).start()
    mock.patch.stopall()


@on_ranks(2)
def test_a_step_that_is_undone_around_it_is_undone(tmp_path: Path) -> None:
    model, optimizer = sleeper = made("plain")
    step(sleeper, 0)
    before = bits_of(sleeper)
    with shardwise.transaction(model, optimizer, skip=shardwise.RejectedStep) as done:
        step(sleeper, 1)
        with shardwise.asleep(model, optimizer, to=tmp_path):
            if dist.get_rank() == 1:
                done.reject("no")
    assert done.outcome == "skipped"
    assert_same_bits(bits_of(sleeper), before)
    step(sleeper, 1)


@on_ranks(2)
def test_what_cannot_sleep_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = made("plain")
    with pytest.raises(ArgumentTypeError, match=r"asleep takes models and optimizers, found \['FSDP.*', 'int'\]"):
        sleep(model, 3, to=tmp_path)
    with pytest.raises(StateError, match='to="host": all of it is in memory of the host already'):
        sleep(model, optimizer, to="host")
    offloaded = ShardedOptimizer(
        dict(model.named_parameters()), torch.optim.AdamW, offload=OptimizerOffload(folder=str(tmp_path))
    )
    with pytest.raises(StateError, match="OptimizerOffload has its state elsewhere already: put the model alone"):
        sleep(model, offloaded, to=tmp_path)
    step((model, offloaded), 0)
    with shardwise.asleep(model, to=tmp_path), pytest.raises(StateError, match="step.. was called while it is asleep"):
        offloaded.step()
    step((model, offloaded), 1)
