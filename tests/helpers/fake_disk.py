"""A disk in memory that remembers what was done to it, and what could be left of that if the machine had stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.checkpoint.files import Buffer
from shardwise.errors import DamagedCheckpointError

Fate = Literal["dropped", "kept", "torn"]


@dataclass(frozen=True)
class Op:
    """One thing done: to a name (create, folder, rename, unlink), to data (write), or a sync of either."""

    kind: str
    path: Path
    to: Path | None = None
    data: bytes = b""
    inode: int = 0


@dataclass
class _Inode:
    data: bytearray = field(default_factory=bytearray)


class FakeDisk:
    """Implements ``Files``.  ``nodes``: file or folder (None) by path."""

    def __init__(self) -> None:
        self.nodes: dict[Path, int | None] = {}
        self.inodes: list[_Inode] = []
        self.ops: list[Op] = []
        self.stop_after: int | None = None  # number of operations after which the disk is full

    # ---- Files ----

    def make_folder(self, path: Path) -> None:
        for each in reversed((path, *path.parents)):
            if each not in self.nodes:
                self._do(Op("folder", each))

    def create(self, path: Path) -> _Output:
        if path in self.nodes:
            raise FileExistsError(path)
        self._check_parent(path)
        self.inodes.append(_Inode())
        self._do(Op("create", path, inode=len(self.inodes) - 1))
        return _Output(self, path, len(self.inodes) - 1)

    def open(self, path: Path) -> _Input:
        inode = self.nodes.get(path)
        if inode is None:
            raise DamagedCheckpointError(f"{path}: the file is missing")
        return _Input(bytes(self.inodes[inode].data), path)

    def sync_folder(self, path: Path) -> None:
        self._check_parent(path / "x")
        self._do(Op("sync folder", path))

    def rename(self, old: Path, new: Path) -> None:
        if self.nodes.get(new, 0) is None and self.names(new):
            raise OSError(39, "Directory not empty", str(new))
        if old not in self.nodes:
            raise FileNotFoundError(old)
        self._do(Op("rename", old, to=new))

    def remove(self, path: Path) -> None:
        for each in sorted((p for p in self.nodes if p == path or path in p.parents), reverse=True):
            inode = self.nodes[each]
            self._do(Op("unlink", each, inode=-1 if inode is None else inode))

    def names(self, path: Path) -> list[str]:
        return sorted(each.name for each in self.nodes if each.parent == path and each != path)

    # ---- what is left ----

    def _check_parent(self, path: Path) -> None:
        if self.nodes.get(path.parent, 0) is not None:
            raise FileNotFoundError(path)

    def _do(self, op: Op) -> None:
        if self.stop_after is not None and len(self.ops) >= self.stop_after:
            raise OSError(28, "No space left on device", str(op.path))
        self.ops.append(op)
        _apply(op, self.nodes, self.inodes)

    def crashes(self, stop: int, seed: int) -> Iterator[FakeDisk]:
        """Yield disks as they may be found if the machine stops after ``stop`` operations.

        What was synced is there.  Names that were not: none, all, or any (each by itself); data: dropped, kept, or torn,
        with other bytes where a file had grown.
        """
        chance = random.Random(seed)
        done = self.ops[:stop]
        for names in ("none", "all", "any", "any"):
            keeps = [
                _is_synced(done, i) or names == "all" or (names == "any" and chance.random() < 0.5) for i in range(stop)
            ]
            for fate in ("dropped", "kept", "torn"):
                yield self._left(done, keeps, fate, chance)

    def _left(self, done: list[Op], keeps: list[bool], fate: Fate, chance: random.Random) -> FakeDisk:
        disk = FakeDisk()
        disk.inodes = [_Inode() for _ in self.inodes]
        for index, op in enumerate(done):
            if op.kind == "write":
                is_synced = any(o.kind == "sync" and o.inode == op.inode for o in done[index:])
                if is_synced or fate == "kept":
                    disk.inodes[op.inode].data += op.data
                elif fate == "torn":
                    cut = chance.randrange(len(op.data) + 1)
                    disk.inodes[op.inode].data += op.data[:cut] + b"\0" * chance.choice((0, len(op.data) - cut))
            elif keeps[index]:
                _apply(op, disk.nodes, disk.inodes)
        return disk


def _is_synced(done: list[Op], index: int) -> bool:
    op = done[index]
    return any(later.kind == "sync folder" and later.path == op.path.parent for later in done[index:])


def _apply(op: Op, nodes: dict[Path, int | None], inodes: list[_Inode]) -> None:
    """Carry an operation out; one on something that is not there, since it got lost before, does nothing."""
    if op.kind == "write":
        inodes[op.inode].data += op.data
    elif op.kind == "folder":
        nodes.setdefault(op.path, None)
    elif op.kind == "create":
        nodes[op.path] = op.inode
    elif op.kind == "unlink" and op.inode >= 0:  # wherever it is: a rename before may have got lost
        for each in [each for each, inode in nodes.items() if inode == op.inode]:
            del nodes[each]
    elif op.kind == "unlink":
        if not any(op.path in each.parents for each in nodes):
            nodes.pop(op.path, None)
    elif op.kind == "rename" and op.path in nodes and op.to is not None:
        if any(op.to in each.parents for each in nodes):
            return
        for each in [each for each in nodes if each == op.path or op.path in each.parents]:
            nodes[op.to / each.relative_to(op.path)] = nodes.pop(each)


class _Output:
    def __init__(self, disk: FakeDisk, path: Path, inode: int) -> None:
        self._disk, self._path, self._inode = disk, path, inode

    def write(self, data: Buffer) -> None:
        self._disk._do(Op("write", self._path, data=bytes(data), inode=self._inode))

    def sync(self) -> None:
        self._disk._do(Op("sync", self._path, inode=self._inode))

    def close(self) -> None:
        pass


class _Input:
    def __init__(self, data: bytes, path: Path) -> None:
        self._data, self._path, self.num_bytes = data, path, len(data)

    def read_into(self, begin: int, buffer: memoryview) -> None:
        if begin + len(buffer) > len(self._data):
            raise DamagedCheckpointError(f"{self._path}: ends early")
        buffer[:] = self._data[begin : begin + len(buffer)]

    def close(self) -> None:
        pass
