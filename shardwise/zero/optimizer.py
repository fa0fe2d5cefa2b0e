"""ZeroRedundancyOptimizer: every rank keeps and updates the optimizer state of its partition of the parameters (ZeRO-1).

Source: ZeRO, arXiv 1910.02054; behaves as the class of this name in ``torch.distributed.optim`` where that works.
Design: docs/design/004-zero.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardwise.collectives.owned import broadcast_object as _broadcast_object
from shardwise.collectives.streams import watch_device
from shardwise.consistency.agreement import open_agreement
from shardwise.errors import StateError
from shardwise.fsdp.clip import Limit, OwnedGradient
from shardwise.observe import note
from shardwise.optim.slices import after_load, after_state_dict, before_load, before_state_dict
from shardwise.optim.state_dict import BlankState, Checkpoint, HeldState, refuse_other_state
from shardwise.zero.backend import Overlapped, ZeroBackend, ZeroJoinHook
from shardwise.zero.gradients import clip_gradients
from shardwise.zero.partition import (
    Partition,
    agree_on,
    check_dense,
    check_overlap,
    check_partition,
    checked_optimizer_class,
    checked_params,
    describe_params,
    flatten_groups,
    make_local_optimizer,
    make_rank_partition,
)
from shardwise.zero.state_dict import ShardedState, load_whole, whole_state_dict

__all__ = ["ZeroRedundancyOptimizer", "_broadcast_object"]

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wrap any optimizer class so that each rank holds and updates about 1/W of its state; parameters stay whole.

    Args:
        params: parameters or parameter groups, the same on all ranks.
        optimizer_class: the class of the local optimizer, e.g. ``torch.optim.AdamW``.
        process_group: the ranks to share with (default: all).
        parameters_as_bucket_view: keep parameters in flat buffers, so that they are sent without packing.
        overlap_with_ddp: :meth:`step` happens in DDP's backward; register a hook made by
            :func:`~shardwise.zero.overlap.hook_with_zero_step`.
        partition: "whole" gives each tensor one owner; "even" gives each rank the same number of elements, for
            optimizers that treat every element alone (tried out at construction).
        mixed_dtypes: allow several dense dtypes.
        overlap_grad_reduce: for loops without DDP: backward sends gradients to their owners as it makes them, from the
            second step on; :meth:`reduce_gradients` waits for what is still on its way.  Backwards whose gradients a later
            one adds to go under :meth:`no_sync`.
        overlap_param_gather: :meth:`step` returns while updated parameters are still on their way; whoever reads one
            through torch's functions waits for it.  What was made of a parameter's memory before (``.data`` or a state dict
            that is kept, arrays) shows the new values once the parameter has been read; ``torch.compile`` needs
            :meth:`wait_for_params` before every forward.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        rank, world_size: this rank's number in ``process_group``, and how many it has.
        initialized: the constructor has ended.
        defaults: those of the local optimizer.

    Construction is collective.  Errors of a single rank reach all ranks as DesyncError, which names rank and cause.
    Raises: TypeError, ConfigError (a ValueError) for wrong arguments; DesyncError if ranks pass different parameters.

    Example:
        >>> ddp = DistributedDataParallel(model)  # doctest: +SKIP
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP
        >>> ddp(inputs).sum().backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

    _backend: ZeroBackend

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partition = "whole",
        mixed_dtypes: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.initialized = False
        self._agreement = open_agreement(process_group, "ZeroRedundancyOptimizer")
        self.process_group = self._agreement.group
        self.rank, self.world_size = self._agreement.rank, self._agreement.size
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.partition: Partition = partition
        self._mixed_dtypes = mixed_dtypes
        self.overlap_grad_reduce, self.overlap_param_gather = overlap_grad_reduce, overlap_param_gather
        self._groups: list[dict[str, Any]] = []
        note("init", "ZeroRedundancyOptimizer")

        def build() -> list[str]:
            given = checked_params(params)
            check_dense(flatten_groups(given), mixed_dtypes)
            check_overlap(overlap_with_ddp, overlap_grad_reduce)
            plain = checked_optimizer_class(optimizer_class, overlap_with_ddp)
            check_partition(partition, plain, given, defaults)
            Optimizer.__init__(self, given, defaults)
            rank_partition = make_rank_partition(self._groups, partition, self.world_size, self.rank)
            local = make_local_optimizer(rank_partition, self._groups, lambda groups: plain(groups, **defaults))
            self.defaults = local.optim.defaults  # schedulers look there for what the optimizer has
            overlapped = Overlapped(overlap_grad_reduce, overlap_param_gather)
            self._backend = ZeroBackend(local, self._agreement, parameters_as_bucket_view, overlapped)
            kind = f"partition={partition!r}, {optimizer_class.__name__}, {overlapped}"
            return [kind, *describe_params(self._groups)]

        agree_on(self._agreement, "ZeroRedundancyOptimizer(...)", build)
        watch_device(self._groups[0]["params"][0].device)
        self._backend.lay_out()
        self.initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters so far keep their owners.  Collective.

        Raises: DesyncError on all ranks if a rank does not call it or passes something else.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return

        def check() -> list[str]:
            self._backend.local.members.check(self._groups)
            given = checked_params([dict(param_group)])
            check_dense([*self._backend.rank_partition.params, *flatten_groups(given)], self._mixed_dtypes)
            return describe_params([*self._groups, *[item for item in given if isinstance(item, dict)]])

        agree_on(self._agreement, "add_param_group", check)
        super().add_param_group(param_group)
        self._backend.add_last_group()

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Update this rank's partition, then bring every rank's partition to all.  Collective.

        Gradients must be the same on all ranks (DDP) or reduced with :meth:`reduce_gradients`.  ``closure`` and
        ``kwargs`` go to the local optimizer, whose result is returned.  With ``overlap_with_ddp`` it only warns.
        Raises: DesyncError where another rank failed or did not take part, naming it.
        """
        if self.overlap_with_ddp:
            logger.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        return self._backend.step(closure, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of all parameters, and of this rank's slices."""
        self._backend.drop_averaging()
        for param in self._backend.rank_partition.params:
            if isinstance(param.grad, OwnedGradient):
                param.grad = None if set_to_none else torch.zeros_like(param, requires_grad=False)
        super().zero_grad(set_to_none)

    def reduce_gradients(self) -> None:
        """Average the gradients, each only on its owner, and free all others (ZeRO-2); then call :meth:`step`.

        For loops without DDP: one unit of volume instead of an all-reduce's two.  Collective: the same parameters must
        have gradients on all ranks.  ``.grad`` is an :class:`~shardwise.fsdp.clip.OwnedGradient` then, on
        every rank; a further backward and call add to it, until :meth:`zero_grad`.  On one rank it does nothing.
        With ``overlap_grad_reduce`` most of it has happened in backward.
        Raises: DesyncError on all ranks if they have gradients of other parameters; StateError in ``Join``.
        """
        if self.world_size > 1:
            self._backend.reduce()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let gradients of backwards in this context stay on their rank, for a later backward to add to and to send.

        Without ``overlap_grad_reduce`` they do anyway.  Gradients that come after their parameter's were sent are sent once
        more, and added: that is right, but twice the bytes, and all ranks must do it.
        """
        sends = self._backend.sends
        was = sends is not None and sends.is_held
        try:
            if sends is not None:
                sends.is_held = True
            yield
        finally:
            if sends is not None:
                sends.is_held = was

    def wait_for_params(self) -> None:
        """Return when all parameters hold their new values, with ``overlap_param_gather``; else they do after a step.

        Raises: DesyncError where another rank failed or did not take part in the step.
        """
        self._backend.arrivals.wait()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before.

        Gradients may be those of DDP, the same on all ranks, or averaged to owners by :meth:`reduce_gradients`.
        Collective, of one number; each rank reads its own elements only.  The norm is a 0-dim tensor, float32 or wider,
        with the same bits on all ranks.  Arguments are those of ``torch.nn.utils.clip_grad_norm_``.

        Raises: DesyncError if gradients are neither; RuntimeError, with nothing scaled, if ``error_if_nonfinite`` and the
        norm is nan or infinite; StateError with ``overlap_with_ddp``, where the step is made in backward.
        """
        if self.overlap_with_ddp:
            raise StateError(
                "with overlap_with_ddp=True the step has been made when backward returns; make the optimizer without "
                "overlap to clip, or clip in the communication hook"
            )
        backend = self._backend
        backend.known.check(
            backend.rank_partition, self._agreement, f"clip_grad_norm_() before step {backend.num_steps + 1}"
        )
        # In Join not every rank is here, but those that are have all gradients.
        owner = None if backend.is_joining else backend
        return clip_gradients(backend.rank_partition, owner, Limit(max_norm, norm_type, error_if_nonfinite))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to group rank ``to``, tensor by tensor, for :meth:`state_dict` there.  Collective.

        Extra memory: the state itself on ``to``, the largest tensor elsewhere.  Without a step since the last call for
        the same rank it moves nothing.
        """
        self._backend.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as the plain optimizer would, on the rank it was consolidated to.

        Raises: StateError (a RuntimeError) elsewhere, or if a step was made since.
        """
        consolidated = self._backend.consolidated
        if consolidated is None or consolidated.state is None:
            raise StateError(
                f"Optimizer state has not been consolidated on this rank since the last step. Please call "
                f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the global "
                "state, or save `.sharded()` with torch.distributed.checkpoint without consolidation."
            )
        before_state_dict(self)
        return after_state_dict(self, whole_state_dict(consolidated.state, self._groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a whole state (ours, torch's or the plain optimizer's); this rank keeps copies of its partition.

        Not collective; ``state_dict`` is not changed.  Raises: ConfigError (a ValueError) if groups do not match.
        """
        load_whole(self._backend.local, before_load(self, state_dict))
        self._backend.mark_loaded()
        after_load(self)

    def sharded(
        self, names: Mapping[str, torch.Tensor] | None = None, loading: bool | Checkpoint = False, flat: bool = False
    ) -> ShardedState:
        """Return this rank's partition of the state for ``torch.distributed.checkpoint``; see :class:`ShardedState`."""
        return ShardedState(self._backend.local, self._backend.mark_loaded, names, loading, flat)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that steps along on ranks without inputs; ``kwargs`` are not used.

        From here to the end of the ``Join`` every step costs one more small all-reduce: active ranks pass reduced
        gradients to the ranks that have joined, which could not update their partition otherwise.
        """
        backend = self._backend
        backend.begin_join()
        if self.overlap_with_ddp:  # DDP's hook makes the step, in backward
            return ZeroJoinHook(lambda: None, backend.end_join)
        return ZeroJoinHook(lambda: backend.step(None, {}, is_active=False), backend.end_join)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._backend.rank_partition.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, which holds this rank's slices and their state."""
        return self._backend.local.optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, of whole parameters; the local optimizer follows their options."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Iterable[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._groups[:] = value  # the same list: the local optimizer has it

    @property
    def state(self) -> Any:
        """The state that this rank holds, of each parameter; empty where others own it, empty for all before any step.

        torch's ``get_optimizer_state_dict`` steps on zero gradients where there is none, so it must be there on all ranks.
        Raises: StateError from what would take entries off it or put others there.
        """
        return HeldState(self._backend.local.states()) if self._backend.has_state else BlankState()

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.initialized:  # torch's constructor assigns it, too
            refuse_other_state()


def zero_backend(optimizer: ZeroRedundancyOptimizer) -> ZeroBackend:
    """Return what steps ``optimizer`` on the partitions of all ranks."""
    return optimizer._backend  # pyright: ignore[reportPrivateUsage]
