"""State after a step, each rank's part in memory that outlives the rank: the launcher has it, as files without a name.

There are two sets of files, one per rank in each.  Steps are written to them in turn, so that one set is complete whenever
a rank is killed.  A rank at any position of any world reads what it needs, by the names and windows of checkpoints.

On several hosts each host has such files.  A rank sends its part to a rank of the next host, during the next forward, and
all have received before the older set is written over: one set is complete without any one host.
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
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.contents import Contents, LoadRequests, Request, merged
from shardwise.checkpoint.format import Manifest, PartRecord, TensorRecord, Write, bytes_of, sum_of
from shardwise.checkpoint.state import carriers_of
from shardwise.consistency.process_groups import (
    await_collective,
    begin_exchange,
    broadcast,
    gather_objects,
    largest_words,
)
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.layout import align
from shardwise.observe import note
from shardwise.optim.slices import Window

_MARK = struct.Struct("<QQQ")  # complete or not (1, 0), begin and size of the description
_TOLD = struct.Struct("<Q")  # after it: whether on_commit has returned (1), or not (0)
_BEGIN = 64  # of tensors, which follow each other by the size of their dtype: all are aligned


@dataclass(frozen=True, slots=True)
class CommitMark:
    """The state after ``step`` steps, by ``num_ranks`` ranks of a generation."""

    step: int
    generation: int
    num_ranks: int


@dataclass(slots=True)
class _MemoryFile:
    """One rank's part of a set; ``fd``: -1 if it is on another host."""

    fd: int
    mapping: mmap.mmap | None = None
    writes: Sequence[Write] | None = None  # that ``places`` and ``parts`` describe
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    parts: str = ""

    def write(self, moment: CommitMark, writes: Sequence[Write], contents: Contents, result: str) -> torch.Tensor:
        """Write this rank's part, and return its bytes.  The mark is last, so that a file that is not whole has none."""
        if self.writes is not writes:
            self.places = list(pairwise(accumulate((write.num_bytes for write in writes), initial=_BEGIN)))
            rows = [
                [w.name, w.dtype, w.shape, w.window.offsets, w.window.sizes, *place]
                for w, place in zip(writes, self.places, strict=True)
            ]
            self.writes, self.parts = writes, json.dumps(rows, separators=(",", ":"))
        head = json.dumps([moment.step, moment.generation, moment.num_ranks, contents.values, contents.ties, result])
        text = f"{head[:-1]},{self.parts}]".encode()
        end = align(self.places[-1][1] if writes else _BEGIN, _BEGIN)
        mapping = self._sized(end + len(text))
        _MARK.pack_into(mapping, 0, 0, end, len(text))
        for write, (begin, after) in zip(writes, self.places, strict=True):
            tensor = contents.tensor_at(write.name, write.window)
            mapping[begin:after] = bytes_of(tensor.cpu().contiguous())  # memcpy: faster than copy_()
        note("elastic commit", f"step {moment.step}")
        mapping[end : end + len(text)] = text
        _TOLD.pack_into(mapping, _MARK.size, 0)
        _MARK.pack_into(mapping, 0, 1, end, len(text))
        return torch.frombuffer(mapping, dtype=torch.uint8, count=end + len(text))

    def put(self, part: torch.Tensor) -> None:
        """Write the bytes of a rank of another host."""
        mapping, data = self._sized(len(part)), memoryview(bytes_of(part))
        mapping[: _MARK.size] = bytes(_MARK.size)
        mapping[_MARK.size : len(data)] = data[_MARK.size :]
        mapping[: _MARK.size] = data[: _MARK.size]

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
        if not self.num_bytes:
            return None
        is_whole, begin, length = _MARK.unpack(os.pread(self.fd, _MARK.size, 0))
        if not is_whole:
            return None
        (is_told,) = _TOLD.unpack(os.pread(self.fd, _TOLD.size, _MARK.size))
        return [*json.loads(os.pread(self.fd, length, begin)), is_told]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.fd).st_size if self.fd >= 0 else 0

    def read(self) -> torch.Tensor:
        """Return the memory."""
        return torch.frombuffer(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)


class SavedState:
    """One complete set: the state after a step.

    Attributes:
        results: what the step returned on each rank, as it was written.  is_told: on_commit has returned on all.

    ``holders``: for each file, the ranks that describe a host which has it, and the file's description.
    """

    def __init__(
        self, moment: CommitMark, files: Sequence[_MemoryFile], holders: Sequence[dict[int, list[Any]]]
    ) -> None:
        self.moment, self._files, self._holders = moment, files, holders
        tensors: dict[str, tuple[str, list[int], list[PartRecord]]] = {}
        ties: dict[str, str] = {}
        described = [next(iter(each.values())) for each in holders]
        self.is_told = all(any(each[-1] for each in found.values()) for found in holders)
        self.results = [str(each[2]) for each in described]
        for rank, (_, own_ties, _, rows, _) in enumerate(described):
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

    def load(self, state: Mapping[str, Any], group: dist.ProcessGroup, num_hosts: int) -> None:
        """Put it into ``state``, whose parts on this rank are of any sharding; what a host lacks is broadcast.

        Collective.  Raises: ConfigError if ``state`` has other tensors than were saved.
        """
        order = LoadRequests(self._manifest)
        carriers = carriers_of(state, group.rank(), group.size())
        applies = [carrier.ask(order) for carrier in carriers]
        odd = [*order.missing, *order.unlike, *order.unexpected([carrier.prefix for carrier in carriers])]
        if odd:
            raise ConfigError(
                f"elastic: build() made a state that differs from the one before a rank was lost: {', '.join(odd[:4])}. It "
                "must make the same model and optimizer at every call, at any number of ranks"
            )
        wanted: list[list[tuple[Request, PartRecord]]] = [[] for _ in self._files]
        for request in order.requests:
            for part in request.record.parts:
                wanted[part.file].append((request, part))
        for file, holders, requests in zip(self._files, self._holders, wanted, strict=True):
            if len(holders) == num_hosts:
                memory = file.read()
            else:
                source, (*_, rows, _) = next(iter(holders.items()))
                num_bytes = rows[-1][-1] if rows else 0
                is_source = group.rank() == source
                memory = (
                    file.read()[:num_bytes] if is_source else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                )
                broadcast(memory, source, group)
            for request, part in requests:
                _fill(request, part, memory)
        for apply in applies:
            apply()


def _fill(request: Request, part: PartRecord, memory: torch.Tensor) -> None:
    common = part.window.meet(request.window) if part.window.sizes else part.window
    if common is not None and common.numel:
        source = memory[part.begin : part.end].view(request.target.dtype).view(part.window.sizes)
        common.cut(request.target, request.window).copy_(common.cut(source, part.window))


class StateMemory:
    """The two sets of files of this host.

    Args:
        fds: by set and rank.  hosts: of each rank of ``group``.
    """

    def __init__(self, fds: Sequence[Sequence[int]], hosts: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sets = [[_MemoryFile(fd) for fd in each] for each in fds]
        self._newest = 1  # the set that the next write must leave alone
        self._group = group
        by_host = [[rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]
        self.num_hosts = len(by_host)
        here = next(each for each in by_host if group.rank() in each)
        self._is_first = group.rank() == here[0]
        self._partners: dict[int, int] = {}  # by rank: on the next host, with a copy of its part
        for each, others in zip(by_host, by_host[1:] + by_host[:1], strict=True):
            self._partners |= {rank: others[number % len(others)] for number, rank in enumerate(each)}
        self._kept = {*here, *(rank for rank, partner in self._partners.items() if partner in here)}
        self._coming: tuple[dist.Work, Sequence[_MemoryFile], Sequence[torch.Tensor]] | None = None
        self.lost_step = 0  # after reading: the newest that a file has, if no set is complete

    @property
    def num_bytes(self) -> int:
        """Bytes of both sets on this host."""
        return sum(file.num_bytes for each in self._sets for file in each)

    def write(self, moment: CommitMark, writes: Sequence[Write], contents: Contents, result: str) -> None:
        """Write this rank's part over the older set; every rank must have written and received its parts of the newer one.

        ``result``: what on_commit is to get.
        """
        if self._is_first and self.num_hosts > 1:
            self.note_told(by_all=True)
        number, rank = 1 - self._newest, self._group.rank()
        files = self._sets[number]
        part = files[rank].write(moment, writes, contents, result)
        for other, file in enumerate(files) if self._is_first else ():
            if other not in self._kept and file.num_bytes:
                os.ftruncate(file.fd, 0)  # of a rank that is lost, or now on another host
        self._newest = number
        if self.num_hosts > 1:
            sizes = torch.zeros(moment.num_ranks, dtype=torch.int64, device="cpu")
            sizes[rank] = len(part)
            largest_words(sizes, self._group)
            takes = [size * (self._partners[other] == rank) for other, size in enumerate(sizes.tolist())]
            sends = [len(part) * (other == self._partners[rank]) for other in range(moment.num_ranks)]
            coming = torch.empty(sum(takes), dtype=torch.uint8, device="cpu")
            self._coming = begin_exchange(coming, part, takes, sends, self._group), files, coming.split(takes)

    def note_told(self, by_all: bool = False) -> None:
        """Note that on_commit has returned for the newest step on this rank, or on all: then also in copies of other hosts."""
        files = self._sets[self._newest]
        for file in files if by_all else files[self._group.rank() :: self._group.size()]:  # fewer than have written it
            if file.num_bytes:
                os.pwrite(file.fd, _TOLD.pack(1), _MARK.size)

    def receive(self, may_wait: bool = True) -> None:
        """Write the parts of another host's ranks that are to come; all of them, or none if that needs a wait."""
        if self._coming is None or not (may_wait or self._coming[0].is_completed()):
            return
        (work, files, parts), self._coming = self._coming, None
        await_collective(work, self._group)
        for file, part in zip(files, parts, strict=False):
            if len(part):
                file.put(part)

    def read(self) -> SavedState | None:
        """Return the newest set that is complete on all hosts together, None if there is none; no rank may write meanwhile."""
        is_asked = self._is_first or self.num_hosts == 1
        mine = [[file.describe() for file in each] for each in self._sets] if is_asked else []
        tables = gather_objects(mine, self._group) if self.num_hosts > 1 else [mine]
        found: dict[tuple[CommitMark, int], dict[int, dict[int, list[Any]]]] = {}
        for holder, table in enumerate(tables):
            for number, descriptions in enumerate(table):
                for rank, each in enumerate(descriptions):
                    if each is not None and rank < each[2]:
                        files = found.setdefault((CommitMark(*each[:3]), number), {})
                        files.setdefault(rank, {})[holder] = each[3:]
        whole = [key for key, files in found.items() if len(files) == key[0].num_ranks]
        self.lost_step = 0 if whole else max((key[0].step for key in found), default=0)
        if not whole:
            return None
        # A host that was away may have later steps of an earlier generation, which the others have given up.
        moment, self._newest = newest = max(whole, key=lambda each: (each[0].generation, each[0].step))
        holders = [found[newest][rank] for rank in range(moment.num_ranks)]
        return SavedState(moment, self._sets[self._newest][: moment.num_ranks], holders)


def copied_bytes(model: nn.Module, state_bytes: float) -> int:
    """Return the bytes of all tensors in both sets, on one host; ``state_bytes``: of the optimizer, per trainable element.

    Names, and values that are no tensors, come on top: each file of a rank ends with a page for them, or several.
    """
    tensors = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)}
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return 2 * (sum(each.nbytes for each in tensors.values()) + int(state_bytes * trainable))


def describe_copies(build: Callable[[], nn.Module], state_bytes: float) -> str:
    """Return :func:`copied_bytes` of what ``build`` makes, which needs no memory, in words."""
    with torch.device("meta"):
        num_bytes = copied_bytes(build(), state_bytes)
    held = f"copies of two steps hold {format_bytes(num_bytes)} of the host's memory, for all ranks"
    return f"--elastic: {held}; of several hosts' together twice that\n\n"
