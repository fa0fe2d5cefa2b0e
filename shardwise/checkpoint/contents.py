"""A rank's tensors: which windows of the full tensor it has, and where; and the contents of a save."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.checkpoint.format import (
    Held,
    Manifest,
    TensorRecord,
    Window,
    bytes_of,
    dtype_name,
    dtype_of,
    join,
    split,
    whole,
)
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.optim.slices import local_of, slices_of
from shardwise.torch_private import ShardedTensor
from shardwise.zero.partition import StateSlice

# ---- Values that are not tensors, as JSON: exactly the types that JSON and a few markers can represent, never a
# pickle.

_MARK = "$"
_MOST_DEEP = 64
_MOST_BITS = 4096  # of a whole number: Python refuses to parse numbers of thousands of digits
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SMALL_NUMEL = 16  # a tensor among the options of a param group is a number or two

Take = Callable[[str, torch.Tensor], None]
Give = Callable[[str], torch.Tensor]


def encode(value: Any, name: str, take: Take | None = None, depth: int = 0) -> Any:
    """Return ``value`` as JSON; ``name`` is its path, for errors and for the tensors inside.

    ``take``: gets each tensor with its name.  Without it, tensors of a few elements are encoded as values.
    Raises: ConfigError with the path of a value that cannot be encoded.
    """
    if depth > _MOST_DEEP:
        raise ConfigError(f"{name}: nested more than {_MOST_DEEP} deep, or within itself; save a flatter state dict")
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, name, take)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "v": str(float(value))}
    if type(value) is int and value.bit_length() <= _MOST_BITS:
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _mapping(cast(Mapping[Any, Any], value), name, take, depth)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}/{i}", take, depth + 1) for i, item in enumerate(cast(list[Any], value))]
        return items if isinstance(value, list) else {_MARK: "tuple", "v": items}
    raise ConfigError(
        f"{name}: a value of type {type(value).__name__} cannot be saved; state dicts may hold tensors, numbers, strings, "
        "bytes, None, and lists, tuples and dicts of these. Leave it out of the state dict or turn it into one of them"
    )


def _mapping(value: Mapping[Any, Any], name: str, take: Take | None, depth: int) -> Any:
    if all(type(key) is str for key in value) and _MARK not in value and not isinstance(value, Counter):
        return {key: encode(item, join_to(name, key), take, depth + 1) for key, item in value.items()}
    kind = "counter" if isinstance(value, Counter) else "dict"
    pairs = [
        [encode(key, name, None, depth + 1), encode(item, join_to(name, str(key)), take, depth + 1)]
        for key, item in value.items()
    ]
    return {_MARK: kind, "v": pairs}


def _tensor(value: torch.Tensor, name: str, take: Take | None) -> Any:
    if take is not None:
        take(name, value)
        return {_MARK: "tensor", "v": name}
    if type(value) is not torch.Tensor or value.numel() > SMALL_NUMEL:
        raise ConfigError(f"{name}: a {type(value).__name__} of {tuple(value.shape)} where a number was expected")
    data = value.detach().cpu().contiguous()
    return {
        _MARK: "number",
        "dtype": dtype_name(data.dtype, name),
        "shape": list(data.shape),
        "v": base64.b64encode(bytes(bytes_of(data))).decode(),
    }


def join_to(name: str, key: str) -> str:
    """Return ``name`` with one more part."""
    return f"{name}/{join(key)}"


def decode(value: Any, name: str, give: Give | None = None, depth: int = 0) -> Any:
    """Return the value that :func:`encode` has encoded; ``give`` returns the tensor of a name.

    Raises: CheckpointError with the path of what is not an encoded value.
    """
    if depth > _MOST_DEEP:
        raise CheckpointError(f"{name[:80]}: nested deeper than any value that is saved")
    if isinstance(value, list):
        return [decode(item, f"{name}/{i}", give, depth + 1) for i, item in enumerate(cast(list[Any], value))]
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    if _MARK not in fields:
        return {key: decode(item, join_to(name, key), give, depth + 1) for key, item in fields.items()}
    try:
        return _marked(fields, name, give, depth)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: {str(fields)[:80]} is not a value of this format ({error!r})") from error


def groups_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return ``value`` as the param groups of an optimizer.  Raises: CheckpointError if it is something else."""
    groups = cast(list[Any], value) if isinstance(value, list) else [value]
    for group in groups:
        fields = cast(dict[str, Any], group) if isinstance(group, dict) else {}
        if not isinstance(fields.get("options"), dict) or not isinstance(fields.get("params"), list):
            raise CheckpointError(f"{name}: expected groups with params and options, found {str(group)[:60]}")
    return groups


def _marked(fields: dict[str, Any], name: str, give: Give | None, depth: int) -> Any:
    kind, inner = fields[_MARK], fields["v"]
    if kind == "float":
        return _FLOATS[inner]
    if kind == "tuple" and isinstance(inner, list):
        return tuple(decode(inner, name, give, depth))
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind in ("dict", "counter"):
        found = {
            decode(key, name, None, depth + 1): decode(item, join_to(name, str(key)[:80]), give, depth + 1)
            for key, item in inner
        }
        return Counter(found) if kind == "counter" else found
    if kind == "tensor" and give is not None and isinstance(inner, str):
        return give(inner)
    if kind == "number":
        shape = [int(size) for size in fields["shape"]]
        data = base64.b64decode(inner, validate=True)
        found = torch.frombuffer(bytearray(data), dtype=dtype_of(fields["dtype"], name))
        if found.numel() > SMALL_NUMEL:
            raise ValueError(f"{found.numel()} numbers")
        return found.view(shape)
    raise ValueError(f"kind {kind!r}")


# ---- The requests of a load: windows of tensors to read into new memory, and values.


@dataclass(frozen=True, slots=True)
class Request:
    """A window of a tensor, and the new memory to read it into."""

    name: str
    record: TensorRecord
    window: Window
    target: torch.Tensor


class LoadRequests:
    """Collects the requests of one load; a request allocates memory, which is filled later.

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
        """Request windows of an existing tensor, to be read into ``targets``."""
        self._used |= {name}
        self.requests += [
            Request(name, record, window, target) for window, target in zip(windows, targets, strict=True)
        ]

    def whole(self, name: str) -> torch.Tensor:
        """Return new memory for an existing full tensor."""
        record = self.manifest.record_of(name)
        if record is None:
            raise CheckpointError(f"{name}: a value refers to this tensor, and the checkpoint has none of that name")
        found = self.windows(name, record.shape, [whole(record.shape)])
        assert found is not None
        return found[0]

    def value(self, name: str, give: Give | None = None) -> Any:
        """Return an existing value; ``give`` returns new memory for its tensors (default: full tensors)."""
        self._used.add(name)
        return decode(self.manifest.values[name], name, give or self.whole)

    def entries(self) -> list[str]:
        """Return the names of the entries of the saved state."""
        parts = [split(name) for name in (*self.manifest.tensors, *self.manifest.values, *self.manifest.ties)]
        return sorted({each[2] if each[0] == "rank" and len(each) > 2 else each[0] for each in parts})

    def names_under(self, prefix: str) -> list[str]:
        """Return the names of tensors and values one level below ``prefix``."""
        if self._by_prefix is None:
            self._by_prefix = {}
            for name in (*self.manifest.tensors, *self.manifest.values):
                self._by_prefix.setdefault(name.rpartition("/")[0], []).append(name)
        return self._by_prefix.get(prefix, [])

    def unexpected(self, prefixes: Sequence[str]) -> list[str]:
        """Return the names under ``prefixes`` that no request has used."""
        found = (*self.manifest.tensors, *self.manifest.ties, *self.manifest.values)
        starts = tuple(f"{prefix}/" for prefix in prefixes)
        return [n for n in found if (n in prefixes or n.startswith(starts)) and n not in self._used]

    def skip(self, prefix: str) -> None:
        """Mark all names under ``prefix`` as used: they are known but not wanted."""
        every = (*self.manifest.tensors, *self.manifest.values)
        self._used |= {name for name in every if name == prefix or name.startswith(f"{prefix}/")}

    def use(self, name: str) -> None:
        """Mark a name as used, without reading it on this rank."""
        self._used.add(name)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's memory of a window of a tensor; ``tensor`` has the window's sizes."""

    window: Window
    tensor: torch.Tensor


# torch takes 100 us to compute the window of a DTensor, and optimizer state has the window of its parameter.  By names of
# DTensors, and by keys: placement, shape, dtype and ``is_lowest``, from which the window follows.
Windows = dict[object, tuple[tuple[object, ...], Held]]


def parts_of(name: str, tensor: torch.Tensor, known: Held | None = None) -> list[LocalPart]:
    """Return this rank's parts of ``tensor``, on the live memory; ``known``: a DTensor's window, if it is known.

    Raises: ConfigError for partial sums, tensors without memory, and tensor subclasses.
    """
    found = _parts(name, tensor, known)
    for part in found:
        check_plain(name, part.tensor)
    return found


def windows_of(name: str, tensor: torch.Tensor) -> list[Window]:
    """Return this rank's windows of ``tensor``, even of a tensor subclass, whose state may be plain."""
    return [part.window for part in _parts(name, tensor)]


def _parts(name: str, tensor: torch.Tensor, known: Held | None = None) -> list[LocalPart]:
    if isinstance(tensor, StateSlice):
        chunks = tensor.__create_chunk_list__()
        views = [tensor.__get_tensor_shard__(MetadataIndex(name, torch.Size(chunk.offsets))) for chunk in chunks]
        return [LocalPart(Window(tuple(c.offsets), tuple(c.sizes)), v) for c, v in zip(chunks, views, strict=True)]
    if isinstance(tensor, DTensor):
        if known is None and tensor.device_mesh.size() > 1 and not dist.is_initialized():
            raise StateError(
                f"{name} is sharded over ranks that are out of reach after destroy_process_group(); save and load before it"
            )
        window = slices_of(name, tensor)[0].box if known is None else known.windows[0]
        local = torch_private.local_of(tensor)
        local = local if type(local) is torch.Tensor else torch_private.wait_tensor(local)
        return [LocalPart(window, local.detach())]
    if hasattr(tensor, "global_offsets"):
        raise ConfigError(
            f"{name}: found a part of a larger tensor (torch's CheckpointableTensor), expected a DTensor, or a plain tensor "
            "that is the same on all ranks; give DTensor.from_local(...) in the state, or save it with "
            "torch.distributed.checkpoint"
        )
    return [LocalPart(param_slice.box, local_of(param_slice).detach()) for param_slice in slices_of(name, tensor)]


def check_plain(name: str, local: torch.Tensor) -> None:
    """Raise a ConfigError unless ``local`` is a plain tensor with values."""
    if local.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; call module.to_empty(device=...) first")
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_sparse:
        raise ConfigError(
            f"{name}: a {type(local).__name__} is a tensor subclass, expected a plain tensor; give its plain form "
            "in the state dict"
        )


@dataclass(slots=True)
class Contents:
    """This rank's part of the state.

    Attributes:
        held, parts, tensors: per tensor, in parallel; the last are as they were given.
        ties: further names of tensors.
        params: parameters of modules, and numbers of steps of optimizers, by name; True for plain ones, of which every rank
            holds the whole.
        buffers: names of plain module buffers that no broadcast makes equal on all ranks.
        values: encoded values; a rank may lack some, but ranks must agree on those that they have.
        divided: names of values that only some ranks have.
        windows: known ones; a save adds its own.
    """

    held: dict[str, Held] = field(default_factory=dict[str, Held])
    parts: dict[str, list[LocalPart]] = field(default_factory=dict[str, list[LocalPart]])
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    params: dict[str, bool] = field(default_factory=dict[str, bool])
    buffers: list[str] = field(default_factory=list[str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    divided: set[str] = field(default_factory=set[str])
    windows: Windows = field(default_factory=Windows)

    def add_tensor(self, name: str, tensor: torch.Tensor, is_lowest: bool = False) -> None:
        """Add a tensor under a new name; ``is_lowest``: see :class:`~shardwise.checkpoint.format.Held`."""
        self._check_new(name)
        key = (
            (torch_private.spec_of(tensor), tensor.shape, tensor.dtype, is_lowest) if type(tensor) is DTensor else None
        )
        known, held = self.windows.get(name, (None, None))
        if known != key:
            _, held = self.windows.get(key, (None, None))  # of another tensor
        parts = parts_of(name, tensor, held)
        if held is None or held.name != name:
            held = Held(
                name, dtype_name(tensor.dtype, name), tuple(tensor.shape), (*(p.window for p in parts),), is_lowest
            )
            if key is not None:
                self.windows[name] = self.windows[key] = key, held
        self.parts[name], self.held[name], self.tensors[name] = parts, held, tensor

    def add_value(self, name: str, value: Any) -> None:
        """Add an encoded value under a new name."""
        self._check_new(name)
        self.values[name] = value

    def tensor_at(self, name: str, window: Window) -> torch.Tensor:
        """Return this rank's memory of a window."""
        return next(part.tensor for part in self.parts[name] if part.window == window)

    def _check_new(self, name: str) -> None:
        if name in self.held or name in self.values:
            raise ConfigError(f"{name}: two entries of the state have this name; give one of them another")


def like(model: torch.Tensor, locals_: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return ``locals_``, this rank's parts, as a tensor of the kind and placement of ``model``."""
    if isinstance(model, DTensor):
        spec = torch_private.spec_of(model, dtype)
        return torch_private.dtensor_from_local(locals_[0], spec)
    if isinstance(model, ShardedTensor):
        return torch_private.sharded_tensor_like(model, locals_ if model.local_shards() else [])
    return locals_[0]


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device of this rank's memory of ``tensor``."""
    local = torch_private.local_of(tensor)
    if isinstance(local, ShardedTensor):
        shards = local.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    return local.device


def merged(values_of_ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of all ranks' values.  Raises: ConfigError with a value that ranks do not agree on."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(values_of_ranks):
        for name, value in values.items():
            first, known = found.setdefault(name, (rank, value))
            if known != value:
                path, (mine, theirs) = next(iter(unlike_leaves(known, value, name).items()))
                raise ConfigError(
                    f"{path}: rank {first} has {mine!s:.80}, rank {rank} {theirs!s:.80}. Ranks step an optimizer with the same "
                    "options; what else differs between ranks is saved as shardwise.checkpoint.PerRank(...)"
                )
    return {name: value for name, (_, value) in found.items()}


def unlike_leaves(first: Any, second: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the encoded values inside of ``first`` and ``second`` that differ, by path; None where one is missing."""
    mine, theirs = (dict(_leaves(each, path)) for each in (first, second))
    paths = [path for path in sorted({*mine, *theirs}) if mine.get(path, ...) != theirs.get(path, ...)]
    return {path: (mine.get(path), theirs.get(path)) for path in paths}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping | list):
        for key, each in cast(Any, value.items() if isinstance(value, Mapping) else enumerate(value)):
            yield from _leaves(each, f"{path}/{key}" if path else str(key))
    else:
        yield path, value
