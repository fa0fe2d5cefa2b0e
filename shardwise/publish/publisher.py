"""``WeightPublisher``: each rank writes what has changed of its own shards; a manifest makes that a version."""

from __future__ import annotations

import logging
import time
from collections import Counter
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

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import Contents, Windows
from shardwise.checkpoint.files import list_checkpoints, read_manifest, remove_checkpoint
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    MANIFEST,
    FileRecord,
    Manifest,
    Write,
    bytes_of,
    dtype_name,
    dtype_of,
    part_file,
    whole,
)
from shardwise.checkpoint.save import Job, Saver, make_manifest, write_manifest
from shardwise.checkpoint.state import ModuleCarrier, together
from shardwise.consistency.agreement import open_store_gather
from shardwise.errors import ArgumentTypeError, CheckpointError, ConfigError, DamagedCheckpointError, UnsafeFileError
from shardwise.publish.delta import MODULUS, WORD_BYTES, PartChange, bits_of
from shardwise.publish.versions import MODEL, POSITIONS, PUBLISH, VALUES, WHOLE, key_of, live_marks

logger = logging.getLogger(__name__)
_POLL_S, _ROUND_S = (
    0.05,
    5.0,
)  # rank 0 looks for marks, and tells the others, who would give up after the group's timeout


@dataclass(frozen=True, slots=True)
class _Published:
    """The last version that was committed: what a delta follows.

    Attributes:
        layout: digests of the windows of each rank, and tied names.
        copies: what this rank has written, by part, in host memory.  digests: of these parts.
    """

    version: int
    save_id: str
    anchor: int
    layout: tuple[tuple[str, ...], dict[str, str]]
    copies: dict[str, PartChange]
    digests: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Options:
    """How versions follow each other, and how they leave the folder."""

    anchor_every: int
    most_versions: int
    most_bytes: int | None
    send: Callable[[Path], object] | None


class _VersionSaver(Saver):
    """Versions as saves whose files have encoded parts; it inherits agreement, files, commit, lock and thread."""

    options: _Options
    _last: _Published | None = None
    _next: _Published | None = None

    def publish(self, collect: Callable[[], Contents], wait: bool) -> int:
        """Return the number of the next version, once it is committed or, without ``wait``, encoded."""
        self.wait()
        last, what = self._last, f"{self.folder}: no version was published"
        mine = [] if last is None else [last.version, last.save_id]
        found = together(self._store_gather, what, lambda: [str(self.folder), mine, self._newest()])
        folders, newest = [folder for folder, *_ in found], found[0][2]
        if other := next((rank for rank, folder in enumerate(folders) if folder != folders[0]), 0):
            raise CheckpointError(
                f"{what}: rank 0 publishes into {folders[0]}, rank {other} into {folders[other]}; pass one folder on all ranks"
            )
        number = 1 + max([newest, *(known[0] for _, known, _ in found if known)])
        job = self._agree(collect, number, None, "rank0")
        # Nothing follows from a version that some rank does not know to be committed, or that has other shards.
        is_known = [newest] == mine[:1] and all(known == mine for _, known, _ in found)
        layout = job.plan.digests, job.contents.ties
        if not last or not is_known or last.layout != layout or number >= last.anchor + self.options.anchor_every:
            last = self._last = None  # before the next copy is made
        copied: Future[Sequence[memoryview]] = Future()
        try:
            job, chunks = self._encode(job, last)
            copied.set_result(chunks)
        except BaseException as error:  # raised where it is reported to all ranks
            copied.set_exception(error)
        if wait:
            self._write(job, copied.result)
        else:
            self._thread = Thread(target=self._run, args=(job, copied), name=f"shardwise-publish-{number}")
            self._thread.start()
        return number

    def on_rank_0(self, what: str, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns on rank 0, on every rank; ``what`` begins the error if it raises."""
        return together(self._store_gather, what, lambda: do() if self.rank == 0 else None)[0]

    # ---- inside ----

    def _newest(self) -> int:
        """Return the newest version in the folder as rank 0 sees it, 0 without one."""
        there = list_checkpoints(self._files, self.folder) if self.rank == 0 else []
        newest = there[-1].path if there and self._last is None else None
        with suppress(DamagedCheckpointError):
            if newest is not None and PUBLISH not in read_manifest(self._files, newest).values:
                raise CheckpointError(f"{newest} is a checkpoint of a run; publish into a folder of its own")
        return there[-1].step if there else 0

    @torch.no_grad()
    def _encode(self, job: Job, last: _Published | None) -> tuple[Job, list[memoryview]]:
        """Return the job with the tensors of this rank's file, and the bytes of each; without ``last``, of an anchor."""
        new, digests, encoded = dict[str, PartChange](), dict[str, int](), list[tuple[Write, memoryview]]()
        most_bytes = max((write.num_bytes for write in job.plan.mine), default=0)
        scratch = torch.empty(most_bytes if last else 0, dtype=torch.uint8, device="cpu")
        for write in job.plan.mine:
            memory = scratch[: write.num_bytes] if last else scratch.new_empty(write.num_bytes)
            cast = memory.view(dtype_of(write.dtype, write.name)).view(write.window.sizes)
            cast.copy_(job.contents.tensor_at(write.name, write.window))
            change, key, digest = PartChange(write.shape, write.window, None, bits_of(cast)), key_of(write.name), 0
            if last is not None:
                copy = last.copies[write.key]
                change = change.since(copy)
                if change.local is not None:
                    digest = last.digests[write.key] - change.digest(copy.bits.view(-1)[change.local], key)
            new[write.key], digests[write.key] = change, (digest + change.digest(change.bits, key)) % MODULUS
            encoded += _in_file(write, change) if last else [(write, bytes_of(cast))]
        encoded.sort(key=lambda each: -DTYPE_BYTES[each[0].dtype])  # aligned
        anchor, base = (job.save.step, None) if last is None else (last.anchor, [last.version, last.save_id])
        self._next = _Published(
            job.save.step, job.save.save_id, anchor, (job.plan.digests, job.contents.ties), new, digests
        )
        said = Contents(values={"base": base, "digests": list(digests.values())}, ties=job.contents.ties)
        plan = replace(job.plan, mine=tuple(write for write, _ in encoded))
        return replace(job, plan=plan, contents=said), [data for _, data in encoded]

    def _write(self, job: Job, data: Callable[[], Sequence[memoryview]]) -> Path:
        pending, send, last = self.folder / job.save.pending, self.options.send, self._last
        if send is not None:
            self._files.make_folder(pending)  # on a host that does not see rank 0's folder
        path = super()._write(job, data)
        if send is not None:
            self._send(job, path, send)
        assert self._next is not None
        copies = self._next.copies
        if last is not None:
            copies = {key: change.after(last.copies[key]) for key, change in copies.items()}
        self._last, self._next = replace(self._next, copies=copies), None
        return path

    def _commit(self, job: Job, reports: Sequence[Any]) -> str:
        made = [(rank, file) for rank, (file, _, _) in enumerate(reports) if file]
        files = {rank: FileRecord(name, size, block, tuple(sums)) for rank, (name, size, block, sums) in made}
        said, digests = [iter(values["digests"]) for _, values, _ in reports], Counter[str]()
        for write in job.plan.writes:
            digests[write.name] += next(said[write.rank])
        base, ties = reports[0][1]["base"], reports[0][2]
        texts = {name: f"{each % MODULUS:016x}" for name, each in digests.items()}
        values = {PUBLISH: {"base": base, "digests": texts}}
        if base is None:
            manifest = make_manifest(job.save, job.plan.writes, files, len(reports), (ties, values))
        else:
            records = tuple(files[rank] for rank in sorted(files))
            manifest = Manifest(job.save.save_id, job.save.step, len(reports), records, {}, {}, values)
        path = write_manifest(self._files, self.folder, manifest)
        try:
            self._prune(job.save.step if self._last is None else self._last.anchor)
        except (OSError, UnsafeFileError) as error:  # the version itself is complete
            logger.warning("%s: older versions could not be removed: %s", self.folder, error)
        return str(path)

    def _prune(self, anchor: int) -> None:
        """Remove what is older than ``anchor``, unless a live reader is reading it and the limits allow that."""
        there = list_checkpoints(self._files, self.folder)
        sizes = [sum(file.lstat().st_size for file in each.path.iterdir()) for each in there]
        oldest = min([anchor, *(reading for _, reading in live_marks(self.folder).values() if reading)])
        most_bytes = self.options.most_bytes or sum(sizes)
        for place, each in enumerate(there):
            is_over = len(there) - place > self.options.most_versions or sum(sizes[place:]) > most_bytes
            if each.step >= (anchor if is_over else oldest):
                return
            remove_checkpoint(self._files, each.path)

    def _send(self, job: Job, path: Path, send: Callable[[Path], object]) -> None:
        """Send this rank's file, then the manifest; a host that does not see rank 0's folder keeps nothing."""
        mine, what = path / part_file(self.rank), f"{path}: was not sent to readers; the next version is an anchor"
        with suppress(OSError):  # done by another rank of this host, or by rank 0
            (self.folder / job.save.pending).rename(path)

        def send_one(path: Path) -> None:
            send(path)

        together(self._store_gather, what, lambda: send_one(mine) if job.plan.mine else None)
        self.on_rank_0(what, lambda: send_one(path / MANIFEST))
        if MANIFEST not in self._files.names(path):
            mine.unlink(missing_ok=True)
            with suppress(OSError):
                path.rmdir()


def _in_file(write: Write, change: PartChange) -> list[tuple[Write, memoryview]]:
    """Return a change of a part as tensors of a file."""

    def tensor(kind: str, dtype: str, sizes: tuple[int, ...]) -> Write:
        return Write(f"{write.key}/{kind}", dtype, sizes, whole(sizes), write.rank)

    if change.local is None:
        return [(tensor(WHOLE, write.dtype, write.window.sizes), bytes_of(change.bits))]
    if not len(change.local):
        return []
    values = tensor(VALUES, write.dtype, (len(change.local),)), bytes_of(change.bits)
    return [values, (tensor(POSITIONS, "U8", (len(change.positions),)), memoryview(change.positions))]


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
        limits = (anchor_every, most_versions, 1 if most_bytes is None else most_bytes)
        if any(type(each) is not int or each < 1 for each in limits):
            raise ConfigError(
                f"WeightPublisher: anchor_every is {anchor_every!r}, most_versions {most_versions!r} and most_bytes "
                f"{most_bytes!r}; expected whole numbers of at least 1"
            )
        self._model, self._folder, self._only, self._group = model, Path(folder).absolute(), only, group
        self._dtype = None if dtype is None else dtype_name(dtype, "WeightPublisher: dtype")
        self._options = _Options(anchor_every, most_versions, most_bytes, send)
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
        saver, end = self._current(), time.monotonic() + timeout_s
        saver.wait()
        what = f"{self._folder}: version {version} is not in use"

        def look() -> bool:
            until = min(end, time.monotonic() + _ROUND_S)
            while True:
                has = {name: each for name, (each, _) in live_marks(self._folder).items()}
                if sum(each >= version for each in has.values()) >= num_readers:
                    return True
                if time.monotonic() > until:
                    break
                time.sleep(_POLL_S)
            if time.monotonic() > end:
                there = ", ".join(f"{name} has {each}" for name, each in sorted(has.items())) or "none is alive"
                raise CheckpointError(f"expected {num_readers} readers after {timeout_s:g} s: {there}")
            return False

        while not saver.on_rank_0(what, look):
            pass

    def close(self) -> None:
        """Return once no version is in flight; release the folder's lock and the copy.  Raises: its CheckpointError."""
        saver, self._saver = self._saver, None
        if saver is not None:
            try:
                saver.wait()
            finally:
                saver.close()

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
        contents.values.clear()  # weights alone
        for name, held in contents.held.items():
            if self._dtype is not None and contents.tensors[name].is_floating_point():
                contents.held[name] = held = replace(held, dtype=self._dtype)
            if DTYPE_BYTES[held.dtype] > WORD_BYTES:
                raise ConfigError(f"{name}: tensors of {held.dtype} cannot be published; leave it out with only=")
        return contents
