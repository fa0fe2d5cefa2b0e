"""Saving together: shared writing, failures on all ranks, the background, locks, and state of every kind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import compare
from helpers.checkpoints import APIS, Net, differences, expected, made, state_of, train
from helpers.ranks import on_ranks
from torch import nn

from shardwise import DesyncError, ShardedOptimizer, fully_shard
from shardwise.checkpoint import CheckpointError, PerRank, RandomState, finish, load, save
from shardwise.checkpoint.files import Files, read_manifest, take
from shardwise.checkpoint.save import HostCopy
from shardwise.testing import faults


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(160, 160, bias=False) for _ in range(8)))


@on_ranks(4)
def test_replicas_share_the_writing_and_nothing_is_written_twice(tmp_path: Path) -> None:
    model = Wide()
    save(tmp_path, {"model": model}, step=0)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step-00000000").glob("part-*"))]
    one = 160 * 160 * 4
    assert len(sizes) == 4
    assert all(2 * one <= size < 2 * one + 2000 for size in sizes), sizes


@on_ranks(2)
def test_a_rank_that_cannot_write_fails_all_and_the_old_state_stands(
    tmp_path: Path,
) -> None:
    model, optimizer = made("fully_shard")
    state = state_of(model, optimizer)
    train(model, optimizer, [0])
    save(tmp_path, state, step=1)
    create = Files.create

    def full(self: Files, path: Path) -> Any:
        raise OSError(28, "No space left on device", str(path))

    for wait in (True, False):
        for place in (0, 1):
            if dist.get_rank() == place:
                Files.create = full  # type: ignore[method-assign]
            try:
                with pytest.raises(
                    CheckpointError, match=rf"step 2 was not saved.*rank {place}: OSError: No space left"
                ):
                    save(tmp_path, state, step=2, wait=wait)
                    finish(tmp_path)
            finally:
                Files.create = create  # type: ignore[method-assign]
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".saving", "step"))] == ["step-00000001"]
    load(tmp_path, state)
    save(tmp_path, state, step=2)
    assert load(tmp_path, state).step == 2


class _OnceInterrupted:
    """State that rank 0 saves once ``path`` is there: meanwhile the others wait for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state_dict(self) -> dict[str, int]:
        while dist.get_rank() == 0 and not self.path.exists():
            time.sleep(0.01)
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@on_ranks(2)
def test_a_save_after_an_interrupt_on_one_rank_meets_no_other_phase_of_the_others(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    state, is_struck = state_of(model, optimizer), dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if is_struck:
            patch.setattr(sys.modules[HostCopy.__module__], "share_out", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt if is_struck else CheckpointError):
            save(tmp_path / "run", state, step=1)
    save(tmp_path / "run", state, step=2)  # though rank 0 had a plan of the writes, and rank 1 had none
    state["late"] = _OnceInterrupted(tmp_path / "interrupted")
    if is_struck:
        with pytest.raises(KeyboardInterrupt), faults.interrupt_at("waits for rank 0"):
            save(tmp_path / "run", state, step=3)
        state["late"].path.touch()
    with pytest.raises(DesyncError, match="in different phases: rank 0: write of step 3; rank 1: start of step 3"):
        save(tmp_path / "run", state, step=3)
    save(tmp_path / "run", state, step=3)
    finish(tmp_path / "run")


@on_ranks(2)
def test_training_during_the_write_changes_nothing_in_the_file(tmp_path: Path) -> None:
    for api in ("fully_shard", "zero even", "whole matrix"):
        folder = tmp_path / api
        model, optimizer = made(api)
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.07
        held, create = threading.Event(), Files.create

        def late(self: Files, path: Path, held: threading.Event = held, create: Any = create) -> Any:
            held.wait(30)
            return create(self, path)

        Files.create = late  # type: ignore[method-assign]
        try:
            assert save(folder, state_of(model, optimizer), step=2, wait=False) is None
            train(model, optimizer, range(10, 12))
            assert not list(folder.glob("step-*"))
        finally:
            held.set()
            finish(folder)
            Files.create = create  # type: ignore[method-assign]
        load(folder, state_of(model, optimizer))
        train(model, optimizer, range(2, 4))
        assert differences(model, expected()) == []


@on_ranks(2)
def test_a_save_in_the_background_is_waited_for_by_the_next_and_its_memory_is_used_again(tmp_path: Path) -> None:
    from shardwise.checkpoint.save import _saver_of

    model, optimizer = made("fully_shard")
    places = set()
    for step in range(3):
        train(model, optimizer, [step])
        save(tmp_path, state_of(model, optimizer), step=step, wait=False, keep=2)
        saver = _saver_of(tmp_path, None)
        assert saver.host.buffer is not None
        places.add((saver.host.buffer.data_ptr(), saver.host.buffer.numel()))
    finish(tmp_path)
    dist.barrier()  # rank 0 has given the lock back
    assert len(places) <= 2, places  # state comes with the first step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@on_ranks(2)
def test_a_save_in_the_background_is_of_the_state_there_is_however_it_has_changed(tmp_path: Path) -> None:
    from shardwise.checkpoint.save import _saver_of

    states = (
        {"x": torch.ones(3), "y": torch.zeros(2)},
        {"x": torch.full((3,), 5.0), "y": torch.ones(2)},  # other values
        {"x": torch.full((4,), 6.0), "y": torch.ones(2)},  # another shape
        {"x": torch.full((4,), 7, dtype=torch.int64), "y": torch.ones(2)},  # another dtype
        {"z": torch.ones(()), "x": torch.ones(0)},
    )
    for step, state in enumerate(states):
        save(tmp_path, {"a": state}, step=step, wait=False)
        _saver_of(tmp_path, None).wait()  # what it keeps for the next save stays
        dist.barrier()
        found: dict[str, Any] = {}
        load(tmp_path, {"a": found})
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), (step, name)
    finish(tmp_path)


@on_ranks(2)
def test_the_plan_of_the_last_save_serves_the_next_one_until_what_is_held_changes(tmp_path: Path) -> None:
    from shardwise.checkpoint.save import _saver_of

    model, optimizer = made("fully_shard")
    train(model, optimizer, [0])
    plans = []
    for step in range(4):
        if step == 3:
            model, optimizer = made("fully_shard")  # no state yet
        save(tmp_path, state_of(model, optimizer), step=step, wait=False)
        plans.append(_saver_of(tmp_path, None)._plan)
    assert plans[0] is plans[1] is plans[2]
    assert plans[3] is not plans[2]
    finish(tmp_path)


@on_ranks(2)
def test_a_copy_that_fails_fails_the_save_on_every_rank_at_the_next_call(tmp_path: Path) -> None:
    state = {"a": {"x": torch.ones(2, 2)}}
    save(tmp_path, state, step=0)
    take = HostCopy.take

    def fails(*_: object) -> Any:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(HostCopy, "take", fails)
        save(tmp_path, state, step=1, wait=False)
        with pytest.raises(CheckpointError, match=r"step 1 was not saved.*rank 0: MemoryError: no room"):
            finish(tmp_path)
    assert HostCopy.take is take
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000"]


@on_ranks(2)
def test_a_save_in_the_background_that_cannot_begin_fails_on_every_rank_before_it_returns(tmp_path: Path) -> None:
    state = {"a": {"x": object() if dist.get_rank() else 1}}
    with pytest.raises(CheckpointError, match=r"step 0 did not start: rank 1: .*object cannot be saved"):
        save(tmp_path, state, step=0, wait=False)
    save(tmp_path, {"a": {"x": 1}}, step=0, wait=False)
    finish(tmp_path)
    assert load(tmp_path, {"a": {}}).step == 0


@on_ranks(2)
def test_groups_save_into_a_folder_one_after_the_other_and_are_finished_one_by_one(tmp_path: Path) -> None:
    from shardwise.checkpoint.save import _saver_of

    alone = dist.new_group([0])
    create, is_first = Files.create, dist.get_rank() == 0

    def fails(self: Files, path: Path) -> Any:
        raise OSError(28, "No space left on device", str(path))

    if is_first:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Files, "create", fails)
            save(tmp_path, {"own": {"x": torch.ones(2)}}, step=1, group=alone, wait=False)
            _saver_of(tmp_path, alone).settle()
            finish(tmp_path / "elsewhere")
    dist.barrier()
    save(tmp_path, {"a": {"x": torch.ones(3)}}, step=2, wait=False)  # what the other group's became of is its own
    finish(tmp_path, group=dist.group.WORLD)
    assert Files.create is create
    if is_first:
        assert (tmp_path / ".lock").exists()
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            finish(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


@on_ranks(2)
def test_a_group_that_has_ended_keeps_no_memory_of_what_it_saved_and_its_folder_can_be_finished(tmp_path: Path) -> None:
    from shardwise.checkpoint.save import _saver_of

    pair = dist.new_group([0, 1])
    save(tmp_path / "a", {"a": {"x": torch.ones(2)}}, step=1, group=pair, wait=False)
    ended = _saver_of(tmp_path / "a", pair)
    gone = weakref.ref(pair)
    dist.destroy_process_group(pair)
    del pair
    assert ended.host.buffer is not None
    save(tmp_path / "b", {"a": {"x": torch.ones(3)}}, step=2)
    gc.collect()
    assert ended.host.buffer is None
    assert gone() is None
    finish(tmp_path / "a")
    dist.barrier()
    assert not (tmp_path / "a" / ".lock").exists()
    assert (tmp_path / "b" / ".lock").exists()
    dist.barrier()
    finish(tmp_path / "b")


@on_ranks(2)
def test_state_that_differs_between_ranks_is_refused_unless_it_is_each_ranks_own(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match="position/sample: rank 0 has 0, rank 1 1.*PerRank"):
        save(tmp_path, {"position": {"sample": rank}}, step=0)
    mine: dict[str, Any] = {"sample": rank}
    torch.manual_seed(rank)
    state = {"position": PerRank(mine), "random": RandomState(), "epoch": {"number": 3}}
    save(tmp_path, state, step=0)
    drawn = torch.rand(3)
    mine["sample"] = -1
    load(tmp_path, state)
    assert mine == {"sample": rank}
    assert torch.equal(torch.rand(3), drawn)


@on_ranks(4)
def test_another_number_of_ranks_derives_its_random_state(tmp_path: Path) -> None:
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        save(tmp_path, {"random": RandomState()}, step=0, group=alone)
    dist.barrier()
    load(tmp_path, {"random": RandomState()})
    drawn = [torch.empty(2) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(2))
    assert len({tuple(each.tolist()) for each in drawn}) == 4


@on_ranks(2)
def test_what_cannot_be_put_into_place_fails_on_all_ranks(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"value": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dist.get_rank() == 1:
                raise KeyError("value of another kind")

    save(tmp_path, {"picky": Picky()}, step=0)
    with pytest.raises(CheckpointError, match="changed in part: rank 1: KeyError: 'value of another kind'"):
        load(tmp_path, {"picky": Picky()})


@on_ranks(2)
def test_older_checkpoints_that_cannot_be_removed_do_not_fail_the_save(tmp_path: Path) -> None:
    rename = Files.rename

    def fails(self: Files, old: Path, new: Path) -> None:
        if new.name.startswith(".removing"):
            raise PermissionError(13, "Permission denied", str(old))
        rename(self, old, new)

    Files.rename = fails  # type: ignore[method-assign]
    try:
        for step in (1, 2):
            save(tmp_path, {"a": {"b": step}}, step=step, keep=1)
    finally:
        Files.rename = rename  # type: ignore[method-assign]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]


def test_parameters_without_memory_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"model/weight is on the meta device .*to_empty"):
        save(tmp_path, {"model": model}, step=0)
    finish(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_are_those_of_the_model_without_wrappers(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    wrapped = net()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    compiled = torch.compile(wrapped)
    average, other = net(), net()
    one, both = (
        torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for params in (compiled.parameters(), [*wrapped.parameters(), *other.parameters()])
    )
    for param in (*wrapped.parameters(), *other.parameters()):
        param.grad = torch.ones_like(param)
    one.step()
    both.step()
    state = {"model": compiled, "ema": average, "other": other, "one": one, "both": both}
    path = save(tmp_path, state, step=1)
    assert path is not None
    names = set(read_manifest(Files(), path).tensors)
    assert {"model/0.weight", "ema/0.weight", "one/state/0.weight/momentum_buffer"} <= names
    assert {"both/state/model:1.bias/momentum_buffer", "both/state/other:1.bias/momentum_buffer"} <= names
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    load(tmp_path, {"model": plain, "one": optimizer})
    assert torch.equal(plain[0].weight, wrapped[0].weight)
    assert optimizer.param_groups[0]["lr"] == 0.1
    finish(tmp_path)


@on_ranks(2)
def test_names_that_differ_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    train(model, optimizer, [0])
    save(tmp_path, state_of(model, optimizer), step=0)
    other = nn.Sequential(nn.Linear(6, 9))
    other.first, other.extra = nn.Linear(6, 9), nn.Linear(2, 2)
    before = other.first.weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"missing there: model/0\.weight.*model/extra\.bias; unexpected: .*model/second"
    ):
        load(tmp_path, {"model": other})
    assert torch.equal(before, other.first.weight)
    found = load(tmp_path, {"model": other}, strict=False)
    assert "model/extra.bias" in found.missing
    assert "model/second.weight" in found.unexpected
    assert not torch.equal(before, other.first.weight)
    wide = nn.Linear(6, 9)
    wide.first = nn.Linear(7, 9)
    with pytest.raises(
        CheckpointError, match=r"of another shape: model/first\.weight is \[9, 6\] in .* \[9, 7\] in the state"
    ):
        load(tmp_path, {"model": wide})
    assert "model/first.weight is [9, 6]" in str(load(tmp_path, {"model": wide}, strict=False).missing)


@on_ranks(2)
def test_state_of_a_parameter_that_has_another_shape_now_is_left_out_and_named(tmp_path: Path) -> None:
    for api in ("fully_shard", "whole matrix", "zero even"):
        model, optimizer = made(api)
        train(model, optimizer, [0])
        save(tmp_path / api, state_of(model, optimizer), step=0)
        other = Net()
        other.first = nn.Linear(5, 9)
        model = APIS[api].wrap(other)
        optimizer = APIS[api].make(model)
        optimizer.param_groups[0]["param_names"] = [name for name, _ in model.named_parameters()]
        with pytest.raises(
            CheckpointError, match=r"shape: optimizer/state/first.weight, whose parameter is \[9, 6\] in"
        ):
            load(tmp_path / api, {"optimizer": optimizer})  # without the model, too
        found = load(tmp_path / api, state_of(model, optimizer), strict=False)
        assert "optimizer/state/first.weight" in str(found.missing)
        train(model, optimizer, [1])


@on_ranks(2)
def test_messages_have_names_as_the_user_wrote_them(tmp_path: Path) -> None:
    model, _ = made("fully_shard")
    save(tmp_path, {"model": model, "own/loader": PerRank({"at": 1})}, step=1)
    with pytest.raises(CheckpointError, match="missing there: own/loader; unexpected"):
        load(tmp_path, {"model": model, "own/loader": {"at": 1}})


@on_ranks(2)
def test_entries_that_were_not_saved_are_told_from_misspelt_ones(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    save(tmp_path, {"model": model, "empty": nn.Identity(), "loader": PerRank({"at": 1})}, step=1)
    load(tmp_path, {"model": model, "empty": nn.Identity(), "loader": PerRank({})})
    with pytest.raises(CheckpointError, match="has no entry 'modle'. Did you mean 'model'. It has 'loader', 'model'"):
        load(tmp_path, {"modle": model})
    with pytest.raises(
        CheckpointError, match="has no entry 'optimizer'. It has 'loader', 'model'. Leave the entry out"
    ):
        load(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="has no entry 'other'"):
        load(tmp_path, {"other": PerRank({})})
    part = next((tmp_path / "step-00000001").glob("part-*"))
    with pytest.raises(CheckpointError, match="is a file; name the folder of a checkpoint"):
        load(part.parent / "manifest.json", {"model": model})


def take_and_stay(folder: Path, pipe: Connection) -> None:
    take(folder)
    pipe.send("taken")
    pipe.recv()


@on_ranks(2)
def test_a_second_job_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    state = {"a": {"b": 1}}
    save(tmp_path, state, step=0)
    if dist.get_rank() == 0:
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    dist.barrier()
    finish(tmp_path)
    first = [0]
    if dist.get_rank() == 0:
        assert not (tmp_path / ".lock").exists()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=take_and_stay, args=(tmp_path, theirs))
        child.start()
        assert ours.recv() == "taken"
        first = [child.pid]
    dist.broadcast_object_list(first)
    with pytest.raises(CheckpointError, match=f"another job: process {first[0]} on .*, since "):
        save(tmp_path, state, step=1)
    if dist.get_rank() == 0:
        child.kill()
        child.join()
    dist.barrier()
    save(tmp_path, state, step=2)  # that process has ended
    finish(tmp_path)


def saves_until_killed(folder: str, victim: int, kill_at: str) -> str:
    model, optimizer = made("fully_shard")
    train(model, optimizer, [0])
    save(folder, state_of(model, optimizer), step=1)
    create = Files.create

    def dies(self: Files, path: Path) -> Any:
        if kill_at in path.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, path)

    if dist.get_rank() == victim:
        Files.create = dies  # type: ignore[method-assign]
    try:
        save(folder, state_of(model, optimizer), step=2)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("victim", "kill_at"), [(1, "part-"), (0, "manifest")])
def test_a_rank_that_is_killed_is_named_and_the_old_state_stands(
    pool: Any, tmp_path: Path, victim: int, kill_at: str
) -> None:
    found = pool.attempt(
        saves_until_killed, num_ranks=2, fresh=True, folder=str(tmp_path), victim=victim, kill_at=kill_at
    )
    survivor = found[1 - victim]
    assert f"rank {victim} is gone" in str(survivor.value), survivor
    assert read_manifest(Files(), tmp_path / "step-00000001").step == 1
    assert not list(tmp_path.glob("step-00000002"))


@on_ranks(2)
def test_state_of_another_shape_than_its_parameter_comes_back(tmp_path: Path) -> None:
    """Adafactor keeps a row and a column for a matrix; its owner holds them whole."""

    def made(seed: int) -> tuple[nn.Module, ShardedOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        fully_shard(model)
        return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adafactor, lr=0.1)

    def step(model: nn.Module, optimizer: ShardedOptimizer) -> list[torch.Tensor]:
        model(torch.ones(2, 8) * (dist.get_rank() + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [compare.full(param).clone() for param in model.parameters()]

    model, optimizer = made(0)
    step(model, optimizer)
    save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    wanted = step(model, optimizer)
    model, optimizer = made(1)
    load(tmp_path, {"model": model, "optimizer": optimizer})
    assert all(map(torch.equal, step(model, optimizer), wanted))


@on_ranks(2)
def test_state_of_a_parameter_without_dims_comes_back(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.tensor(1.1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.scale

    model = fully_shard(Scaled())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        before = {key: type(value) for key, value in optimizer.state[model.scale].items()}
        save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        load(tmp_path, {"model": model, "optimizer": optimizer})
        assert {key: type(value) for key, value in optimizer.state[model.scale].items()} == before
