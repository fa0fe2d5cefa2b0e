"""A checkpoint read from beginning to end by one process: verified, in order, in windows of bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import Manifest, TensorRecord
from shardwise.checkpoint.order import LoadRequests
from shardwise.checkpoint.plan import Window, whole
from shardwise.checkpoint.reader import read_requests

MOST_NUMEL = 2**24


@dataclass(frozen=True, slots=True)
class WindowOfTensor:
    """Some rows of the tensor called ``name``, on the CPU; ``is_last``: the tensor ends with it."""

    name: str
    tensor: torch.Tensor
    is_last: bool


def windows_of(record: TensorRecord, most_numel: int = MOST_NUMEL) -> list[Window]:
    """Cut a tensor into windows of whole rows: one after the other they are its bytes in order.

    Each has at most ``most_numel`` elements, or one row.
    """
    if not record.shape or not prod(record.shape):
        return [whole(record.shape)]
    rest = record.shape[1:]
    step = max(1, most_numel // max(1, prod(rest)))
    starts = range(0, max(1, record.shape[0]), step)
    return [Window((start, *(0 for _ in rest)), (min(step, record.shape[0] - start), *rest)) for start in starts]


def stream(
    files: Files, checkpoint: Path, manifest: Manifest, names: Iterable[str], most_numel: int = MOST_NUMEL
) -> Iterator[WindowOfTensor]:
    """Read the tensors called ``names``, in this order.

    Memory: twice ``most_numel`` elements, or one row.  Neighbours are read together: blocks hold many small tensors.
    Raises: DamagedCheckpointError naming file, block and tensor.
    """
    pending: list[tuple[str, Window, bool]] = []
    numel = 0
    for name in names:
        record = manifest.record_of(name)
        assert record is not None, name
        windows = windows_of(record, most_numel)
        for window in windows:
            if numel + window.numel > most_numel and pending:
                yield from _read(files, checkpoint, manifest, pending)
                pending, numel = [], 0
            pending.append((name, window, window is windows[-1]))
            numel += window.numel
    yield from _read(files, checkpoint, manifest, pending)


def _read(
    files: Files, checkpoint: Path, manifest: Manifest, wanted: list[tuple[str, Window, bool]]
) -> Iterator[WindowOfTensor]:
    order = LoadRequests(manifest)
    found: list[WindowOfTensor] = []
    for name, window, is_last in wanted:
        record = manifest.record_of(name)
        tensors = order.windows(name, record.shape if record else (), [window])
        assert tensors is not None, name
        found.append(WindowOfTensor(name, tensors[0], is_last))
    read_requests(files, checkpoint, manifest, order.requests)
    yield from found
