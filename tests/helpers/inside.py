"""What tests look at inside a sharded model, and the constants they turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise.fsdp.gradients
import shardwise.layout
from shardwise import observe, set_default_transport
from shardwise.collectives.c10d import GroupCommunicator
from shardwise.collectives.routes import Transport
from shardwise.fsdp import engine as engines
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.engine import Engine
from shardwise.observe import Call


def engine_of(model: nn.Module) -> Engine:
    attachment = attachment_of(model)
    assert attachment is not None
    engine = engines.engine_of(attachment.unit)
    assert engine is not None, "the model has not run yet"
    return engine


def link_name_of(model: nn.Module) -> str | None:
    """Return the name of the link of all ranks that ``model`` uses; None: the backend's collectives."""
    world = dist.group.WORLD
    assert world is not None
    link = engine_of(model).comm_ctx.pass_tracker.known_links.get(world.group_name)
    return None if link is None else link.name


def start_peak(engine: Engine) -> None:
    """Measure the peak of the pool from now on."""
    engine.comm_ctx.pool.peak_used_bytes = engine.comm_ctx.pool.used_bytes


@contextmanager
def parts_from(large_numel: int) -> Iterator[None]:
    """Let tensors of ``large_numel`` elements or more take the ways of large ones."""
    with (
        mock.patch.object(shardwise.layout, "LARGE_NUMEL", large_numel),
        mock.patch.object(shardwise.fsdp.gradients, "LARGE_BYTES", 4 * large_numel),
    ):
        yield


@contextmanager
def full_from(num_bytes: int) -> Iterator[None]:
    """Let a bucket be full with so many bytes."""
    with mock.patch.object(shardwise.fsdp.gradients, "FULL_BYTES_ON_HOST", num_bytes):
        yield


@contextmanager
def all_reduced() -> Iterator[list[int]]:
    """Collect how many elements each all-reduce has."""
    seen: list[int] = []
    real = GroupCommunicator.all_reduce

    def all_reduce(self: Any, tensor: torch.Tensor, *args: Any) -> Any:
        seen.append(tensor.numel())
        return real(self, tensor, *args)

    with mock.patch.object(GroupCommunicator, "all_reduce", all_reduce):
        yield seen


@contextmanager
def over(transport: Transport) -> Iterator[None]:
    """Let models made inside use ``transport``."""
    set_default_transport(transport)
    try:
        yield
    finally:
        set_default_transport("auto")


class Recorder(observe.Listener):
    """Hears what an engine does from when it is made."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[Call] = []
        self._track = weakref.ref(engine.exec_order.track)
        observe.listeners.append(self)
        weakref.finalize(engine, observe.listeners.remove, self)

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        mine = self._track()
        if call is not None and mine is not None and track == mine.name:
            self.calls.append(call)


@contextmanager
def counted(*names: str) -> Iterator[list[str]]:
    """Return the names of those of the collectives ``names`` of torch.distributed that the body issues, in their order."""
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
