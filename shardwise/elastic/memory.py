"""State after a step, each rank's part in memory that outlives the rank: the launcher has it, as files without a name.

There are two sets of files, one per rank in each.  Steps are written to them in turn, so that one set is complete whenever
a rank is killed.  A thread copies optimizer state, which only optimizers write, while the next forward runs.  A rank at any
position of any world reads what it needs, by the names and windows of checkpoints.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from shardwise.checkpoint.contents import Contents, LoadRequests, Request, merged
from shardwise.checkpoint.format import Manifest, PartRecord, TensorRecord, Write, dtype_of, sum_of
from shardwise.checkpoint.state import carriers_of
from shardwise.errors import ConfigError, StateError
from shardwise.layout import align
from shardwise.observe import note
from shardwise.optim.slices import Window

_MARK = struct.Struct("<QQQ")  # complete or not (1, 0), begin and size of the description
_BEGIN = 64  # of tensors, which follow each other by the size of their dtype: all are aligned
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class CommitMark:
    """The state after ``step`` steps, by ``num_ranks`` ranks of a generation."""

    step: int
    generation: int
    num_ranks: int


@dataclass(slots=True)
class _MemoryFile:
    """One rank's part of a set."""

    fd: int
    mapping: mmap.mmap | None = None
    targets: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    writes: Sequence[Write] = ()
    parts: str = ""

    def write(
        self, moment: CommitMark, writes: Sequence[Write], contents: Contents, later: tuple[str, ...]
    ) -> Callable[[], None]:
        """Write this rank's tensors; return a function that writes those whose names begin with ``later``, and the values.

        The mark is last, so that a file that is not whole has none.
        """
        begins = list(accumulate((write.num_bytes for write in writes), initial=_BEGIN))
        if self.mapping is None or self.writes is not writes:
            rows = [
                [w.name, w.dtype, w.shape, w.window.offsets, w.window.sizes, begin, begin + w.num_bytes]
                for w, begin in zip(writes, begins, strict=False)
            ]
            self.writes, self.parts = writes, json.dumps(rows, separators=(",", ":"))
            self.targets.clear()
        head = json.dumps([moment.step, moment.generation, moment.num_ranks, contents.values, contents.ties])
        text = f"{head[:-1]},{self.parts}]".encode()
        end = align(begins[-1], _BEGIN)
        mapping = self._sized(end + len(text))
        if len(self.targets) != len(writes):
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
            self.targets = [
                memory[begin : begin + w.num_bytes].view(dtype_of(w.dtype, w.name)).view(w.window.sizes)
                for w, begin in zip(writes, begins, strict=False)
            ]
        _MARK.pack_into(mapping, 0, 0, end, len(text))
        # In-place operations of DTensors count versions of these, not of their local tensors.
        versions = [(name, each, each._version) for name, each in contents.tensors.items() if name.startswith(later)]
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for write, target in zip(writes, self.targets, strict=True):
                tensor = contents.tensor_at(write.name, write.window)
                if write.name.startswith(later):
                    rest.append((target, tensor))
                else:
                    target.copy_(tensor)

        def finish() -> None:
            with torch.no_grad():
                for target, tensor in rest:
                    target.copy_(tensor)
            note("elastic commit", f"step {moment.step}")
            if odd := [name for name, each, version in versions if each._version != version]:
                raise StateError(
                    f"elastic: {odd[0]} was written while it was copied; only optimizers may write it before they step"
                )
            mapping[end : end + len(text)] = text
            _MARK.pack_into(mapping, 0, 1, end, len(text))

        return finish

    def _sized(self, num_bytes: int) -> mmap.mmap:
        if self.mapping is None or len(self.mapping) < num_bytes:
            self.targets.clear()
            self.mapping = None
            size = align(num_bytes + _PAGE, _PAGE)  # values of another step may be a little longer
            os.ftruncate(self.fd, 0)  # no mark is left of fewer ranks, whose parts were larger
            os.ftruncate(self.fd, size)
            self.mapping = mmap.mmap(self.fd, size)
        return self.mapping

    def describe(self) -> list[Any] | None:
        """Return the description, None if the file is not whole."""
        is_whole, begin, length = _MARK.unpack(os.pread(self.fd, _MARK.size, 0) or bytes(_MARK.size))
        return json.loads(os.pread(self.fd, length, begin)) if is_whole else None


class SavedState:
    """One complete set: the state after a step."""

    def __init__(
        self, number: int, moment: CommitMark, files: Sequence[_MemoryFile], described: Sequence[list[Any]]
    ) -> None:
        self.number, self.moment, self._files = number, moment, files
        tensors: dict[str, tuple[str, list[int], list[PartRecord]]] = {}
        ties: dict[str, str] = {}
        for rank, (_, own_ties, rows) in enumerate(described):
            ties |= own_ties
            for name, dtype, shape, offsets, sizes, begin, end in rows:
                part = PartRecord(rank, name, Window(tuple(offsets), tuple(sizes)), begin, end)
                tensors.setdefault(name, (dtype, shape, []))[2].append(part)
        records = {
            name: TensorRecord(dtype, tuple(shape), tuple(parts)) for name, (dtype, shape, parts) in tensors.items()
        }
        values: list[Mapping[str, Any]] = [each[0] for each in described]
        save_id = sum_of(f"step {moment.step}".encode())
        self._manifest = Manifest(save_id, moment.step, moment.num_ranks, (), records, ties, merged(values))

    def load(self, state: Mapping[str, Any], rank: int, size: int) -> None:
        """Put it into ``state``, whose parts on this rank are of any sharding.

        Collective.  Raises: ConfigError if ``state`` has other tensors than were saved.
        """
        order = LoadRequests(self._manifest)
        carriers = carriers_of(state, rank, size)
        applies = [carrier.ask(order) for carrier in carriers]
        odd = [*order.missing, *order.unlike, *order.unexpected([carrier.prefix for carrier in carriers])]
        if odd:
            raise ConfigError(
                f"elastic: build() made a state that differs from the one before a rank was lost: {', '.join(odd[:4])}. It "
                "must make the same model and optimizer at every call, at any number of ranks"
            )
        mapped = [mmap.mmap(each.fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE) for each in self._files]
        memories = [torch.frombuffer(each, dtype=torch.uint8) for each in mapped]
        for request in order.requests:
            _fill(request, memories)
        for apply in applies:
            apply()


def _fill(request: Request, memories: Sequence[torch.Tensor]) -> None:
    for part in request.record.parts:
        common = part.window.meet(request.window) if part.window.sizes else part.window
        if common is not None and common.numel:
            source = memories[part.file][part.begin : part.end].view(request.target.dtype).view(part.window.sizes)
            common.cut(request.target, request.window).copy_(common.cut(source, part.window))


class StateMemory:
    """The two sets of files.

    ``fds``: by set and rank.  ``later``: how names begin of what does not change until :meth:`wait`, and is copied meanwhile.
    """

    def __init__(self, fds: Sequence[Sequence[int]], later: tuple[str, ...]) -> None:
        self._sets = [[_MemoryFile(fd) for fd in each] for each in fds]
        self._newest = 1  # the set that the next write must leave alone
        self._later, self._thread = later, ThreadPoolExecutor(1, "shardwise-elastic-copy")
        self._copy = self._thread.submit(lambda: None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks in both sets."""
        return sum(os.fstat(file.fd).st_size for each in self._sets for file in each)

    def write(self, moment: CommitMark, rank: int, writes: Sequence[Write], contents: Contents) -> None:
        """Write this rank's part over the older set; every rank must have written its part of the newer one."""
        number = 1 - self._newest
        finish = self._sets[number][rank].write(moment, writes, contents, self._later)
        if rank == 0:
            for file in self._sets[number][moment.num_ranks :]:
                os.ftruncate(file.fd, 0)  # of a rank that is lost
        self._newest = number
        self._copy = self._thread.submit(finish)

    def wait(self, *_: object) -> None:
        """Return once the last write is whole.  Raises: StateError if what it copied was written meanwhile."""
        self._copy.result()

    def read(self) -> SavedState | None:
        """Return the newest complete set, None if there is none; no rank may write meanwhile."""
        found: list[SavedState] = []
        for number, files in enumerate(self._sets):
            if (first := files[0].describe()) is None:
                continue
            moment = CommitMark(*first[:3])
            described = [file.describe() for file in files[: moment.num_ranks]]
            whole = [each[3:] for each in described if each is not None and CommitMark(*each[:3]) == moment]
            if len(whole) == moment.num_ranks:
                found.append(SavedState(number, moment, files[: moment.num_ranks], whole))
        newest = max(found, key=lambda each: (each.moment.step, each.moment.generation), default=None)
        self._newest = 1 if newest is None else newest.number
        return newest
