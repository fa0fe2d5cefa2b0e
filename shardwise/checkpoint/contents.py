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


@dataclass(frozen=True, slots=True)
class KnownWindow:
    """The window of DTensors on ``mesh``, which is kept: its ``id`` stays its own."""

    mesh: DeviceMesh
    window: Window


# Finding the window of a DTensor takes torch 100 us; state has that of its parameter, and the next save that of this one.
Known = dict[tuple[int, object, tuple[int, ...]], KnownWindow]


def parts_of(name: str, tensor: torch.Tensor, known: Known | None = None) -> list[LocalPart]:
    """Return what this rank holds of ``tensor``, on the live memory.

    ``known``: windows of DTensors that were found before, by mesh, placements and shape; it is added to.
    Raises: ConfigError for partial sums, tensors without memory, and tensors in a form of their own.
    """
    if isinstance(tensor, StateSlice):
        chunks = tensor.__create_chunk_list__()
        views = [tensor.__get_tensor_shard__(MetadataIndex(name, torch.Size(chunk.offsets))) for chunk in chunks]
        found = [LocalPart(Window(tuple(c.offsets), tuple(c.sizes)), v) for c, v in zip(chunks, views, strict=True)]
    elif isinstance(tensor, DTensor):
        found = [
            LocalPart(
                _window_of(name, tensor, known), torch_private.wait_tensor(torch_private.local_of(tensor)).detach()
            )
        ]
    else:
        found = [
            LocalPart(Window(piece.box.offsets, piece.box.sizes), local_of(piece).detach())
            for piece in pieces_of(name, tensor)
        ]
    for part in found:
        if part.tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device and has no values; call module.to_empty(device=...) first")
        if type(part.tensor) not in (torch.Tensor, torch.nn.Parameter) or part.tensor.is_sparse:
            raise ConfigError(
                f"{name}: a {type(part.tensor).__name__} is a form of its own, expected plain numbers per element; give its "
                "plain form in the state dict"
            )
    return found


def _window_of(name: str, tensor: DTensor, known: Known | None) -> Window:
    mesh = tensor.device_mesh
    key = (id(mesh), tensor.placements, tuple(tensor.shape))
    found = known.get(key) if known is not None else None
    if found is None:
        (piece,) = pieces_of(name, tensor)
        found = KnownWindow(mesh, Window(piece.box.offsets, piece.box.sizes))
        if known is not None:
            known[key] = found
    return found.window


@dataclass(slots=True)
class Contents:
    """What this rank has to say of the state.

    Attributes:
        held, parts: per tensor, in parallel.
        ties: further names of tensors.
        values: what is no tensor, encoded; ranks may lack values, but those that have one agree.
        known: see :func:`parts_of`; may outlive this.
    """

    held: dict[str, Held] = field(default_factory=dict[str, Held])
    parts: dict[str, list[LocalPart]] = field(default_factory=dict[str, list[LocalPart]])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    known: Known = field(default_factory=Known)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor under a new name."""
        self._check_new(name)
        parts = parts_of(name, tensor, self.known)
        dtype = dtype_name(tensor.dtype, name)
        self.parts[name] = parts
        self.held[name] = Held(name, dtype, tuple(tensor.shape), tuple(part.window for part in parts))

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
