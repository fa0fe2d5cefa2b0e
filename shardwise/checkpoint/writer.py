"""What a save writes: the file of one rank, and the manifest that makes all of them a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.blocks import BLOCK_BYTES, BlockSums
from shardwise.checkpoint.files import Buffer, Files, write_all
from shardwise.checkpoint.folder import commit
from shardwise.checkpoint.header import SAVE_KEY, STEP_KEY, make_header
from shardwise.checkpoint.manifest import FileRecord, Manifest, PartRecord, TensorRecord, to_bytes
from shardwise.checkpoint.names import MANIFEST, SAVING, step_folder
from shardwise.checkpoint.plan import Write


@dataclass(frozen=True, slots=True)
class SaveId:
    """Which save it is, and of which step."""

    save_id: str
    step: int

    @property
    def pending(self) -> str:
        """The folder while it is being written."""
        return f"{SAVING}{self.save_id}"

    def metadata(self) -> dict[str, str]:
        """Return what every file of the save says of itself."""
        return {"format": "pt", SAVE_KEY: self.save_id, STEP_KEY: str(self.step)}


def write_part(
    files: Files,
    path: Path,
    writes: Sequence[Write],
    data: Sequence[Buffer],
    save: SaveId,
    block_bytes: int = BLOCK_BYTES,
) -> FileRecord:
    """Write and sync the file with ``writes``, whose bytes are ``data``; return its record."""
    header, _ = make_header(writes, save.metadata())
    sums, num_bytes = BlockSums(block_bytes), 0
    file = files.create(path)
    try:
        for chunk in (header, *data):
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), block_bytes):
                block = view[start : start + block_bytes]
                sums.update(block)  # while it is in the caches
                file.write(block)
            num_bytes += len(view)
        file.sync()
    finally:
        file.close()
    files.sync_folder(path.parent)  # the name, made by this host: on a shared disk rank 0 may know less
    return FileRecord(path.name, num_bytes, block_bytes, tuple(sums.finish()))


def make_manifest(
    save: SaveId,
    writes: Sequence[Write],
    records: Mapping[int, FileRecord],
    num_ranks: int,
    extra: tuple[Mapping[str, str], Mapping[str, Any]],
) -> Manifest:
    """Return the manifest of a save; ``records``: the file of each rank that wrote one; ``extra``: ties and values."""
    ranks = sorted(records)
    begins: dict[int, list[int]] = {
        rank: make_header([write for write in writes if write.rank == rank], save.metadata())[1] for rank in ranks
    }
    tensors: dict[str, tuple[Write, list[PartRecord]]] = {}
    for write in writes:
        begin = begins[write.rank].pop(0)
        part = PartRecord(ranks.index(write.rank), write.key, write.window, begin, begin + write.num_bytes)
        tensors.setdefault(write.name, (write, []))[1].append(part)
    table = {name: TensorRecord(w.dtype, w.shape, tuple(parts)) for name, (w, parts) in sorted(tensors.items())}
    ties, values = extra
    return Manifest(save.save_id, save.step, num_ranks, tuple(records[r] for r in ranks), table, ties, values)


def write_manifest(files: Files, folder: Path, manifest: Manifest) -> Path:
    """Commit the save that is in its pending folder, by its manifest and one rename; return where it is then."""
    save = SaveId(manifest.save_id, manifest.step)
    pending = folder / save.pending
    write_all(files, pending / MANIFEST, to_bytes(manifest))
    files.sync_folder(pending)
    return commit(files, pending, folder / step_folder(manifest.step))
