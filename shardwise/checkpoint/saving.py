"""What one process keeps of a folder that it saves into: the plan, host memory, and the save that is on its way."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.black_box import note
from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.buffer_choice import BufferCheck, Buffers
from shardwise.checkpoint.contents import Contents, Known, merged
from shardwise.checkpoint.dtypes import bytes_of
from shardwise.checkpoint.files import DiskFiles, Files
from shardwise.checkpoint.folder import clean, keep_last
from shardwise.checkpoint.host_copy import HostCopy
from shardwise.checkpoint.lock import give_back, take
from shardwise.checkpoint.manifest import FileRecord
from shardwise.checkpoint.meeting import together
from shardwise.checkpoint.names import part_file
from shardwise.checkpoint.plan import Held, Write, held_from_text, held_to_text, share_out
from shardwise.checkpoint.writer import SaveId, make_manifest, write_manifest, write_part
from shardwise.comm.roll_call import RollCall
from shardwise.errors import CheckpointError

logger = logging.getLogger(__name__)

Collect = Callable[[Known], Contents]


@dataclass(frozen=True, slots=True)
class Draft:
    """What this rank has to say of a save that nobody has agreed on: ``contents`` as ``text``, or why it has none."""

    contents: Contents
    text: str
    digest: str
    step: int
    keep: int | None
    buffers: BufferCheck | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Said:
    """What this rank said of itself when it saved last."""

    held: Mapping[str, Held]
    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who writes what, as long as every rank holds what it held when it said ``digests``; ``mine``: what this one writes."""

    digests: tuple[str, ...]
    writes: tuple[Write, ...]
    mine: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One save as this rank carries it out."""

    save: SaveId
    plan: SavePlan
    contents: Contents
    keep: int | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """What the thread of a save and its caller tell each other: the save as agreed; the bytes, once copied."""

    agreed: Future[Job]
    copied: Future[Sequence[memoryview]]


class Saver:
    """Saves into one folder.  Every rank makes the same calls."""

    def __init__(self, folder: Path, roll: RollCall, files: Files | None = None) -> None:
        self.folder = folder
        self._roll = roll
        self.rank, self.size = roll.rank, roll.size
        self._files: Files = files or DiskFiles()
        self._plan: SavePlan | None = None
        self._known: Known = {}
        self._said = _Said({}, "", "")
        self.host = HostCopy()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_exit_known = False

    # ---- what is called ----

    def save(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None = None) -> Path:
        """Write from the live tensors, while the caller waits; return the checkpoint's folder."""
        job = self._agree(self._draft(collect, step, keep, buffers), self._roll)
        copies = [_on_host(job.contents.tensor_at(write.name, write.window)) for write in job.plan.mine]
        return self._write(job, lambda: [bytes_of(each) for each in copies], self._roll)

    def start(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None = None) -> None:
        """Return when the ranks have agreed and this one's bytes are copied; a thread writes them.

        Ranks meet while the bytes are copied: into the places that the last save had, which is of use if the plan stays.
        Raises: CheckpointError on every rank if they do not agree.  A copy that fails does so in the thread, on all ranks.
        """
        draft = self._draft(collect, step, keep, buffers)
        self._number += 1
        flight, roll = _Flight(Future(), Future()), self._roll.branch(str(self._number))
        thread = threading.Thread(target=self._fly, args=(draft, flight, roll), name=f"shardwise-save-{step}")
        self._thread = thread
        thread.start()
        try:
            self._copy(draft, flight)
        except BaseException as error:
            if not flight.copied.done():
                flight.copied.set_exception(CheckpointError(f"interrupted by {type(error).__name__}"))
            raise

    def settle(self) -> None:
        """Return when no save is on its way, whatever became of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when no save is on its way.  Raises: what the last one in the background failed of, once."""
        self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, keeps_lock: bool = False) -> None:
        """Give the host memory back, and the lock if no other group of this process saves into the folder."""
        self.host = HostCopy()
        if self.rank == 0 and not keeps_lock:
            give_back(self.folder)

    def retire(self) -> None:
        """Keep what :meth:`wait` and :meth:`close` need alone: the group is gone, no save can follow."""
        if self._thread is not None and self._thread.is_alive():
            return  # its peers may be gone, too: not waited for before somebody asks
        self.host, self._plan, self._known, self._roll = HostCopy(), None, {}, RollCall(None)

    # ---- phases ----

    def _draft(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None) -> Draft:
        try:
            contents = collect(self._known)
            check = BufferCheck(contents, buffers, self.rank)
            if self._said.held != contents.held or not self._said.digest:
                text = held_to_text(contents.held.values())
                self._said = _Said(contents.held, text, sum_of(text.encode()))
        except BaseException as error:  # the others hear of it when ranks meet
            return Draft(Contents(), "", "", step, keep, error=error)
        return Draft(contents, self._said.text, self._said.digest, step, keep, check)

    def _agree(self, draft: Draft, roll: RollCall) -> Job:
        """Agree on the save and on who writes what; the folder to write into is there then."""
        opened: list[SaveId] = []
        try:
            return self._meet(draft, roll, opened)
        except BaseException:
            for save in opened:
                self._files.remove(self.folder / save.pending)
            raise

    def _meet(self, draft: Draft, roll: RollCall, opened: list[SaveId]) -> Job:
        what = f"{self.folder}: the save of step {draft.step} did not start"

        def begin() -> list[Any]:
            if draft.error is not None:
                raise draft.error
            assert draft.buffers is not None
            opens = self._open(draft.step, opened) if roll.rank == 0 else ""
            return [opens, draft.digest, draft.buffers.mark, draft.step]

        said = together(roll, what, begin)
        _check_steps([step for *_, step in said], what)
        save, digests = SaveId(said[0][0], draft.step), tuple(str(digest) for _, digest, *_ in said)
        assert draft.buffers is not None
        if len({mark for _, _, mark, _ in said}) > 1 and draft.buffers.settle(
            what, lambda do: together(roll, what, do)
        ):
            self._plan = None  # what was copied by it has other values
        if self._plan is None or self._plan.digests != digests:
            self._plan = None
            texts = together(roll, what, lambda: draft.text)
            together(roll, what, lambda: self._make_plan(digests, texts))
        assert self._plan is not None
        return Job(save, self._plan, draft.contents, draft.keep)

    def _copy(self, draft: Draft, flight: _Flight) -> None:
        """Copy this rank's bytes, as the ranks agree or have agreed before, and hand them to the thread."""
        guess, data = self._plan, None
        try:
            if guess is not None and guess.digests[self.rank] == draft.digest:
                data = self.host.take(guess.mine, draft.contents)
        except (MemoryError, RuntimeError):
            data = None  # again below, where all ranks hear of it
        plan = flight.agreed.result().plan
        try:
            if data is None or plan is not guess:
                data = self.host.take(plan.mine, draft.contents)
        except (MemoryError, RuntimeError) as error:
            flight.copied.set_exception(error)
            return
        draft.contents.parts.clear()  # what was gathered for the copy need not outlive it
        flight.copied.set_result(data)

    def _fly(self, draft: Draft, flight: _Flight, roll: RollCall) -> None:
        try:
            job = self._agree(draft, roll)
        except BaseException as error:
            flight.agreed.set_exception(error)
            return
        flight.agreed.set_result(job)
        try:
            self._write(job, flight.copied.result, roll)
        except BaseException as error:
            self._failure = error

    def _write(self, job: Job, data: Callable[[], Sequence[memoryview]], roll: RollCall) -> Path:
        """Write this rank's file, of ``data()``, and commit with all others; return the folder of the checkpoint.

        Raises: CheckpointError on every rank if one could not write; nothing of the save is left.
        """
        pending = self.folder / job.save.pending
        note("checkpoint save", f"step {job.save.step}")
        what = f"{self.folder}: step {job.save.step} was not saved, earlier checkpoints stand"

        def write() -> Any:
            values, ties, mine = job.contents.values, job.contents.ties, job.plan.mine
            chunks = data()
            if not mine:
                return [None, values, ties]
            record = write_part(self._files, pending / part_file(roll.rank), mine, chunks, job.save)
            return [[record.name, record.num_bytes, record.block_bytes, list(record.sums)], values, ties]

        try:
            said = together(roll, what, write)
            return Path(together(roll, what, lambda: self._commit(job, said) if roll.rank == 0 else "")[0])
        except BaseException:
            if roll.rank == 0:
                self._files.remove(pending)
            raise

    # ---- inside ----

    def _open(self, step: int, opened: list[SaveId]) -> str:
        self._files.make_folder(self.folder)
        take(self.folder)
        if not self._is_exit_known:
            self._is_exit_known = True
            atexit.register(give_back, self.folder)
        clean(self._files, self.folder)
        save = SaveId(secrets.token_hex(16), step)
        opened.append(save)
        self._files.make_folder(self.folder / save.pending)
        return save.save_id

    def _make_plan(self, digests: tuple[str, ...], texts: Sequence[str]) -> None:
        writes = share_out([held_from_text(text) for text in texts])
        self._plan = SavePlan(digests, writes, tuple(write for write in writes if write.rank == self.rank))

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
        manifest = make_manifest(job.save, job.plan.writes, records, len(said), (ties, merged(values)))
        path = write_manifest(self._files, self.folder, manifest)
        try:
            if job.keep is not None:
                keep_last(self._files, self.folder, job.keep)
        except OSError as error:  # what was to be saved is saved
            logger.warning("%s: older checkpoints could not be removed: %s", self.folder, error)
        return str(path)


def _check_steps(steps: Sequence[int], what: str) -> None:
    """Refuse ranks that save different steps, as threads of a rank may in another order.  Raises: CheckpointError."""
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise CheckpointError(f"{what}: rank 0 saves step {steps[0]}, rank {other} step {steps[other]}")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
