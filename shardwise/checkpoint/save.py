"""``save`` and ``finish``: write state of any API into a folder, by all ranks together."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from shardwise import torch_private
from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import Contents, merged
from shardwise.checkpoint.files import Buffer, Files, clean, commit, give_back, keep_last, take, write_all
from shardwise.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    SAVE_KEY,
    SAVING,
    STEP_KEY,
    FileRecord,
    Manifest,
    Write,
    bytes_of,
    held_from_text,
    held_to_text,
    make_header,
    part_file,
    share_out,
    step_folder,
    sum_of,
    tensor_records,
    to_bytes,
)
from shardwise.checkpoint.state import BufferCheck, Buffers, ParameterCheck, check_choice, contents_of, together
from shardwise.consistency.agreement import StoreGather, open_store_gather
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout import align
from shardwise.observe import note

# ---- The files of a save: one per rank, and the manifest that makes them a checkpoint.


@dataclass(frozen=True, slots=True)
class SaveId:
    """A save: its id and its step."""

    save_id: str
    step: int

    @property
    def pending(self) -> str:
        """The folder's name while it is being written."""
        return f"{SAVING}{self.save_id}"

    def metadata(self) -> dict[str, str]:
        """Return the metadata in every file of the save."""
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
    sums, summed, num_bytes, num_left = list[str](), xxhash.xxh3_128(), 0, block_bytes
    with closing(files.create(path)) as file:
        for chunk in (header, *data):
            view = memoryview(chunk).cast("B")
            while len(view):
                part, view = view[:num_left], view[num_left:]  # up to the end of the block
                summed.update(part)  # while it is in the caches
                file.write(part)
                num_bytes, num_left = num_bytes + len(part), num_left - len(part)
                if not num_left:
                    sums.append(summed.hexdigest())
                    summed.reset()
                    num_left = block_bytes
        file.sync()
    if num_left < block_bytes:
        sums.append(summed.hexdigest())
    files.sync_folder(path.parent)  # this host made the name: on a shared disk rank 0 may not see it
    return FileRecord(path.name, num_bytes, block_bytes, tuple(sums))


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
    table = tensor_records((write, ranks.index(write.rank), begins[write.rank].pop(0)) for write in writes)
    return Manifest(save.save_id, save.step, num_ranks, tuple(records[r] for r in ranks), table, *extra)


def write_manifest(files: Files, folder: Path, manifest: Manifest) -> Path:
    """Commit the save in its pending folder, by its manifest and one rename; return its final folder."""
    save = SaveId(manifest.save_id, manifest.step)
    pending = folder / save.pending
    write_all(files, pending / MANIFEST, to_bytes(manifest))
    files.sync_folder(pending)
    return commit(files, pending, folder / step_folder(manifest.step))


# ---- Host memory for the bytes of one save, kept for the next one.

_ALIGNMENT = 64  # bytes between tensors


class HostCopy:
    """One buffer, pinned if tensors are on a GPU.

    Attributes:
        buffer: None before the first copy.  Its size is that of all writes of a rank, and never shrinks.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def take(self, writes: Sequence[Write], contents: Contents) -> list[memoryview]:
        """Copy the tensors that ``writes`` name; return the bytes of each, in the buffer.

        The previous contents are lost, so no save may still write them.  Raises: MemoryError, RuntimeError (no memory).
        """
        tensors = [contents.tensor_at(write.name, write.window) for write in writes]
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        sizes = [align(write.num_bytes, _ALIGNMENT) for write in writes]
        buffer = self.buffer
        if buffer is None or buffer.numel() < sum(sizes):
            self.buffer = buffer = None  # never two buffers at once
            self.buffer = buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
        places: list[torch.Tensor] = []
        for write, tensor, start in zip(writes, tensors, accumulate(sizes, initial=0), strict=False):
            places.append(buffer[start : start + write.num_bytes])
            if write.num_bytes:
                places[-1].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=is_pinned)
        if is_pinned:
            torch.cuda.synchronize()
        return [bytes_of(place) for place in places]


# ---- The saver of a folder in this process: the plan, host memory, and the save in flight.

logger = logging.getLogger(__name__)

Collect = Callable[[], Contents]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Which rank writes what, valid while every rank's windows have these ``digests``; ``mine``: this rank's writes."""

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


class Saver:
    """Saves of one group into one folder.  Every rank makes the same calls.

    It outlives a call: a background save may be in flight, which the next call must find.
    """

    def __init__(self, folder: Path, store_gather: StoreGather, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self._group = folder, None if group is None else weakref.ref(group)
        self._store_gather = store_gather
        self.rank, self.size = store_gather.rank, store_gather.size
        self._files = Files()
        self._plan: SavePlan | None = None
        self.host = HostCopy()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def place(self) -> Path:
        """The folder by the name that it has without links: two names may be of one folder."""
        return self.folder.resolve()

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Return True if it saves for ``group``, None for this process alone."""
        return group is None if self._group is None else group is not None and self._group() is group

    # ---- entry points ----

    def save(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None = None) -> Path:
        """Write from the live tensors while the caller waits; return the checkpoint's folder."""
        job = self._agree(collect, step, keep, buffers)
        tensors = [job.contents.tensor_at(write.name, write.window) for write in job.plan.mine]
        return self._write(job, lambda: [bytes_of(tensor.detach().cpu().contiguous()) for tensor in tensors])

    def start(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None = None) -> None:
        """Return once the ranks have agreed and this rank's bytes are copied; a thread writes them.

        Raises: CheckpointError on every rank if they do not agree.  A failed copy raises in the thread, on all ranks.
        """
        job = self._agree(collect, step, keep, buffers)
        copied: Future[Sequence[memoryview]] = Future()
        try:
            copied.set_result(self.host.take(job.plan.mine, job.contents))
        except (MemoryError, RuntimeError) as error:
            copied.set_exception(error)
        except BaseException as error:
            copied.set_exception(CheckpointError(f"interrupted by {type(error).__name__}"))
            raise
        finally:
            job.contents.tensors.clear()
            job.contents.parts.clear()  # what was gathered for the copy is no longer needed
            self._thread = threading.Thread(target=self._run, args=(job, copied), name=f"shardwise-save-{step}")
            self._thread.start()

    def settle(self) -> None:
        """Return once no save is in flight, whatever its result."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return once no save is in flight.  Raises: the error of the last background save, once."""
        self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, keeps_lock: bool = False) -> None:
        """Free the host memory, and the lock unless another group of this process saves into the folder."""
        self.host = HostCopy()
        if self.rank == 0 and not keeps_lock:
            give_back(self.folder)

    def retire(self) -> None:
        """Free all that :meth:`wait` and :meth:`close` do not need if the group is gone, so that no save can follow."""
        if self._group is None or any(self.is_of(group) for group in torch_private.all_groups()):
            return
        if self._thread is not None and self._thread.is_alive():
            return  # its peers may be gone too: wait() waits for it if called
        self.host, self._plan, self._store_gather = HostCopy(), None, StoreGather(None)

    # ---- phases ----

    def _agree(self, collect: Collect, step: int, keep: int | None, buffers: Buffers | None) -> Job:
        """Agree on the save and on the writer of each part; create the folder to write into."""
        what = f"{self.folder}: the save of step {step} did not start"
        exchange = partial(together, self._store_gather, what)
        opened: list[SaveId] = []
        mine: list[tuple[Contents, str, BufferCheck, ParameterCheck | None]] = []

        def begin() -> list[Any]:
            contents = collect()
            of_buffers, text = BufferCheck(contents, buffers, self.rank), held_to_text(contents.held.values())
            digest = sum_of(text.encode())
            of_params = ParameterCheck(contents, digest) if self.size > 1 else None
            mine.append((contents, text, of_buffers, of_params))
            opens = self._open(step, opened) if self.rank == 0 else ""
            has_plan = self._plan is not None
            return [opens, digest, of_buffers.mark, has_plan, {} if of_params is None else of_params.marks]

        try:
            reports = exchange(f"start of step {step}", begin)  # threads of a rank may save in another order
            ((contents, text, of_buffers, of_params),) = mine
            if of_params is not None:
                of_params.compare(what, [marks for *_, marks in reports], exchange)
            if len({mark for _, _, mark, *_ in reports}) > 1:
                of_buffers.compare(what, exchange)
            digests = tuple(str(digest) for _, digest, *_ in reports)
            # An interrupt may have left a plan on some ranks only.
            if self._plan is None or self._plan.digests != digests or not all(has_plan for *_, has_plan, _ in reports):
                self._plan = None
                texts = exchange("contents", lambda: text)
                exchange("plan", lambda: self._make_plan(digests, texts))
            assert self._plan is not None
            return Job(SaveId(reports[0][0], step), self._plan, contents, keep)
        except BaseException:
            for save in opened:
                self._files.remove(self.folder / save.pending)
            raise

    def _run(self, job: Job, copied: Future[Sequence[memoryview]]) -> None:
        try:
            self._write(job, copied.result)
        except BaseException as error:
            self._failure = error

    def _write(self, job: Job, data: Callable[[], Sequence[memoryview]]) -> Path:
        """Write this rank's file, of ``data()``, and commit with all others; return the folder of the checkpoint.

        Raises: CheckpointError on every rank if one could not write; then nothing of the save remains.
        """
        pending = self.folder / job.save.pending
        note("checkpoint save", f"step {job.save.step}")
        what = f"{self.folder}: step {job.save.step} was not saved, earlier checkpoints stand"
        exchange = partial(together, self._store_gather, what)

        def write() -> Any:
            values, ties, mine = job.contents.values, job.contents.ties, job.plan.mine
            chunks = data()
            if not mine:
                return [None, values, ties]
            record = write_part(self._files, pending / part_file(self.rank), mine, chunks, job.save)
            return [astuple(record), values, ties]

        try:
            reports = exchange(f"write of step {job.save.step}", write)
            end = partial(self._commit, job, reports) if self.rank == 0 else str
            return Path(exchange(f"commit of step {job.save.step}", end)[0])
        except BaseException:
            if self.rank == 0:
                self._files.remove(pending)
            raise

    # ---- inside ----

    def _open(self, step: int, opened: list[SaveId]) -> str:
        self._files.make_folder(self.folder)
        take(self.folder)
        clean(self._files, self.folder)
        save = SaveId(secrets.token_hex(16), step)
        opened.append(save)
        self._files.make_folder(self.folder / save.pending)
        return save.save_id

    def _make_plan(self, digests: tuple[str, ...], texts: Sequence[str]) -> None:
        writes = share_out([held_from_text(text) for text in texts])
        self._plan = SavePlan(digests, writes, tuple(write for write in writes if write.rank == self.rank))

    def _commit(self, job: Job, reports: Sequence[Any]) -> str:
        records = {
            rank: FileRecord(file[0], file[1], file[2], tuple(file[3]))
            for rank, (file, _, _) in enumerate(reports)
            if file is not None
        }
        ties: dict[str, str] = {}
        for _, _, found in reports:
            ties |= found
        values: list[Mapping[str, Any]] = [found for _, found, _ in reports]
        manifest = make_manifest(job.save, job.plan.writes, records, len(reports), (ties, merged(values)))
        path = write_manifest(self._files, self.folder, manifest)
        try:
            if job.keep is not None:
                keep_last(self._files, self.folder, job.keep, job.save.step)
        except OSError as error:  # the save itself is complete
            logger.warning("%s: older checkpoints could not be removed: %s", self.folder, error)
        return str(path)


_savers: list[Saver] = []
_turns: dict[Path, threading.RLock] = {}  # threads that save into one folder take turns


def _turn_of(folder: Path) -> threading.RLock:
    return _turns.setdefault(folder.resolve(), threading.RLock())


@explains_arguments
def save(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    wait: bool = True,
    group: dist.ProcessGroup | None = None,
    buffers: Buffers | None = None,
) -> Path | None:
    """Save ``state`` as the checkpoint after ``step`` steps; it becomes visible once all ranks have written, or not at all.

    Args:
        folder: where checkpoints are written, each into a folder ``step-NNNNNNNN``; the same on all ranks, on a shared
            disk.
        state: models, optimizers of every API, anything with ``state_dict`` and ``load_state_dict``, or dicts of plain
            values, by name.  Parameters of an optimizer get their names from the models in the same state.
        step: of the checkpoint, from 0 on; one of the same step is replaced.
        keep: how many checkpoints up to this step to keep, the newest ones; those of later steps stay.
        wait: False to return once this rank's part is copied to host memory; a thread writes it, one save at a time.
            The next :func:`save` or :func:`finish` of the folder raises its errors.  The memory, as many bytes as the
            rank writes, is kept for the next save; its allocation makes the first save slower.
        group: the ranks that have the state (default: all; without a process group, this process only).
        buffers: what to save of module buffers whose values differ between ranks: "rank0" (those of the lowest rank) or
            "per_rank" (those of every rank; :func:`load` restores them at the same number of ranks, else the lowest
            rank's on all).  None: raise CheckpointError.

    Returns: the checkpoint's folder, None if ``wait`` is False.

    Each rank writes its own shards; replicas share the writing.  Collective.  The folder is locked for this job until
    :func:`finish` or the exit of the process.
    Raises: CheckpointError on every rank, with the rank that failed and why; earlier checkpoints stay.  DesyncError on
        every rank if they save different steps, or an interrupt ended the call of one.  ConfigError for a wrong ``step``
        or ``keep``; StateError outside ``group``.

    Example:
        >>> save("run", {"model": model, "optimizer": optimizer}, step=100, keep=3)  # doctest: +SKIP
    """
    if type(step) is not int or step < 0 or (keep is not None and keep < 1):
        raise ConfigError(
            f"step is {step!r} and keep {keep!r}; expected a whole number from 0 on, and None or at least 1"
        )
    check_choice(buffers)
    with _turn_of(Path(folder)):
        saver = _saver_of(Path(folder), group)
        saver.wait()
        collect = partial(contents_of, state, saver.rank, saver.size)
        if wait:
            return saver.save(collect, step, keep, buffers)
        saver.start(collect, step, keep, buffers)
        return None


def finish(folder: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Return once no save into ``folder`` is in flight; release its lock and host memory.

    Args:
        folder: as for :func:`save`.
        group: finish only the saves of this group; None: all saves of this process, of any group.

    Call it on every rank that saves, at any time: a rank waits for its own save only, and does not communicate.  A
    folder without saves is finished.
    Raises: CheckpointError, on every rank, if the last background save failed; everything is released all the same.

    Example:
        >>> finish("run")
    """
    place = Path(folder).resolve()
    failures: list[BaseException] = []
    with _turn_of(place):
        for saver in [each for each in _savers if each.place == place and (group is None or each.is_of(group))]:
            try:
                saver.wait()  # an interrupt leaves the save in flight, for a later call of this or of save()
            except Exception as error:
                failures.append(error)
            _savers.remove(saver)
            saver.close(keeps_lock=any(other.place == place for other in _savers))
    if failures:
        raise failures[0]


def finish_all() -> None:
    """Do as :func:`finish` for every folder of this process; saves that failed are logged: a lost rank may be why."""
    for folder in {saver.place for saver in _savers}:
        try:
            finish(folder)
        except Exception as error:
            logger.warning("%s", error)


def _saver_of(folder: Path, group: dist.ProcessGroup | None) -> Saver:
    path = folder.absolute()
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    saver = next((each for each in _savers if each.place == path.resolve() and each.is_of(group)), None)
    if saver is None:
        for each in _savers:  # of a destroyed group it has a whole copy of the state, and the group's threads
            each.retire()
        _check_one_folder(path, group)
        saver = Saver(path, open_store_gather(group, f"checkpoint/{str(path)!a}"), group)
        _savers.append(saver)
    for each in _savers:
        if each.place == path.resolve():
            each.settle()  # one save at a time, of any group: a save that begins removes what is unfinished
    return saver


def _check_one_folder(path: Path, group: dist.ProcessGroup | None) -> None:
    """Compare the folder between ranks before the gathers named after it, which would wait for each other in vain.

    Only in main threads: other threads may begin to save into their folders in another order on each rank.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    folders = together(
        open_store_gather(group, "checkpoint folder"), f"{path}: the save did not start", "folder", lambda: str(path)
    )
    other = next((rank for rank, folder in enumerate(folders) if folder != folders[0]), None)
    if other is not None:
        raise CheckpointError(
            f"ranks save into different folders: rank 0 into {folders[0]}, rank {other} into {folders[other]}; pass the same "
            "folder on all ranks (make a time stamp on one rank and broadcast it)"
        )
