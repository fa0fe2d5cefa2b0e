"""``WeightPublisher``: each rank writes what has changed of its own shards; a manifest makes that a version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.arguments import check_whole, explains_arguments
from shardwise.checkpoint.contents import Contents, Windows
from shardwise.checkpoint.files import list_checkpoints, read_manifest, remove_checkpoint
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    MANIFEST,
    Write,
    bytes_of,
    dtype_name,
    dtype_of,
    part_file,
    whole,
)
from shardwise.checkpoint.save import Job, Saver
from shardwise.checkpoint.state import ModuleCarrier, together
from shardwise.consistency.agreement import open_store_gather
from shardwise.consistency.store import digest_of
from shardwise.errors import ArgumentTypeError, CheckpointError, ConfigError, DamagedCheckpointError, UnsafeFileError
from shardwise.publish.delta import WORD_BYTES, PartChange, bits_of, change_of
from shardwise.publish.versions import MODEL, POSITIONS, PUBLISH, live_marks

logger = logging.getLogger(__name__)
_POLL_S, _MOST_POLL_S = 0.05, 1.0  # between looks for marks of readers


@dataclass(frozen=True, slots=True)
class _PublishOptions:
    """How versions follow each other, and how they leave the folder."""

    anchor_every: int
    most_versions: int
    most_bytes: int | None
    send: Callable[[Path], object] | None


class _VersionSaver(Saver):
    """Versions as saves whose files have encoded parts; it inherits agreement, files, commit, lock and thread."""

    options: _PublishOptions
    _last: Job | None = None  # the version that was committed last, which a delta follows
    _anchor = 0  # its anchor, or the one that is being written
    _next: tuple[Job, dict[str, PartChange]] | None = None

    def publish(self, collect: Callable[[], Contents], wait: bool) -> int:
        """Return the number of the next version, once it is committed or, without ``wait``, encoded."""
        self.wait()
        last, what = self._last, f"{self.folder}: no version was published"
        mine = [] if last is None else [last.save.step, last.save.save_id]
        found = together(self._store_gather, what, "number", lambda: [self._newest() if self.rank == 0 else 0, mine])
        number = 1 + max([found[0][0], *(known[0] for _, known in found if known)])
        job = self._agree(collect, number, None, "rank0")
        # Nothing follows from a version that some rank does not know to be committed, or that has other shards.
        is_known = mine[:1] == found[0][:1] and all(known == mine for _, known in found)
        is_alike = last and (last.plan.digests, last.contents.ties) == (job.plan.digests, job.contents.ties)
        if not is_known or not is_alike or number >= self._anchor + self.options.anchor_every:
            self._last, self._anchor, self._copies = None, number, dict[str, torch.Tensor]()  # before others are made
        copied: Future[Sequence[memoryview]] = Future()
        interrupt: BaseException | None = None
        try:
            job, chunks = self._encode(job, mine if self._last is not None else None)
            copied.set_result(chunks)
        except BaseException as error:  # raised where it is reported to all ranks
            interrupt = None if wait or isinstance(error, Exception) else error
            copied.set_exception(CheckpointError(f"interrupted by {type(error).__name__}") if interrupt else error)
        if wait:
            self._write(job, copied.result)
        else:
            self._thread = Thread(target=self._run, args=(job, copied), name=f"shardwise-publish-{number}")
            self._thread.start()
        if interrupt is not None:
            raise interrupt
        return number

    def wait_for(self, num_readers: int, version: int, timeout_s: float) -> None:
        """Return once as many live readers have ``version`` or a later one."""
        self.wait()
        begin = time.monotonic()

        def look() -> bool:
            has = {name: each for name, (each, _) in live_marks(self.folder).items()} if self.rank == 0 else {}
            are_there = sum(each >= version for each in has.values()) >= num_readers
            if self.rank == 0 and not are_there and time.monotonic() > begin + timeout_s:
                there = ", ".join(f"{name} has {each}" for name, each in sorted(has.items())) or "none is alive"
                raise CheckpointError(f"expected {num_readers} readers after {timeout_s:g} s: {there}")
            return are_there

        while not together(self._store_gather, f"{self.folder}: version {version} is not in use", "readers", look)[0]:
            time.sleep(min(_MOST_POLL_S, max(_POLL_S, (time.monotonic() - begin) / 10)))

    # ---- inside ----

    def _newest(self) -> int:
        """Return the number of the newest version, 0 without one.  Raises: CheckpointError in a folder of a run."""
        there = list_checkpoints(self._files, self.folder)
        with suppress(DamagedCheckpointError):
            if there and PUBLISH not in read_manifest(self._files, there[-1].path).values:
                raise CheckpointError(f"{there[-1].path} is a checkpoint of a run; publish into a folder of its own")
        return there[-1].step if there else 0

    @torch.no_grad()
    def _encode(self, job: Job, base: list[Any] | None) -> tuple[Job, list[memoryview]]:
        """Return the job with the tensors of this rank's file, and the bytes of each; without ``base``, of an anchor."""
        values, changes, encoded = dict[str, Any](), dict[str, PartChange](), list[tuple[Write, memoryview]]()
        for write in job.plan.mine:
            cast = torch.empty(write.window.sizes, dtype=dtype_of(write.dtype, write.name), device="cpu")
            bits = bits_of(cast.copy_(job.contents.tensor_at(write.name, write.window)))
            values[f"{PUBLISH}/{write.key}"] = digest_of(bits)
            if base is None:
                changes[write.key] = PartChange(write.name, write.window, None, bits)
                encoded.append((write, bytes_of(bits)))
            else:
                changes[write.key], positions = change_of(write.name, write.window, bits, self._copies[write.key])
                encoded += _in_file(write, changes[write.key], positions)
        encoded.sort(key=lambda each: -DTYPE_BYTES[each[0].dtype])  # aligned
        self._next = replace(job, contents=Contents(ties=job.contents.ties)), changes
        # The manifest of a delta has neither tensors nor ties: they are those of its anchor.
        writes, ties = (job.plan.writes, job.contents.ties) if base is None else ((), {})
        plan = replace(job.plan, writes=writes, mine=tuple(write for write, _ in encoded))
        contents = Contents(values={PUBLISH: {"base": base}, **values}, ties=ties)
        return replace(job, plan=plan, contents=contents), [data for _, data in encoded]

    def _write(self, job: Job, data: Callable[[], Sequence[memoryview]]) -> Path:
        send, pending = self.options.send, self.folder / job.save.pending
        if send is not None:
            self._files.make_folder(pending)  # on a host that does not see rank 0's folder
        path = super()._write(job, data)
        if send is not None:
            self._send(pending, path, send)
        assert self._next is not None
        version, changes = self._next
        for key, change in changes.items():
            change.put(self._copies.setdefault(key, change.bits))
        self._last, self._next = version, None
        return path

    def _commit(self, job: Job, reports: Sequence[Any]) -> str:
        path = super()._commit(job, reports)
        try:
            self._prune()
        except (OSError, UnsafeFileError) as error:  # the version itself is complete
            logger.warning("%s: older versions could not be removed: %s", self.folder, error)
        return path

    def _prune(self) -> None:
        """Remove what is older than the anchor: what is over the limits, and the rest if no live reader reads."""
        there = list_checkpoints(self._files, self.folder)
        sizes = [sum(file.lstat().st_size for file in each.path.iterdir()) for each in there]
        most_bytes = self.options.most_bytes or sum(sizes)
        may_all_go = not any(is_reading for _, is_reading in live_marks(self.folder).values())
        for place, each in enumerate(there):
            is_over = len(there) - place > self.options.most_versions or sum(sizes[place:]) > most_bytes
            if each.step < self._anchor and (may_all_go or is_over):
                remove_checkpoint(self._files, each.path)

    def _send(self, pending: Path, path: Path, send: Callable[[Path], object]) -> None:
        """Send this rank's file, then the manifest; a host that does not see rank 0's folder keeps nothing."""
        what = f"{path}: was not sent to readers; the next version is an anchor"
        with suppress(OSError):  # done by another rank of this host, or by rank 0
            pending.rename(path)
        mine = [path / name for name in self._files.names(path) if name == part_file(self.rank)]
        for files in (mine, [path / MANIFEST] if self.rank == 0 else []):
            together(self._store_gather, what, "delta", lambda files=files: [None for each in files if send(each)])
        if MANIFEST not in self._files.names(path):
            self._files.remove(path)


def _in_file(write: Write, change: PartChange, positions: bytes) -> list[tuple[Write, memoryview]]:
    """Return a change of a part as tensors of a file."""
    sizes, places = tuple(change.bits.shape), (len(positions),)
    values = Write(write.key, write.dtype, sizes, whole(sizes), write.rank), bytes_of(change.bits)
    if change.local is None:
        return [values]
    where = Write(f"{write.key}/{POSITIONS}", "U8", places, whole(places), write.rank), memoryview(positions)
    return [values, where] if len(change.local) else []


class WeightPublisher:
    """Publishes the weights of a model as versions in a folder, from which :class:`WeightReader` takes them.

    Each rank writes what has changed of its own shards since the last version, found by bits after the cast to ``dtype``:
    no gather, no full tensor.  A rank keeps a copy in host memory of what it writes, in ``dtype``.

    Args:
        model: of any API, or plain; it may be trained further at any time after.
        folder: where versions are written, each into a folder ``step-NNNNNNNN``; the same on all ranks, on a shared disk.
        dtype: of floating-point tensors.  None: their own.
        anchor_every: every so many versions one is an anchor: all weights, as a checkpoint of ``{"model": model}``.
        only: returns True for the names that are wanted; the same on every rank.  None: all parameters and buffers.
        most_versions, most_bytes: what the folder may hold of versions before the newest anchor, which stay only for
            readers that are reading them.
        send: is called with the path of each file of a version on the rank that has written it, last with that of the
            manifest on rank 0, for readers that do not see the folder.
        group: the ranks that have the model (default: all; without a process group, this process only).

    Buffers that differ between ranks are those of the lowest rank.

    Raises: ConfigError, ArgumentTypeError.

    Example:
        >>> publisher = WeightPublisher(model, "publish", dtype=torch.bfloat16)  # doctest: +SKIP
        >>> version = publisher.publish()  # doctest: +SKIP
    """

    @explains_arguments
    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        anchor_every: int = 50,
        only: Callable[[str], bool] | None = None,
        most_versions: int = 200,
        most_bytes: int | None = None,
        send: Callable[[Path], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
            raise ArgumentTypeError(f"WeightPublisher takes a module, found {type(model).__name__}")
        check_whole("WeightPublisher: anchor_every", anchor_every, 1)
        check_whole("WeightPublisher: most_versions", most_versions, 1)
        check_whole("WeightPublisher: most_bytes", 1 if most_bytes is None else most_bytes, 1)
        self._model, self._folder, self._only, self._group = model, Path(folder).absolute(), only, group
        self._dtype = None if dtype is None else dtype_name(dtype, "WeightPublisher: dtype")
        self._options = _PublishOptions(anchor_every, most_versions, most_bytes, send)
        self._saver: _VersionSaver | None = None
        self._windows = Windows()

    def publish(self, *, wait: bool = True) -> int:
        """Publish the weights as the next version; return its number.

        Args:
            wait: False to return once what has changed is encoded; a thread writes it.  The next call of a method raises
                its errors.

        Collective, between steps.  Where it raises, readers still have the versions before, and the model may be trained on.
        Raises: CheckpointError on every rank, with the rank that failed and why.
        """
        saver = self._current()
        return saver.publish(lambda: self._collect(saver.rank, saver.size), wait)

    def wait_for(self, num_readers: int, version: int, *, timeout_s: float = 600.0) -> None:
        """Return once as many live readers have ``version`` or a later one.

        Collective; it first waits for a version that a thread writes.
        Raises: CheckpointError on every rank after ``timeout_s``, with what each reader has.
        """
        self._current().wait_for(num_readers, version, timeout_s)

    def close(self) -> None:
        """Return once no version is in flight; release the folder's lock and the copy.  Raises: its CheckpointError."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.settle()
            saver.close()
            saver.wait()

    # ---- inside ----

    def _current(self) -> _VersionSaver:
        """Return the saver of the process group: another one has other shards, and begins with an anchor."""
        group = self._group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if self._saver is None or not self._saver.is_of(group):
            self._saver = _VersionSaver(self._folder, open_store_gather(group, "publish"), group)
            self._saver.options = self._options
        return self._saver

    def _collect(self, rank: int, size: int) -> Contents:
        contents = Contents(windows=self._windows)
        ModuleCarrier(MODEL, self._model, rank, size, self._only).put(contents)
        for name, held in contents.held.items():
            if self._dtype is not None and contents.tensors[name].is_floating_point():
                contents.held[name] = held = replace(held, dtype=self._dtype)
            if DTYPE_BYTES[held.dtype] > WORD_BYTES:
                raise ConfigError(f"{name}: tensors of {held.dtype} cannot be published; leave it out with only=")
        return contents
