"""Buffers that ranks update by themselves: refused by name when they differ, or saved by the rule that the user chooses."""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import ConfigError, fully_shard, replicate
from shardwise.checkpoint import CheckpointError, finish, load, save


class Net(nn.Module):
    """With a codebook that is larger than what the lowest rank writes by itself, and a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("codes", torch.zeros(40_000, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scratch", torch.full((2,), float(dist.get_rank())), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes += x.mean().detach()
        return self.norm(self.first(x))


def _trained(shard: Callable[[nn.Module], Any] = fully_shard) -> Any:
    model = shard(Net())
    noise = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(16, 4, generator=noise) + dist.get_rank()).sum().backward()
    if dist.get_rank():
        next(each for each in model.modules() if isinstance(each, nn.BatchNorm1d)).num_batches_tracked += 1
    return model


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if not name.endswith("scratch")}


def _of_all(buffers: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, buffers)
    return found


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2, FOUR)
def test_buffers_that_differ_are_refused_by_name_on_every_rank(wait: bool, tmp_path: Path) -> None:
    model = _trained()
    names = "model/codes, model/norm.running_mean, model/norm.running_var, model/norm.num_batches_tracked; rank 0 and rank 1"
    with pytest.raises(CheckpointError, match=rf"step 1 did not start: buffers differ between ranks: {names} have"):
        save(tmp_path, {"model": model}, step=1, wait=wait)
    finish(tmp_path)
    assert not list(tmp_path.glob("*step*"))
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    save(tmp_path, {"model": model}, step=1, wait=wait)
    finish(tmp_path)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("choice", ["rank0", "per_rank"])
@on_ranks(2, FOUR)
def test_what_is_saved_is_what_the_user_chooses(choice: Any, wait: bool, tmp_path: Path) -> None:
    model = _trained()
    for step in (1, 2):  # the second save may use the plan of the first
        before = _buffers(model)
        everyone = _of_all(before)
        save(tmp_path, {"model": model}, step=step, wait=wait, buffers=choice)
        finish(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in _buffers(model).items())
        other = fully_shard(Net())
        load(tmp_path, {"model": other})
        for name, value in _buffers(other).items():
            values = [each[name] for each in everyone]
            expected = before[name] if choice == "per_rank" else values[0]
            assert torch.equal(value, expected), name
        model(torch.full((3, 4), float(dist.get_rank())))


@on_ranks(4)
def test_buffers_of_each_rank_load_at_another_number_of_ranks_as_those_of_the_lowest(tmp_path: Path) -> None:
    model = _trained()
    save(tmp_path, {"model": model}, step=1, buffers="per_rank")
    finish(tmp_path)
    lowest = _of_all(_buffers(model))[0]
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        other = Net()
        load(tmp_path, {"model": other}, group=pair)
        assert all(torch.equal(value, lowest[name]) for name, value in _buffers(other).items())


@on_ranks(2)
def test_models_whose_forward_begins_with_one_ranks_buffers_save_that_ranks(tmp_path: Path) -> None:
    for step, shard in enumerate([DistributedDataParallel, lambda model: replicate(model, device_ids=None)]):
        model = _trained(shard)
        lowest = _of_all(_buffers(model))[0]
        copied = copy.deepcopy(model) if step else model
        save(tmp_path, {"model": copied}, step=step)
        load(tmp_path, {"model": model})
        assert all(torch.equal(value, lowest[name]) for name, value in _buffers(model).items())


@on_ranks(2)
def test_other_choices_are_refused(tmp_path: Path) -> None:
    model = _trained()
    with pytest.raises(ConfigError, match="buffers is 'first', expected 'rank0', 'per_rank' or None"):
        save(tmp_path, {"model": model}, step=1, buffers="first")
    with pytest.raises(CheckpointError, match="buffers is 'rank0', 'per_rank' on ranks 0 to 1, expected one for all"):
        save(tmp_path, {"model": model}, step=1, buffers=["rank0", "per_rank"][dist.get_rank()])


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2, FOUR)
def test_folders_that_differ_between_ranks_are_named_on_every_rank_and_the_next_save_is_right(
    wait: bool, tmp_path: Path
) -> None:
    state, stamped = (
        {"model": fully_shard(nn.Linear(4, 4))},
        tmp_path / f"run-{dist.get_rank() // (dist.get_world_size() - 1)}",
    )
    found = f"rank 0 into {tmp_path / 'run-0'}, rank {dist.get_world_size() - 1} into {tmp_path / 'run-1'}"
    with pytest.raises(CheckpointError, match=re.escape(found)):
        save(stamped, state, step=1, wait=wait)
    assert not stamped.exists()
    save(tmp_path / "run-0", state, step=1, wait=wait)
    finish(tmp_path / "run-0")
    assert load(tmp_path / "run-0", state).step == 1


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_threads_that_save_into_folders_of_their_own_in_any_order_do_not_mix(wait: bool, tmp_path: Path) -> None:
    states = [{"model": fully_shard(nn.Linear(4, 4))} for _ in range(2)]
    failures: list[BaseException] = []

    def save_own(number: int) -> None:
        try:
            save(tmp_path / str(number), states[number], step=number, wait=wait)
            finish(tmp_path / str(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save_own, args=(number,)) for number in range(2)]
    first, second = threads if dist.get_rank() else threads[::-1]
    first.start()
    time.sleep(0.3)  # the other rank begins with the other folder
    second.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [load(tmp_path / str(number), states[number]).step for number in range(2)] == [0, 1]


def _steps(api: Callable[[nn.Module], Any], seed: int, num_steps: int = 5) -> list[str]:
    """Return what was logged about buffers in the first steps of this rank, on inputs from ``seed``."""
    model, found = api(Net()), list[str]()
    handler, logger = logging.Handler(), logging.getLogger("shardwise.checks")
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    try:
        noise = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            model(torch.randn(16, 4, generator=noise)).sum().backward()
    finally:
        logger.removeHandler(handler)
    return found


@pytest.mark.parametrize("api", [fully_shard, partial(replicate, broadcast_buffers=False)])
@on_ranks(2, FOUR)
def test_buffers_that_differ_are_named_once_in_the_first_steps_on_every_rank(api: Any) -> None:
    names = r"codes, norm.running_mean, norm.running_var; rank 0 and rank \d have different values"
    (found,) = _steps(api, dist.get_rank())
    assert re.match(rf"after the first step buffers differ between ranks: {names}.*SyncBatchNorm", found), found


@on_ranks(2, FOUR)
def test_buffers_that_a_broadcast_or_the_same_inputs_keep_equal_are_not_named() -> None:
    assert _steps(partial(replicate, broadcast_buffers=True), dist.get_rank()) == []
    assert _steps(fully_shard, 0) == []
