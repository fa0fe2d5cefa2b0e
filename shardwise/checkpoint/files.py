"""The file layer: everything that a checkpoint does to a disk, so that tests can replace it."""

from __future__ import annotations

import atexit
import errno
import fcntl
import io
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch

from shardwise.checkpoint.contents import Request
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    LOCK,
    MANIFEST,
    REMOVING,
    REPLACED,
    SAVE_KEY,
    SAVING,
    ByteRange,
    FileRecord,
    Header,
    Manifest,
    PartRecord,
    bytes_of,
    from_bytes,
    header_bytes,
    parse_header,
    runs_of,
    step_of,
    sum_of,
)
from shardwise.errors import CheckpointError, DamagedCheckpointError, UnsafeFileError
from shardwise.safe_files import open_append, opened, read_text

# ---- One job per folder: a locked file that names the job; the kernel releases the lock when the process has ended, on
# whatever host, and with it those that it forked.

_locks: dict[Path, tuple[int, IO[str]]] = {}  # those of a process, by path


def take(folder: Path) -> bool:
    """Acquire the lock of ``folder`` for this process; return False if it has it already.

    Raises: CheckpointError with the job that has it.
    """
    path = folder.resolve() / LOCK
    if path in _locks and _locks[path][0] == os.getpid():
        return False
    while True:
        with suppress(FileNotFoundError), ExitStack() as stack:  # not found: its owner has just removed it
            file = stack.enter_context(open_append(folder, LOCK))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:  # else the file system has no locks
                    owner = read_text(folder, LOCK, 4096)
                    raise CheckpointError(
                        f"{folder} is being written by another job: {owner}. Save into another folder, or end that job"
                    ) from error
            mine = os.fstat(file.fileno())
            if os.path.samestat(mine, path.lstat()):
                if not mine.st_size:
                    stack.pop_all()
                    break
                path.unlink()  # of a process that has ended; or a hard link to what is not ours to write
    text = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        os.write(file.fileno(), text.encode())
    except OSError:  # a full disk: the error would keep this frame, and with it the lock
        path.unlink(missing_ok=True)
        file.close()
        raise
    _locks[path] = os.getpid(), file
    return True


@atexit.register
def give_back_all() -> None:
    """Release the locks of this process."""
    for path in list(_locks):
        give_back(path.parent)


def give_back(folder: Path) -> None:
    """Release the lock if this process has it."""
    path = folder.resolve() / LOCK
    pid, file = _locks.pop(path, (0, None))
    if file is not None and pid == os.getpid():
        path.unlink(missing_ok=True)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have it open
        file.close()


_MOST_HOLLOW = 1024  # times: file systems with compression use fewer blocks than bytes, but not that few
Buffer = bytes | bytearray | memoryview


class Files:
    """The files of this machine.  ``root``: a folder inside which no link leads to another folder.

    Errors are those of the operating system.  Tests have an in-memory class with the same methods.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> Output:
        """Return a new file.  Raises: FileExistsError."""
        return Output(io.FileIO(path, "x"))

    def open(self, path: Path) -> Input:
        """Open a regular file, not through a link.  Raises: DamagedCheckpointError if it is something else."""
        folder, name = path.parent, path.name
        if self._root is not None and path.is_relative_to(self._root):
            folder, name = self._root, str(path.relative_to(self._root))
        try:
            with opened(folder, name) as opened_fd:
                fd = os.dup(opened_fd)
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
        return Input(path, fd, status.st_size)

    def sync_folder(self, path: Path) -> None:
        """Return once the names in a folder would survive a crash of the machine."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder; a file of the new name is replaced atomically."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; nothing if the folder does not exist."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []


class Output(io.BufferedWriter):
    """A file that is being written."""

    def sync(self) -> None:
        """Return once the written bytes would survive a crash of the machine."""
        self.flush()
        os.fsync(self.fileno())


class Input:
    """A file that is being read; ``num_bytes``: its size when it was opened."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self._path, self._fd, self.num_bytes = path, fd, num_bytes

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``begin`` on.  Raises: DamagedCheckpointError if the file ends earlier."""
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
        """Close the file."""
        os.close(self._fd)


def read_all(files: Files, path: Path, most_bytes: int = 2**34) -> bytes:
    """Return all bytes of a file.  Raises: DamagedCheckpointError if it is longer than ``most_bytes``."""
    with closing(files.open(path)) as file:
        if file.num_bytes > most_bytes:
            raise DamagedCheckpointError(f"{path}: {file.num_bytes} bytes, expected at most {most_bytes}")
        data = bytearray(file.num_bytes)
        file.read_into(0, memoryview(data))
        return bytes(data)


def write_all(files: Files, path: Path, data: Buffer) -> None:
    """Write a new file; return once it would survive a crash of the machine."""
    with closing(files.create(path)) as file:
        file.write(data)
        file.sync()


# ---- Reading: exactly the blocks that are needed, each compared with its checksum before its bytes are used.


def read_manifest(files: Files, checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint.  Raises: DamagedCheckpointError if it has changed since it was written."""
    path = checkpoint / MANIFEST
    return from_bytes(read_all(files, path), str(path))


def read_header(read_into: Callable[[int, memoryview], object], num_bytes: int, path: Path) -> Header:
    """Return the header of the safetensors file at ``path``, of ``num_bytes``.  Raises: DamagedCheckpointError."""
    start = bytearray(LENGTH_BYTES)
    read_into(0, memoryview(start))
    data = bytearray(header_bytes(bytes(start), num_bytes, str(path)))
    read_into(0, memoryview(data))
    return parse_header(bytes(data), num_bytes, str(path))


class VerifiedFile:
    """A file that delivers bytes only from blocks that match their checksums.

    Raises: DamagedCheckpointError with the file, the block and what was being read.
    """

    def __init__(self, files: Files, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._file = files.open(path)
        self.num_bytes_read = 0
        self._scratch, self._loaded = bytearray(0), -1
        if self._file.num_bytes != record.num_bytes:
            found = self._file.num_bytes
            self.close()
            raise DamagedCheckpointError(f"{path}: has {found} bytes, {record.num_bytes} were written")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, begin: int, out: memoryview, what: str) -> None:
        """Fill ``out`` with the bytes from ``begin`` on; whole blocks are read in place."""
        size = self._record.block_bytes
        done = 0
        while done < len(out):
            number, start = divmod(begin + done, size)
            length = min(size, self._record.num_bytes - number * size)
            if not start and len(out) - done >= length:
                self._read(number, out[done : done + length], what)
                done += length
                continue
            self._load_block(number, length, what)
            count = min(length - start, len(out) - done)
            out[done : done + count] = memoryview(self._scratch)[start : start + count]
            done += count

    def check(self, number: int, what: str) -> None:
        """Compare one block with its checksum."""
        size = self._record.block_bytes
        self._load_block(number, min(size, self._record.num_bytes - number * size), what)

    def header(self, save_id: str) -> Header:
        """Return the header.  Raises: DamagedCheckpointError, also if the file belongs to another save."""
        record = self._record
        if record.num_bytes < LENGTH_BYTES:
            raise DamagedCheckpointError(f"{self._path}: {record.num_bytes} bytes are too few for a header")
        found = None
        with suppress(DamagedCheckpointError):  # the checksums show where
            found = read_header(self._file.read_into, record.num_bytes, self._path).metadata.get(SAVE_KEY)
        if found is not None and found != save_id:  # checksums would only show that it is another file
            raise DamagedCheckpointError(
                f"{self._path}: belongs to save {found[:40]}, expected {save_id}: files of two saves mix"
            )
        return read_header(partial(self.read_into, what="the header"), record.num_bytes, self._path)

    def _load_block(self, number: int, length: int, what: str) -> None:
        if self._loaded != number:
            self._loaded = -1
            if len(self._scratch) != length:
                self._scratch = bytearray(length)
            self._read(number, memoryview(self._scratch), what)
            self._loaded = number

    def _read(self, number: int, out: memoryview, what: str) -> None:
        self._file.read_into(number * self._record.block_bytes, out)
        self.num_bytes_read += len(out)
        if self._record.sums and sum_of(out) != self._record.sums[number]:
            begin = number * self._record.block_bytes
            raise DamagedCheckpointError(
                f"{self._path}: block {number} (bytes {begin} to {begin + len(out)}) is not what was written; found when "
                f"reading {what}"
            )


def read_requests(files: Files, checkpoint: Path, manifest: Manifest, requests: Iterable[Request]) -> int:
    """Fill the targets of ``requests``; return how many bytes were read.

    Memory: one block besides the targets, and up to a block of rows for targets that are not contiguous.
    Raises: DamagedCheckpointError with file, block and tensor.
    """
    by_file: dict[int, list[tuple[int, ByteRange, Request]]] = {}  # where each range begins in the file
    for request in requests:
        for part in request.record.parts:
            for run in _ranges(part, request, manifest):
                by_file.setdefault(part.file, []).append((part.begin + run.begin, run, request))
    total = 0
    for number, steps in sorted(by_file.items()):
        record = manifest.files[number]
        with closing(VerifiedFile(files, checkpoint / record.name, record)) as file:
            if record.sums:
                file.header(manifest.save_id)
            for begin, run, request in sorted(steps, key=lambda each: each[0]):
                _read_range(file, begin, run, request)
            total += file.num_bytes_read
    return total


def _ranges(part: PartRecord, request: Request, manifest: Manifest) -> list[ByteRange]:
    """Return the bytes of ``part`` that ``request`` needs."""
    common = part.window.meet(request.window) if part.window.sizes else part.window
    if common is None or not common.numel:
        return []
    itemsize = DTYPE_BYTES[request.record.dtype]
    return runs_of(part.window, common, itemsize, max(manifest.files[part.file].block_bytes, itemsize))


def _read_range(file: VerifiedFile, begin: int, run: ByteRange, request: Request) -> None:
    place = run.wanted.cut(request.target, request.window)
    if run.is_exact and place.is_contiguous():
        file.read_into(begin, bytes_of(place), request.name)
        return
    rows = torch.empty(run.hull.sizes, dtype=request.target.dtype, device="cpu")
    file.read_into(begin, bytes_of(rows), request.name)
    place.copy_(run.wanted.cut(rows, run.hull))


def verify(files: Files, checkpoint: Path) -> list[str]:
    """Compare every block of every file with its checksum, and the headers with the manifest; return the defects."""
    try:
        manifest = read_manifest(files, checkpoint)
    except DamagedCheckpointError as error:
        return [str(error)]
    found: list[str] = []
    for number, record in enumerate(manifest.files):
        try:
            with closing(VerifiedFile(files, checkpoint / record.name, record)) as file:
                found += _verify_file(file, manifest, number)
        except DamagedCheckpointError as error:
            found.append(str(error))
    return found


def _verify_file(file: VerifiedFile, manifest: Manifest, number: int) -> list[str]:
    record, found = manifest.files[number], list[str]()
    ranges = sorted((p.begin, p.end, n) for n, t in manifest.tensors.items() for p in t.parts if p.file == number)
    for block in range(len(record.sums)):
        begin = block * record.block_bytes
        inside = [name for start, end, name in ranges if start < begin + record.block_bytes and end > begin]
        try:
            file.check(block, ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "") or "the header")
        except DamagedCheckpointError as error:
            found.append(str(error))
    if found:
        return found
    entries = file.header(manifest.save_id).entries
    parts = [(name, part) for name, tensor in manifest.tensors.items() for part in tensor.parts if part.file == number]
    for name, part in parts:
        entry = entries.get(part.key)
        if entry is None or (entry.begin, entry.end) != (part.begin, part.end):
            found.append(f"{record.name}: {part.key} is not where the manifest says that {name} is")
    return found


# ---- A folder of checkpoints: which ones exist, which is newest, and which may be removed.

_DCP = ".metadata"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    step: int


def list_checkpoints(files: Files, folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints of ``folder``, oldest first, including damaged ones; partial ones do not count."""
    by_step: dict[int, Checkpoint] = {}
    for name in files.names(folder):  # sorted: names that begin with a dot come first, so later names replace them
        step = step_of(name)
        if step is None:
            continue
        inside = files.names(folder / name)
        # Folders get such a name once they are complete, so one without a manifest is damaged. DCP's folders have
        # .metadata.
        if MANIFEST in inside or (not name.startswith(REPLACED) and _DCP not in inside):
            by_step[step] = Checkpoint(folder / name, step)
    return [by_step[step] for step in sorted(by_step)]


def clean(files: Files, folder: Path) -> None:
    """Remove the remains of saves that died.  The caller must have the folder's lock."""
    there = files.names(folder)
    for name in there:
        final = name.removeprefix(REPLACED)
        if final != name and final not in there:
            files.rename(folder / name, folder / final)
            files.sync_folder(folder)
        elif name.startswith((SAVING, REMOVING, REPLACED)):
            files.remove(folder / name)


def commit(files: Files, pending: Path, final: Path) -> Path:
    """Rename a folder that is written and synced to ``final``, replacing one of that name; return ``final``."""
    folder = final.parent
    aside = folder / f"{REPLACED}{final.name}"
    is_there = final.name in files.names(folder)
    if is_there:
        files.remove(aside)
        files.rename(final, aside)
    files.rename(pending, final)
    files.sync_folder(folder)
    if is_there:
        files.remove(aside)
    return final


def keep_last(files: Files, folder: Path, keep: int, step: int) -> None:
    """Remove all but the last ``keep`` checkpoints up to ``step``, which is complete; later ones are not this run's."""
    for checkpoint in [each for each in list_checkpoints(files, folder) if each.step <= step][:-keep]:
        remove_checkpoint(files, checkpoint.path)


def remove_checkpoint(files: Files, path: Path) -> None:
    """Remove a checkpoint, which at no time is there in part."""
    aside = path.parent / f"{REMOVING}{path.name}"
    files.rename(path, aside)
    files.sync_folder(path.parent)  # half of it is found under this name only
    files.remove(aside)
