"""Data on real ranks: saved by all, read by others, undone with a step, and compared before it is read."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.microbatches import MAKES, NUM_STEPS, Seen, V, make, undisturbed
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import CheckpointError, DesyncError, Microbatches, transaction
from shardwise.checkpoint import load, save
from shardwise.testing import WorkerPool


def read(data: Microbatches, step: int) -> Seen:
    """Return this rank's microbatches of a step."""
    own = range(dist.get_rank() * V // dist.get_world_size(), V)
    return {(step, k): batch for k, batch in zip(own, data.of_step(step), strict=False)}


def go_on(folder: str, until: int) -> dict[str, Seen]:
    """Load the checkpoint if there is one, make the steps ``until`` this one, and save; return what this rank has read."""
    entries: dict[str, Any] = {kind: make(kind) for kind in MAKES}
    if Path(folder).exists():
        load(folder, entries)
    seen: dict[str, Seen] = {kind: {} for kind in entries}
    for kind, data in entries.items():
        for step in range(data.step, until):
            seen[kind] |= read(data, step)
    save(folder, entries, step=until)
    return seen


def load_other_data(folder: str) -> None:
    for other in (make("map"), Microbatches(range(28), num_microbatches=V, microbatch_size=1, seed=3)):
        with pytest.raises(CheckpointError, match="mixture: Microbatches: the state is of other data: dataset"):
            load(folder, {"mixture": other}, strict=False)
        assert other.step == 0


def test_what_ranks_have_saved_is_read_on_by_other_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    seen: dict[str, Seen] = {kind: {} for kind in MAKES}
    for num_ranks, until in ((4, 3), (2, 5), (1, 7), (3, NUM_STEPS)):
        for found in pool.run(go_on, num_ranks=num_ranks, folder=str(tmp_path / "run"), until=until):
            for kind, its in found.items():
                seen[kind] |= its
    assert seen == {kind: undisturbed(kind) for kind in MAKES}
    pool.run(load_other_data, num_ranks=2, folder=str(tmp_path / "run"))


class Rejected(Exception):
    """A rank does not want a step."""


def undo_steps(with_state: bool) -> dict[str, Seen]:
    """Make six steps, of which two are undone; return what this rank has read of those that stayed."""
    model, rank, found = nn.Linear(1, 1), dist.get_rank(), {kind: Seen() for kind in MAKES}
    optimizer = torch.optim.SGD(model.parameters())
    datas = {kind: make(kind) for kind in MAKES}
    if with_state:
        datas["packed"] = make("packed", num_workers=1, multiprocessing_context="fork")
    also = [*datas.values()] if with_state else []
    for step in range(6):
        for attempt in range(2):
            with transaction(model, optimizer, retry=Rejected, also=also) as done:
                for kind, data in datas.items():
                    its = iter(data.of_step(step))
                    if (step, attempt, rank) == (2, 0, 1) and kind in ("mixture", "packed"):
                        next(its)  # one rank is further than the other
                        if kind == "packed":
                            raise Rejected
                    found[kind] |= {(step, k): batch for k, batch in zip(range(rank * 6, V), its, strict=False)}
                if (step, attempt, rank) == (4, 0, 0):
                    raise Rejected
            if not done.again:
                break
    return found


@pytest.mark.parametrize("with_state", [True, False])
def test_a_step_that_is_undone_gives_its_data_again(pool: WorkerPool, with_state: bool) -> None:
    first, second = pool.run(undo_steps, num_ranks=2, with_state=with_state)
    for kind in MAKES:
        expected = {at: batch for at, batch in undisturbed(kind).items() if at[0] < 6}
        assert first[kind] | second[kind] == expected, kind


@on_ranks(2)
def test_ranks_that_have_other_data_are_told_before_they_read() -> None:
    rank, sizes = dist.get_rank(), dict[str, Any](num_microbatches=2, microbatch_size=2)
    for data, message in (
        (Microbatches(range(9), **sizes, seed=rank), "rank 0: seed 0; rank 1: seed 1"),
        (Microbatches(range(9 + rank), **sizes), "rank 0: dataset 9 samples, .*; rank 1: dataset 10 samples"),
        (Microbatches([0, rank], **sizes), "rank 0: dataset 2 samples, .*; rank 1: dataset 2 samples.* own generator"),
    ):
        with pytest.raises(DesyncError, match=f"Microbatches: ranks disagree. {message}"):
            next(data.of_step(0))
    broken = Microbatches([torch.ones(1)] if rank == 0 else {0: 1, 2: 3}, **sizes)
    with pytest.raises(DesyncError if rank == 0 else KeyError, match="" if rank else "rank 1 raised KeyError"):
        next(broken.of_step(0))


class Opened(torch.utils.data.Dataset[tuple[bool, int]]):
    """Opens its file, of one process each, at its first sample, and counts what this process has read."""

    opened_by, num_read = 0, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[bool, int]:
        self.opened_by, self.num_read = self.opened_by or os.getpid(), self.num_read + 1
        return self.opened_by == os.getpid(), self.num_read


@on_ranks(2)
def test_files_that_workers_open_are_their_own() -> None:
    """The samples that ranks compare are read in a worker; and workers stay when the group is gone."""
    data = Microbatches(Opened(), num_microbatches=4, microbatch_size=1, num_workers=1)
    for step in range(2):
        assert all(is_own for is_own, _ in data.of_step(step))
    dist.destroy_process_group()
    assert [int(num_read) for step in (2, 3) for _, num_read in data.of_step(step)] == [1, 2, 3, 4, 5, 6, 7, 8]


def read_on_meshes() -> tuple[list[Any], list[Any]]:
    """Return what this rank reads of steps 0 and 1, with a mesh of half of the ranks, and with one of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, both = make("saved", mesh=mesh["dp"]), make("saved", mesh=mesh)
    return [*chain(*map(data.of_step, range(2)))], [*chain(*map(both.of_step, range(2)))]


def test_ranks_of_one_tensor_parallel_group_read_the_same_microbatches(pool: WorkerPool) -> None:
    expected = undisturbed("saved")
    for rank, (shared, alone) in enumerate(pool.run(read_on_meshes, num_ranks=4)):
        assert shared == [expected[step, k + rank // 2 * 6] for step in range(2) for k in range(6)]
        assert alone == [expected[step, k + rank * 3] for step in range(2) for k in range(3)]
