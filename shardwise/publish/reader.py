"""``WeightReader``: the newest version in the tensors of an inference engine, all of it or nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import IO

import torch

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import LoadRequests
from shardwise.checkpoint.files import Files, VerifiedFile, list_checkpoints, read_requests
from shardwise.checkpoint.format import Entry, Manifest, TensorRecord, Window, bytes_of, dtype_of, join, split, whole
from shardwise.errors import ConfigError, DamagedCheckpointError, StateError
from shardwise.publish.delta import MODULUS, PartChange, bits_of, decode_positions
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
_Changes = dict[str, dict[Window, PartChange]]  # by tensor and part
_Part = tuple[str, TensorRecord, Window]


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
        changes = self._advance(weights, names or {})
        return {split(name)[1]: torch.cat([each.rows() for each in found]).unique() for name, found in changes.items()}

    def changed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and tensor of all that is new in the newest version, as ``load_weights`` of engines take them.

        Tied tensors come under each name.  They are this reader's own, one copy of the weights in host memory, which later
        calls change.  Raises: as :meth:`advance`.
        """
        changes = self._advance(None, {})
        ties = {} if self._anchor is None else self._anchor.ties
        tied = [tie for tie, first in ties.items() if first in changes]
        return [(split(name)[1], self._own[split(name)[1]]) for name in (*changes, *tied)]

    def close(self) -> None:
        """Remove the mark."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()

    # ---- inside ----

    def _advance(self, weights: Mapping[str, torch.Tensor] | None, names: Names) -> dict[str, list[PartChange]]:
        """Return the changes of each tensor, which are then in ``weights``; None: in this reader's own."""
        path, staged = self._read()
        if not path:
            return {}
        anchor = path[0].manifest if path[0].base is None else self._anchor
        assert anchor is not None
        if weights is None and path[0].base is None:
            own = {name: _empty(each) for name, each in anchor.tensors.items()}
            self._own = {split(name)[1]: own[anchor.ties.get(name, name)] for name in (*own, *anchor.ties)}
        targets = _targets(anchor, self._own if weights is None else weights, names)
        self._verify(path, staged, targets)
        self._at, self.is_mixed = None, True
        with torch.inference_mode():
            for name, changes in staged.items():
                for target, change in product(targets[name], changes.values()):
                    change.put(target)
        self._at, self._anchor, self.is_mixed = path[-1], anchor, False
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
                    f"{self._folder}: version {number} is missing, which version {found[0].manifest.step} follows. The weights "
                    f"stay those of version {self.version} until the next anchor"
                )
            version = read_version(self._files, there[number])
            if version.identity == at:
                break
            if found and (found[0].base, {*found[0].digests}) != (version.identity, {*version.digests}):
                raise DamagedCheckpointError(f"{version.path}: is not the version that version {number + 1} follows")
            found.insert(0, version)
            if version.base in (None, at):
                break
            number = version.base[0]
        if found and found[0].base is None:
            logger.info("%s: from version %s to anchor %d", self._folder, self.version, found[0].manifest.step)
        return found

    def _staged(self, path: Sequence[Version]) -> _Changes:
        staged: _Changes = {}
        tensors = self._anchor.tensors if self._anchor is not None else {}
        for version in path:
            if version.base is None:
                tensors, order = version.manifest.tensors, LoadRequests(version.manifest)
                for name, each in tensors.items():
                    window = whole(each.shape)
                    staged[name] = {window: PartChange(each.shape, window, None, bits_of(order.whole(name)))}
                read_requests(self._files, version.path, version.manifest, order.requests)
                continue
            parts = {part.key: (name, each, part.window) for name, each in tensors.items() for part in each.parts}
            for name, change in self._changes(version, parts):
                known, full = staged.setdefault(name, {}), whole(change.shape)
                if full in known and known[full].local is None:
                    change.put(known[full].bits)
                else:
                    known[change.window] = change.after(known.get(change.window))
        return staged

    def _changes(self, version: Version, parts: Mapping[str, _Part]) -> Iterator[tuple[str, PartChange]]:
        for record in version.manifest.files:
            place = version.path / record.name
            file = VerifiedFile(self._files, place, record)
            try:
                entries = file.header(version.manifest.save_id).entries
                for full in [full for full in entries if not full.endswith(f"/{POSITIONS}")]:
                    key, _, kind = full.rpartition("/")
                    name, tensor, window = parts[key]
                    new, local = _empty(entries[full]), None
                    file.read_into(entries[full].begin, bytes_of(new), full)
                    if kind == VALUES:
                        at = entries[f"{key}/{POSITIONS}"]
                        data = bytearray(at.end - at.begin)
                        file.read_into(at.begin, memoryview(data), full)
                        local = decode_positions(data, new.numel(), window.numel)
                    sizes = window.sizes if local is None else local.shape
                    if kind not in (WHOLE, VALUES) or entries[full].dtype != tensor.dtype or new.shape != sizes:
                        raise ValueError(f"{kind}: {entries[full].dtype} {list(new.shape)}")
                    yield name, PartChange(tensor.shape, window, local, bits_of(new))
            except (KeyError, ValueError) as error:
                raise DamagedCheckpointError(
                    f"{place}: its tensors are not the changes of a version ({error})"
                ) from error
            finally:
                file.close()

    def _verify(self, path: Sequence[Version], staged: _Changes, targets: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Compare the digest that each tensor will have with that of the last version of ``path``."""
        at = None if path[0].base is None else self._at
        for name, digest in path[-1].digests.items():
            changes, key = [*staged.get(name, {}).values()], key_of(name)
            new = sum(change.digest(change.bits, key) for change in changes) - digest
            for target in targets[name]:
                old = 0 if at is None else at.digests[name] - sum(c.digest(c.old(target), key) for c in changes)
                if (old + new) % MODULUS:
                    self._at, what = None, f"{path[-1].path}: {name} would not be what was published"
                    if at is None:
                        raise DamagedCheckpointError(f"{what}: its digest is another")
                    raise StateError(
                        f"{what}: it was changed since this reader wrote version {at.manifest.step}. Nothing is changed now; "
                        "the next call writes all weights"
                    )

    def _tell(self, reading: int) -> None:
        """Leave the mark that this reader has its version, and reads what begins at ``reading`` (0: nothing)."""
        try:
            if self._mark is None:
                name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
                mark = create_file(self._folder, f"{READERS}/.{name}")
                fcntl.flock(mark, fcntl.LOCK_EX)
                move_file(self._folder, f"{READERS}/.{name}", f"{READERS}/{name}")
                self._mark = mark
                weakref.finalize(self, mark.close)
            write_mark(self._mark.fileno(), self.version or 0, reading)
        except OSError as error:
            logger.warning("%s: the publisher does not know this reader, which leaves no mark: %s", self._folder, error)


def _empty(of: TensorRecord | Entry) -> torch.Tensor:
    return torch.empty(of.shape, dtype=dtype_of(of.dtype, "a tensor"), device="cpu")


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
    if lacking := [split(name)[1] for name, each in found.items() if not each]:
        raise ConfigError(
            f"weights lack {lacking[0]!r} (of {len(lacking)} tensors); what has other names goes into names="
        )
    return found
