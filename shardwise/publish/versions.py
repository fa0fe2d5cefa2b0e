"""What publisher and readers share: the values of a manifest that make it a version, and the marks of readers."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import Files, read_manifest
from shardwise.checkpoint.format import MANIFEST, Manifest, as_list, as_number, as_table, step_of
from shardwise.errors import DamagedCheckpointError
from shardwise.safe_files import opened

MODEL = "model"  # an anchor is a checkpoint of {"model": model}
PUBLISH = "publish"  # the value of a manifest; those below it are the digests of parts
POSITIONS = "positions"  # of the changes of a part, in the files of a delta
READERS = "readers"  # the folder of their marks


@dataclass(frozen=True, slots=True)
class Version:
    """A version in the folder; ``base``: number and save of the version that it follows, None of an anchor."""

    path: Path
    manifest: Manifest
    base: list[Any] | None

    @property
    def identity(self) -> list[Any]:
        """Return what the ``base`` of the next version is."""
        return [self.manifest.step, self.manifest.save_id]


def read_version(files: Files, path: Path) -> Version:
    """Return the version in the folder ``path``.  Raises: DamagedCheckpointError, also for a checkpoint of a run."""
    manifest, what = read_manifest(files, path), f"{path}: {PUBLISH}"
    if step_of(path.name) != manifest.step:
        raise DamagedCheckpointError(f"{path / MANIFEST}: is that of step {manifest.step}")
    base = as_table(manifest.values.get(PUBLISH), what).get("base")
    if base is not None:
        as_number(as_list(base, f"{what}.base", 2)[0], f"{what}.base", manifest.step - 1)
    return Version(path, manifest, base)


# ---- Marks: a locked file per reader. The kernel releases the lock when the process has ended, on whatever host.


def write_mark(fd: int, version: int, is_reading: bool) -> None:
    """Write that a reader has ``version`` (0: none), and whether it is reading others."""
    os.pwrite(fd, f"{version:020d} {is_reading:d}\n".encode(), 0)


def live_marks(folder: Path) -> dict[str, tuple[int, bool]]:
    """Return what each live reader has, and whether it reads; remove the marks of those that have ended."""
    found: dict[str, tuple[int, bool]] = {}
    for name in [name for name in Files().names(folder / READERS) if name[0] != "."]:  # those are not locked yet
        with suppress(FileNotFoundError), opened(folder, f"{READERS}/{name}", os.O_RDWR) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it lives, or the file system has no locks
                version, _, is_reading = os.pread(fd, 23, 0).decode(errors="replace").partition(" ")
                found[name] = int(version) if version.isdecimal() else 0, is_reading != "0\n"
            else:
                (folder / READERS / name).unlink()
    return found
