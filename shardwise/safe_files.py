"""Files in folders that another user may have made: the package reads and writes them only through this module.

The user names a folder, which may be a link; its contents may not.  Names are relative to the opened folder, no link is
followed, only regular files are opened (a FIFO would block, a device has no end), and sizes are checked before memory
is allocated.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from shardwise.errors import UnsafeFileError

MOST_BYTES = 2**28  # of a file that is read whole
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o666  # minus the umask
_KINDS = {errno.ELOOP: "a symbolic link", errno.ENXIO: "a FIFO or a device", errno.EISDIR: "a folder"}


@contextmanager
def opened(folder: Path, name: str, flags: int = os.O_RDONLY) -> Generator[int, None, None]:
    """Yield the descriptor of the regular file ``name`` in ``folder``.

    Raises: UnsafeFileError for links and for anything but a regular file; other errors are those of the system.
    """
    with _parent(folder, name, False) as (parent, last):
        fd = _opened(folder / name, last, flags | _FILE, parent)
    try:
        yield fd
    finally:
        os.close(fd)


def open_input(folder: Path, name: str, most_bytes: int | None = None) -> IO[bytes]:
    """Return a file to read.  Raises: UnsafeFileError, also if it has more than ``most_bytes``."""
    with opened(folder, name) as fd:
        num_bytes = os.fstat(fd).st_size
        if most_bytes is not None and num_bytes > most_bytes:
            raise UnsafeFileError(f"{folder / name}: {num_bytes} bytes, expected at most {most_bytes}. Remove it")
        return os.fdopen(os.dup(fd), "rb")


def read_bytes(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the contents of a file.  Raises: UnsafeFileError, also if it has more than ``most_bytes``."""
    with open_input(folder, name, most_bytes) as file:
        return file.read(most_bytes)


def read_text(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file; bytes that are not UTF-8 become replacement characters.  Raises: UnsafeFileError."""
    return read_bytes(folder, name, most_bytes).decode(errors="replace")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file.  Raises: UnsafeFileError if it contains something else."""
    return parse_object(read_text(folder, name), str(folder / name))


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in ``text``.  Raises: UnsafeFileError with ``what`` if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsafeFileError(f"{what}: cannot be read: not the JSON that was written ({str(error)[:120]})") from None
    if not isinstance(found, dict):
        raise UnsafeFileError(f"{what}: holds a {type(found).__name__}, expected a JSON object")
    return cast(dict[str, Any], found)


def create_file(folder: Path, name: str) -> IO[bytes]:
    """Return a new file to write, replacing one of that name."""
    with _parent(folder, name, True) as (parent, last):
        with suppress(FileNotFoundError):
            os.unlink(last, dir_fd=parent)
        return os.fdopen(_opened(folder / name, last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, parent), "wb")


def replace_file(folder: Path, name: str, content: str | bytes) -> None:
    """Write ``content`` to a temporary name and rename it: readers see the old file or the new one."""
    *between, last = name.split("/")
    beside = "/".join([*between, f".{last}.writing"])
    with create_file(folder, beside) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    move_file(folder, beside, name)


def move_file(folder: Path, name: str, to: str) -> None:
    """Rename a file in ``folder``, replacing one of the new name."""
    with _parent(folder, name, False) as (old, last), _parent(folder, to, True) as (new, other):
        os.replace(last, other, src_dir_fd=old, dst_dir_fd=new)


def open_append(folder: Path, name: str) -> IO[str]:
    """Return a file to append text to.  Raises: UnsafeFileError."""
    with opened(folder, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        return os.fdopen(os.dup(fd), "a")


@contextmanager
def opened_folder(folder: Path, name: str) -> Generator[str, None, None]:
    """Yield a name for the folder ``name``, created if missing, that follows no link and is plain text in any case."""
    with _parent(folder, f"{name}/", True) as (fd, _):
        yield f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self/fd") else str(folder / name)


def check_folders(folder: Path, names: Iterable[str]) -> None:
    """Refuse folders in ``folder`` that are something else, above all links.  Raises: UnsafeFileError."""
    for name in names:
        with suppress(FileNotFoundError), _parent(folder, f"{name}/", False):
            pass


@contextmanager
def _parent(folder: Path, name: str, makes: bool) -> Generator[tuple[int, str], None, None]:
    *between, last = name.split("/")
    fd = os.open(folder, _FOLDER)
    try:
        for part in between:
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            try:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except NotADirectoryError as error:  # also raised for a link
                raise UnsafeFileError(
                    f"{folder / name}: {part} is a link or a file, expected a folder. Remove it"
                ) from error
            os.close(fd)
            fd = inner
        yield fd, last
    finally:
        os.close(fd)


def _opened(path: Path, last: str, flags: int, parent: int) -> int:
    try:
        fd = os.open(last, flags, _MODE, dir_fd=parent)
    except OSError as error:
        if error.errno in _KINDS:
            raise _not_regular(path, _KINDS[error.errno]) from error
        error.filename = str(path)
        raise
    found = os.fstat(fd).st_mode
    if stat.S_ISREG(found):
        return fd
    os.close(fd)
    raise _not_regular(path, "a folder" if stat.S_ISDIR(found) else "a FIFO or a device")


def _not_regular(path: Path, kind: str) -> UnsafeFileError:
    return UnsafeFileError(f"{path}: is {kind}, expected a regular file. Remove it")
