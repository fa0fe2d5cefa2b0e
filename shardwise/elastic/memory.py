"""State after a step, each rank's part in memory that outlives the rank: files without a name (:mod:`.keeper`).

There are two sets of files.  Steps are written to them in turn, so that one set is complete whenever a rank is killed.  A
rank at any position of any world reads what it needs, by the names and windows of checkpoints.

On several hosts each host has such files.  A rank also sends its part to a rank of the next host, before the step counts as
written: one set is complete without any one host.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.contents import Contents, LoadRequests, Request, Windows, merged
from shardwise.checkpoint.format import (
    Held,
    Manifest,
    PartRecord,
    Write,
    bytes_of,
    held_from_text,
    held_to_text,
    share_out,
    sum_of,
    tensor_records,
)
from shardwise.checkpoint.state import BufferCheck, carriers_of, contents_of
from shardwise.consistency.process_groups import (
    await_collective,
    begin_exchange,
    broadcast,
    gather_objects,
    largest_words,
)
from shardwise.elastic.membership import Generation
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.layout import align
from shardwise.observe import note

_MARK = struct.Struct("<QQQQ")  # one of these; begin and size of the description; generation
_PARTIAL, _WHOLE, TOLD, OVER = range(4)  # not whole; whole; and on_commit has returned; and the run is over
_BEGIN = 64  # of tensors, which follow each other by the size of their dtype: all are aligned


class _CommitMark(NamedTuple):
    """The state after ``step`` steps, by ``num_ranks`` ranks of a generation.

    A host that was away may have later steps of an earlier generation, which the others have given up.
    """

    generation: int
    step: int
    num_ranks: int


@dataclass(slots=True)
class _MemoryFile:
    """A file for one rank's part of a set."""

    fd: int
    mapping: mmap.mmap | None = None

    def write(self, moment: _CommitMark, text: bytes, places: _Places, contents: Contents) -> torch.Tensor:
        """Write a part and its description, and return its bytes.  The mark is last: a file that is not whole has none."""
        end = align(places[-1][2] if places else _BEGIN, _BEGIN)
        mapping = self._sized(end + len(text))
        _MARK.pack_into(mapping, 0, _PARTIAL, end, len(text), moment.generation)
        for write, begin, after in places:
            tensor = contents.tensor_at(write.name, write.window)
            mapping[begin:after] = bytes_of(tensor.cpu().contiguous())  # memcpy: faster than copy_()
        note("elastic commit", f"step {moment.step}")
        mapping[end : end + len(text)] = text
        _MARK.pack_into(mapping, 0, _WHOLE, end, len(text), moment.generation)
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
        """Return the description, the bytes of tensors, and whether on_commit has returned; None if the file is not whole."""
        mark = os.pread(self.fd, _MARK.size, 0)
        how, begin, length, _ = _MARK.unpack(mark or bytes(_MARK.size))
        return None if how == _PARTIAL else [*json.loads(os.pread(self.fd, length, begin)), begin, how >= TOLD]

    def read(self) -> torch.Tensor:
        """Return the memory."""
        return torch.frombuffer(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)


_Places: TypeAlias = list[tuple[Write, int, int]]  # what a rank writes, and where it begins and ends in its file
# By the rank that describes the files of a host: where there a part is, its values and ties, what the step returned, what the
# rank held, the part's bytes, and whether on_commit has returned.
_Holders: TypeAlias = dict[int, list[Any]]


class StateMemory:
    """The two sets of files of this host, and what the ranks of a generation write into them; all ranks together.

    Args:
        fds: of both sets.
    Raises: ConfigError if a set has fewer files than this host has ranks, and copies.
    """

    def __init__(self, fds: Sequence[int], generation: Generation, group: dist.ProcessGroup) -> None:
        most = len(fds) // 2
        self._sets = [[_MemoryFile(fd) for fd in each] for each in (fds[:most], fds[most:])]
        self._newest = 1  # the set that the next write must leave alone
        self._number, self.group, self._rank = generation.number, group, group.rank()
        hosts = generation.hosts or ("",) * group.size()
        by_host = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in hosts}
        self._num_hosts, here, ring = len(by_host), by_host[hosts[self._rank]], [*by_host.values()]
        self._first = here[0]
        self._partners: dict[int, int] = {}  # by rank: on the next host, with a copy of its part
        for each, others in zip(ring, ring[1:] + ring[:1], strict=True):
            self._partners |= {rank: others[number % len(others)] for number, rank in enumerate(each)}
        self._kept = sorted({*here, *(rank for rank, partner in self._partners.items() if partner in here)})
        if len(self._kept) > most:
            raise ConfigError(
                f"elastic: the memory of a host is for {most} ranks, and copies of another one's; found {len(self._kept)}. "
                "Start fewer ranks per host"
            )
        self._own: Sequence[_MemoryFile] = ()  # of the newest set, where this rank notes that on_commit has returned
        self._held: dict[str, Held] = {}
        self._windows, self._places, self._text = Windows(), _Places(), ""  # of this rank's file, and ``held`` as text
        # After a load: the newest step that a file has, if no set is complete; whether on_commit has returned on all.
        self.lost_step, self.is_told = 0, False

    @property
    def num_bytes(self) -> int:
        """Bytes of both sets on this host."""
        return sum(os.fstat(file.fd).st_size for each in self._sets for file in each)

    def commit(self, state: Mapping[str, Any], step: int, newest: int, result: str) -> bool:
        """Write the state after a step.  Return True if a rank knows of a newer generation (``newest``): all return the same.

        After the exchange all ranks have ended the step, so the set of the step before is complete, without any one host,
        and the one before that is written over.

        ``result``: what on_commit is to get.  Raises: ConfigError on every rank if values differ between ranks.
        """
        contents = contents_of(state, self._rank, self.group.size(), self._windows)
        BufferCheck(contents, "per_rank", self._rank)
        common = {name: value for name, value in contents.values.items() if name not in contents.divided}
        digest = int(sum_of(json.dumps(common).encode())[:15], 16)
        facts = [newest, int(contents.held != self._held), digest, -digest]
        words = torch.tensor(facts, dtype=torch.int64, device="cpu")
        largest_words(words, self.group)
        newest, is_new, most, least = words.tolist()
        if most != -least:
            merged(gather_objects(common, self.group))
        if is_new:
            self._held, self._text = contents.held, held_to_text(contents.held.values())
            held = map(held_from_text, gather_objects(self._text, self.group))
            self._places = _places_of(share_out([*held]), self._rank)
        self._write(_CommitMark(self._number, step, self.group.size()), contents, result)
        return newest > self._number

    def _write(self, moment: _CommitMark, contents: Contents, result: str) -> None:
        self._newest = 1 - self._newest
        files = self._sets[self._newest]
        if self._rank == self._first:
            _mark(self._sets[1 - self._newest], TOLD)  # on_commit has returned on all: also in copies of other hosts
            for file in files[len(self._kept) :]:  # of ranks that are lost, or now on other hosts
                os.ftruncate(file.fd, 0)
        by_rank = dict(zip(self._kept, files, strict=False))
        self._own = [by_rank[self._rank]]
        head = json.dumps([*moment, self._rank, contents.values, contents.ties, result])
        part = by_rank[self._rank].write(moment, f"{head[:-1]},{self._text}]".encode(), self._places, contents)
        if self._num_hosts > 1:
            sizes = gather_objects(len(part), self.group)
            takes = [size * (self._partners[other] == self._rank) for other, size in enumerate(sizes)]
            sends = [len(part) * (other == self._partners[self._rank]) for other in range(moment.num_ranks)]
            coming = torch.empty(sum(takes), dtype=torch.uint8, device="cpu")
            await_collective(begin_exchange(coming, part, takes, sends, self.group), self.group)
            for other, copy in enumerate(coming.split(takes)):
                if len(copy):
                    by_rank[other].put(copy)

    def note(self, how: int) -> None:
        """Note on this rank that the newest step is :data:`TOLD`, or :data:`OVER`."""
        _mark(self._own, how)

    def load(self, state: Mapping[str, Any]) -> tuple[int, str] | None:
        """Put the newest state that is complete on all hosts together into ``state``, of any sharding; None if there is none.

        Return its step, and what that returned on the rank of this number.
        Collective; no rank may write meanwhile.  Raises: ConfigError if ``state`` has other tensors than were saved.
        """
        found = self._find()
        if found is None:
            return None
        moment, holders = found
        described = [next(iter(each.values())) for each in holders]
        writes = share_out([held_from_text(json.dumps(each[4])) for each in described])
        placed = [each for rank in range(moment.num_ranks) for each in _places_of(writes, rank)]
        records = tensor_records((write, write.rank, begin) for write, begin, _ in placed)
        ties = {name: other for each in described for name, other in each[2].items()}
        values: list[Mapping[str, Any]] = [each[1] for each in described]
        order = LoadRequests(Manifest("0" * 32, moment.step, moment.num_ranks, (), records, ties, merged(values)))
        carriers = carriers_of(state, self._rank, self.group.size())
        applies = [carrier.ask(order) for carrier in carriers]
        odd = [*order.missing, *order.unlike, *order.unexpected([carrier.prefix for carrier in carriers])]
        if odd:
            raise ConfigError(
                f"elastic: build() made a state that differs from the one before a rank was lost: {', '.join(odd[:4])}. It "
                "must make the same model and optimizer at every call, at any number of ranks"
            )
        self._fill(order.requests, holders)
        for apply in applies:
            apply()
        self.is_told = all(any(each[-1] for each in part.values()) for part in holders)
        return moment.step, described[self._rank % moment.num_ranks][3]

    def _find(self) -> tuple[_CommitMark, list[_Holders]] | None:
        """Return the newest set that is complete, and who has each of its parts."""
        mine = [[file.describe() for file in each] for each in self._sets] if self._rank == self._first else []
        tables = gather_objects(mine, self.group)
        found: dict[tuple[_CommitMark, int], dict[int, _Holders]] = {}
        for holder, table in enumerate(tables):
            for number, descriptions in enumerate(table):
                for place, each in enumerate(descriptions):
                    if each is not None:
                        parts = found.setdefault((_CommitMark(*each[:3]), number), {})
                        parts.setdefault(each[3], {})[holder] = [place, *each[4:]]
        whole = [key for key, parts in found.items() if len(parts) == key[0].num_ranks]
        if not whole:
            self.lost_step = max((moment.step for moment, _ in found), default=0)
            return None
        moment, self._newest = newest = max(whole)
        if self._num_hosts == 1:  # fewer than have written it
            self._own = self._sets[self._newest][self._rank :: self.group.size()]
        return moment, [found[newest][rank] for rank in range(moment.num_ranks)]

    def _fill(self, requests: Sequence[Request], holders: Sequence[_Holders]) -> None:
        """Fill the targets of ``requests``; what a host lacks is broadcast."""
        wanted: list[list[tuple[Request, PartRecord]]] = [[] for _ in holders]
        for request in requests:
            for part in request.record.parts:
                wanted[part.file].append((request, part))
        files = self._sets[self._newest]
        for found, pairs in zip(holders, wanted, strict=True):
            source, (*_, num_bytes, _) = next(iter(found.items()))
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            if self._rank == source or len(found) == self._num_hosts:
                memory = files[found[self._first][0]].read()[:num_bytes]
            if len(found) < self._num_hosts:
                broadcast(memory, source, self.group)
            for request, part in pairs:
                common = part.window.meet(request.window) if part.window.sizes else part.window
                if common is not None and common.numel:
                    values = memory[part.begin : part.end].view(request.target.dtype).view(part.window.sizes)
                    common.cut(request.target, request.window).copy_(common.cut(values, part.window))


def _places_of(writes: Sequence[Write], rank: int) -> _Places:
    own = [write for write in writes if write.rank == rank]
    ends = pairwise(accumulate((write.num_bytes for write in own), initial=_BEGIN))
    return [(write, *each) for write, each in zip(own, ends, strict=True)]


def _mark(files: Sequence[_MemoryFile], how: int) -> None:
    for file in files:
        if any(os.pread(file.fd, 8, 0)):  # it is whole
            os.pwrite(file.fd, how.to_bytes(8, "little"), 0)


def look(fds: Sequence[int]) -> tuple[int, bool]:
    """Return the newest generation that has written into one of these files, and whether it has noted that the run is over."""
    marks = [_MARK.unpack(mark) for fd in fds if (mark := os.pread(fd, _MARK.size, 0))]
    number, how = max(((mark[-1], mark[0]) for mark in marks), default=(0, _PARTIAL))
    return number, how == OVER


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
