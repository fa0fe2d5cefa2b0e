"""torch's own DCP folders are read without running anything."""

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

from shardwise.checkpoint.dcp import TorchDcpReader
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
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def load_safely(folder: str) -> None:
    model, optimizer = made("fully_shard", seed=1)
    state = _state(model, optimizer)
    state["progress"] = {"epoch": 0, "ratio": (0.0, None)}
    dcp.load(state, storage_reader=TorchDcpReader(folder))
    assert state["progress"] == {"epoch": 3, "ratio": (0.5, None)}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    train(model, optimizer, range(NUM_SAVED, NUM_STEPS))
    assert differences(model, expected()) == []


def test_dcps_own_folders_are_read_safely_at_another_number_of_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_both, num_ranks=2, folder=str(tmp_path))
    pool.run(load_safely, num_ranks=3, folder=str(tmp_path))


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
