"""``WeightReader``: the newest version in the tensors of an inference engine, all of it or nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import torch

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import LoadRequests
from shardwise.checkpoint.files import Files, list_checkpoints, read_requests
from shardwise.checkpoint.format import Manifest, TensorRecord, Window, dtype_of, join, split
from shardwise.checkpoint.load import foreign_manifest
from shardwise.consistency.store import digest_of
from shardwise.errors import ConfigError, DamagedCheckpointError, StateError
from shardwise.publish.delta import PartChange, bits_of, decode_positions
from shardwise.publish.versions import MODEL, POSITIONS, PUBLISH, READERS, Version, read_version, write_mark
from shardwise.safe_files import create_file, move_file

logger = logging.getLogger(__name__)
Names = Mapping[str, str | Sequence[str]]


_Changes = Mapping[str, list[PartChange]]  # of each part, one after the other


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
        rows: dict[str, list[torch.Tensor]] = {}
        for changes in self._advance(weights, names or {}).values():
            rows.setdefault(split(changes[0].name)[1], []).extend(change.rows() for change in changes)
        return {name: torch.cat(found).unique() for name, found in rows.items()}

    def changed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and tensor of all that is new in the newest version, as ``load_weights`` of engines take them.

        Tied tensors come under each name.  They are this reader's own, one copy of the weights in host memory, which later
        calls change.  Raises: as :meth:`advance`.
        """
        new = dict.fromkeys(changes[0].name for changes in self._advance(None, {}).values())
        ties = {} if self._anchor is None else self._anchor.ties
        names = [split(name)[1] for name in (*new, *(tie for tie, first in ties.items() if first in new))]
        return [(name, self._own[name]) for name in names]

    def close(self) -> None:
        """Remove the mark."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    # ---- inside ----

    def _advance(self, weights: Mapping[str, torch.Tensor] | None, names: Names) -> _Changes:
        """Return what has changed, which is then in ``weights``; None: in this reader's own."""
        if self._receive is not None:
            self._receive(self._folder)
        if not list_checkpoints(self._files, self._folder):
            return {}
        self._mark_as(reading=True)  # nothing that is in the folder from here on is removed meanwhile
        try:
            path = self._path()
            anchor = path[0].manifest if path and path[0].base is None else self._anchor
            if not path or anchor is None:
                return {}
            staged = self._staged(path, anchor)
            if weights is None and path[0].base is None:
                own = {name: LoadRequests(anchor).whole(name) for name in anchor.tensors}
                self._own = {split(name)[1]: own[anchor.ties.get(name, name)] for name in (*own, *anchor.ties)}
            targets = _targets(anchor, self._own if weights is None else weights, names)
            places = [
                (key, changes, changes[0].window.cut(bits_of(target)))
                for key, changes in staged.items()
                for target in targets[changes[0].name]
            ]
            with torch.inference_mode():
                for key, changes, place in places:
                    self._verify(path, key, changes, place.clone())
                self._at, self.is_mixed = None, True
                for _, changes, place in places:
                    _put(changes, place)
            self._at, self._anchor, self.is_mixed = path[-1], anchor, False
            return staged
        finally:
            self._mark_as(reading=False)

    def _verify(self, path: Sequence[Version], key: str, changes: Sequence[PartChange], copy: torch.Tensor) -> None:
        """Compare the digest that a part will have with what was published."""
        _put(changes, copy)
        if digest_of(copy) == path[-1].manifest.values.get(f"{PUBLISH}/{key}"):
            return
        at, self._at, what = self._at, None, f"{path[-1].path}: {changes[0].name} would not be what was published"
        if at is None or path[0].base is None:
            raise DamagedCheckpointError(f"{what}: its digest is another")
        raise StateError(
            f"{what}: it was changed since this reader wrote version {at.manifest.step}. Nothing is changed now; "
            "the next call writes all weights"
        )

    def _path(self) -> list[Version]:
        """Return the versions from the one after this reader's, or else from the newest anchor, to the newest one."""
        there = {each.step: each.path for each in list_checkpoints(self._files, self._folder)}
        found: list[Version] = []
        at, number = self._at and self._at.identity, max(there, default=0)
        while number:
            if number not in there:
                raise DamagedCheckpointError(
                    f"{self._folder}: version {number} is missing, which version {found[0].manifest.step} follows. The weights "
                    f"stay those of version {self.version} until the next anchor"
                )
            version = read_version(self._files, there[number])
            if version.identity == at:
                break
            if found and found[0].base != version.identity:
                raise DamagedCheckpointError(f"{version.path}: is not the version that version {number + 1} follows")
            found.insert(0, version)
            number = 0 if version.base is None or version.base == at else version.base[0]
        if found and found[0].base is None:
            logger.info("%s: from version %s to anchor %d", self._folder, self.version, found[0].manifest.step)
        return found

    def _staged(self, path: Sequence[Version], anchor: Manifest) -> _Changes:
        """Return what has changed along ``path``, by part; all of it is read and verified."""
        parts = {part.key: (name, each, part.window) for name, each in anchor.tensors.items() for part in each.parts}
        changes: dict[str, list[PartChange]] = {}
        for version in path:
            # Tensors are found in the headers of files, which are verified with the rest of these.
            names = [file.name for file in version.manifest.files]
            found = foreign_manifest(self._files, version.path, names, PUBLISH)
            order = LoadRequests(replace(version.manifest, tensors=found.tensors))
            tensors = {split(name)[1]: order.whole(name) for name in found.tensors}
            read_requests(self._files, version.path, order.manifest, order.requests)
            try:
                for key, change in _changes(tensors, parts):
                    changes[key] = [change] if change.local is None else [*changes.get(key, ()), change]
                changes = {key: changes[key] for key in (parts if path[0].base is None else changes)}
            except (KeyError, ValueError) as why:
                raise DamagedCheckpointError(
                    f"{version.path}: its tensors are not the changes of a version ({why})"
                ) from why
        return changes

    def _mark_as(self, reading: bool) -> None:
        """Leave the mark that this reader has its version, and whether it reads others."""
        try:
            if self._mark is None:
                name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
                mark = create_file(self._folder, f"{READERS}/.{name}")
                try:
                    fcntl.flock(mark, fcntl.LOCK_EX)
                    move_file(self._folder, f"{READERS}/.{name}", f"{READERS}/{name}")
                except OSError:  # a file system without locks: the next call tries again
                    mark.close()
                    self._files.remove(self._folder / READERS / f".{name}")
                    raise
                self._mark = mark
                weakref.finalize(self, mark.close)
            write_mark(self._mark.fileno(), self.version or 0, reading)
        except OSError as error:
            logger.warning("%s: the publisher does not know this reader, which leaves no mark: %s", self._folder, error)


def _put(changes: Iterable[PartChange], part: torch.Tensor) -> None:
    for change in changes:
        change.put(part)


def _changes(
    tensors: Mapping[str, torch.Tensor], parts: Mapping[str, tuple[str, TensorRecord, Window]]
) -> Iterator[tuple[str, PartChange]]:
    """Yield the changes of parts that the files of a delta have.  Raises: KeyError, ValueError for anything else."""
    for key, values in tensors.items():
        if key.rpartition("/")[0] in parts:
            continue  # positions
        name, record, window = parts[key]
        local, positions = None, tensors.get(f"{key}/{POSITIONS}")
        if positions is not None:
            local = decode_positions(bits_of(positions).numpy().view(np.uint8), values.numel(), window.numel)
        sizes = window.sizes if local is None else local.shape
        if values.dtype != dtype_of(record.dtype, name) or values.shape != sizes:
            raise ValueError(f"{key}: {values.dtype} {list(values.shape)}")
        yield key, PartChange(name, window, local, bits_of(values))


def _targets(anchor: Manifest, weights: Mapping[str, torch.Tensor], names: Names) -> dict[str, list[torch.Tensor]]:
    """Return what of ``weights`` each published tensor goes into.  Raises: ConfigError."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in anchor.tensors}
    for given, tensor in weights.items():
        wanted, start = names.get(given, given), 0
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            full, place = join(MODEL, name), tensor
            record = anchor.record_of(full)
            if record is None and given not in names:
                continue  # the engine's own
            if record is not None and not isinstance(wanted, str):
                is_stacked = tensor.dim() > len(record.shape)
                stop = start + (1 if is_stacked else record.shape[0])
                place = tensor[start] if is_stacked else tensor[start:stop]
                start = stop
            if record is None or (tuple(place.shape), place.dtype) != (record.shape, dtype_of(record.dtype, name)):
                expected = "no such tensor" if record is None else f"{list(record.shape)} of {record.dtype}"
                raise ConfigError(f"{given}: {list(place.shape)} of {place.dtype} for {name}; published is {expected}")
            found[anchor.ties.get(full, full)].append(place)
        if start and start != len(tensor):
            raise ConfigError(f"{given}: it has {len(tensor)} rows, the tensors of names= {start}")
    if lacks := [split(name)[1] for name, each in found.items() if not each]:
        raise ConfigError(f"weights lack {lacks[0]!r} (of {len(lacks)} tensors); what has other names goes into names=")
    return found
