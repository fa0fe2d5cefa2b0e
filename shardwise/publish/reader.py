"""``WeightReader``: the newest version in the tensors of an inference engine, all of it or nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO

import torch

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import Request
from shardwise.checkpoint.files import Files, VerifiedFile, list_checkpoints, read_requests
from shardwise.checkpoint.format import Manifest, TensorRecord, Window, bytes_of, dtype_of, join, split, whole
from shardwise.errors import ConfigError, DamagedCheckpointError, StateError
from shardwise.publish.delta import MODULUS, Change, bits_of, decode_positions
from shardwise.publish.versions import (
    MODEL,
    POSITIONS,
    READERS,
    VALUES,
    WHOLE,
    Version,
    key_of,
    read_version,
    write_mark,
)
from shardwise.safe_files import create_file, move_file

logger = logging.getLogger(__name__)
Names = Mapping[str, str | Sequence[str]]
_Changes = dict[str, dict[Window, Change]]  # by tensor and part


class WeightReader:
    """Takes the versions of a :class:`WeightPublisher` into an inference engine: one process, no process group, no model.

    Args:
        folder: the publisher's.
        receive: is called with ``folder`` before each look at it, and brings what the publisher's ``send`` has sent.

    Everything is read and verified before anything is changed.  A mark in ``folder`` tells the publisher what this reader
    has, as long as its process lives.

    Attributes:
        version: the number of the version that the weights are; None before the first, and while they are mixed.
        is_mixed: True after an interrupt while tensors were written; the next call writes all of them again.

    Example:
        >>> reader = WeightReader("publish")  # doctest: +SKIP
        >>> changed = reader.advance(dict(engine.named_parameters()))  # doctest: +SKIP
    """

    @explains_arguments
    def __init__(self, folder: str | Path, *, receive: Callable[[Path], object] | None = None) -> None:
        self._folder, self._receive = Path(folder).absolute(), receive
        self._files = Files(self._folder)
        self.is_mixed = False
        self._at: Version | None = None
        self._anchor: Manifest | None = None  # the one before, which has the parts of all that follows
        self._mark: IO[bytes] | None = None
        self._own: dict[str, torch.Tensor] = {}

    @property
    def version(self) -> int | None:
        """The number of the version that the weights are; None before the first, and while they are mixed."""
        return None if self._at is None else self._at.manifest.step

    def advance(self, weights: Mapping[str, torch.Tensor], *, names: Names | None = None) -> dict[str, torch.Tensor]:
        """Write the newest version into ``weights``, all or none; return the rows (along dim 0) that are new, by name.

        Args:
            weights: the engine's tensors, or views of them, of any strides and device; the same in each call.
            names: of published tensors that one of ``weights`` consists of: one name, or several that lie one after the
                other along dim 0, or that are stacked along a new dim 0.  What is not named has the published name.

        The names that it returns are the published ones, without those of tied tensors; nothing if there is no newer
        version.  Memory: what has changed; of an anchor, all.
        Raises: DamagedCheckpointError for what is not what was published; ConfigError for ``weights`` that lack a tensor or
            have another shape or dtype; StateError for weights that are not what this reader has written.  None of them
            changes anything.
        """
        found = self._advance(weights, names or {})
        return {
            split(name)[1]: torch.cat([each.rows() for each in changes]).unique() for name, changes in found.items()
        }

    def changed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and tensor of all that is new in the newest version, as ``load_weights`` of engines take them.

        Tied tensors come under each name.  They are this reader's own, one copy of the weights in host memory, which later
        calls change.  Raises: as :meth:`advance`.
        """
        found = self._advance(None, {})
        same = {} if self._anchor is None else self._anchor.ties
        names = [name for name in found for name in (name, *(tie for tie, first in same.items() if first == name))]
        return [(split(name)[1], self._own[split(name)[1]]) for name in names]

    def close(self) -> None:
        """Remove the mark."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()

    # ---- inside ----

    def _advance(self, weights: Mapping[str, torch.Tensor] | None, names: Names) -> dict[str, list[Change]]:
        """Return the changes of each tensor, which are then in ``weights``; None: in this reader's own."""
        path, staged = self._read()
        if not path:
            return {}
        if weights is None:
            weights = self._own = self._own if path[0].base else self._new_tensors()
        targets = self._targets(weights, names)
        self._verify(path[-1], staged, targets)
        self._at, self.is_mixed = None, True
        with torch.inference_mode():
            for name, changes in staged.items():
                for target in targets[name]:
                    for change in changes.values():
                        change.put(target)
        self._at, self.is_mixed = path[-1], False
        self._tell(0)
        return {name: list(changes.values()) for name, changes in staged.items()}

    def _read(self) -> tuple[list[Version], _Changes]:
        """Return the versions that lead to the newest one, and all that they change."""
        tried = 0
        while True:
            if self._receive is not None:
                self._receive(self._folder)
            there = {each.step: each.path for each in list_checkpoints(self._files, self._folder)}
            try:
                path = self._path(there)
                if path:
                    self._tell(path[0].manifest.step)
                return path, self._staged(path)
            except DamagedCheckpointError:
                if max(there) <= tried:
                    raise
                tried = max(there)  # it may have been removed meanwhile: then a newer one is there

    def _path(self, there: Mapping[int, Path]) -> list[Version]:
        """Return the versions from the one after this reader's, or else from the newest anchor, to the newest one."""
        found: list[Version] = []
        at, number = self._at and self._at.identity, max(there, default=0)
        while number:
            if number not in there:
                raise DamagedCheckpointError(
                    f"{self._folder}: version {number} is missing, from which version {found[0].manifest.step} follows. The "
                    f"weights stay at version {self.version}; the next anchor will be taken"
                )
            version = read_version(self._files, there[number])
            if version.identity == at:
                return found
            if found and found[0].base != version.identity:
                raise DamagedCheckpointError(
                    f"{version.path}: is of another save than version {number + 1} follows from"
                )
            found.insert(0, version)
            if version.base in (None, at):
                break
            number = version.base[0]
        if found and found[0].base is None:
            logger.info("%s: from version %s to anchor %d", self._folder, self.version, found[0].manifest.step)
            self._anchor = found[0].manifest
        return found

    def _staged(self, path: Sequence[Version]) -> _Changes:
        tensors = self._anchor.tensors if self._anchor is not None else {}
        parts = {part.key: (name, each, part.window) for name, each in tensors.items() for part in each.parts}
        staged: _Changes = {}
        for version in path:
            if version.base is None:
                found = {
                    name: torch.empty(each.shape, dtype=dtype_of(each.dtype, name), device="cpu")
                    for name, each in tensors.items()
                }
                wanted = [Request(name, each, whole(each.shape), found[name]) for name, each in tensors.items()]
                read_requests(self._files, version.path, version.manifest, wanted)
                for name, each in tensors.items():
                    window = whole(each.shape)
                    staged[name] = {window: Change(each.shape, window, None, bits_of(found[name]))}
                continue
            for name, change in self._changes(version, parts):
                of_parts, full = staged.setdefault(name, {}), whole(change.shape)
                if full in of_parts and of_parts[full].local is None:
                    change.put(of_parts[full].bits)
                else:
                    before = of_parts.get(change.window)
                    of_parts[change.window] = change if before is None else change.after(before)
        return staged

    def _changes(
        self, version: Version, parts: Mapping[str, tuple[str, TensorRecord, Window]]
    ) -> Iterator[tuple[str, Change]]:
        for record in version.manifest.files:
            place = version.path / record.name
            file = VerifiedFile(self._files, place, record)
            try:
                entries = file.header(version.manifest.save_id).entries
                for full, entry in entries.items():
                    key, _, kind = full.rpartition("/")
                    if kind == POSITIONS:
                        continue
                    name, tensor, window = parts[key]
                    sizes = window.sizes if kind == WHOLE else (prod(entry.shape),)
                    if kind not in (WHOLE, VALUES) or (entry.dtype, entry.shape) != (tensor.dtype, sizes):
                        raise ValueError(f"{entry.dtype} {list(entry.shape)}")
                    new = torch.empty(sizes, dtype=dtype_of(entry.dtype, name), device="cpu")
                    file.read_into(entry.begin, bytes_of(new), full)
                    local = None
                    if kind == VALUES:
                        at = entries[f"{key}/{POSITIONS}"]
                        data = bytearray(at.end - at.begin)
                        file.read_into(at.begin, memoryview(data), full)
                        local = decode_positions(data, len(new), window.numel)
                    yield name, Change(tensor.shape, window, local, bits_of(new))
            except (KeyError, ValueError) as error:
                raise DamagedCheckpointError(
                    f"{place}: its tensors are not the changes of a version ({error})"
                ) from error
            finally:
                file.close()

    def _targets(self, weights: Mapping[str, torch.Tensor], names: Names) -> dict[str, list[torch.Tensor]]:
        """Return what of ``weights`` each tensor goes into."""
        assert self._anchor is not None
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self._anchor.tensors}
        for given, tensor in weights.items():
            wanted = names.get(given, given)
            start, each = 0, (wanted,) if isinstance(wanted, str) else tuple(wanted)
            for number, name in enumerate(each):
                record = self._anchor.record_of(join(MODEL, name))
                if record is None:
                    if given in names:
                        raise ConfigError(f"{given}: names has {name!r}, which is not published")
                    continue  # the engine's own
                piece = tensor
                if not isinstance(wanted, str):
                    is_stacked, rows = tensor.dim() > len(record.shape), record.shape[0] if record.shape else 1
                    piece = tensor[number] if is_stacked else tensor[start : start + rows]
                    start += 1 if is_stacked else rows
                if (tuple(piece.shape), piece.dtype) != (record.shape, dtype_of(record.dtype, name)):
                    raise ConfigError(
                        f"{given}: {list(piece.shape)} of {piece.dtype} for {name}, which is {list(record.shape)} of "
                        f"{dtype_of(record.dtype, name)}"
                    )
                full = join(MODEL, name)
                found[self._anchor.ties.get(full, full)].append(piece)
            if start and start != len(tensor):
                raise ConfigError(f"{given}: {start} rows are named, it has {len(tensor)}")
        if lacking := [split(name)[1] for name, each in found.items() if not each]:
            raise ConfigError(f"weights have no {lacking[0]!r} (of {len(lacking)} tensors); name it with names=")
        return found

    def _verify(self, version: Version, staged: _Changes, targets: Mapping[str, list[torch.Tensor]]) -> None:
        """Compare the digest that each tensor will have with that of ``version``."""
        for name, digest in version.digests.items():
            changes, key = list(staged.get(name, {}).values()), key_of(name)
            is_all = bool(changes) and all(each.local is None for each in changes)
            is_all = is_all and sum(each.window.numel for each in changes) == prod(changes[0].shape)
            new = sum(change.digest(change.bits, key) for change in changes)
            for target in targets[name][: len(changes) or 1] if is_all else targets[name]:
                old = sum(change.digest(change.old(target), key) for change in changes) if not is_all else 0
                before = 0 if is_all or self._at is None else self._at.digests[name]
                if (before - old + new - digest) % MODULUS == 0:
                    continue
                if is_all:
                    raise DamagedCheckpointError(
                        f"{version.path}: {name}: its digest is not that of what was published"
                    )
                was, self._at = self.version, None
                raise StateError(
                    f"{name}: its elements are not those of version {was}, which this reader wrote: nothing was changed. The "
                    "next call writes all weights"
                )

    def _new_tensors(self) -> dict[str, torch.Tensor]:
        assert self._anchor is not None
        found = {
            name: torch.empty(each.shape, dtype=dtype_of(each.dtype, name), device="cpu")
            for name, each in self._anchor.tensors.items()
        }
        return {split(name)[1]: found[self._anchor.ties.get(name, name)] for name in (*found, *self._anchor.ties)}

    def _tell(self, reading: int) -> None:
        """Leave the mark that this reader has its version, and reads what begins at ``reading`` (0: nothing)."""
        try:
            if self._mark is None:
                name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
                mark = create_file(self._folder, f"{READERS}/.{name}")
                fcntl.flock(mark, fcntl.LOCK_EX)
                move_file(self._folder, f"{READERS}/.{name}", f"{READERS}/{name}")
                self._mark = mark
            write_mark(self._mark.fileno(), self.version or 0, reading)
        except OSError as error:
            logger.warning(
                "%s: this reader leaves no mark, so that its publisher does not know it: %s", self._folder, error
            )
