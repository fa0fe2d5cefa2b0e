"""Files of other tools as a checkpoint: safetensors files with the tensors of one model, as Hugging Face has them."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.checkpoint.blocks import BLOCK_BYTES
from shardwise.checkpoint.files import Files, read_all, reading
from shardwise.checkpoint.header import LENGTH_BYTES, Header, header_bytes, parse_header
from shardwise.checkpoint.json_fields import as_table, as_text, parse_json
from shardwise.checkpoint.manifest import FileRecord, Manifest, PartRecord, TensorRecord
from shardwise.checkpoint.names import join
from shardwise.checkpoint.plan import whole
from shardwise.errors import CheckpointError, DamagedCheckpointError

_BLOBS = "blobs"  # where Hugging Face's cache has the files that its snapshots link to
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_foreign(files: Files, path: Path) -> tuple[Path, list[str]] | None:
    """Return the folder and names of the safetensors files that ``path`` stands for; None if it is something else.

    ``path``: a file, or a folder with ``model.safetensors`` or its index.
    Raises: DamagedCheckpointError for an index that leads out of its folder.
    """
    path = path.resolve()  # what the user names may be a link
    if path.suffix == ".safetensors" or (path.is_file() and path.parent.name == _BLOBS):
        return path.parent, [path.name]
    names = files.names(path)
    if INDEX in names:
        what = str(path / INDEX)
        fields = parse_json(read_all(files, path / _real_name(path, INDEX), 2**30), what)
        table = as_table(fields.get("weight_map"), f"{what}: weight_map")
        found = sorted({as_text(name, f"{what}: weight_map") for name in table.values()})
        outside = [name for name in found if "/" in name or "\\" in name or not name.endswith(".safetensors")]
        if outside:
            raise DamagedCheckpointError(f"{what}: weight_map: {outside[0][:80]!r} is no file of this folder")
        return path, [_real_name(path, name) for name in found]
    return (path, [_real_name(path, SINGLE)]) if SINGLE in names else None


def _real_name(folder: Path, name: str) -> str:
    """Return the file that ``name`` stands for: in a snapshot of Hugging Face's cache it is a link into ``blobs``."""
    place = folder / name
    target = os.path.normpath(folder / os.readlink(place)) if place.is_symlink() else ""
    places = [folder.parent / _BLOBS, folder.parent.parent / _BLOBS]
    is_own = Path(target).parent in places and not Path(target).parent.is_symlink()
    return os.path.relpath(target, folder) if is_own else name


def foreign_manifest(files: Files, folder: Path, names: list[str], prefix: str) -> Manifest:
    """Return what is in these files, as tensors of the model called ``prefix``; there are no sums to verify them by.

    Raises: DamagedCheckpointError for what is no safetensors file; CheckpointError for a tensor in two of them.
    """
    records: list[FileRecord] = []
    tensors: dict[str, TensorRecord] = {}
    for number, name in enumerate(names):
        header, num_bytes = read_header(files, folder / name)
        records.append(FileRecord(name, num_bytes, BLOCK_BYTES, ()))
        for key, entry in header.entries.items():
            full = join(prefix, key)
            if full in tensors:
                raise CheckpointError(f"{folder / name}: {key!r} is in another file too")
            part = PartRecord(number, key, whole(entry.shape), entry.begin, entry.end)
            tensors[full] = TensorRecord(entry.dtype, entry.shape, (part,))
    return Manifest("0" * 32, 0, 1, tuple(records), tensors)


def read_header(files: Files, path: Path) -> tuple[Header, int]:
    """Return the header of a safetensors file and the file's size.  Raises: DamagedCheckpointError."""
    with reading(files, path) as file:
        start = bytearray(LENGTH_BYTES)
        file.read_into(0, memoryview(start))
        data = bytearray(header_bytes(bytes(start), file.num_bytes, str(path)))
        file.read_into(0, memoryview(data))
        return parse_header(bytes(data), file.num_bytes, str(path)), file.num_bytes
