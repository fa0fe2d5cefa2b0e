"""Tensors as a rank holds them: which windows of the whole, on which memory; and what a save collects of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardwise import torch_private
from shardwise.checkpoint.dtypes import dtype_name
from shardwise.checkpoint.plan import Held, Window
from shardwise.errors import ConfigError
from shardwise.optim.pieces import local_of, pieces_of
from shardwise.zero.checkpoint import StateSlice


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Memory of this rank that holds a window of a tensor: ``tensor`` has the window's sizes."""

    window: Window
    tensor: torch.Tensor


# Finding the window of a DTensor takes torch 100 us, and state has that of its parameter.
Windows = dict[tuple[int, object, tuple[int, ...]], Window]


def parts_of(name: str, tensor: torch.Tensor, windows: Windows | None = None) -> list[LocalPart]:
    """Return what this rank holds of ``tensor``, on the live memory.

    ``windows``: of DTensors that were found before, by mesh, placements and shape; it is added to.
    Raises: ConfigError for partial sums, tensors without memory, and tensors in a form of their own.
    """
    found = _parts(name, tensor, {} if windows is None else windows)
    for part in found:
        _check_plain(name, part.tensor)
    return found


def windows_of(name: str, tensor: torch.Tensor) -> list[Window]:
    """Return which windows of ``tensor`` this rank holds, in whatever form: state beside it may be plain."""
    return [part.window for part in _parts(name, tensor, {})]


def _parts(name: str, tensor: torch.Tensor, windows: Windows) -> list[LocalPart]:
    if isinstance(tensor, StateSlice):
        chunks = tensor.__create_chunk_list__()
        views = [tensor.__get_tensor_shard__(MetadataIndex(name, torch.Size(chunk.offsets))) for chunk in chunks]
        return [LocalPart(Window(tuple(c.offsets), tuple(c.sizes)), v) for c, v in zip(chunks, views, strict=True)]
    if isinstance(tensor, DTensor):
        return [LocalPart(_window_of(name, tensor, windows), _own_memory(tensor))]
    return [
        LocalPart(Window(piece.box.offsets, piece.box.sizes), local_of(piece).detach())
        for piece in pieces_of(name, tensor)
    ]


def _window_of(name: str, tensor: DTensor, windows: Windows) -> Window:
    key = (id(tensor.device_mesh), tensor.placements, tuple(tensor.shape))
    found = windows.get(key)
    if found is None:
        (piece,) = pieces_of(name, tensor)
        found = windows[key] = Window(piece.box.offsets, piece.box.sizes)
    return found


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    local = torch_private.local_of(tensor)
    return (local if type(local) is torch.Tensor else torch_private.wait_tensor(local)).detach()


def _check_plain(name: str, local: torch.Tensor) -> None:
    if local.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; call module.to_empty(device=...) first")
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_sparse:
        raise ConfigError(
            f"{name}: a {type(local).__name__} is a form of its own, expected plain numbers per element; give its plain form "
            "in the state dict"
        )


@dataclass(frozen=True, slots=True)
class KnownTensor:
    """What a rank held of a tensor when it was saved last: one window.  ``mesh``, ``placements`` None: no DTensor."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None
    dtype: torch.dtype
    held: Held

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Return True if this rank holds the same of ``tensor``, which may be another one of the same name."""
        if isinstance(tensor, DTensor):
            is_placed = self.mesh is tensor.device_mesh and self.placements == tensor.placements
        else:
            is_placed = self.mesh is None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return is_placed and self.dtype == tensor.dtype and self.held.shape == tuple(tensor.shape)


Known = dict[str, KnownTensor]


@dataclass(slots=True)
class Contents:
    """What this rank has to say of the state.

    Attributes:
        held, parts: per tensor, in parallel.
        ties: further names of tensors.
        buffers: names of plain buffers of modules that no broadcast keeps equal on all ranks.
        values: what is no tensor, encoded; ranks may lack values, but those that have one agree.
        known: by name, what was found before of tensors that stay as they are; it is added to, and outlives this.
    """

    held: dict[str, Held] = field(default_factory=dict[str, Held])
    parts: dict[str, list[LocalPart]] = field(default_factory=dict[str, list[LocalPart]])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    buffers: list[str] = field(default_factory=list[str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    known: Known = field(default_factory=Known)
    _windows: Windows = field(default_factory=Windows)

    def add_tensor(self, name: str, tensor: torch.Tensor, is_lowest: bool = False) -> None:
        """Take a tensor under a new name; ``is_lowest``: see :class:`~shardwise.checkpoint.plan.Held`."""
        self._check_new(name)
        known = self.known.get(name)
        if known is not None and known.is_like(tensor):
            local = _own_memory(tensor)
            _check_plain(name, local)
            self.parts[name], self.held[name] = [LocalPart(known.held.windows[0], local)], known.held
            return
        parts = parts_of(name, tensor, self._windows)
        held = Held(
            name, dtype_name(tensor.dtype, name), tuple(tensor.shape), tuple(part.window for part in parts), is_lowest
        )
        self.parts[name], self.held[name] = parts, held
        if isinstance(tensor, DTensor):
            self.known[name] = KnownTensor(tensor.device_mesh, tensor.placements, tensor.dtype, held)
        elif type(tensor) in (torch.Tensor, torch.nn.Parameter):
            self.known[name] = KnownTensor(None, None, tensor.dtype, held)

    def add_value(self, name: str, value: Any) -> None:
        """Take an encoded value under a new name."""
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
        spec = torch_private.spec_in(torch_private.spec_of(model), dtype)
        return torch_private.dtensor_from_local(locals_[0], spec)
    if isinstance(model, ShardedTensor):
        return torch_private.sharded_tensor_like(model, locals_ if model.local_shards() else [])
    return locals_[0]


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return where this rank's memory of ``tensor`` is."""
    local = torch_private.local_of(tensor)
    if isinstance(local, ShardedTensor):
        shards = local.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    return local.device


def merged(values_of_ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all ranks as one.  Raises: ConfigError naming a value that ranks do not agree about."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(values_of_ranks):
        for name, value in values.items():
            first, known = found.setdefault(name, (rank, value))
            if known != value:
                raise ConfigError(
                    f"{name}: rank {first} has {str(known)[:80]}, rank {rank} {str(value)[:80]}; what differs between ranks is "
                    "saved as shardwise.checkpoint.PerRank(...)"
                )
    return {name: value for name, (_, value) in found.items()}
