"""A rank reads the blocks that hold its ranges, and no others; what it reads it has verified."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers.fake_disk import FakeDisk

from shardwise.checkpoint.contents import LoadRequests
from shardwise.checkpoint.files import read_requests, verify
from shardwise.checkpoint.format import Held, Manifest, Window, bytes_of, share_out
from shardwise.checkpoint.save import SaveId, make_manifest, write_manifest, write_part
from shardwise.errors import DamagedCheckpointError

FOLDER, BLOCK = Path("/disk/run"), 256
SAVE = SaveId("ab" * 16, 3)
Shape = tuple[int, ...]


def _shards(shape: Shape, dim: int, size: int) -> list[Window]:
    each = -(-shape[dim] // size)
    found: list[Window] = []
    for rank in range(size):
        start = min(rank * each, shape[dim])
        count = min(each, shape[dim] - start)
        found.append(
            Window((*(0,) * dim, start, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], count, *shape[dim + 1 :]))
        )
    return found


def _cut(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    for dim, (start, count) in enumerate(zip(window.offsets, window.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, count)
    return tensor


def _save(disk: FakeDisk, tensors: dict[str, torch.Tensor], dim: int, size: int) -> Manifest:
    windows = {name: _shards(tuple(tensor.shape), dim, size) for name, tensor in tensors.items()}
    rows = [[Held(n, "F32", tuple(t.shape), (windows[n][rank],)) for n, t in tensors.items()] for rank in range(size)]
    writes = share_out(rows)
    disk.make_folder(FOLDER / SAVE.pending)
    records = {}
    for rank in range(size):
        mine = [write for write in writes if write.rank == rank]
        data = [bytes_of(_cut(tensors[write.name], write.window).contiguous()) for write in mine]
        if mine:
            path = FOLDER / SAVE.pending / f"part-{rank:05d}.safetensors"
            records[rank] = write_part(disk, path, mine, data, SAVE, BLOCK)
    manifest = make_manifest(SAVE, writes, records, size, ({}, {}))
    write_manifest(disk, FOLDER, manifest)
    return manifest


@pytest.mark.parametrize("shape", [(50, 6), (3, 40, 5), (4, 200), (1,), (130,)], ids=str)
@pytest.mark.parametrize(("saved_dim", "dim"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_any_cut_is_read_from_any_other(shape: Shape, saved_dim: int, dim: int) -> None:
    if max(saved_dim, dim) >= len(shape):
        return
    tensors = {f"t{i}": torch.randn(shape) for i in range(3)}
    for saved in (1, 2, 3):
        disk = FakeDisk()
        manifest = _save(disk, tensors, saved_dim, saved)
        assert verify(disk, FOLDER / "step-00000003") == []
        for size in (1, 2, 5):
            for rank in range(size):
                order = LoadRequests(manifest)
                wanted = [(name, _shards(shape, dim, size)[rank]) for name in tensors]
                targets = [order.windows(name, shape, [window]) for name, window in wanted]
                read_requests(disk, FOLDER / "step-00000003", manifest, order.requests)
                for (name, window), found in zip(wanted, targets, strict=True):
                    assert found is not None
                    assert torch.equal(found[0], _cut(tensors[name], window))


def test_a_rank_reads_the_blocks_of_its_rows_alone() -> None:
    tensors = {"t": torch.randn(4096, 8)}
    num_bytes = tensors["t"].numel() * 4
    disk = FakeDisk()
    manifest = _save(disk, tensors, 0, 2)
    for size in (1, 2, 4, 8):
        for rank in range(size):
            order = LoadRequests(manifest)
            order.windows("t", (4096, 8), [_shards((4096, 8), 0, size)[rank]])
            count = read_requests(disk, FOLDER / "step-00000003", manifest, order.requests)
            files = 2 if size == 1 else 1
            assert (
                num_bytes // size <= count <= num_bytes // size + files * 4 * BLOCK
            )  # the header, and blocks at the ends


def test_no_byte_of_a_block_that_was_not_compared_is_handed_out() -> None:
    chance = random.Random(0)
    tensors = {f"t{i}": torch.randn(60, 3) for i in range(3)}
    disk = FakeDisk()
    manifest = _save(disk, tensors, 0, 2)
    path = FOLDER / "step-00000003"
    for _ in range(150):
        name = chance.choice(disk.names(path)[1:])
        inode = disk.nodes[path / name]
        assert inode is not None
        data = disk.inodes[inode].data
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        order = LoadRequests(manifest)
        for tensor in tensors:
            order.windows(tensor, (60, 3), [Window((0, 0), (60, 3))])
        with pytest.raises(
            DamagedCheckpointError,
            match=rf"{name}: block {place // BLOCK} .* reading (t\d|the header)|{name}: belongs to save",
        ):
            read_requests(disk, path, manifest, order.requests)
        assert len(verify(disk, path)) == 1
        data[place] ^= data[place] ^ _original(disk, path / name, place)


def _original(disk: FakeDisk, path: Path, place: int) -> int:
    written = b"".join(op.data for op in disk.ops if op.kind == "write" and op.path.name == path.name)
    return written[place]


def test_a_file_of_another_save_is_named_as_that() -> None:
    disk = FakeDisk()
    manifest = _save(disk, {"t": torch.zeros(60, 3)}, 0, 2)
    path = FOLDER / "step-00000003"
    for name in disk.names(path)[1:]:
        inode = disk.nodes[path / name]
        assert inode is not None
        data = disk.inodes[inode].data
        data[:] = data.replace(SAVE.save_id.encode(), b"cd" * 16)
    order = LoadRequests(manifest)
    order.windows("t", (60, 3), [Window((0, 0), (60, 3))])
    with pytest.raises(DamagedCheckpointError, match=f"belongs to save {'cd' * 16}, expected {SAVE.save_id}"):
        read_requests(disk, path, manifest, order.requests)
