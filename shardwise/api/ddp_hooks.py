"""Communication hooks that let a ZeroRedundancyOptimizer step inside the backward of torch's DistributedDataParallel."""

from __future__ import annotations

import weakref

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.api.zero import ZeroRedundancyOptimizer, share_stepper
from shardwise.errors import ConfigError
from shardwise.zero.overlap import DDPHook, Overlap, Reduce, Warmup, make_hook


def hook_with_zero_step(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    reduce: Reduce = "all",
    warmup: Warmup = "update",
) -> DDPHook:
    """Return a hook that steps at the end of backward, bucket by bucket, while later buckets are still reduced.

    Args:
        hook: reduces a bucket's gradients, e.g. ``allreduce_hook`` (or a compressing one).
        ddp: the module that the result is registered with, by ``ddp.register_comm_hook(None, result)``.
        zero: made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for torch's sake; owners come from ``zero``'s partition, balanced over the whole model,
            so the buckets are always shared between ranks.
        reduce: "owner" sends gradients to their owners only and frees the others' (ZeRO-2): two units of volume per
            step instead of three.  ``hook`` is not used then and must be ``allreduce_hook`` or None.
        warmup: "skip" makes no step in the first two (static graph: three) iterations, as torch does; "update" does.

    Results are bitwise those of ``overlap_with_ddp=False`` with the same gradients.
    Raises: ConfigError (a ValueError) for arguments that do not go together.
    Example:
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))  # doctest: +SKIP
    """
    return _make(hook, ddp, zero, reduce, warmup, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    reduce: Reduce = "all",
    warmup: Warmup = "update",
) -> DDPHook:
    """Return a hook that updates a bucket's parameters in backward, as soon as the next bucket is ready.

    Arguments as for :func:`hook_with_zero_step`.  Parameters change while backward runs, so a parameter must not be
    read in backward after its gradient is complete (autograd raises if a saved one was changed).  With
    ``find_unused_parameters`` it steps at the end of backward, when it is known what was used.
    """
    return _make(hook, ddp, zero, reduce, warmup, is_interleaved=True)


def _make(
    hook: DDPHook | None,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    reduce: Reduce,
    warmup: Warmup,
    is_interleaved: bool,
) -> DDPHook:
    if not zero.overlap_with_ddp:
        raise ConfigError("the hook needs ZeroRedundancyOptimizer(..., overlap_with_ddp=True)")
    if reduce not in ("all", "owner") or warmup not in ("update", "skip"):
        raise ConfigError(f"found reduce={reduce!r} and warmup={warmup!r}, expected 'all'|'owner' and 'update'|'skip'")
    if reduce == "owner" and hook not in (None, allreduce_hook):
        raise ConfigError("reduce='owner' reduces by itself: pass hook=None or allreduce_hook")
    if reduce == "owner" and ddp.find_unused_parameters and not ddp.static_graph:
        raise ConfigError(
            "reduce='owner' cannot tell unused parameters from zero gradients: use reduce='all' or a DDP without "
            "find_unused_parameters"
        )
    stepper = share_stepper(zero)
    known = set(stepper.share.params)
    strangers = sum(param.requires_grad and param not in known for param in ddp.parameters())
    if strangers and reduce == "owner":
        raise ConfigError(
            f"{strangers} parameters of the module are not in the ZeroRedundancyOptimizer, so no rank owns their "
            "gradients: pass them to it or use reduce='all'"
        )
    return make_hook(Overlap(hook or allreduce_hook, weakref.ref(ddp), stepper, reduce, warmup, is_interleaved))
