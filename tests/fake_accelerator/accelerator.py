"""The fake accelerator: stands for the host's tensors in engines that are made inside it.

Example, on torch's "fake" process group, where one process is any rank of any world:
    >>> from fake_accelerator.accelerator import FakeAccelerator
    >>> fake = FakeAccelerator()
    >>> with fake.in_use():  # doctest: +SKIP
    ...     model = fully_shard(build())
    ...     model(batch).sum().backward()
    >>> fake.violations
    []
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from fake_accelerator.allocations import Allocations, Violation
from fake_accelerator.dispatch import Collective, OperationRecorder
from fake_accelerator.timeline import HOST, FakeStream, Timeline
from shardwise.collectives.streams import Device, stand_in
from shardwise.observe import Call, Listener, listening


class FakeAccelerator(Device):
    """A device whose lanes write down what they are given, and whose memory knows who uses it.

    Args:
        keeps_works: keep all work, so that it can be asked what may run beside what.

    Attributes:
        timeline: what happened before what.
    """

    has_streams = can_pin = True
    has_values = False

    def __init__(self, keeps_works: bool = False) -> None:
        self.doing = "nothing"
        self.timeline = Timeline(keeps_works, label=lambda: self.doing)
        self._allocations = Allocations(self.timeline)
        self._recorder = OperationRecorder(self.timeline, self._allocations)

    @contextmanager
    def in_use(self) -> Generator[FakeAccelerator, None, None]:
        """Record what happens inside; engines that are made inside have this device's lanes."""
        token = stand_in.set(self)
        try:
            with listening(_Doing(self)), self._recorder:
                yield self
        finally:
            stand_in.reset(token)

    @property
    def violations(self) -> list[Violation]:
        """What was not ordered, in the order in which it was found."""
        return self._allocations.violations

    @property
    def collectives(self) -> list[Collective]:
        """The collectives that were issued, in their order."""
        return self._recorder.collectives

    @property
    def live_bytes(self) -> int:
        """Bytes of device memory that are allocated now."""
        return self._allocations.live_bytes("device")

    # ---- what the engine asks ----

    def new_stream(self, name: str, priority: int) -> Any:
        """Return a new lane."""
        del priority
        return FakeStream(self.timeline, self.timeline.new_lane(name))

    def current_stream(self) -> Any:
        """Return the lane that work goes to."""
        return FakeStream(self.timeline, self.timeline.current[-1])

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Do as ``Tensor.record_stream``, which takes real streams alone: keep its memory until ``stream`` has used it."""
        block = self._allocations.block_at(tensor.data_ptr())
        if block is not None:
            block.recorded.add(stream.lane)

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        """Return memory of the host, which no lane may touch but in copies."""
        with self._recorder.apart():
            found = torch.zeros(numel, dtype=dtype)
        if found.untyped_storage().nbytes():
            self._allocations.adopt(
                found.untyped_storage(), "pinned" if pins else "pageable", HOST, "memory of the host"
            )
        return found

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``source`` in device memory: by a copy on the current lane, then a cast there, if it is not that."""
        block = self._allocations.block_at(source.data_ptr())
        if block is not None and block.kind != "device":
            source = torch.empty(source.shape, dtype=source.dtype).copy_(source, non_blocking=True)
        return source.to(dtype)


class _Doing(Listener):
    """Labels the work of ``fake`` with what the engine does."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._fake = fake

    def begin(self, track: str, what: str, subject: str) -> None:
        self._fake.doing = f"{what} {subject}".strip()

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        self._fake.doing = f"{what} {subject}".strip()

    def reach(self, place: str, what: str, subject: object) -> bool:
        self._fake.doing = f"{place} {what}".strip()
        return False
