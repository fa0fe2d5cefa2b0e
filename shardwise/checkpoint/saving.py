"""What one process keeps of a folder that it saves into: the plan, host memory, and the save that is on its way."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.black_box import note
from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.contents import Contents, merged
from shardwise.checkpoint.dtypes import bytes_of
from shardwise.checkpoint.files import DiskFiles, Files
from shardwise.checkpoint.folder import clean, keep_last
from shardwise.checkpoint.lock import give_back, take
from shardwise.checkpoint.manifest import FileRecord
from shardwise.checkpoint.meeting import together
from shardwise.checkpoint.names import part_file
from shardwise.checkpoint.plan import Write, held_from_text, held_to_text, share_out
from shardwise.checkpoint.writer import SaveId, make_manifest, write_manifest, write_part
from shardwise.comm.roll_call import RollCall

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes between tensors in host memory


@dataclass(frozen=True, slots=True)
class Job:
    """One save as this rank carries it out; ``data``: the bytes of its writes."""

    save: SaveId
    writes: tuple[Write, ...]
    mine: tuple[Write, ...]
    contents: Contents
    keep: int | None


class Saver:
    """Saves into one folder.  Every rank makes the same calls."""

    def __init__(self, folder: Path, roll: RollCall, files: Files | None = None) -> None:
        self.folder = folder
        self._roll = roll
        self.rank, self.size = roll.rank, roll.size
        self._files: Files = files or DiskFiles()
        self._plan: tuple[tuple[str, ...], tuple[Write, ...]] | None = None
        self._buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_exit_known = False
        self._opened: str | None = None  # on rank 0, the id of the save that was begun last

    # ---- phases ----

    def prepare(self, collect: Callable[[], Contents], step: int, keep: int | None) -> Job:
        """Agree on the save and on who writes what; the folder to write into is there then."""
        try:
            return self._prepare(collect, step, keep)
        except BaseException:
            if self._opened is not None:
                self._files.remove(self.folder / SaveId(self._opened, step).pending)
            raise

    def _prepare(self, collect: Callable[[], Contents], step: int, keep: int | None) -> Job:
        contents = Contents()
        text = ""

        def begin() -> list[str]:
            nonlocal contents, text
            contents = collect()
            text = held_to_text(contents.held.values())
            return [self._open(step) if self._roll.rank == 0 else "", sum_of(text.encode())]

        said = together(self._roll, f"{self.folder}: the save of step {step} did not start", begin)
        save, digests = SaveId(said[0][0], step), tuple(str(digest) for _, digest in said)
        if self._plan is None or self._plan[0] != digests:
            self._plan = None
            what = f"{self.folder}: the save of step {step} did not start"
            texts = together(self._roll, what, lambda: text)
            together(self._roll, what, lambda: self._make_plan(digests, texts))
        assert self._plan is not None
        writes = self._plan[1]
        mine = tuple(write for write in writes if write.rank == self._roll.rank)
        return Job(save, writes, mine, contents, keep)

    def write(self, job: Job, data: Sequence[memoryview], roll: RollCall) -> Path:
        """Write this rank's file and commit with all others; return the folder of the checkpoint.

        Raises: CheckpointError on every rank if one could not write; nothing of the save is left.
        """
        pending = self.folder / job.save.pending
        note("checkpoint save", f"step {job.save.step}")
        what = f"{self.folder}: step {job.save.step} was not saved, earlier checkpoints stand"

        def write() -> Any:
            values, ties = job.contents.values, job.contents.ties
            if not job.mine:
                return [None, values, ties]
            record = write_part(self._files, pending / part_file(roll.rank), job.mine, data, job.save)
            return [[record.name, record.num_bytes, record.block_bytes, list(record.sums)], values, ties]

        try:
            said = together(roll, what, write)
            return Path(together(roll, what, lambda: self._commit(job, said) if roll.rank == 0 else "")[0])
        except BaseException:
            if roll.rank == 0:
                self._files.remove(pending)
            raise

    def run(self, job: Job) -> Path:
        """Write from the live tensors, while the caller waits."""
        copies = [_on_host(job.contents.tensor_at(write.name, write.window)) for write in job.mine]
        return self.write(job, [bytes_of(each) for each in copies], self._roll)

    def start(self, job: Job) -> None:
        """Copy this rank's bytes to host memory and write them in a thread."""
        data = self._copy(job)
        roll = self._roll.branch(job.save.save_id)

        def write() -> None:
            try:
                self.write(job, data, roll)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=write, name=f"shardwise-save-{job.save.step}", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when no save is on its way.  Raises: what the last one in the background failed of, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Give the lock and the host memory back."""
        self._buffer = None
        if self._roll.rank == 0:
            give_back(self.folder)

    # ---- inside ----

    def _open(self, step: int) -> str:
        self._files.make_folder(self.folder)
        take(self.folder)
        if not self._is_exit_known:
            self._is_exit_known = True
            atexit.register(give_back, self.folder)
        clean(self._files, self.folder)
        save = SaveId(secrets.token_hex(16), step)
        self._opened = save.save_id
        self._files.make_folder(self.folder / save.pending)
        return save.save_id

    def _make_plan(self, digests: tuple[str, ...], texts: Sequence[str]) -> None:
        self._plan = (digests, share_out([held_from_text(text) for text in texts]))

    def _commit(self, job: Job, said: Sequence[Any]) -> str:
        records = {
            rank: FileRecord(file[0], file[1], file[2], tuple(file[3]))
            for rank, (file, _, _) in enumerate(said)
            if file is not None
        }
        ties: dict[str, str] = {}
        for _, _, found in said:
            ties |= found
        values: list[Mapping[str, Any]] = [found for _, found, _ in said]
        manifest = make_manifest(job.save, job.writes, records, len(said), (ties, merged(values)))
        path = write_manifest(self._files, self.folder, manifest)
        try:
            if job.keep is not None:
                keep_last(self._files, self.folder, job.keep)
        except OSError as error:  # what was to be saved is saved
            logger.warning("%s: older checkpoints could not be removed: %s", self.folder, error)
        return str(path)

    def _copy(self, job: Job) -> list[memoryview]:
        sizes = [-(-write.num_bytes // _ALIGNMENT) * _ALIGNMENT for write in job.mine]
        tensors = [job.contents.tensor_at(write.name, write.window) for write in job.mine]
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        buffer = self._buffer
        if buffer is None or buffer.numel() < sum(sizes):
            self._buffer = buffer = None  # never two
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
            self._buffer = buffer
        found: list[memoryview] = []
        offset = 0
        for write, tensor, size in zip(job.mine, tensors, sizes, strict=True):
            place = buffer[offset : offset + write.num_bytes]
            if write.num_bytes:
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=is_pinned)
            found.append(bytes_of(place))
            offset += size
        if is_pinned:
            torch.cuda.synchronize()
        return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
