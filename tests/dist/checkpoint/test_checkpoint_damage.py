"""Damage is found before anything is changed, on every rank, and all ranks go back to the same checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import made, state_of, train
from helpers.damage import damage
from helpers.ranks import on_ranks

from shardwise.checkpoint import DamagedCheckpointError, finish, load, save

NUM_CASES = 64


def _copy(source: Path, to: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to)
    dist.barrier()


def _locals(state: dict) -> list[torch.Tensor]:
    values = list(state["model"].state_dict().values())
    for entry in state["optimizer"].state_dict()["state"].values():
        values += [entry[key] for key in sorted(entry)]
    return [getattr(value, "_local_tensor", value).detach().clone() for value in values]


def cases(folder: str, seeds: list[int]) -> list[str]:
    """Return which damages were not found, or had effects."""
    whole, hurt = Path(folder) / "whole", Path(folder) / "hurt"
    model, optimizer = made("fully_shard")
    state = state_of(model, optimizer)
    for step in (1, 2):
        train(model, optimizer, [step])
        save(whole, state, step=step)
    finish(whole)
    wrong: list[str] = []
    train(model, optimizer, [3])
    before = _locals(state)
    for seed in seeds:
        _copy(whole, hurt)
        what = [damage(hurt / "step-00000002", hurt / "step-00000001", seed) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(what)
        try:
            load(hurt, state, step=2)
            wrong.append(f"{what[0]}: not found")
        except DamagedCheckpointError as error:
            if str(hurt) not in str(error):
                wrong.append(f"{what[0]}: {error}")
        if not all(torch.equal(a, b) for a, b in zip(before, _locals(state), strict=True)):
            wrong.append(f"{what[0]}: state has changed")
            before = _locals(state)
    return wrong


@on_ranks(2)
def test_all_damage_is_found_and_changes_nothing(tmp_path: Path) -> None:
    wrong = cases(str(tmp_path), list(range(NUM_CASES)))
    assert wrong == [], "\n".join(wrong)


@on_ranks(2)
def test_all_ranks_go_back_to_the_newest_checkpoint_that_verifies(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    state = state_of(model, optimizer)
    for step in range(4):
        train(model, optimizer, [step])
        save(tmp_path, state, step=step)
        if step == 1:
            good = _locals(state)
    if dist.get_rank() == 0:
        for name in ("step-00000003/part-00001.safetensors", "step-00000002/manifest.json"):
            path = tmp_path / name
            data = bytearray(path.read_bytes())
            data[-7] ^= 1
            path.write_bytes(data)
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match=r"rank 1: .*part-00001.safetensors: block 0 .* reading"):
        load(tmp_path, state)
    found = load(tmp_path, state, fallback=True)
    assert found.step == 1
    assert ["part-00001" in found.skipped[0], "manifest.json" in found.skipped[1]] == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(good, _locals(state), strict=True))
    save(tmp_path, state, step=9, keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000009"]
