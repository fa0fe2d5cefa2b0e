"""Steps in the backward of torch's DistributedDataParallel, bucket by bucket, while later buckets are still reduced.

All collectives start on the thread that runs backward, in the order of DDP's buckets.  torch's interleaved hook starts
broadcasts from callbacks of the backend's threads, in an order that differs between ranks, and hangs on gloo.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwise.collectives.owned import Broadcast, BroadcastHandle, launch_broadcasts
from shardwise.errors import ConfigError
from shardwise.torch_private import call_after_backward, graph_task_id
from shardwise.zero.optimizer import ZeroRedundancyOptimizer, zero_backend
from shardwise.zero.partition import gradient_for, is_dense

# No ``from __future__ import annotations``: DDP compares the hook's annotations with the types themselves.


DDPHook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


@dataclass(slots=True)
class _Bucket:
    """A bucket whose gradients, views of ``buffer``, are being reduced."""

    indices: list[int]
    gradients: list[torch.Tensor]
    reduced: Future[torch.Tensor]
    buffer: torch.Tensor


class Overlap:
    """A hook of ``ddp``, which reduces buckets by ``hook``, and the progress of the backward that it steps in."""

    def __init__(
        self, hook: DDPHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, is_interleaved: bool
    ) -> None:
        if not zero.overlap_with_ddp:
            raise ConfigError("the hook needs ZeroRedundancyOptimizer(..., overlap_with_ddp=True)")
        self._hook, self._ddp = hook, weakref.ref(ddp)  # weak: DDP's reducer references the hook
        self._backend, self._is_interleaved = zero_backend(zero), is_interleaved
        self._index_of: dict[torch.Tensor, int] = {}  # in the partition
        self._strides: list[tuple[int, ...]] = []  # when DDP laid out its buckets
        self._has_unused = False
        self._buckets: list[_Bucket] = []
        self._broadcasts: list[BroadcastHandle] = []
        self._adopt_params()

    def _adopt_params(self) -> None:
        params = self._backend.rank_partition.params
        for index in range(len(self._strides), len(params)):
            self._index_of[params[index]] = index
            self._strides.append(params[index].stride())

    def _begin(self) -> None:
        self._wait_for_broadcasts()  # a backward that raised left them
        ddp, self._buckets = self._ddp(), []
        assert ddp is not None  # it runs this backward
        self._has_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._adopt_params()
        self._check_memory_order()
        self._backend.refresh()

    def _check_memory_order(self) -> None:
        """Check that no parameter has other strides than when the hook was made.

        Raises: ConfigError if one has: DDP may lay out its buckets by the old strides.
        """
        for index, (param, stride) in enumerate(zip(self._backend.rank_partition.params, self._strides, strict=True)):
            if param.stride() != stride:
                text = (
                    f"parameter {index} of shape {tuple(param.shape)} has strides {param.stride()}, but had {stride} when the "
                    "hook was made: in which order DDP's buckets hold its gradient is not known. Change memory formats first, "
                    "then make DDP and the hook"
                )
                agreement = self._backend.agreement
                agreement.report_failure(f"rank {agreement.name}: {text}")
                raise ConfigError(text)

    def on_bucket(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Reduce a bucket, and step what is reduced; DDP calls it for each, in order."""
        if bucket.index() == 0:
            self._begin()
        indices = [self._index_of.get(param, -1) for param in bucket.parameters()]
        gradients = _gradient_views(bucket)
        future = self._hook(state, bucket)
        self._buckets.append(_Bucket(indices, gradients, future, bucket.buffer()))
        if self._is_interleaved and not self._has_unused and len(self._buckets) > 1:
            self._step_bucket(self._buckets.pop(0))
        if bucket.is_last():
            if graph_task_id() == -1:  # DDP in Join: a rank without inputs runs the buckets outside any backward
                self._finish()
            else:
                call_after_backward(self._finish)
        return future

    def _finish(self) -> None:
        """Step the remaining buckets.  Runs after the last node of backward and before DDP assigns the gradients."""
        if self._has_unused and graph_task_id() != -1:
            self._buckets = []
            call_after_backward(self._step_from_gradients)
            return
        while self._buckets:
            self._step_bucket(self._buckets.pop(0))
        self._end()

    def _end(self) -> None:
        self._wait_for_broadcasts()
        self._backend.mark_stepped()

    def _wait_for_broadcasts(self) -> None:
        for pending in self._broadcasts:
            pending.wait()
        self._broadcasts = []

    def _step_bucket(self, bucket: _Bucket) -> None:
        try:
            result = bucket.reduced.wait()
        except RuntimeError as error:
            raise self._backend.agreement.explain(self._what, error) from error
        gradients = _gradients_of(bucket, result[0] if isinstance(result, list) else result)
        known = {index: gradient for index, gradient in gradients.items() if index >= 0}
        self._step(known, self._backend.layout.broadcasts_of(tuple(known)))

    def _step(self, gradients: dict[int, torch.Tensor], broadcasts: Sequence[Broadcast]) -> None:
        """Update this rank's slices of the parameters that have ``gradients``, by index, and launch ``broadcasts``."""
        backend = self._backend
        own = backend.rank_partition.local_by_param
        found = [(each, gradient_for(each, gradients[index])) for index in sorted(gradients) for each in own[index]]
        try:
            if found:
                backend.local.step_slices(found)
        except Exception as error:  # other ranks wait for the broadcasts of this one
            raised = f"rank {backend.agreement.name} raised {type(error).__name__} in {self._what}: {error}"
            backend.agreement.report_failure(raised, may_be_caught=True)
            raise
        self._broadcasts += launch_broadcasts(broadcasts, backend.agreement, self._what)

    def _step_from_gradients(self) -> None:
        """Step on ``.grad`` as DDP has set it: parameters that no rank used have none and must not change."""
        params = self._backend.rank_partition.params
        found = {index: param.grad for index, param in enumerate(params) if param.grad is not None}
        self._step(found, self._backend.layout.broadcasts)
        self._end()

    @property
    def _what(self) -> str:
        return f"step number {self._backend.num_steps + 1} in DDP's backward"


def _gradient_views(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return the gradients as they lie in the bucket: in the memory order of their parameters.

    ``bucket.gradients()`` reads the same bytes in row-major order, which permutes channels_last and transposed
    gradients.
    """
    return [
        gradient if param.is_contiguous() or not is_dense(param) else gradient.as_strided(param.shape, param.stride())
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


def _gradients_of(bucket: _Bucket, reduced: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the reduced gradients by parameter index: DDP's views of its buffer, or the same views of a new tensor."""
    views = bucket.gradients
    if reduced.data_ptr() != bucket.buffer.data_ptr():
        flat = reduced.view(-1).split([gradient.numel() for gradient in views])
        pairs = zip(flat, views, strict=True)
        views = [part.as_strided(like.shape, like.stride(), part.storage_offset()) for part, like in pairs]
    return dict(zip(bucket.indices, views, strict=True))


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
    return Overlap(hook or allreduce_hook, ddp, zero, is_interleaved=False).on_bucket


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
    return Overlap(hook or allreduce_hook, ddp, zero, is_interleaved=True).on_bucket
