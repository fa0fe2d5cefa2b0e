"""Whenever the machine stops, a folder of checkpoints holds the old state or the new one, whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.fake_disk import FakeDisk

from shardwise.checkpoint.contents import LoadRequests
from shardwise.checkpoint.files import Files, clean, keep_last, list_checkpoints, read_manifest, read_requests, verify
from shardwise.checkpoint.format import Held, Window, bytes_of, share_out
from shardwise.checkpoint.save import SaveId, make_manifest, write_manifest, write_part
from shardwise.errors import CheckpointError

FOLDER = Path("/disk/run")
ROWS, RANKS, BLOCK = 4, 2, 300


def save(disk: Files, step: int, value: float, keep: int | None = None) -> None:
    """Save a tensor of ``value`` as three ranks do."""
    save_id = SaveId(f"{step:030x}{int(value):02x}", step)
    rows = [[Held("model/a", "F32", (ROWS, 4), (Window((2 * r, 0), (2, 4)),))] for r in range(RANKS)]
    writes = share_out(rows)
    disk.make_folder(FOLDER)
    clean(disk, FOLDER)
    disk.make_folder(FOLDER / save_id.pending)
    data = bytes_of(torch.full((2, 4), value))
    records = {
        rank: write_part(
            disk,
            FOLDER / save_id.pending / f"part-{rank:05d}.safetensors",
            [write for write in writes if write.rank == rank],
            [data],
            save_id,
            BLOCK,
        )
        for rank in range(RANKS)
    }
    write_manifest(disk, FOLDER, make_manifest(save_id, writes, records, RANKS, ({}, {"value": value})))
    if keep is not None:
        keep_last(disk, FOLDER, keep, save_id.step)


def states(disk: Files) -> dict[int, float]:
    """Return the value that each committed checkpoint holds; each of them is whole."""
    found: dict[int, float] = {}
    for checkpoint in list_checkpoints(disk, FOLDER):
        assert verify(disk, checkpoint.path) == []
        manifest = read_manifest(disk, checkpoint.path)
        order = LoadRequests(manifest)
        tensor = order.whole("model/a")
        read_requests(disk, checkpoint.path, manifest, order.requests)
        assert torch.equal(tensor, torch.full((ROWS, 4), float(manifest.values["value"])))
        found[checkpoint.step] = manifest.values["value"]
    return found


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_after_every_crash_the_old_state_or_the_new_one_is_whole(step: int) -> None:
    disk = FakeDisk()
    save(disk, 1, 1.0)
    disk.sync_folder(FOLDER.parent)  # a folder that is itself lost has no old state
    disk.sync_folder(FOLDER.parent.parent)
    begin = len(disk.ops)
    save(disk, step, 2.0)
    old, new = {1: 1.0}, {1: 1.0, step: 2.0}
    for stop in range(begin, len(disk.ops) + 1):
        for left in disk.crashes(stop, seed=stop):
            found = states(left)
            assert found in (old, new), (stop, disk.ops[stop - 1])
            assert stop < len(disk.ops) or found == new
            save(left, 7, 7.0)  # and the next save goes well
            assert states(left) == {**found, 7: 7.0}
            assert not [name for name in left.names(FOLDER) if name.startswith(".")]


def test_after_every_crash_of_a_removal_what_is_left_is_whole() -> None:
    disk = FakeDisk()
    for step in (1, 2, 3):
        save(disk, step, float(step))
    for path in (FOLDER.parent, FOLDER.parent.parent):
        disk.sync_folder(path)
    begin = len(disk.ops)
    save(disk, 4, 4.0, keep=2)
    assert states(disk) == {3: 3.0, 4: 4.0}
    for stop in range(begin, len(disk.ops) + 1):
        for left in disk.crashes(stop, seed=stop):
            found = states(left)
            assert max(found) in (3, 4)
            assert found == {step: float(step) for step in found}


def test_a_full_disk_leaves_the_old_state() -> None:
    whole = FakeDisk()
    save(whole, 1, 1.0)
    first = len(whole.ops)
    save(whole, 2, 2.0)
    for stop in range(first, len(whole.ops)):
        disk = FakeDisk()
        save(disk, 1, 1.0)
        disk.stop_after = stop
        with pytest.raises((OSError, CheckpointError)):
            save(disk, 2, 2.0)
        assert states(disk) in ({1: 1.0}, {1: 1.0, 2: 2.0})
