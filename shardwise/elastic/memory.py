"""State after a step, each rank's part in memory that outlives the rank: the launcher has it, as files without a name.

There are two sets of files, one per rank in each.  Steps are written to them in turn, so that one set is complete whenever
a rank is killed.  A rank at any position of any world reads what it needs, by the names and windows of checkpoints.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.contents import Contents, LoadRequests, Request, merged
from shardwise.checkpoint.format import Manifest, PartRecord, TensorRecord, Write, bytes_of, sum_of
from shardwise.checkpoint.state import carriers_of
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.layout import align
from shardwise.observe import note
from shardwise.optim.slices import Window

_MARK = struct.Struct("<QQQ")  # complete or not (1, 0), begin and size of the description
_BEGIN = 64  # of tensors, which follow each other by the size of their dtype: all are aligned


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
    writes: Sequence[Write] | None = None  # that ``places`` and ``parts`` describe
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    parts: str = ""

    def write(self, moment: CommitMark, writes: Sequence[Write], contents: Contents) -> None:
        """Write this rank's part.  The mark is last, so that a file that is not whole has none."""
        if self.writes is not writes:
            self.places = list(pairwise(accumulate((write.num_bytes for write in writes), initial=_BEGIN)))
            rows = [
                [w.name, w.dtype, w.shape, w.window.offsets, w.window.sizes, *place]
                for w, place in zip(writes, self.places, strict=True)
            ]
            self.writes, self.parts = writes, json.dumps(rows, separators=(",", ":"))
        head = json.dumps([moment.step, moment.generation, moment.num_ranks, contents.values, contents.ties])
        text = f"{head[:-1]},{self.parts}]".encode()
        end = align(self.places[-1][1] if writes else _BEGIN, _BEGIN)
        mapping = self._sized(end + len(text))
        _MARK.pack_into(mapping, 0, 0, end, len(text))
        for write, (begin, after) in zip(writes, self.places, strict=True):
            tensor = contents.tensor_at(write.name, write.window)
            mapping[begin:after] = bytes_of(tensor.cpu().contiguous())  # memcpy: faster than copy_()
        note("elastic commit", f"step {moment.step}")
        mapping[end : end + len(text)] = text
        _MARK.pack_into(mapping, 0, 1, end, len(text))

    def _sized(self, num_bytes: int) -> mmap.mmap:
        if self.mapping is None or len(self.mapping) < num_bytes:
            self.mapping = None
            size = align(num_bytes + mmap.PAGESIZE, mmap.PAGESIZE)  # values of another step may be a little longer
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
    """The two sets of files; ``fds``: by set and rank."""

    def __init__(self, fds: Sequence[Sequence[int]]) -> None:
        self._sets = [[_MemoryFile(fd) for fd in each] for each in fds]
        self._newest = 1  # the set that the next write must leave alone

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks in both sets."""
        return sum(os.fstat(file.fd).st_size for each in self._sets for file in each)

    def write(self, moment: CommitMark, rank: int, writes: Sequence[Write], contents: Contents) -> None:
        """Write this rank's part over the older set; every rank must have written its part of the newer one."""
        number = 1 - self._newest
        self._sets[number][rank].write(moment, writes, contents)
        if rank == 0:
            for file in self._sets[number][moment.num_ranks :]:
                os.ftruncate(file.fd, 0)  # of a rank that is lost
        self._newest = number

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


def copied_bytes(model: nn.Module, state_bytes: float) -> int:
    """Return the bytes of all tensors in both sets; ``state_bytes``: of the optimizer, per trainable element.

    Names, and values that are no tensors, come on top: each file of a rank ends with a page for them, or several.
    """
    tensors = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)}
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return 2 * (sum(each.nbytes for each in tensors.values()) + int(state_bytes * trainable))


def describe_copies(build: Callable[[], nn.Module], state_bytes: float) -> str:
    """Return :func:`copied_bytes` of what ``build`` makes, which needs no memory, in words."""
    with torch.device("meta"):
        num_bytes = copied_bytes(build(), state_bytes)
    return f"--elastic: copies of two steps hold {format_bytes(num_bytes)} of the host's memory, for all ranks\n\n"
