"""Optimizer state on disk: equal to the bit, named errors on all ranks, and nothing left behind."""

from __future__ import annotations

import copy
import errno
import os
import re
import resource
import signal
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.folders import files_on_disk
from helpers.jobs import Job, tell
from helpers.models import batch_for, build, units_of
from helpers.ranks import FOUR, on_ranks
from torch import nn

import shardwise
from shardwise import (
    ConfigError,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimizerOffload,
    RejectedStep,
    ShardedOptimizer,
    fully_shard,
    transaction,
)
from shardwise.checkpoint import load, save
from shardwise.errors import DesyncError, StateError, TransportError
from shardwise.one_host import resident_bytes

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),  # its state is there before the first step
}


def sharded(name: str) -> nn.Module:
    model = build(name)
    for module in units_of(name, model):
        fully_shard(module)
    return fully_shard(model)


def optimizer_for(model: nn.Module, kind: str, folder: str | None) -> ShardedOptimizer:
    made, options = OPTIMIZERS[kind]
    offload = None if folder is None else OptimizerOffload(folder=folder)
    return ShardedOptimizer(dict(model.named_parameters()), made, offload=offload, **options)


def train(name: str, model: nn.Module, optimizer: ShardedOptimizer, steps: range) -> list[float]:
    """Return the losses of steps of which every second one clips."""
    losses: list[float] = []
    for number in steps:
        loss = model(batch_for(name, 10 * number + dist.get_rank(), 4)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        shardwise.clip_grad_norm_(model.parameters(), 0.05 if number % 2 else 1e6)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    found = {name: param.detach().to_local() for name, param in model.named_parameters()}  # pyright: ignore
    for name, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            found[f"{name}.{key}"] = torch.as_tensor(getattr(value, "to_local", lambda value=value: value)())
    return {name: value.clone() for name, value in found.items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name, value in left.items() if not torch.equal(value, right[name])]


@contextmanager
def shared_folder() -> Generator[str, None, None]:
    """Make one folder for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield made[0]
    finally:
        dist.barrier()


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        (2, "Adagrad"),
        (2, "SGD"),
        pytest.param(1, "AdamW", marks=pytest.mark.exhaustive),
        pytest.param(2, "AdamW", marks=pytest.mark.exhaustive),
    ],
)
@on_ranks()
def test_clipped_steps_are_those_of_state_in_memory(kind: str, steps: int) -> None:
    with shared_folder() as folder:
        runs: list[Any] = []
        for where in (None, folder):
            model = sharded("mixed")
            optimizer = optimizer_for(model, kind, where)
            runs.append((train("mixed", model, optimizer, range(steps)), state_of(model, optimizer)))
            assert (where is None) == (not files_on_disk(folder))
        assert not os.listdir(folder)  # not even while it is used
        assert runs[0][0] == runs[1][0]
        assert_equal(runs[0][1], runs[1][1])


@on_ranks(2)
def test_checkpoints_of_either_tier_go_on_in_the_other() -> None:
    with shared_folder() as folder:
        model = sharded("plain")
        optimizer = optimizer_for(model, "AdamW", None)
        train("plain", model, optimizer, range(9))
        plain = state_of(model, optimizer)
        for first, then in ((folder, None), (None, folder)):
            path = Path(folder) / f"checkpoint-{first is None}"
            model = sharded("plain")
            optimizer = optimizer_for(model, "AdamW", first)
            train("plain", model, optimizer, range(5))
            save(path, {"model": model, "optimizer": optimizer}, step=5)
            resumed = sharded("plain")
            other = optimizer_for(resumed, "AdamW", then)
            load(path, {"model": resumed, "optimizer": other})
            for each, its in ((model, optimizer), (resumed, other)):
                train("plain", each, its, range(5, 9))
                assert_equal(state_of(each, its), plain)


@on_ranks(2)
def test_a_rejected_step_leaves_the_state_on_disk_as_it_was() -> None:
    with shared_folder() as folder:
        model = sharded("plain")
        optimizer = optimizer_for(model, "AdamW", folder)
        train("plain", model, optimizer, range(2))
        before = state_of(model, optimizer)
        with transaction(model, optimizer, skip=(RejectedStep,)) as step:
            train("plain", model, optimizer, range(2, 4))
            step.reject("as a test")
        assert_equal(state_of(model, optimizer), before)


@on_ranks(2)
def test_the_step_after_a_rejected_first_one_is_that_of_state_in_memory() -> None:
    """The first step makes the state of AdamW; Adagrad has it before."""
    with shared_folder() as folder:
        for kind in ("AdamW", "Adagrad"):
            runs: list[Any] = []
            for where in (None, folder):
                model = sharded("plain")
                optimizer = optimizer_for(model, kind, where)
                with transaction(model, optimizer, skip=(RejectedStep,)) as step:
                    train("plain", model, optimizer, range(1))
                    step.reject("as a test")
                runs.append((train("plain", model, optimizer, range(1, 4)), state_of(model, optimizer)))
            assert runs[0][0] == runs[1][0]
            assert_equal(runs[0][1], runs[1][1])


@on_ranks(2)
def test_a_folder_that_one_rank_lacks_or_cannot_write_to_is_named_on_all_ranks() -> None:
    with shared_folder() as folder:
        lacks = os.path.join(folder, "not mounted")
        model = sharded("plain")
        with pytest.raises(ConfigError, match=r"rank 1 cannot write to the folder .*not mounted: No such file"):
            optimizer_for(model, "AdamW", lacks if dist.get_rank() == 1 else folder)
        assert not os.path.exists(lacks)
        mine = Path(folder) / "file"
        mine.write_text("")
        model = sharded("plain")
        with pytest.raises(ConfigError, match=r"rank 1 cannot write to the folder .*file"):
            optimizer_for(model, "AdamW", str(mine) if dist.get_rank() == 1 else folder)


@on_ranks(2)
def test_all_state_has_its_space_before_the_first_step_or_all_ranks_name_the_one_without() -> None:
    with shared_folder() as folder:
        model = nn.Sequential(*[nn.Linear(width, 30) for width in (512, 30, 30)])
        for module in (*model, model):
            fully_shard(module)
        numel = sum(param.to_local().numel() for param in model.parameters())  # pyright: ignore
        for kind, num_bytes in (("AdamW", 8), ("SGD", 4), ("Adagrad", 4)):
            before = files_on_disk(folder)
            optimizer = optimizer_for(model, kind, folder)
            (fd,) = [each for each in files_on_disk(folder) if each not in before]
            reserved = os.fstat(fd)
            assert num_bytes * numel <= reserved.st_size < num_bytes * numel + 3 * 8192  # gaps, and pages of each unit
            assert 512 * reserved.st_blocks >= reserved.st_size
            for data in (torch.ones(2, 512), torch.zeros(2, 512)):
                model(data).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert os.fstat(fd).st_size == reserved.st_size, "a step has taken more than was reserved"
        full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        message = "rank 1 cannot write to the folder .*: no space for .* of optimizer state: No space left on device"
        with full if dist.get_rank() == 1 else nullcontext(), pytest.raises(ConfigError, match=message):
            optimizer_for(model, "AdamW", folder)


def trains_until_rank_one_fails(folder: str, kind: str) -> None:
    model = nn.Linear(1000, 1000)
    fully_shard(model)
    optimizer = optimizer_for(model, "AdamW", folder)
    if dist.get_rank() == 1 and kind == "full":
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (2**21, resource.RLIM_INFINITY)
        )  # the store of the job is a file, too
    for number in range(9):
        if dist.get_rank() == 1 and number == 3 and kind == "torn":
            (fd,) = files_on_disk(folder)
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                for begin in range(0, os.fstat(fd).st_size, 4096):
                    os.pwrite(file.fileno(), b"torn", begin)
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full", "a write failed: only a part of a block was written"),
        ("torn", "a read failed: the block at byte .* is not the one that was written"),
    ],
)
def test_a_full_disk_or_torn_bytes_of_one_rank_are_named_on_all_ranks(kind: str, message: str, tmp_path: Path) -> None:
    with Job(trains_until_rank_one_fails, str(tmp_path), kind, num_ranks=2) as job:
        errors = [job.outcome(rank, limit_s=60).error for rank in range(2)]
    for error, kinds in zip(errors, ((TransportError, DesyncError), (StateError,)), strict=True):
        assert error is not None
        assert error[0] in kinds
        assert re.search(rf"optimizer state on disk \(.*\): {message}", error[1])


def trains_until_it_is_killed(folder: str) -> None:
    model = nn.Linear(300, 300)
    fully_shard(model)
    optimizer = optimizer_for(model, "AdamW", folder)
    for number in range(10**6):
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(number)


def test_a_killed_run_leaves_no_file_and_no_space_behind(tmp_path: Path) -> None:
    for num_steps in (1, 4):
        with Job(trains_until_it_is_killed, str(tmp_path), num_ranks=1) as job:
            for _ in range(num_steps):
                job.message(0)
            os.kill(job.pids[0], signal.SIGKILL)
        assert not list(tmp_path.iterdir())


# ---- Parameters and gradients in files that are mapped.


@on_ranks(pytest.param(1, marks=pytest.mark.exhaustive), 2, FOUR)
def test_parameters_and_gradients_on_disk_have_the_bits_of_those_in_memory() -> None:
    with shared_folder() as folder:
        for name, precision in (("mixed", MixedPrecisionPolicy()), ("tied", MixedPrecisionPolicy(torch.bfloat16))):
            runs: list[Any] = []
            for policy in (OffloadPolicy(), DiskOffloadPolicy(folder=folder)):
                model = build(name)
                for module in (*units_of(name, model), model):
                    fully_shard(module, mp_policy=precision, offload_policy=policy)
                is_mapped = isinstance(policy, DiskOffloadPolicy)
                optimizer = optimizer_for(model, "AdamW", folder if is_mapped else None)
                runs.append((train(name, model, optimizer, range(5)), state_of(model, optimizer)))
                mapped = mapped_into(folder)
                for param in model.parameters():
                    local = param.to_local()  # pyright: ignore
                    assert not local.numel() or is_mapped == any(local.data_ptr() in each for each in mapped)
            assert runs[0][0] == runs[1][0]
            assert_equal(runs[0][1], runs[1][1])
        assert not os.listdir(folder)


def mapped_into(folder: str) -> list[range]:
    """Return the addresses of memory that is mapped from files in ``folder``."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    return [range(*(int(each, 16) for each in line[0].split("-"))) for line in lines]


def resident_in(folder: str) -> int:
    """Return the bytes of this process that are mapped from files in ``folder`` and resident."""
    found, is_there = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_there = folder in line
        elif line.startswith("Rss:") and is_there:
            found += 1024 * int(line.split()[1])
    return found


def read_bytes() -> int:
    """Return how many bytes this process has read from disks."""
    return int(re.findall(r"read_bytes: (\d+)", Path("/proc/self/io").read_text())[0])


@on_ranks(pytest.param(1, marks=pytest.mark.exhaustive), 2)
def test_parameters_and_gradients_on_disk_leave_memory_when_a_unit_is_done_with_them() -> None:
    with shared_folder() as folder:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])
        for module in (*model, model):
            fully_shard(module, offload_policy=DiskOffloadPolicy(folder=folder))
        for block in model:  # one after the other, so that only one is in memory
            shardwise.init_parameters(block, device="cpu")
        resident = [resident_in(folder)]
        for block in model:
            block.register_forward_hook(lambda *_: resident.append(resident_in(folder)))
        optimizer = optimizer_for(model, "AdamW", folder)
        for number in range(2):
            before = read_bytes()
            loss = model(torch.full((2, 1024), number + 1.0)).sum()
            # Of 48 MiB: while memory is not short, pages stay in the page cache.
            assert read_bytes() - before < 12 * 2**20
            loss.backward()
            resident.append(resident_in(folder))
            optimizer.step()
            resident.append(resident_in(folder))
            optimizer.zero_grad()
        # Of 48 MiB of all ranks, and as many of gradients.
        assert max(resident) < 5 * 4 * 2**20, [each >> 20 for each in resident]


@on_ranks(pytest.param(1, marks=pytest.mark.exhaustive), 2)
def test_state_that_was_read_goes_back_to_the_disk_in_the_next_forward() -> None:
    with shared_folder() as folder:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        for module in (*model, model):
            fully_shard(module)
        optimizer = optimizer_for(model, "AdamW", folder)
        data, state_bytes = torch.ones(2, 1024), 64 * 2**20 // dist.get_world_size()

        def step() -> None:
            model(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        before = resident_bytes()
        name, read = next(iter(optimizer.state_dict()["state"].items()))
        assert resident_bytes() - before > 0.6 * state_bytes
        del read
        model(data)
        last = time.monotonic() + 60
        while resident_bytes() - before > 0.3 * state_bytes:
            assert time.monotonic() < last
            time.sleep(0.01)
        for value in optimizer.state_dict()["state"][name].values():  # what is read is the user's until then
            if value.ndim:
                value.fill_(0.25)
        model(data)
        found = [value for value in optimizer.state_dict()["state"][name].values() if value.ndim]
        assert all(value.full_tensor().eq(0.25).all() for value in found)


@on_ranks(2)
def test_state_that_a_reader_keeps_can_be_copied_and_has_no_values_of_other_units_later() -> None:
    with shared_folder() as folder:
        model = sharded("plain")
        optimizer = optimizer_for(model, "AdamW", folder)
        train("plain", model, optimizer, range(2))
        kept = {
            f"{name}.{key}": value for name, of in optimizer.state_dict()["state"].items() for key, value in of.items()
        }
        kept = {name: value for name, value in kept.items() if value.ndim}
        read = copy.deepcopy(kept)
        train("plain", model, optimizer, range(2, 5))
        now, then = ({name: value.to_local() for name, value in each.items()} for each in (kept, read))
        assert_equal(now, then)


@on_ranks(1)
def test_a_model_that_is_initialized_on_disk_is_never_whole_in_memory() -> None:
    def peak_of(count: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)])
        for module in (*model, model):
            fully_shard(module, offload_policy=DiskOffloadPolicy(folder=folder))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        shardwise.init_parameters(model, device="cpu")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    with shared_folder() as folder:
        peak_of(1)
        assert peak_of(24) < 64 * 1024  # KiB, of 96 MiB


@on_ranks(2)
def test_gradients_on_disk_are_in_files_too_and_leave_them_when_they_are_dropped() -> None:
    with shared_folder() as folder:
        model = fully_shard(nn.Linear(1500, 1500), offload_policy=DiskOffloadPolicy(folder=folder))
        for _ in range(70):  # of 4.5 MB each: more than one file
            model(torch.ones(1, 1500)).sum().backward()
            gradient = model.weight.grad.to_local()  # pyright: ignore
            assert any(gradient.data_ptr() in each for each in mapped_into(folder))
            del gradient
            model.zero_grad()
        assert len(files_on_disk(folder)) <= 4  # of both ranks, parameters and the newest gradients


def full_of_rank_one(folder: str) -> None:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, resource.RLIM_INFINITY))
    model = fully_shard(nn.Linear(700, 700), offload_policy=DiskOffloadPolicy(folder=folder))
    model(torch.ones(2, 700))


def test_a_disk_that_is_full_for_one_rank_is_named_on_all_ranks(tmp_path: Path) -> None:
    with Job(full_of_rank_one, str(tmp_path), num_ranks=2) as job:
        errors = [job.outcome(rank, limit_s=60).error for rank in range(2)]
    for error, kinds in zip(errors, ((TransportError, DesyncError), (StateError,)), strict=True):
        assert error is not None
        assert error[0] in kinds
        assert re.search(r"DiskOffloadPolicy: no file of .* MiB in the folder .*: .*File too large", error[1])
