"""The small file layer: everything that a checkpoint does to a disk, so that a fake can stand for one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shardwise.errors import DamagedCheckpointError, UnsafeFileError
from shardwise.safe_files import opened

_MOST_HOLLOW = 1024  # times: file systems that compress leave fewer blocks than bytes, but not so few
Buffer = bytes | bytearray | memoryview


class Output(Protocol):
    """A file that is being written."""

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        ...

    def sync(self) -> None:
        """Return when what was written would outlive the machine."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Input(Protocol):
    """A file that is being read; ``num_bytes`` when it was opened."""

    num_bytes: int

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``begin`` on.  Raises: DamagedCheckpointError if the file ends before."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Files(Protocol):
    """A file system.  Errors are those of the operating system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it that are missing."""
        ...

    def create(self, path: Path) -> Output:
        """Return a new file.  Raises: FileExistsError."""
        ...

    def open(self, path: Path) -> Input:
        """Return a regular file, not through a link.  Raises: DamagedCheckpointError if it is something else."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder would outlive the machine."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name; a file of that name is replaced at once."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all in it; nothing happens if it is not there."""
        ...

    def names(self, path: Path) -> list[str]:
        """Return what is in a folder, sorted; nothing if the folder is not there."""
        ...


class DiskFiles:
    """The files of this machine.  ``root``: a folder within which no link leads to another folder."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def make_folder(self, path: Path) -> None:
        """See :class:`Files`."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> Output:
        """See :class:`Files`."""
        return _DiskOutput(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def open(self, path: Path) -> Input:
        """See :class:`Files`."""
        try:
            fd = self._opened(path)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path}: the file is missing") from None
        except UnsafeFileError as error:
            raise DamagedCheckpointError(str(error)) from error
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        status = os.fstat(fd)
        if status.st_size > 2**30 + _MOST_HOLLOW * 512 * status.st_blocks > 2**30:
            os.close(fd)
            raise DamagedCheckpointError(
                f"{path}: has {status.st_size} bytes, {512 * status.st_blocks} of them on the disk: a save leaves no holes"
            )
        return _DiskInput(path, fd, status.st_size)

    def _opened(self, path: Path) -> int:
        folder, name = path.parent, path.name
        if self._root is not None and path.is_relative_to(self._root):
            folder, name = self._root, str(path.relative_to(self._root))
        with opened(folder, name) as fd:
            return os.dup(fd)

    def sync_folder(self, path: Path) -> None:
        """See :class:`Files`."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """See :class:`Files`."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """See :class:`Files`."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def names(self, path: Path) -> list[str]:
        """See :class:`Files`."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []


class _DiskOutput:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(self._fd, view[: 2**30]) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _DiskInput:
    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self._path, self._fd, self.num_bytes = path, fd, num_bytes

    def read_into(self, begin: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + 2**30]], begin + done)
            except OSError as error:
                raise DamagedCheckpointError(f"{self._path}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise DamagedCheckpointError(f"{self._path}: ends at byte {begin + done}, it was longer")
            done += count

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def reading(files: Files, path: Path) -> Generator[Input]:
    """Open a file for the time of a ``with``."""
    file = files.open(path)
    try:
        yield file
    finally:
        file.close()


def read_all(files: Files, path: Path, most_bytes: int = 2**34) -> bytes:
    """Return all bytes of a file.  Raises: DamagedCheckpointError if it is longer than ``most_bytes``."""
    with reading(files, path) as file:
        if file.num_bytes > most_bytes:
            raise DamagedCheckpointError(f"{path}: {file.num_bytes} bytes, expected at most {most_bytes}")
        data = bytearray(file.num_bytes)
        file.read_into(0, memoryview(data))
        return bytes(data)


def write_all(files: Files, path: Path, data: Buffer) -> None:
    """Write a new file, and return when it would outlive the machine."""
    file = files.create(path)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()
