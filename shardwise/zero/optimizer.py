"""ZeroRedundancyOptimizer: every rank stores and updates the optimizer state of its partition of the parameters (ZeRO-1).

Source: ZeRO, arXiv 1910.02054.  It behaves like the class of this name in ``torch.distributed.optim``, except for
defects of that class.  Design: docs/design/004-zero.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardwise.collectives.owned import broadcast_object as _broadcast_object
from shardwise.collectives.streams import watch_device
from shardwise.consistency.agreement import open_agreement
from shardwise.errors import StateError
from shardwise.fsdp.clip import clip_grad_norm_
from shardwise.observe import note
from shardwise.optim.slices import after_load, after_state_dict, before_load, before_state_dict
from shardwise.optim.state_dict import BlankState, HeldState, refuse_other_state
from shardwise.zero.backend import ZeroBackend, ZeroJoinHook
from shardwise.zero.partition import (
    Partition,
    agree_on,
    check_dense,
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
    """Wrap an optimizer class so that each rank stores and updates about 1/W of its state; parameters are replicated.

    Args:
        params: parameters or parameter groups, the same on all ranks.
        optimizer_class: the class of the local optimizer, e.g. ``torch.optim.AdamW``.
        process_group: the ranks that share the state (default: all).
        parameters_as_bucket_view: accepted, as torch has it; parameters are sent from where they lie, small ones packed.
        overlap_with_ddp: the step happens in DDP's backward; register a hook made by
            :func:`~shardwise.zero.overlap.hook_with_zero_step`.
        partition: "whole" gives each tensor one owner; "even" gives each rank the same number of elements, for
            optimizers that treat every element separately (checked at construction).
        mixed_dtypes: allow several dense dtypes.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        rank, world_size: this rank in ``process_group``, and the number of its ranks.
        initialized: the constructor has ended.
        defaults: those of the local optimizer.

    Construction is collective.  An error on one rank raises DesyncError on all, with that rank and the cause.
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
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.initialized = False
        self._agreement = open_agreement(process_group, "ZeroRedundancyOptimizer")
        self.process_group = self._agreement.group
        self.rank, self.world_size = self._agreement.rank, self._agreement.size
        self.parameters_as_bucket_view, self.overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp
        self.partition: Partition = partition
        self._mixed_dtypes = mixed_dtypes
        self._groups: list[dict[str, Any]] = []
        note("init", "ZeroRedundancyOptimizer")

        def build() -> list[str]:
            checked = checked_params(params)
            check_dense(flatten_groups(checked), mixed_dtypes)
            plain = checked_optimizer_class(optimizer_class, overlap_with_ddp)
            check_partition(partition, plain, checked, defaults)
            Optimizer.__init__(self, checked, defaults)
            rank_partition = make_rank_partition(self._groups, partition, self.world_size, self.rank)
            local = make_local_optimizer(rank_partition, self._groups, lambda groups: plain(groups, **defaults))
            self.defaults = local.optim.defaults  # schedulers read the optimizer's options there
            self._backend = ZeroBackend(local, self._agreement)
            return [f"partition={partition!r}, {optimizer_class.__name__}", *describe_params(self._groups)]

        agree_on(self._agreement, "ZeroRedundancyOptimizer(...)", build)
        watch_device(self._groups[0]["params"][0].device)
        self.initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; existing parameters keep their owners.  Collective.

        Raises: DesyncError on all ranks if a rank does not call it or passes something else.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return

        def check() -> list[str]:
            self._backend.local.members.check(self._groups)
            checked = checked_params([dict(param_group)])
            check_dense([*self._backend.rank_partition.params, *flatten_groups(checked)], self._mixed_dtypes)
            return describe_params([*self._groups, *[item for item in checked if isinstance(item, dict)]])

        agree_on(self._agreement, "add_param_group", check)
        super().add_param_group(param_group)
        self._backend.adopt_last_group()

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Update this rank's partition, then send every rank's partition to all.  Collective.

        Gradients must be equal on all ranks, as DDP makes them.  ``closure`` and ``kwargs`` go to the local optimizer,
        whose result is returned.  With ``overlap_with_ddp`` it only warns.
        Raises: DesyncError if another rank failed or did not take part, with its rank.
        """
        if self.overlap_with_ddp:
            logger.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        return self._backend.step(closure, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before scaling.

        Gradients must be equal on all ranks, as DDP makes them.  Arguments are those of ``torch.nn.utils.clip_grad_norm_``.

        Raises: DesyncError if gradients differ between ranks; RuntimeError, before anything is scaled, if
        ``error_if_nonfinite`` and the norm is nan or infinite; StateError with ``overlap_with_ddp``, whose step is in
        backward.
        """
        if self.overlap_with_ddp:
            raise StateError(
                "with overlap_with_ddp=True the step has been made when backward returns; make the optimizer without "
                "overlap to clip, or clip in the communication hook"
            )
        backend = self._backend
        backend.check_gradients(f"clip_grad_norm_() before step {backend.num_steps + 1}")
        return clip_grad_norm_(backend.rank_partition.params, max_norm, norm_type, error_if_nonfinite)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the full state to group rank ``to``, tensor by tensor, for :meth:`state_dict` there.  Collective.

        Extra memory: the state itself on ``to``, the largest tensor elsewhere.  It sends nothing if there was no step
        since the last call for the same rank.
        """
        self._backend.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state as the plain optimizer would, on the rank that it was consolidated to.

        Raises: StateError (a RuntimeError) on other ranks, or if there was a step since.
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
        """Load a full state (of this class, torch's, or the plain optimizer); this rank copies its partition.

        Not collective; ``state_dict`` does not change.  Raises: ConfigError (a ValueError) if groups do not match.
        """
        load_whole(self._backend.local, before_load(self, state_dict))
        self._backend.mark_loaded()
        after_load(self)

    def sharded(self, names: Mapping[str, torch.Tensor] | None = None, loading: bool = False) -> ShardedState:
        """Return this rank's partition of the state for ``torch.distributed.checkpoint``; see :class:`ShardedState`."""
        return ShardedState(self._backend.local, self._backend.mark_loaded, names, loading)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that takes part in steps on ranks without inputs; ``kwargs`` are not used.

        From here to the end of the ``Join`` every step costs one more small all-reduce: active ranks send reduced
        gradients to the ranks that have joined, which could not update their partition otherwise.
        """
        backend = self._backend
        backend.begin_join()
        if self.overlap_with_ddp:  # DDP's hook steps, in backward
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
        """The local optimizer, which has this rank's slices and their state."""
        return self._backend.local.optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, of full parameters; the local optimizer follows their options."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Iterable[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._groups[:] = value  # keep the list: the local optimizer references it

    @property
    def state(self) -> Any:
        """The state on this rank, of each parameter; empty for parameters of other owners, and for all before the first step.

        torch's ``get_optimizer_state_dict`` steps on zero gradients if there is no state, so all ranks must have some.
        Raises: StateError if entries are added or removed.
        """
        return HeldState(self._backend.local.states()) if self._backend.has_state else BlankState()

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.initialized:  # torch's constructor assigns it too
            refuse_other_state()


def zero_backend(optimizer: ZeroRedundancyOptimizer) -> ZeroBackend:
    """Return the backend that steps ``optimizer`` on the partitions of all ranks."""
    return optimizer._backend  # pyright: ignore[reportPrivateUsage]
