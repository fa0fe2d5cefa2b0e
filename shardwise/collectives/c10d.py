"""The communicator of a group of ranks: over its link, or over any backend through one packed buffer per collective.

Every call looks the collective up on ``torch.distributed``, so that tools and tests may wrap it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from shardwise import torch_private
from shardwise.collectives.routes import (
    Arithmetic,
    ByBackend,
    CustomCollective,
    CustomCollectives,
    GatherEnds,
    Handle,
    LeftOut,
    Link,
    OnceHandle,
    PassTracker,
    Scale,
    ScatterEnds,
    SumContents,
    collectives_are_watched,
    resolve_scale,
)
from shardwise.collectives.streams import BufferPool, PooledBuffer, SideStream
from shardwise.consistency.failure_report import name_partners
from shardwise.consistency.process_groups import FIRST, await_collective, outlast
from shardwise.observe import EVERYBODY, listeners, note, now, remember, ring, tell, thread

# torch's functions spend part of their time on cases that do not occur here: tensor subclasses, ranks outside of the group,
# coalesced collectives.  So call the process group directly, unless a tool has replaced the function.
_ALL_GATHER, _REDUCE_SCATTER = dist.all_gather_single, dist.reduce_scatter_single


_GATHERING = AllgatherOptions()
_GATHERING.asyncOp = True
_RED_OP = type(dist.ReduceOp.SUM)


def _scattering(op: Any) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


_SCATTERING = {op: _scattering(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)}


def all_gather_single(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool = True
) -> dist.Work | None:
    """Launch ``output = concat(shard of every rank)``."""
    function = dist.all_gather_single
    if async_op and function is _ALL_GATHER and not output.is_complex():
        return group.all_gather_single(output, shard, _GATHERING)
    return function(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, packed: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = True
) -> dist.Work | None:
    """Launch ``output = my section of op(packed of every rank)``."""
    function = dist.reduce_scatter_single
    if async_op and function is _REDUCE_SCATTER:
        scattering = _SCATTERING.get(op) if type(op) is _RED_OP else None
        return group.reduce_scatter_single(output, packed, scattering or _scattering(op))
    return function(output, packed, group=group, op=op, async_op=async_op)


def all_to_all_rows(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Launch an all-to-all: row r of ``sent`` goes to rank r, row r of ``received`` comes from rank r.

    Both are contiguous and of shape (ranks, bytes).
    """
    return dist.all_to_all_single(received, sent, group=group, async_op=async_op)


class HostWork:
    """A collective of ``group`` on the host; ``wait`` waits for ``work``, calls ``end(result)``, releases ``buffer``; once.

    ``take_over(buffer)`` comes first, if it is given; neither happens if it returns True.
    """

    __slots__ = ("_buffer", "_end", "_group", "_result", "_take_over", "_work")
    holds_input = True

    def __init__(
        self,
        work: dist.Work | None,
        end: Callable[[torch.Tensor], None],
        result: torch.Tensor,
        buffer: PooledBuffer | None,
        group: dist.ProcessGroup,
        take_over: Callable[[PooledBuffer], bool] | None = None,
    ) -> None:
        self._work, self._result, self._group, self._buffer = work, result, group, buffer
        self._end: Callable[[torch.Tensor], None] | None = end
        self._take_over = take_over

    def is_done(self) -> bool:
        return self._end is None or self._work is None or self._work.is_completed()

    def wait(self) -> None:
        work, end, self._end = self._work, self._end, None  # the end keeps gradients: let it go
        if end is None:
            return
        if work is not None:
            if not work.is_completed():
                # If the event before is that of a unit, it was a moment ago, and its time will do.
                mine, last = thread(), ring[-1] if ring else None
                begun = now() if last is None or last[1] != mine or not last[2] else last[0]
                remember((begun, mine, "", 0, EVERYBODY, ""))
            try:
                work.wait(FIRST) if type(work) is dist.Work else work.wait()  # a custom collective's own Work class
            except RuntimeError as error:
                self._outlast(work, error)
        buffer, take_over = self._buffer, self._take_over
        if take_over is not None and buffer is not None and take_over(buffer):
            return
        end(self._result)
        if buffer is not None:
            buffer.release()

    def cancel(self) -> None:
        # The backend may still write to the buffers, so they must live until its work is done.
        self._take_over = None
        if self._end is not None:
            self._end = _drop
        with contextlib.suppress(RuntimeError):  # a peer may be gone; then the buffer is never released to the pool
            self.wait()

    def _outlast(self, work: dist.Work, error: RuntimeError) -> None:
        """Continue to wait after a first wait that raised ``error``.  Raises: RuntimeError that names the other ranks."""
        try:
            if type(work) is not dist.Work:
                raise error
            outlast(work, self._group)
        except RuntimeError as last:
            name_partners(last, self._group)
            raise


def _drop(_: torch.Tensor) -> None:
    pass


class StreamWork(OnceHandle[Callable[[], None]]):
    """A collective enqueued on a side stream; ``wait`` orders the current stream after it.

    Args:
        stream: the side stream.
        end: delivers the result and releases buffers.
        forget: releases buffers only, after a cancel.
        keeps: tensors that the collective uses, kept alive until the wait.
        fetch: the side stream that has allocated ``keeps``; it must not reuse that memory before ``stream`` has read it.
    """

    __slots__ = ("_fetch", "_forget", "_keeps", "_mark", "_stream")

    def __init__(
        self,
        stream: SideStream,
        end: Callable[[], None],
        forget: Callable[[], None],
        keeps: object,
        fetch: SideStream | None = None,
    ) -> None:
        super().__init__(end)
        self._stream = stream
        self._mark = stream.mark()
        self._forget = forget
        self._keeps = keeps
        self._fetch = fetch

    # is_done() does not query the device: that would free memory at different times on each rank, and memory plans would
    # be wrong.

    def finish(self, ends: Callable[[], None]) -> None:
        self._come_after()
        ends()

    def drop(self, ends: Callable[[], None]) -> None:
        self._come_after()
        self._forget()

    def _come_after(self) -> None:
        self._stream.current_waits(self._mark)
        if self._fetch is not None:
            self._fetch.wait_event(self._mark)
        self._keeps = None


class InPlaceStreamWork(OnceHandle[SideStream]):
    """An in-place all-reduce enqueued on a side stream; it has no result to deliver and no buffer to release."""

    __slots__ = ()
    holds_input = False

    def finish(self, ends: SideStream) -> None:
        ends.current_waits(ends.mark())

    drop = finish


def fetch_alone(fetch: SideStream, ends: GatherEnds) -> Handle:
    """Copy offloaded parameters to the device on stream ``fetch``, for a rank that has all shards."""
    with fetch.run():
        shard = ends.shard()

    def end() -> None:
        ends.deliver(shard)
        fetch.wait_current()  # before ``fetch`` reuses memory that it allocated and the current stream has read

    return StreamWork(fetch, end, lambda: None, None)


class GroupCommunicator:
    """The collectives of one group of ranks along a mesh axis, over its link or its backend.

    The choice depends on the sizes of a collective and on the agreement of the ranks at the begin of the pass, so it is the
    same on every rank.

    Args:
        group: the process group.
        stream: the stream of its collectives.
        pool: the pool of packed buffers.
        passes: knows the links of the running pass.
        custom: replacements of the collectives.
        fetch: the side stream that copies offloaded shards from the host; None if shards are not offloaded.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stream: SideStream,
        pool: BufferPool,
        passes: PassTracker,
        custom: CustomCollectives | None = None,
        fetch: SideStream | None = None,
    ) -> None:
        self.group = group
        self.stream = stream
        self.fetch = fetch
        self.pool = pool
        self.custom = custom or CustomCollectives()
        self._passes = passes
        self._name = group.group_name
        self.size = group.size()
        self.rank = group.rank()
        # The scale of the last reduction, which is the same object in every step (``scale_of``), and its arithmetic.
        self._resolved: tuple[Scale | None, Arithmetic] = None, resolve_scale(Scale(), self.size)

    @property
    def gathers_to_pool(self) -> bool:
        """True if results of all-gathers are in buffers of the pool."""
        return self.custom.all_gather is None and not self._allocates_from_group

    @property
    def _allocates_from_group(self) -> bool:
        device = self.pool.device
        return self.custom.allocates_from_group and torch_private.backend_of(self.group, device).supports_tensor_alloc(
            device
        )

    @property
    def planned_link(self) -> Link | None:
        """The link that collectives are expected to use, for planning."""
        return self._passes.known_links.get(self._name)

    def all_gather(self, ends: GatherEnds) -> Handle:
        """All-gather by the link, or sections into one packed buffer, which ``wait`` gives ``ends.take_over`` or ``deliver``.

        The side stream does not wait for the current stream; the engine orders it after writes to shards.
        """
        if listeners and tell("all-gather", "", ends):
            return LeftOut(ends, self.size)
        entry, custom = self._passes.entries.get(self._name), self.custom
        if entry is not None and not entry.has_no_link and custom.all_gather is None:
            link = self._passes.link(self.group, lambda link: link.takes_gather(ends))
            if link is not None:
                return link.all_gather(ends)
        if self.stream.is_concurrent:
            return self._all_gather_on_stream(ends)
        shard = ends.shard()
        if custom.all_gather is None and not custom.allocates_from_group:
            buffer = self.pool.acquire(shard.numel() * self.size * shard.dtype.itemsize, shard.dtype)
            packed = buffer.flat
            work = all_gather_single(packed, shard, self.group)
        else:
            packed, buffer = self._buffer(shard.numel() * self.size, shard.dtype, custom.all_gather)
            work = self._start_gather(packed, shard, async_op=True)
        return HostWork(work, ends.deliver, packed, buffer, self.group, ends.take_over)

    def _all_gather_on_stream(self, ends: GatherEnds) -> Handle:
        stream, fetch = self.stream, self.fetch
        with stream.run() if fetch is None else fetch.run():
            shard = ends.shard()
        if fetch is not None:
            stream.wait_event(fetch.mark())
        with stream.run():
            packed, buffer = self._buffer(shard.numel() * self.size, shard.dtype, self.custom.all_gather)
            work = self._start_gather(packed, shard, async_op=False)
            if work is not None:
                work.wait()  # the side stream waits, not the host

        def end() -> None:
            if ends.take_over is not None and buffer is not None and ends.take_over(buffer):
                buffer.reuser = stream  # which allocated it; the current stream reads it until it is released
                return
            ends.deliver(packed)
            # The side stream allocated ``packed`` and the current stream has read it; order later uses of that memory by the
            # side stream after this read.
            stream.wait_current()
            forget()

        def forget() -> None:
            if buffer is not None:
                buffer.release()

        return StreamWork(stream, end, forget, (packed, shard), fetch)

    def _start_gather(self, packed: torch.Tensor, shard: torch.Tensor, async_op: bool) -> dist.Work | None:
        if self.custom.all_gather is None:
            return all_gather_single(packed, shard, self.group, async_op)
        return self.custom.all_gather(packed, shard, self.group, async_op=async_op)

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Reduce-scatter by the link or by the backend."""
        if listeners and tell("reduction", ends.label, ends):
            return LeftOut(ends)
        entry = self._passes.entries.get(self._name)
        if entry is not None and not entry.has_no_link and self.custom.reduce_scatter is None:
            link = self._passes.link(self.group, lambda link: link.takes_scatter(ends, scale))
            if link is not None:
                return link.reduce_scatter(ends, scale)
        return self.reduce_scatter_by_backend(ends, scale)

    def reduce_scatter_by_backend(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Fill one packed buffer, reduce-scatter it, and pass this rank's section to ``ends.deliver``.

        The section is delivered on a stream at once, on the host in ``wait``.  The buffer is in use until ``wait`` in either
        case.
        """
        custom, dtype = self.custom, ends.dtype
        if custom.reduce_scatter is None and not custom.allocates_from_group:
            buffer = self.pool.acquire(ends.section_numel * self.size * dtype.itemsize, dtype)
            packed = buffer.flat
        else:
            packed, buffer = self._buffer(ends.section_numel * self.size, dtype, custom.reduce_scatter)
        ends.fill(packed)  # it also releases the gradients: from here on only the packed buffer has them
        if self._resolved[0] is not scale:
            self._resolved = scale, resolve_scale(scale, self.size)
        by = self._resolved[1]
        if self.stream.is_concurrent:
            return self._reduce_scatter_on_stream(ends, by, packed, buffer)
        output, work = self._start_scatter(ends, by, packed, async_op=True)
        after = by.after
        if after is None:
            return HostWork(work, ends.deliver, output, buffer, self.group)

        def end(output: torch.Tensor) -> None:
            output.div_(after)
            ends.deliver(output)

        return HostWork(work, end, output, buffer, self.group)

    def _reduce_scatter_on_stream(
        self, ends: ScatterEnds, by: Arithmetic, packed: torch.Tensor, buffer: PooledBuffer | None
    ) -> Handle:
        stream = self.stream
        stream.wait_current()
        with stream.run():
            output, work = self._start_scatter(ends, by, packed, async_op=False)
            if work is not None:
                work.wait()  # the side stream waits, not the host
            if by.after is not None:
                output.div_(by.after)
            ends.deliver(output)

        def end() -> None:
            # The current stream allocated ``packed`` and waits for the side stream that read it, so it may reuse the memory.
            if buffer is not None:
                buffer.release()

        return StreamWork(stream, end, end, packed)

    def _start_scatter(
        self, ends: ScatterEnds, by: Arithmetic, packed: torch.Tensor, async_op: bool
    ) -> tuple[torch.Tensor, dist.Work | None]:
        custom = self.custom.reduce_scatter
        if custom is None:
            output = ends.target()
        else:
            output = custom.allocate((ends.section_numel,), dtype=ends.dtype, device=packed.device)
        if by.before is not None:
            packed.div_(by.before)
        if custom is None:
            return output, reduce_scatter_single(output, packed, self.group, by.op, async_op)
        return output, custom(output, packed, self.group, by.op, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Handle:
        """All-reduce ``tensor`` in place; on a stream, after the work that is enqueued on the current stream."""
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        sums = self._passes.sums(self.group, tensor, scale)
        if sums is None:
            return self.all_reduce_by_backend(tensor, scale, contents)
        by_backend = ByBackend(collectives_are_watched(), lambda: self.all_reduce_by_backend(tensor, scale, contents))
        return sums.all_reduce(tensor, scale, contents, by_backend)

    def all_reduce_by_backend(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None) -> Handle:
        """Do :meth:`all_reduce` without a link."""
        if self.stream.is_concurrent:
            self.stream.wait_current()
            with self.stream.run():
                self.all_reduce_here(tensor, scale)
            return InPlaceStreamWork(self.stream)
        by, checksum = resolve_scale(scale, self.size), None if contents is None else contents.checksum
        summed = tensor if checksum is None else checksum.put()
        if by.before is not None:
            summed.div_(by.before)
        work = dist.all_reduce(summed, op=by.op, group=self.group, async_op=True)

        def end(summed: torch.Tensor) -> None:
            if by.after is not None:
                summed.div_(by.after)
            if checksum is not None:
                checksum.check(1.0 / scale.over(self.size), dist.get_process_group_ranks(self.group), dist.get_rank())

        return HostWork(work, end, summed, None, self.group)

    def all_reduce_here(self, tensor: torch.Tensor, scale: Scale) -> None:
        """All-reduce ``tensor`` in place on the current stream; on the host, wait for the result."""
        by = resolve_scale(scale, self.size)
        if by.before is not None:
            tensor.div_(by.before)
        if self.stream.is_concurrent:
            dist.all_reduce(tensor, op=by.op, group=self.group)
        else:
            await_collective(dist.all_reduce(tensor, op=by.op, group=self.group, async_op=True), self.group)
        if by.after is not None:
            tensor.div_(by.after)

    def _buffer(
        self, numel: int, dtype: torch.dtype, custom: CustomCollective | None
    ) -> tuple[torch.Tensor, PooledBuffer | None]:
        if custom is not None:
            return custom.allocate((numel,), dtype=dtype, device=self.pool.device), None
        if self._allocates_from_group:
            backend = torch_private.backend_of(self.group, self.pool.device)
            return backend.allocate_tensor(numel, dtype=dtype, device=self.pool.device), None
        buffer = self.pool.acquire(numel * dtype.itemsize, dtype)
        return buffer.flat, buffer


class OrderedSums(Protocol):
    """Sums of a group's gradients in an order that does not depend on the number of ranks.

    Attributes:
        most_parts: a rank sends up to so many partial sums of each gradient.
        is_last: this rank's last microbatch runs, after which the sums are complete.
    """

    most_parts: int

    @property
    def is_last(self) -> bool: ...

    def of_copy(self) -> OrderedSums:
        """Return the sums of a copy of the group."""
        ...

    def communicator(self, way: GroupCommunicator, passes: PassTracker) -> GroupCommunicator:
        """Return the communicator that sums over the ranks of ``way``."""
        ...
