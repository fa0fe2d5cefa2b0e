"""Steps in the backward of torch's DistributedDataParallel, bucket by bucket, while later buckets are still reduced.

All collectives start on the thread that runs backward, in the order of DDP's buckets.  torch's interleaved hook starts
broadcasts from callbacks of the backend's threads, in an order that differs between ranks, and hangs on gloo.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwise.collectives.owned import Broadcast, BroadcastHandle, launch_broadcasts
from shardwise.errors import ConfigError
from shardwise.torch_private import call_after_backward, graph_task_id
from shardwise.zero.optimizer import ZeroBackend, ZeroRedundancyOptimizer, zero_backend
from shardwise.zero.partition import gradient_for, is_dense

# No ``from __future__ import annotations``: DDP compares the hook's annotations with the types themselves.


DDPHook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """The configuration of a hook.

    Attributes:
        hook: reduces a bucket's gradients.
        ddp: a weak reference, because DDP's reducer references the hook.
        index_of: the index of each parameter in the partition.
        strides: of the parameters when DDP laid out its buckets.
    """

    hook: DDPHook
    ddp: weakref.ref[DistributedDataParallel]
    backend: ZeroBackend
    is_interleaved: bool
    index_of: dict[torch.Tensor, int] = field(default_factory=dict[torch.Tensor, int])
    strides: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])


@dataclass(slots=True)
class _Bucket:
    """A bucket whose gradients, views of ``buffer``, are being reduced."""

    indices: list[int]
    gradients: list[torch.Tensor]
    reduced: Future[torch.Tensor]
    buffer: torch.Tensor


@dataclass(slots=True)
class _Backward:
    """The progress of one backward."""

    has_unused: bool = False
    buckets: list[_Bucket] = field(default_factory=list[_Bucket])
    broadcasts: list[BroadcastHandle] = field(default_factory=list[BroadcastHandle])


def _adopt_params(overlap: Overlap) -> None:
    params = overlap.backend.rank_partition.params
    for index in range(len(overlap.strides), len(params)):
        overlap.index_of[params[index]] = index
        overlap.strides.append(params[index].stride())


def _begin(overlap: Overlap, running: _Backward) -> None:
    # a backward that raised left them
    for pending in running.broadcasts:
        pending.wait()
    running.buckets, running.broadcasts = [], []
    ddp = overlap.ddp()
    assert ddp is not None  # it runs this backward
    running.has_unused = ddp.find_unused_parameters and not ddp.static_graph
    _adopt_params(overlap)
    _check_memory_order(overlap)
    overlap.backend.refresh()


def _check_memory_order(overlap: Overlap) -> None:
    """Check that no parameter has other strides than when the hook was made.

    Raises: ConfigError if one has: DDP may lay out its buckets by the old strides.
    """
    for index, (param, stride) in enumerate(zip(overlap.backend.rank_partition.params, overlap.strides, strict=True)):
        if param.stride() != stride:
            text = (
                f"parameter {index} of shape {tuple(param.shape)} has strides {param.stride()}, but had {stride} when the "
                "hook was made: in which order DDP's buckets hold its gradient is not known. Change memory formats first, "
                "then make DDP and the hook"
            )
            agreement = overlap.backend.agreement
            agreement.report_failure(f"rank {agreement.name}: {text}")
            raise ConfigError(text)


def _on_bucket(overlap: Overlap, running: _Backward, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    indices = [overlap.index_of.get(param, -1) for param in bucket.parameters()]
    gradients = _gradient_views(bucket)
    future = overlap.hook(state, bucket)
    running.buckets.append(_Bucket(indices, gradients, future, bucket.buffer()))
    if overlap.is_interleaved and not running.has_unused and len(running.buckets) > 1:
        _step_bucket(overlap, running, running.buckets.pop(0))
    if bucket.is_last():
        if graph_task_id() == -1:  # DDP in Join: a rank without inputs runs the buckets outside any backward
            _finish(overlap, running)
        else:
            call_after_backward(lambda: _finish(overlap, running))
    return future


def _gradient_views(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return the gradients as they lie in the bucket: in the memory order of their parameters.

    ``bucket.gradients()`` reads the same bytes in row-major order, which permutes channels_last and transposed
    gradients.
    """
    return [
        gradient if param.is_contiguous() or not is_dense(param) else gradient.as_strided(param.shape, param.stride())
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


def _finish(overlap: Overlap, running: _Backward) -> None:
    """Step the remaining buckets.  Runs after the last node of backward and before DDP assigns the gradients."""
    if running.has_unused and graph_task_id() != -1:
        running.buckets = []
        call_after_backward(lambda: _step_from_gradients(overlap, running))
        return
    while running.buckets:
        _step_bucket(overlap, running, running.buckets.pop(0))
    _end(overlap, running)


def _end(overlap: Overlap, running: _Backward) -> None:
    for pending in running.broadcasts:
        pending.wait()
    running.broadcasts = []
    overlap.backend.mark_stepped()


def _step_bucket(overlap: Overlap, running: _Backward, bucket: _Bucket) -> None:
    gradients = _gradients_of(bucket, _wait_future(overlap.backend, bucket.reduced))
    known = {index: gradient for index, gradient in gradients.items() if index >= 0}
    _step(overlap, running, known, overlap.backend.layout.broadcasts_of(tuple(known)))


def _step(
    overlap: Overlap, running: _Backward, gradients: dict[int, torch.Tensor], broadcasts: Sequence[Broadcast]
) -> None:
    """Update this rank's slices of the parameters that have ``gradients``, by index, and launch ``broadcasts``."""
    backend = overlap.backend
    own = backend.rank_partition.local_by_param
    slices = [local for index in sorted(gradients) for local in own[index]]
    if slices:
        backend.local.step_slices([(each, gradient_for(each, gradients[each.owned_slice.tensor])) for each in slices])
    running.broadcasts += launch_broadcasts(broadcasts, backend.agreement, _what(backend))


def _wait_future(backend: ZeroBackend, future: Future[torch.Tensor]) -> torch.Tensor:
    try:
        result = future.wait()
    except RuntimeError as error:
        raise backend.agreement.explain(_what(backend), error) from error
    return result[0] if isinstance(result, list) else result


def _gradients_of(bucket: _Bucket, reduced: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the reduced gradients by parameter index: DDP's views of its buffer, or the same views of a new tensor."""
    if reduced.data_ptr() == bucket.buffer.data_ptr():
        views = bucket.gradients
    else:
        flat = reduced.view(-1).split([gradient.numel() for gradient in bucket.gradients])
        views = [
            part.as_strided(gradient.shape, gradient.stride(), part.storage_offset())
            for part, gradient in zip(flat, bucket.gradients, strict=True)
        ]
    return dict(zip(bucket.indices, views, strict=True))


def _step_from_gradients(overlap: Overlap, running: _Backward) -> None:
    """Step on ``.grad`` as DDP has set it: parameters that no rank used have none and must not change."""
    params = overlap.backend.rank_partition.params
    found = {index: param.grad for index, param in enumerate(params) if param.grad is not None}
    _step(overlap, running, found, overlap.backend.layout.broadcasts)
    _end(overlap, running)


def _what(backend: ZeroBackend) -> str:
    return f"step number {backend.num_steps + 1} in DDP's backward"


# ---- Communication hooks that let a ZeroRedundancyOptimizer step inside the backward of torch's
# DistributedDataParallel.


def hook_with_zero_step(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> DDPHook:
    """Return a hook that steps at the end of backward, bucket by bucket, while later buckets are still reduced.

    Args:
        hook: reduces a bucket's gradients, e.g. ``allreduce_hook`` (or a compressing one).
        ddp: the module on which to register the result, by ``ddp.register_comm_hook(None, result)``.
        zero: made with ``overlap_with_ddp=True``.
        shard_buckets: ignored; torch has this argument.  Owners come from ``zero``'s partition, which is balanced over
            the whole model, so several ranks always update parts of a bucket.

    Results are bitwise those of ``overlap_with_ddp=False`` with the same gradients.  torch's hooks leave out the step of
    the first two or three iterations; these don't.
    Raises: ConfigError for arguments that contradict each other.
    Example:
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))  # doctest: +SKIP
    """
    return _make(hook, ddp, zero, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> DDPHook:
    """Return a hook that updates a bucket's parameters in backward, as soon as the next bucket is ready.

    Arguments as for :func:`hook_with_zero_step`.  Parameters change while backward runs, so backward must not read a
    parameter after its gradient is complete (autograd raises if a saved one has changed).  With
    ``find_unused_parameters`` it steps at the end of backward, when the used parameters are known.
    """
    return _make(hook, ddp, zero, is_interleaved=True)


def _make(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    is_interleaved: bool,
) -> DDPHook:
    if not zero.overlap_with_ddp:
        raise ConfigError("the hook needs ZeroRedundancyOptimizer(..., overlap_with_ddp=True)")
    overlap = Overlap(hook or allreduce_hook, weakref.ref(ddp), zero_backend(zero), is_interleaved)
    running = _Backward()
    _adopt_params(overlap)

    def zero_step_hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            _begin(overlap, running)
        return _on_bucket(overlap, running, state, bucket)

    return zero_step_hook
