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
from shardwise.consistency.agreement import StoreGather, open_store_gather
from shardwise.errors import ArgumentTypeError, CheckpointError, ConfigError, DamagedCheckpointError, UnsafeFileError
from shardwise.publish.delta import MODULUS, WORD_BYTES, Change, bits_of, encode_positions
from shardwise.publish.versions import MODEL, POSITIONS, PUBLISH, VALUES, WHOLE, key_of, live_marks

logger = logging.getLogger(__name__)
_POLL_S, _ROUND_S = (
    0.05,
    5.0,
)  # rank 0 looks for marks, and tells the others, who would give up after the group's timeout


@dataclass(slots=True)
class _Copy:
    """A part that this rank writes, as it was last published, in host memory, and its digest."""

    tensor: torch.Tensor
    digest: int


@dataclass(frozen=True, slots=True)
class _Published:
    """The last version that was committed: what a delta follows.  ``windows``: digests of those of each rank."""

    version: int
    save_id: str
    anchor: int
    windows: tuple[str, ...]
    copies: dict[str, _Copy]


@dataclass(frozen=True, slots=True)
class _Options:
    """How versions follow each other, and how they leave the folder."""

    anchor_every: int
    most_versions: int
    most_bytes: int | None
    send: Callable[[Path], object] | None


class _VersionSaver(Saver):
    """Versions as saves whose files have encoded parts; it inherits agreement, files, commit, lock and thread."""

    def __init__(
        self, folder: Path, store_gather: StoreGather, group: dist.ProcessGroup | None, options: _Options
    ) -> None:
        super().__init__(folder, store_gather, group)
        self._options = options
        self._last: _Published | None = None
        self._adopt: Callable[[], _Published] | None = None

    def publish(self, collect: Callable[[], Contents], wait: bool) -> int:
        """Return the number of the next version, once it is committed or, without ``wait``, encoded."""
        self.wait()
        last, what = self._last, f"{self.folder}: no version was published"
        mine = [] if last is None else [last.version, last.save_id]
        found = together(self._store_gather, what, lambda: [str(self.folder), mine, self._newest()])
        for rank, (folder, _, _) in enumerate(found):
            if folder != found[0][0]:
                raise CheckpointError(
                    f"{what}: rank 0 publishes into {found[0][0]}, rank {rank} into {folder}; pass the same folder on all ranks"
                )
        newest = found[0][2]
        number = 1 + max(newest, *(known[0] for _, known, _ in found if known), 0)
        job = self._agree(collect, number, None, "rank0")
        # A rank that does not know that the last version was committed, or another folder: nothing follows from it.
        is_known = last is not None and last.version == newest and all(known == mine for _, known, _ in found)
        if not (
            is_known and last and number - last.anchor < self._options.anchor_every and job.plan.digests == last.windows
        ):
            last = None
        copied: Future[Sequence[memoryview]] = Future()
        try:
            job, chunks = self._encode(job, last)
            copied.set_result(chunks)
        except BaseException as error:  # raised where all ranks hear of it
            copied.set_exception(error)
        if wait:
            self._write(job, copied.result)
        else:
            self._thread = Thread(target=self._run, args=(job, copied), name=f"shardwise-publish-{number}")
            self._thread.start()
        return number

    def together(self, what: str, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns on rank 0, on every rank."""
        return together(self._store_gather, what, lambda: do() if self.rank == 0 else None)[0]

    # ---- inside ----

    def _newest(self) -> int:
        """Return the newest version in the folder as rank 0 sees it, 0 without one."""
        there = list_checkpoints(self._files, self.folder) if self.rank == 0 else []
        if there and self._last is None:
            with suppress(DamagedCheckpointError):
                if PUBLISH not in read_manifest(self._files, there[-1].path).values:
                    raise CheckpointError(
                        f"{there[-1].path} is a checkpoint of a run; publish into a folder of its own"
                    )
        return there[-1].step if there else 0

    @torch.no_grad()
    def _encode(self, job: Job, last: _Published | None) -> tuple[Job, list[memoryview]]:
        """Return the job with the files' tensors of this rank, and the bytes of each; without ``last``, of an anchor."""
        if last is None:
            self._last = None  # never two copies
        copies: dict[str, _Copy] = {} if last is None else last.copies
        changes: list[_NewPart] = []
        encoded: list[tuple[Write, memoryview]] = []
        digests: list[int] = []
        scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        if last is not None:
            scratch = scratch.new_empty(max((write.num_bytes for write in job.plan.mine), default=0))
        for write in job.plan.mine:
            memory = scratch[: write.num_bytes] if last is not None else scratch.new_empty(write.num_bytes)
            cast = memory.view(dtype_of(write.dtype, write.name)).view(write.window.sizes)
            cast.copy_(job.contents.tensor_at(write.name, write.window))
            if last is None:
                change = Change(write.shape, write.window, None, bits_of(cast))
                copies[write.key] = _Copy(cast, change.digest(change.bits, key_of(write.name)))
                encoded.append((write, bytes_of(cast)))
                digests.append(copies[write.key].digest)
                continue
            found = _encoded(write, copies[write.key], bits_of(cast))
            digests.append(copies[write.key].digest if found is None else found.digest)
            if found is not None:
                changes.append(found)
                encoded += found.tensors

        def adopt() -> _Published:
            for new in changes:
                flat, local = bits_of(new.copy.tensor).view(-1), new.change.local
                flat[... if local is None else local] = new.change.bits.view(-1)
                new.copy.digest = new.digest
            anchor = job.save.step if last is None else last.anchor
            return _Published(job.save.step, job.save.save_id, anchor, job.plan.digests, copies)

        self._adopt = adopt
        encoded.sort(key=lambda each: each[0].dtype == "U8")  # the format aligns what is in order of size
        base = None if last is None else [last.version, last.save_id]
        said = Contents(values={"digests": digests, "base": base}, ties=job.contents.ties)
        plan = replace(job.plan, mine=tuple(write for write, _ in encoded))
        return replace(job, plan=plan, contents=said), [data for _, data in encoded]

    def _write(self, job: Job, data: Callable[[], Sequence[memoryview]]) -> Path:
        pending, send = self.folder / job.save.pending, self._options.send
        try:
            if send is not None:
                self._files.make_folder(pending)  # on a host that does not see rank 0's folder
            path = super()._write(job, data)
        except BaseException:
            self._files.remove(pending)
            raise
        if send is not None:
            self._send(job, path, send)
        assert self._adopt is not None
        self._last = self._adopt()
        return path

    def _commit(self, job: Job, reports: Sequence[Any]) -> str:
        files = {rank: FileRecord(*file[:3], tuple(file[3])) for rank, (file, _, _) in enumerate(reports) if file}
        said, digests = [iter(values["digests"]) for _, values, _ in reports], Counter[str]()
        for write in job.plan.writes:
            digests[write.name] += next(said[write.rank])
        base, ties = reports[0][1]["base"], reports[0][2]
        texts = {name: f"{digest % MODULUS:016x}" for name, digest in digests.items()}
        extra = ties if base is None else {}, {PUBLISH: {"base": base, "digests": texts}}
        if base is None:
            manifest = make_manifest(job.save, job.plan.writes, files, len(reports), extra)
        else:
            records = tuple(files[rank] for rank in sorted(files))
            manifest = Manifest(job.save.save_id, job.save.step, len(reports), records, {}, *extra)
        path = write_manifest(self._files, self.folder, manifest)
        try:
            self._prune(job.save.step if base is None or self._last is None else self._last.anchor)
        except (OSError, UnsafeFileError) as error:  # the version itself is complete
            logger.warning("%s: older versions could not be removed: %s", self.folder, error)
        return str(path)

    def _prune(self, anchor: int) -> None:
        """Remove what is older than ``anchor``, unless a live reader is reading it and the limits allow that."""
        there = list_checkpoints(self._files, self.folder)
        sizes = [sum(file.lstat().st_size for file in each.path.iterdir()) for each in there]
        oldest_read = min((reading for _, reading in live_marks(self.folder).values() if reading), default=anchor)
        most_bytes = self._options.most_bytes
        for place, each in enumerate(there):
            is_over = len(there) - place > self._options.most_versions
            is_over |= most_bytes is not None and sum(sizes[place:]) > most_bytes
            if each.step >= anchor or (each.step >= oldest_read and not is_over):
                return
            remove_checkpoint(self._files, each.path)

    def _send(self, job: Job, path: Path, send: Callable[[Path], object]) -> None:
        """Send this rank's file, then the manifest; a host that does not see rank 0's folder keeps nothing."""
        mine = path / part_file(self.rank)
        with suppress(OSError):  # done by another rank of this host, or by rank 0
            (self.folder / job.save.pending).rename(path)

        def send_part() -> None:
            if job.plan.mine:
                send(mine)

        def send_manifest() -> None:
            send(path / MANIFEST)

        what = f"{path}: the version could not be sent to its readers; the next one is an anchor"
        together(self._store_gather, what, send_part)
        self.together(what, send_manifest)
        if MANIFEST not in self._files.names(path):
            mine.unlink(missing_ok=True)
            with suppress(OSError):
                path.rmdir()


@dataclass(frozen=True, slots=True)
class _NewPart:
    """What has changed of a part, as tensors of a file, and the digest of the part."""

    copy: _Copy
    change: Change
    digest: int
    tensors: tuple[tuple[Write, memoryview], ...]


def _encoded(write: Write, copy: _Copy, new: torch.Tensor) -> _NewPart | None:
    """Return what differs from the copy in ``new``, the bits of a part, in the smallest encoding; None for nothing."""

    def in_file(kind: str, dtype: str, data: memoryview, sizes: tuple[int, ...]) -> tuple[Write, memoryview]:
        return Write(f"{write.key}/{kind}", dtype, sizes, whole(sizes), write.rank), data

    bits, old, key = new.view(-1), bits_of(copy.tensor).view(-1), key_of(write.name)
    local = (bits != old).nonzero().view(-1)
    count = len(local)
    if not count:
        return None
    if count * (bits.element_size() + 1) < write.num_bytes:
        positions, change = encode_positions(local), Change(write.shape, write.window, local, bits[local])
        if len(positions) + count * bits.element_size() < write.num_bytes:
            digest = (copy.digest - change.digest(old[local], key) + change.digest(change.bits, key)) % MODULUS
            values = in_file(VALUES, write.dtype, bytes_of(change.bits), (count,))
            tensors = values, in_file(POSITIONS, "U8", memoryview(positions), (len(positions),))
            return _NewPart(copy, change, digest, tensors)
    change = Change(write.shape, write.window, None, new.clone())
    tensors = (in_file(WHOLE, write.dtype, bytes_of(change.bits), write.window.sizes),)
    return _NewPart(copy, change, change.digest(change.bits, key), tensors)


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

        Collective; a version that is on its way is waited for.
        Raises: CheckpointError on every rank after ``timeout_s``, with what each reader has.
        """
        saver, end = self._current(), time.monotonic() + timeout_s
        saver.wait()
        what = f"{self._folder}: version {version} is not in use"

        def look() -> bool:
            until = time.monotonic() + _ROUND_S
            while True:
                marks = {name: has for name, (has, _) in live_marks(self._folder).items()}
                if sum(has >= version for has in marks.values()) >= num_readers:
                    return True
                if time.monotonic() > end:
                    there = ", ".join(f"{name} has {has}" for name, has in sorted(marks.items())) or "none is alive"
                    raise CheckpointError(f"expected {num_readers} readers after {timeout_s:g} s: {there}")
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_S)

        while not saver.together(what, look):
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
            self._saver = _VersionSaver(self._folder, open_store_gather(group, "publish"), group, self._options)
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
