"""What publisher and readers share: the entry of a manifest that makes it a version, and the marks of readers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardwise.checkpoint.files import Files, read_manifest
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    MANIFEST,
    Manifest,
    as_list,
    as_number,
    as_table,
    as_text,
    step_of,
    wrong,
)
from shardwise.errors import DamagedCheckpointError
from shardwise.publish.delta import WORD_BYTES
from shardwise.safe_files import opened

MODEL = "model"  # an anchor is a checkpoint of {"model": model}
PUBLISH = "publish"  # the value of a manifest
POSITIONS, VALUES, WHOLE = "positions", "values", "whole"  # of a part, in the files of a delta
READERS = "readers"  # the folder of their marks


def key_of(name: str) -> int:
    """Return the key of the digests of the tensor ``name``, a signed number of 64 bits."""
    return xxhash.xxh3_64_intdigest(name.encode()) - 2**63


@dataclass(frozen=True, slots=True)
class Version:
    """A version in the folder.

    Attributes:
        base: the number and the save of the version that it follows; None of an anchor, whose manifest has the tensors.
        digests: of whole tensors, by name.
    """

    path: Path
    manifest: Manifest
    base: tuple[int, str] | None
    digests: Mapping[str, int]

    @property
    def identity(self) -> tuple[int, str]:
        """Return what the ``base`` of the next version is."""
        return self.manifest.step, self.manifest.save_id


def read_version(files: Files, path: Path) -> Version:
    """Return the version in the folder ``path``.  Raises: DamagedCheckpointError, also for a checkpoint of a run."""
    manifest, what = read_manifest(files, path), f"{path}: {PUBLISH}"
    if step_of(path.name) != manifest.step:
        raise DamagedCheckpointError(f"{path / MANIFEST}: is that of step {manifest.step}")
    fields = as_table(manifest.values.get(PUBLISH), what)
    base = fields.get("base")
    if base is not None:
        number, save_id = as_list(base, f"{what}.base", 2)
        base = as_number(number, f"{what}.base", manifest.step - 1), as_text(save_id, f"{what}.base")
    try:
        digests = {name: int(each, 16) for name, each in as_table(fields.get("digests"), f"{what}.digests").items()}
    except (TypeError, ValueError):
        raise wrong(f"{what}.digests", "hex digits", fields["digests"]) from None
    is_anchor = digests.keys() == manifest.tensors.keys()
    if base is None and not (
        is_anchor and all(DTYPE_BYTES[each.dtype] <= WORD_BYTES for each in manifest.tensors.values())
    ):
        raise DamagedCheckpointError(f"{what}.digests: not those of the tensors of this anchor")
    return Version(path, manifest, base, digests)


# ---- Marks: a locked file per reader. The kernel releases the lock when the process has ended, on whatever host.


def write_mark(fd: int, version: int, reading: int) -> None:
    """Write that a reader has ``version`` (0: none) and reads what begins at ``reading`` (0: nothing)."""
    os.pwrite(fd, f"{version:020d} {reading:020d}\n".encode(), 0)


def live_marks(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what each live reader has and reads; remove the marks of those that have ended."""
    found: dict[str, tuple[int, int]] = {}
    for name in [name for name in Files().names(folder / READERS) if name[0] != "."]:  # those are not locked yet
        with suppress(FileNotFoundError), opened(folder, f"{READERS}/{name}", os.O_RDWR) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it lives, or the file system has no locks
                version, _, reading = os.pread(fd, 41, 0).decode(errors="replace").partition(" ")
                is_mark = version.isdecimal() and reading.isdecimal()
                found[name] = (int(version), int(reading)) if is_mark else (0, 1)
            else:
                (folder / READERS / name).unlink()
    return found
