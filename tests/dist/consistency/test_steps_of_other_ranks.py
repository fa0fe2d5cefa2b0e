"""Optimizers that ranks step unlike each other: replicas and shards of one model must take the same steps."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import Job
from helpers.ranks import on_ranks
from torch import nn

from shardwise import CheckpointError, DesyncError, fully_shard, replicate, transaction
from shardwise.checkpoint import save
from shardwise.consistency.agreement import MismatchCheck


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model[0])
    return fully_shard(model)


def train_unlike(kind: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = replicate(nn.Linear(8, 4), process_group=None) if kind == "rate" else sharded()
    if kind == "assigned":  # another parameter than that of the first forward, at another address
        model = fully_shard(nn.Linear(8, 4, bias=False))
        model(torch.ones(2, 8)).sum().backward()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + (rank == 1 and kind in ("rate", "assigned"))))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for number in range(12):
        model(torch.ones(2, 8)).square().sum().backward()
        if kind == "skip" and rank == 1 and number == 5:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        if kind == "plateau":
            schedule.step(1.0 if rank == 1 and number > 4 else 1.0 / (number + 1))


@pytest.mark.parametrize(
    ("kind", "num_ranks", "found"),
    [
        (
            "skip",
            3,
            r"rank 1: 5 steps, the last one 2 backwards ago: AdamW\(lr=0.01.*rank 2: steps and options as before",
        ),
        ("rate", 2, r"rank 0: 1 steps.*lr=0.01.*rank 1: 1 steps.*lr=0.02|rank 1: .*lr=0.02.*rank 0: .*lr=0.01"),
        ("assigned", 2, r"rank 0: 1 steps.*lr=0.01.*rank 1: 1 steps.*lr=0.02|rank 1: .*lr=0.02.*rank 0: .*lr=0.01"),
        ("plateau", 2, r"rank 1: .*lr=0.001.*rank 0: steps and options as before"),
    ],
)
def test_a_step_of_one_rank_alone_and_options_of_its_own_are_named_on_all_ranks(
    kind: str, num_ranks: int, found: str
) -> None:
    with Job(train_unlike, kind, num_ranks=num_ranks) as job:
        for rank in range(num_ranks):
            error = job.outcome(rank, limit_s=60).error
            assert error is not None
            assert error[0] is DesyncError
            assert re.search(f"ranks do not step their optimizers alike: {found}", error[1]), error[1]


@on_ranks(2)
def test_steps_that_ranks_make_alike_are_compared_when_they_change_alone() -> None:
    """Accumulation, its shorter window at the end of an epoch, a schedule per step, steps that are undone, two optimizers."""
    model, posted = fully_shard(nn.Linear(8, 4)), list[str]()
    optimizers = [torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], lr=1.0, momentum=0.9)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    post = MismatchCheck.post

    def counted(self: MismatchCheck, what: str, text: str) -> None:
        posted.append(what)
        post(self, what, text)

    def window(size: int) -> None:
        for _ in range(size):
            model(torch.ones(2, 8)).square().sum().backward()
        for each, schedule in zip(optimizers, schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()

    with mock.patch.object(MismatchCheck, "post", counted):
        for size in [2] * 5:  # options change for the fourth time
            window(size)
        before = len(posted)
        for size in [2] * 3:
            window(size)
        assert len(posted) == before
        for size in (1, 2, 3, 2):
            window(size)
        assert before < len(posted) <= before + 12
        with transaction(model, optimizers, skip=(ValueError,)):
            window(2)
            raise ValueError("as a test")
        for size in (2, 2):
            window(size)


@on_ranks(2)
def test_a_save_names_the_option_and_the_number_of_steps_that_differ(tmp_path: Path) -> None:
    model, rank = sharded(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (rank + 1))
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(
        CheckpointError, match=r"optimizer/groups/0/options/lr: rank 0 has 0.01, rank 1 0.02\. Ranks step"
    ):
        save(tmp_path, state, step=1)
    optimizer.param_groups[0]["lr"] = 1e-2
    for number in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        if number or rank:
            optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(
        CheckpointError, match=r"numbers of steps\) differ .*: optimizer/state/0.weight/step and 3 more; rank 0"
    ):
        save(tmp_path, state, step=2)


@on_ranks(2)
def test_a_step_from_plain_gradients_that_no_backward_has_averaged_is_warned_of_once() -> None:
    model = replicate(nn.Linear(4, 2), process_group=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [0, 0]
    for part, syncs in enumerate(((False, True), (True, False, True, False))):
        with mock.patch.object(logging.getLogger("shardwise.checks"), "warning") as warned:
            for is_synced in syncs:
                model.set_requires_gradient_sync(is_synced)
                model(torch.ones(1, 4)).sum().backward()
                if is_synced == (part == 0):
                    optimizer.step()
                    optimizer.zero_grad()
        found[part] = warned.call_count
    assert found == [0, 1]
