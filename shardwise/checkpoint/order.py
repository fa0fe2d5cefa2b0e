"""What a load needs of a checkpoint: windows of tensors, to be read into new memory, and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.manifest import Manifest, TensorRecord
from shardwise.checkpoint.names import split
from shardwise.checkpoint.plan import Window, whole
from shardwise.checkpoint.values import Give, decode
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Request:
    """A window of a tensor and the new memory that it is read into."""

    name: str
    record: TensorRecord
    window: Window
    target: torch.Tensor


class LoadRequests:
    """Collects the requests of one load; memory is taken when something is asked for, and filled later.

    Attributes:
        missing: requested names that the checkpoint does not have.
        unlike: requested tensors that have another shape in the checkpoint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.requests: list[Request] = []
        self.missing: list[str] = []
        self.unlike: list[str] = []
        self._used: set[str] = set()
        self._by_prefix: dict[str, list[str]] | None = None

    def windows(self, name: str, shape: Sequence[int], windows: Sequence[Window]) -> list[torch.Tensor] | None:
        """Return new memory for windows of a tensor; None if the checkpoint has none of that name and shape."""
        record = self.manifest.record_of(name)
        if record is None:
            self.missing.append(name)
            return None
        self._used |= {name, self.manifest.ties.get(name, name)}
        if record.shape != tuple(shape):
            self.unlike.append(f"{name} is {list(record.shape)} in the checkpoint and {list(shape)} in the state")
            return None
        dtype = dtype_of(record.dtype, name)
        targets = [torch.empty(window.sizes, dtype=dtype, device="cpu") for window in windows]
        self.into(name, record, windows, targets)
        return targets

    def into(self, name: str, record: TensorRecord, windows: Sequence[Window], targets: Sequence[torch.Tensor]) -> None:
        """Ask for windows of a tensor that is there, to be read into ``targets``."""
        self._used |= {name}
        self.requests += [
            Request(name, record, window, target) for window, target in zip(windows, targets, strict=True)
        ]

    def whole(self, name: str) -> torch.Tensor:
        """Return new memory for a whole tensor that is there."""
        record = self.manifest.record_of(name)
        if record is None:
            raise CheckpointError(f"{name}: a value refers to this tensor, and the checkpoint has none of that name")
        found = self.windows(name, record.shape, [whole(record.shape)])
        assert found is not None
        return found[0]

    def value(self, name: str, give: Give | None = None) -> Any:
        """Return a value that is there; ``give`` returns new memory for tensors in it (default: whole)."""
        self._used.add(name)
        return decode(self.manifest.values[name], name, give or self.whole)

    def has_value(self, name: str) -> bool:
        """Return True if there is a value of that name."""
        return name in self.manifest.values

    def entries(self) -> list[str]:
        """Return the names of the entries of the state that was saved."""
        parts = [split(name) for name in (*self.manifest.tensors, *self.manifest.values, *self.manifest.ties)]
        return sorted({each[2] if each[0] == "rank" and len(each) > 2 else each[0] for each in parts})

    def names_under(self, prefix: str) -> list[str]:
        """Return the names of tensors and values that are ``prefix``, a slash and one more part."""
        if self._by_prefix is None:
            self._by_prefix = {}
            for name in (*self.manifest.tensors, *self.manifest.values):
                self._by_prefix.setdefault(name.rpartition("/")[0], []).append(name)
        return self._by_prefix.get(prefix, [])

    def unexpected(self, prefixes: Sequence[str]) -> list[str]:
        """Return what the checkpoint has under ``prefixes`` and nobody asked for."""
        found = (*self.manifest.tensors, *self.manifest.ties, *self.manifest.values)
        starts = tuple(f"{prefix}/" for prefix in prefixes)
        return [n for n in found if (n in prefixes or n.startswith(starts)) and n not in self._used]

    @property
    def is_whole(self) -> bool:
        """True if every tensor was asked for, but for state that is each rank's own."""
        return all(name in self._used or name.startswith("rank/") for name in self.manifest.tensors)

    def leave(self, prefix: str) -> None:
        """Count all under ``prefix`` as asked for: it is known and not wanted."""
        every = (*self.manifest.tensors, *self.manifest.values)
        self._used |= {name for name in every if name == prefix or name.startswith(f"{prefix}/")}

    def use(self, name: str) -> None:
        """Count a name as asked for, without reading it on this rank."""
        self._used.add(name)
