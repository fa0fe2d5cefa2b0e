"""Two checkpoints beside each other: which tensors and values differ, and by how much; a tensor of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.export import Source, open_source
from shardwise.checkpoint.manifest import TensorRecord


@dataclass(frozen=True, slots=True)
class Difference:
    """One name that the two do not share in all.

    Attributes:
        what: in words.
        num_differing, most: of tensors of one shape: how many elements differ, and the largest difference; nan counts as
            different from everything but nan.
    """

    name: str
    what: str
    num_differing: int = 0
    most: float = 0.0


def differences(
    left: str | Path, right: str | Path, progress: Callable[[int], None] | None = None
) -> Iterator[Difference]:
    """Yield what differs between two checkpoints, in the order of names.

    Raises: DamagedCheckpointError if bytes that are compared are not those that were saved.

    Example:
        >>> for each in differences("run/step-00000100", "run/step-00000200"):  # doctest: +SKIP
        ...     print(each.name, each.what)
    """
    sources = (open_source(left), open_source(right))
    first, second = (source.manifest for source in sources)
    for name in sorted({*first.tensors, *second.tensors, *first.values, *second.values}):
        a, b = first.tensors.get(name), second.tensors.get(name)
        if a is not None and b is not None:
            found = _compare(name, (a, b), sources)
            if progress is not None:
                progress(a.num_bytes)
            if found is not None:
                yield found
        elif name in first.values and name in second.values:
            x, y = first.values[name], second.values[name]
            if x != y:
                yield Difference(name, f"{str(x)[:60]} in the first, {str(y)[:60]} in the second")
        else:
            is_first = a is not None or name in first.values
            yield Difference(name, f"in the {'first' if is_first else 'second'} alone")


def _compare(
    name: str, records: tuple[TensorRecord, TensorRecord], sources: tuple[Source, Source]
) -> Difference | None:
    a, b = records
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return Difference(name, f"{a.dtype} {list(a.shape)} in the first, {b.dtype} {list(b.shape)} in the second")
    loaded = [torch.empty(a.shape, dtype=dtype_of(a.dtype, name)) for _ in sources]
    for source, record, tensor in zip(sources, records, loaded, strict=True):
        source.read(name, record, tensor)
    x, y = (tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in loaded)
    differs = (x != y) & ~(x.isnan() & y.isnan())
    count = int(differs.sum())
    if not count:
        return None
    most = float((x - y)[differs].abs().max())
    return Difference(name, f"{count} of {x.numel()} elements, by up to {most:.3g}", count, most)
