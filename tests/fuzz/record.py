"""What a contender has shown: values that travel between processes and can be compared anywhere."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise.testing
from fuzz.codes import Codes
from shardwise import ShardwiseError, torch_private

Array = npt.NDArray[np.float64]
# Autograd's own words where a backward needs what has been written to since: they name what happened.
WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"
PACKAGE = str(Path(shardwise.__file__).resolve().parent)
OUTSIDE = str(Path(shardwise.testing.__file__).resolve().parent)  # the tests' own part of the package


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        shape: of the whole tensor.  offset: where ``values`` begin in it.
        dtype: of the tensor; ``values`` are float64.  "": not to be compared.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Array
    dtype: str

    @property
    def is_whole(self) -> bool:
        """True if this rank holds everything."""
        return tuple(self.values.shape) == self.shape


@dataclass(frozen=True, slots=True)
class Record:
    """All that could be seen at one moment.

    Attributes:
        shared: by name, tensors that ranks hold together or alike; None for a gradient that is not there.  Names begin with
            their kind: "param" (what the optimizer steps), "full" (what is registered instead), "grad", "state", "kept".
        own: by name, what every rank has for itself: losses, buffers, gradients of inputs.
        hidden: kinds of names (before the colon) that this contender cannot show now.
    """

    label: str
    shared: dict[str, Part | None]
    own: dict[str, Part | None]
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A local tensor that a program keeps, and the parameter that it is the local tensor of."""

    local: Tensor
    param: Tensor


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, as a value.

    Attributes:
        kinds: names of its class and of that class's bases.
        is_named: shardwise raised it on purpose.
        trace: the traceback, for people.
    """

    kinds: tuple[str, ...]
    text: str
    is_named: bool
    trace: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.kinds[0]

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe ``error``."""
        kinds = tuple(each.__name__ for each in type(error).__mro__ if each not in (object, BaseException))
        return cls(kinds, str(error), _is_named(error), "".join(traceback.format_exception(error)))


@dataclass(slots=True)
class Tale:
    """What one rank of a contender has shown, to the end or to an exception.

    Attributes:
        notes: facts about this rank that are findings by themselves, e.g. more parameters alive than planned.
    """

    records: list[Record] = field(default_factory=list[Record])
    raised: Raised | None = None
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def _is_named(error: BaseException) -> bool:
    """True for errors of ours, and for torch's types that our code raises with a message of its own."""
    if isinstance(error, ShardwiseError):
        return True
    if str(error).startswith(WRITTEN):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not str(error) or isinstance(error, (AttributeError, KeyError, IndexError, NameError)):
        return False
    last = frames[-1]
    is_ours = last.filename.startswith(PACKAGE) and not last.filename.startswith(OUTSIDE)
    return is_ours and (last.line or "").lstrip().startswith("raise")


def part_of(tensor: Tensor) -> Part:
    """Return what this rank holds of ``tensor``.  Collective only for tensors cut in ways that are not plain rows."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and not _is_cut_in_rows(tensor):
        tensor = tensor.full_tensor()
    return _part(torch_private.local_of(tensor), tensor)


def _part(local: Tensor, whole: Tensor) -> Part:
    dtype = str(whole.dtype).removeprefix("torch.")
    return Part(tuple(whole.shape), _offset(whole), _values(torch_private.wait_tensor(local)), dtype)


def _is_cut_in_rows(tensor: DTensor) -> bool:
    kinds = [type(placement) for placement in tensor.placements]
    return set(kinds) <= {Shard, Replicate} and kinds.count(Shard) < 2


def _offset(tensor: Tensor) -> tuple[int, ...]:
    offset = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                rows = -(-tensor.shape[placement.dim] // tensor.device_mesh.size(axis))
                offset[placement.dim] = min(coordinate[axis] * rows, tensor.shape[placement.dim])
    return tuple(offset)


def _values(tensor: Tensor) -> Array:
    whole = tensor.detach()
    return (whole.dequantize() if isinstance(whole, Codes) else whole).to("cpu", torch.float64, copy=True).numpy()


def parts_in(value: Any, prefix: str) -> dict[str, Part | None]:
    """Return the tensors, and the places where there is None, in nested containers by their paths."""
    if isinstance(value, Tensor):
        return {prefix: part_of(value)}
    if isinstance(value, Held):
        return {prefix: _part(value.local, value.param)}
    if value is None:
        return {prefix: None}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, (list, tuple)):
        pairs = list(enumerate(cast("list[Any]", value)))
    found: dict[str, Part | None] = {}
    for key, each in pairs:
        found.update(parts_in(each, f"{prefix}[{key}]"))
    return found
