"""Copies of gradients and parameters for the thread of the updates, and of new values back."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import torch_private
from shardwise.collectives.streams import Device, SideStream
from shardwise.fsdp.flat_buffer import ParamStorage
from shardwise.offload.disk import layout_of, views_in
from shardwise.optim.slices import ParamSlice, local_of

Gradients = Sequence[torch.Tensor | None]

# ---- What an update depends on, compared without second copies.

_NUM_COLUMNS = 1021  # a prime: rows of a matrix that trade places change the columns of their words


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over the bits of ``tensor``, one per column; they show a change unless it cancels in every column.

    A sum over all words would not show a change of all signs if as many elements are positive as are negative.

    Example:
        >>> torch.equal(digest_of(torch.ones(5000)), digest_of(-torch.ones(5000)))
        False
    """
    found = tensor.detach()
    if not found.is_contiguous() or found.storage_offset() * found.element_size() % 8:
        found = found.clone(memory_format=torch.contiguous_format)
    data = found.view(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    num_rows = words.numel() // _NUM_COLUMNS
    rows = words[: num_rows * _NUM_COLUMNS].view(num_rows, _NUM_COLUMNS)
    return torch.cat([rows.sum(0), words[rows.numel() :], data[words.numel() * 8 :].long()])


Digests = tuple[list[bool], torch.Tensor]


def digests_of(tensors: Gradients) -> Digests:
    """Return which tensors are there, and the digests of these, one after the other.

    Version counters would cost less, but torch counts no write of ``torch._foreach`` functions to DTensors, which its
    ``clip_grad_norm_`` uses.
    """
    return [each is not None for each in tensors], torch.cat([digest_of(each) for each in tensors if each is not None])


# ---- Memory of the host.


class Copies:
    """Copies of parameters in one allocation of host memory, and views of gradients that lie in another one alike.

    Attributes:
        staging: of their device.  tensors: the copies.
    """

    def __init__(self, slices: Sequence[ParamSlice], staging: Staging) -> None:
        self.staging, self._slices = staging, slices
        self._starts, num_bytes = layout_of(self.params())
        self.tensors = [torch.empty_like(local, device="meta").detach() for local in self.params()]
        self.tensors = views_in(staging.new_memory(num_bytes), self.tensors, self._starts)
        staging.fit(num_bytes)
        self._staged: dict[int, list[torch.Tensor]] = {}  # views by the address of their memory

    def params(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [local_of(each) for each in self._slices]

    def staged(self, load: Load) -> Gradients:
        """Return the gradients of ``load`` where they are copied to; those with another dtype than parameters stay.

        A wrong dtype raises in the optimizer, as it does in the plain one.
        """
        assert load.memory is not None
        if (address := load.memory.data_ptr()) not in self._staged:
            self._staged[address] = views_in(load.memory, self.tensors, self._starts)
        pairs = zip(self._staged[address], load.gradients, strict=True)
        return [view if each is not None and each.dtype == view.dtype else each for view, each in pairs]


@dataclass(slots=True, eq=False)
class Load:
    """The gradients of one update.

    Attributes:
        gradients: as they are in ``.grad``, or will be if the user changes nothing.
        ready: an event after which their memory has the values; None: it has them.
        memory: of the host, where they are copied to.  copied: an event after that; None: the host has copied them.
    """

    gradients: Gradients
    ready: Any = None
    memory: torch.Tensor | None = None
    copied: Any = None


class Staging:
    """Copies gradients and parameters that are at one place to host memory, and new values of parameters back.

    On an accelerator there is a stream for each way, and page-locked memory for gradients of two units: those of one are used
    while those of the next one arrive.  Only the thread of the updates launches copies and waits for them.

    Attributes:
        is_concurrent: there are streams.
    """

    def __init__(self, place: ParamStorage) -> None:
        self._place = place
        device = Device(torch.device("cpu")) if place.is_offloaded else place.on
        self._down, self._up = SideStream(device, "offload down"), SideStream(device, "offload up")
        self.is_concurrent = device.has_streams
        self._free: list[torch.Tensor] = []
        self._num_bytes = -1
        self._coming: deque[tuple[Copies, Load]] = deque()  # in the order of their updates; the user's thread appends
        self._now: Any = None

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        """Return host memory."""
        return self._place.on.host_memory(num_bytes, torch.uint8, self.is_concurrent)

    # ---- on the user's thread ----

    def fit(self, num_bytes: int) -> None:
        """Have memory for gradients of ``num_bytes`` per unit; call it while no update runs."""
        if num_bytes > self._num_bytes:
            self._num_bytes = num_bytes
            self._free = [self.new_memory(num_bytes) for _ in range(1 + self.is_concurrent)]

    def expect(self, copies: Copies, load: Load) -> None:
        """Let the update before that of ``load`` launch its copies."""
        if self.is_concurrent:
            self._coming.append((copies, load))

    def begin(self) -> Any:
        """Return an event after which parameters and gradients are as ``step()`` has found them."""
        self._now = self._place.on.current_stream().record_event() if self.is_concurrent else None
        return self._now

    def end(self) -> None:
        """Start the user's next work on the device after all new values are there."""
        if self._up.is_started:
            self._up.current_waits(self._up.mark())

    # ---- on the thread of the updates ----

    @contextmanager
    def staged(self, copies: Copies, load: Load) -> Generator[None]:
        """Return a context in which ``copies`` are the parameters, with the gradients of ``load``."""
        if self._coming and self._coming[0][1] is load:
            self._coming.popleft()
        self._launch(copies, load)
        if self._coming and self._coming[0][0] is not copies:
            self._launch(*self._coming[0])
        if load.copied is not None:
            load.copied.synchronize()
        for each, gradient in zip(copies.tensors, copies.staged(load), strict=True):
            each.grad = gradient
        try:
            yield
        finally:
            assert load.memory is not None
            self._free.append(load.memory)
            load.memory, load.gradients = None, ()

    def _launch(self, copies: Copies, load: Load) -> None:
        if load.memory is not None:
            return
        load.memory = self._free.pop()
        if load.ready is not None:
            self._down.wait_event(load.ready) if self.is_concurrent else load.ready.synchronize()
        pairs = zip(copies.staged(load), load.gradients, strict=True)
        moved = [(view, each) for view, each in pairs if view is not None and each is not None and view is not each]
        with self._down.run():
            self._copy(
                [*copies.tensors, *[view for view, _ in moved]], [*copies.params(), *[each for _, each in moved]]
            )
        load.copied = self._down.mark()

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if not self.is_concurrent:
            torch_private.copy_all(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):  # one function for all would cast on the host
            target.copy_(source, non_blocking=True)

    def digests(self, tensors: Gradients) -> Digests:
        """Return :func:`digests_of` tensors as ``step()`` has found them, in host memory."""
        if not self.is_concurrent:
            return digests_of(tensors)
        self._down.wait_event(self._now)
        with self._down.run():
            are_there, found = digests_of(tensors)
            here = self._place.on.host_memory(found.numel(), found.dtype, True).copy_(found, non_blocking=True)
        self._down.mark().synchronize()
        return are_there, here

    def send(self, copies: Copies) -> None:
        """Copy ``copies`` into the parameters; this thread has waited for copies of what ``step()`` has found."""
        with self._up.run():
            self._copy(copies.params(), copies.tensors)
