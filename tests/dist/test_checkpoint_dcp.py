"""Callers of DCP get commit and checksums by one argument, and torch's own folders are read without running anything."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoints import NUM_SAVED, NUM_STEPS, differences, expected, made, train
from helpers.ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwise.checkpoint.dcp import DcpReader, DcpWriter, TorchDcpReader
from shardwise.checkpoint.files import Files, verify
from shardwise.errors import CheckpointError
from shardwise.testing import WorkerPool

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    states = get_state_dict(model, optimizer, options=FLAT)
    return {"model": states[0], "optimizer": states[1], "progress": {"epoch": 3, "ratio": (0.5, None)}}


def save_both(folder: str) -> None:
    model, optimizer = made("fully_shard")
    train(model, optimizer, range(NUM_SAVED))
    optimizer.param_groups[0]["lr"] = 0.07
    for _ in range(2):  # the second replaces the first
        dcp.save(_state(model, optimizer), storage_writer=DcpWriter(f"{folder}/step-00000002"))
    dcp.save(_state(model, optimizer), checkpoint_id=f"{folder}/torch")


def load_each(folder: str) -> None:
    for reader in (DcpReader(f"{folder}/step-00000002"), TorchDcpReader(f"{folder}/torch")):
        model, optimizer = made("fully_shard", seed=1)
        state = _state(model, optimizer)
        state["progress"] = {"epoch": 0, "ratio": None}
        if isinstance(reader, TorchDcpReader):
            state["progress"] = {"epoch": 0, "ratio": (0.0, None)}
        dcp.load(state, storage_reader=reader)
        assert state["progress"] == {"epoch": 3, "ratio": (0.5, None)}
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT
        )
        train(model, optimizer, range(NUM_SAVED, NUM_STEPS))
        assert differences(model, expected()) == []


def test_dcp_saves_and_loads_through_our_format_and_reads_its_own_safely(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_both, num_ranks=2, folder=str(tmp_path))
    assert verify(Files(), tmp_path / "step-00000002") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "torch"]
    pool.run(load_each, num_ranks=3, folder=str(tmp_path))


@on_ranks(2)
def test_damage_is_found_through_dcp_and_changes_nothing(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": 3}
    dcp.save(state, storage_writer=DcpWriter(tmp_path / "x"))
    if dist.get_rank() == 0:
        path = next((tmp_path / "x").glob("part-*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    target = {"a": torch.zeros(6), "b": 0}
    with pytest.raises(CheckpointException, match="block 0"):
        dcp.load(target, storage_reader=DcpReader(tmp_path / "x"))
    assert torch.equal(target["a"], torch.zeros(6))


class _Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@on_ranks(2)
def test_metadata_that_names_other_things_runs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    dcp.save({"a": torch.ones(2), "b": {"c": 1}}, checkpoint_id=folder)
    fine = {"a": torch.zeros(2), "b": {"c": 0}}
    dcp.load(fine, storage_reader=TorchDcpReader(folder))
    assert torch.equal(fine["a"], torch.ones(2))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / ".metadata").write_bytes(pickle.dumps(_Runs()))
    dist.barrier()
    with pytest.raises(CheckpointException, match="which DCP's metadata does not"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=TorchDcpReader(folder))
    assert not Path("ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_in_torchs_folders_run_nothing(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": _Runs()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="more than plain values"):
        dcp.load({"a": torch.zeros(2), "b": None}, storage_reader=TorchDcpReader(tmp_path), no_dist=True)
    assert not Path("ran").exists()
    with pytest.raises(CheckpointError, match="not the metadata"):
        (tmp_path / ".metadata").write_bytes(b"\x80\x04.")
        TorchDcpReader(tmp_path).read_metadata()
