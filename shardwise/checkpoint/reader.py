"""Reading: exactly the blocks that hold what is asked for, each compared with its sum before anybody sees its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.dtypes import bytes_of
from shardwise.checkpoint.files import Files, read_all
from shardwise.checkpoint.header import LENGTH_BYTES, SAVE_KEY, Header, header_bytes, parse_header
from shardwise.checkpoint.manifest import FileRecord, Manifest, PartRecord, from_bytes
from shardwise.checkpoint.names import MANIFEST
from shardwise.checkpoint.order import Request
from shardwise.checkpoint.plan import DTYPE_BYTES, ByteRange, Window, runs_of
from shardwise.errors import DamagedCheckpointError


def read_manifest(files: Files, checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint.  Raises: DamagedCheckpointError if it is not the one that was written."""
    path = checkpoint / MANIFEST
    return from_bytes(read_all(files, path), str(path))


class VerifiedFile:
    """A file of which every byte that is handed out lies in a block that was compared with its sum.

    Raises: DamagedCheckpointError naming the file, the block and what was being read.
    """

    def __init__(self, files: Files, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._file = files.open(path)
        self.num_bytes_read = 0
        self._scratch, self._held = bytearray(0), -1
        if self._file.num_bytes != record.num_bytes:
            found = self._file.num_bytes
            self.close()
            raise DamagedCheckpointError(f"{path}: has {found} bytes, {record.num_bytes} were written")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, begin: int, out: memoryview, what: str) -> None:
        """Fill ``out`` with the bytes from ``begin`` on; whole blocks go straight to their place."""
        size = self._record.block_bytes
        done = 0
        while done < len(out):
            number, start = divmod(begin + done, size)
            length = min(size, self._record.num_bytes - number * size)
            if not start and len(out) - done >= length:
                self._read(number, out[done : done + length], what)
                done += length
                continue
            self._hold(number, length, what)
            count = min(length - start, len(out) - done)
            out[done : done + count] = memoryview(self._scratch)[start : start + count]
            done += count

    def check(self, number: int, what: str) -> None:
        """Compare one block with its sum."""
        size = self._record.block_bytes
        self._hold(number, min(size, self._record.num_bytes - number * size), what)

    def header(self, save_id: str) -> Header:
        """Return the header.  Raises: DamagedCheckpointError too if the file belongs to another save."""
        record = self._record
        if record.num_bytes < LENGTH_BYTES:
            raise DamagedCheckpointError(f"{self._path}: {record.num_bytes} bytes are no header")
        self._check_save(save_id)
        start = bytearray(LENGTH_BYTES)
        self.read_into(0, memoryview(start), "the header")
        data = bytearray(header_bytes(bytes(start), record.num_bytes, str(self._path)))
        self.read_into(0, memoryview(data), "the header")
        return parse_header(bytes(data), record.num_bytes, str(self._path))

    def _check_save(self, save_id: str) -> None:
        """Name a file of another save as that: its sums would only say that it is another."""
        start = bytearray(LENGTH_BYTES)
        self._file.read_into(0, memoryview(start))
        try:
            data = bytearray(header_bytes(bytes(start), self._record.num_bytes, str(self._path)))
            self._file.read_into(0, memoryview(data))
            found = parse_header(bytes(data), self._record.num_bytes, str(self._path)).metadata.get(SAVE_KEY)
        except DamagedCheckpointError:
            return  # the sums will say where
        if found is not None and found != save_id:
            raise DamagedCheckpointError(
                f"{self._path}: belongs to save {found[:40]}, expected {save_id}: files of two saves mix"
            )

    def _hold(self, number: int, length: int, what: str) -> None:
        if self._held != number:
            self._held = -1
            if len(self._scratch) != length:
                self._scratch = bytearray(length)
            self._read(number, memoryview(self._scratch), what)
            self._held = number

    def _read(self, number: int, out: memoryview, what: str) -> None:
        self._file.read_into(number * self._record.block_bytes, out)
        self.num_bytes_read += len(out)
        if self._record.sums and sum_of(out) != self._record.sums[number]:
            begin = number * self._record.block_bytes
            raise DamagedCheckpointError(
                f"{self._path}: block {number} (bytes {begin} to {begin + len(out)}) is not what was written; found when "
                f"reading {what}"
            )


@dataclass(frozen=True, slots=True)
class _ReadStep:
    """Bytes of one part, for one request."""

    begin: int
    run: ByteRange
    request: Request


def read_requests(files: Files, checkpoint: Path, manifest: Manifest, requests: Iterable[Request]) -> int:
    """Fill the targets of ``requests``; return how many bytes were read.

    Memory: one block beside the targets, and rows up to a block where targets are not contiguous.
    Raises: DamagedCheckpointError naming file, block and tensor.
    """
    by_file: dict[int, list[_ReadStep]] = {}
    for request in requests:
        for part in request.record.parts:
            for step in _steps(part, request, manifest.files[part.file].block_bytes):
                by_file.setdefault(part.file, []).append(step)
    total = 0
    for number, steps in sorted(by_file.items()):
        record = manifest.files[number]
        file = VerifiedFile(files, checkpoint / record.name, record)
        try:
            if record.sums:
                file.header(manifest.save_id)
            for step in sorted(steps, key=lambda each: each.begin):
                _carry_out(step, file)
            total += file.num_bytes_read
        finally:
            file.close()
    return total


def _steps(part: PartRecord, request: Request, block_bytes: int) -> list[_ReadStep]:
    common = part.window.meet(request.window) if part.window.sizes else part.window
    if common is None or not common.numel:
        return []
    itemsize = DTYPE_BYTES[request.record.dtype]
    most = max(block_bytes, itemsize)
    return [_ReadStep(part.begin + run.begin, run, request) for run in runs_of(part.window, common, itemsize, most)]


def _carry_out(step: _ReadStep, file: VerifiedFile) -> None:
    run, request = step.run, step.request
    place = _cut(request.target, run.wanted, request.window)
    if run.is_exact and place.is_contiguous():
        file.read_into(step.begin, bytes_of(place), request.name)
        return
    rows = torch.empty(run.hull.sizes, dtype=request.target.dtype, device="cpu")
    file.read_into(step.begin, bytes_of(rows), request.name)
    place.copy_(_cut(rows, run.wanted, run.hull))


def _cut(tensor: torch.Tensor, window: Window, of: Window) -> torch.Tensor:
    """Return the view of ``tensor``, which holds the window ``of``, that is ``window``."""
    for dim, (start, size, first) in enumerate(zip(window.offsets, window.sizes, of.offsets, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, start - first, size)
    return tensor


def verify(
    files: Files, checkpoint: Path, share: tuple[int, int] = (0, 1), progress: Callable[[int], None] | None = None
) -> list[str]:
    """Compare every block of every file with its sum, and the headers with the manifest; return what is wrong.

    ``share``: (rank, size) to verify every size-th file alone, beginning with number rank.
    ``progress``: is told bytes as they are compared.
    """
    try:
        manifest = read_manifest(files, checkpoint)
    except DamagedCheckpointError as error:
        return [str(error)]
    found: list[str] = []
    for number in range(share[0], len(manifest.files), share[1]):
        record = manifest.files[number]
        try:
            file = VerifiedFile(files, checkpoint / record.name, record)
        except DamagedCheckpointError as error:
            found.append(str(error))
            continue
        try:
            found += _verify_file(file, manifest, number, progress)
        finally:
            file.close()
    return found


def _verify_file(
    file: VerifiedFile, manifest: Manifest, number: int, progress: Callable[[int], None] | None
) -> list[str]:
    record, found = manifest.files[number], list[str]()
    ranges = sorted((p.begin, p.end, n) for n, t in manifest.tensors.items() for p in t.parts if p.file == number)
    for block in range(len(record.sums)):
        begin = block * record.block_bytes
        inside = [name for start, end, name in ranges if start < begin + record.block_bytes and end > begin]
        try:
            file.check(block, ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "") or "the header")
        except DamagedCheckpointError as error:
            found.append(str(error))
        if progress is not None:
            progress(min(record.block_bytes, record.num_bytes - begin))
    if found:
        return found
    try:
        entries = file.header(manifest.save_id).entries
    except DamagedCheckpointError as error:
        return [str(error)]
    parts = [(name, part) for name, tensor in manifest.tensors.items() for part in tensor.parts if part.file == number]
    for name, part in parts:
        entry = entries.get(part.key)
        if entry is None or (entry.begin, entry.end) != (part.begin, part.end):
            found.append(f"{record.name}: {part.key} is not where the manifest says that {name} is")
    return found
