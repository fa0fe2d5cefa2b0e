"""ZeroRedundancyOptimizer: every rank keeps and updates the optimizer state of its share of the parameters (ZeRO-1).

Source: ZeRO, arXiv 1910.02054; behaves as the class of this name in ``torch.distributed.optim`` where that works.
Design: docs/design/004-zero.md.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardwise.comm.board import open_board
from shardwise.comm.buffers import BufferPool
from shardwise.comm.matrices import sum_of
from shardwise.comm.owned import broadcast_object as _broadcast_object
from shardwise.comm.owned import launch_broadcasts
from shardwise.errors import ConfigError, DesyncError, StateError
from shardwise.layout.owners import Piece
from shardwise.optim.checkpointed import Checkpoint
from shardwise.optim.owned import OwnedGradient
from shardwise.zero.checkpoint import ShardedState
from shardwise.zero.checks import (
    Partition,
    check_dense,
    check_elementwise,
    checked_optimizer_class,
    checked_params,
    describe_params,
    flatten_groups,
)
from shardwise.zero.clip import clip_gradients
from shardwise.zero.compare import are_same
from shardwise.zero.gradients import (
    Reduction,
    attached,
    check_averaged,
    describe_presence,
    presence_of,
    reduce_to_pieces,
)
from shardwise.zero.join import ZeroJoinHook, share_gradients
from shardwise.zero.pieces import LocalPiece, copy_options, narrowed
from shardwise.zero.share import Layout, addresses_of, make_layout, make_share, moving_of, trainable_of
from shardwise.zero.state import Consolidated, consolidate, load_local

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
            :func:`~shardwise.api.ddp_hooks.hook_with_zero_step`.
        partition: "whole" gives each tensor one owner; "even" gives each rank the same number of elements, for
            optimizers that treat every element alone (tried out at construction).
        mixed_dtypes: allow several dense dtypes.
        **defaults: arguments of ``optimizer_class``.

    Construction is collective.  Errors of a single rank reach all ranks as DesyncError, which names rank and cause.
    Raises: TypeError, ConfigError (a ValueError) for wrong arguments; DesyncError if ranks pass different parameters.

    Example:
        >>> ddp = DistributedDataParallel(model)  # doctest: +SKIP
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP
        >>> ddp(inputs).sum().backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

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
        self.board = open_board(process_group, "ZeroRedundancyOptimizer")
        self.process_group = self.board.group
        self.rank, self.world_size = self.board.rank, self.board.size
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.partition: Partition = partition
        self.is_joining = False
        self.optimizer_defaults = dict(defaults)
        self._mixed_dtypes = mixed_dtypes
        self.num_steps = 0
        self._consolidated: Consolidated | None = None
        self._staging: dict[torch.device, BufferPool] = {}
        self._has_state = False
        self._is_compared = False  # whether gradients like those of the last step are known to be the same on all ranks
        self._agreed_presences: set[tuple[torch.dtype | None, ...]] = set()
        self._layout: Layout | None = None
        facts: list[str] = []
        error: Exception | None = None
        try:
            given = checked_params(params)
            check_dense(flatten_groups(given), mixed_dtypes)
            self._check_options(optimizer_class, given, defaults)
            Optimizer.__init__(self, given, defaults)
            self._build(checked_optimizer_class(optimizer_class, overlap_with_ddp), defaults)
            facts = [f"partition={partition!r}, {optimizer_class.__name__}", *describe_params(self.param_groups)]
        except Exception as found:
            error = found
        try:
            self.board.agree("ZeroRedundancyOptimizer(...)", facts, error)
        finally:
            del error  # an error and the frame it was raised in would keep each other, and the group, alive
        self._adopt_layout()
        self.initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters so far keep their owners.  Collective.

        Raises: DesyncError on all ranks if a rank does not call it or passes something else.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        facts: list[str] = []
        error: Exception | None = None
        try:
            group = dict(param_group)
            given = checked_params([group])
            check_dense([*self.share.params, *flatten_groups(given)], self._mixed_dtypes)
            facts = describe_params([*self.param_groups, *[item for item in given if isinstance(item, dict)]])
        except Exception as found:
            error = found
        try:
            self.board.agree("add_param_group", facts, error)
        finally:
            del error
        super().add_param_group(param_group)
        self.share = make_share(self.param_groups, self.partition, self.world_size, self.rank, self.share)
        self._is_compared = False
        self.optim.add_param_group(self._local_group(len(self.param_groups) - 1))
        copy_options(self.optim.param_groups, self.param_groups)
        self._adopt_layout()

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Update this rank's share, then bring every rank's share to all.  Collective.

        Gradients must be the same on all ranks (DDP) or reduced with :meth:`reduce_gradients`.  ``closure`` and
        ``kwargs`` go to the local optimizer, whose result is returned.  With ``overlap_with_ddp`` it only warns.
        Raises: DesyncError where another rank failed or did not take part, naming it.
        """
        if self.overlap_with_ddp:
            logger.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        return self.step_as(True, closure, kwargs)

    def step_as(self, is_active: bool, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> Any:
        """Do one step; ``is_active`` is False on a rank that has run out of inputs (in ``Join``)."""
        what = f"step() number {self.num_steps + 1}"
        received = share_gradients(self, is_active, what) if self.is_joining else None
        self.refresh()
        error: Exception | None = None
        loss: Any = None
        try:
            if closure is None:
                self._check_gradients(what, has_inputs=is_active)
            loss = self._local_step(closure, kwargs, received)
        except DesyncError:  # known to all ranks
            raise
        except Exception as found:
            error = found
        try:
            if closure is not None:
                self.board.agree(f"the closure of {what}", error=error)
            elif error is not None:
                self.board.report_failure(f"rank {self.rank} raised {type(error).__name__} in {what}: {error}")
                raise error
        finally:
            del error
        for pending in launch_broadcasts(self.layout.broadcasts, self.board, what):
            pending.wait()
        self.mark_stepped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of all parameters, and of this rank's pieces."""
        for param in self.share.params:
            if isinstance(param.grad, OwnedGradient):
                param.grad = None if set_to_none else torch.zeros_like(param, requires_grad=False)
        super().zero_grad(set_to_none)

    def staging(self, device: torch.device) -> BufferPool:
        """Return where the buffers of messages come from; on CPU they are kept for the next step."""
        return self._staging.setdefault(device, BufferPool(device))

    def reduce_gradients(self) -> None:
        """Average the gradients, each only on its owner, and free all others (ZeRO-2); then call :meth:`step`.

        For loops without DDP: one unit of volume instead of an all-reduce's two.  Collective: the same parameters must
        have gradients on all ranks.  ``.grad`` is an :class:`~shardwise.optim.owned.OwnedGradient` then, on every rank;
        a further backward and call add to it, until :meth:`zero_grad`.  On one rank it does nothing.
        Raises: DesyncError on all ranks if they have gradients of other parameters; StateError in ``Join``.
        """
        if self.world_size == 1:
            return
        what = f"reduce_gradients() for step {self.num_steps + 1}"
        if self.is_joining:
            raise StateError(
                f"{what}: ranks that have run out of inputs in Join do not take part; wrap the model in "
                "DistributedDataParallel, or do without Join"
            )
        presence = presence_of(self.share)
        if presence not in self._agreed_presences:
            self.board.agree(what, describe_presence(self.share, presence))
            self._agreed_presences.add(presence)
        reduce_to_pieces(Reduction(self.share, self.board, self.staging, weakref.ref(self), what))
        self._is_compared = False

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
        self._check_gradients(f"clip_grad_norm_() before step {self.num_steps + 1}")
        group = (
            None if self.is_joining else self
        )  # in Join not every rank is here, but those that are have all gradients
        return clip_gradients(self.share, group, max_norm, norm_type, error_if_nonfinite)

    def sum_over_ranks(self, value: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the sum (or maximum) of ``value`` over the ranks, the same bits on each.  Collective."""
        return sum_of(value, self.process_group, is_max)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to group rank ``to``, tensor by tensor, for :meth:`state_dict` there.  Collective.

        Extra memory: the state itself on ``to``, the largest tensor elsewhere.  Without a step since the last call for
        the same rank it moves nothing.
        """
        steps = f"{self.num_steps} step(s) so far"
        self.board.agree(f"consolidate_state_dict(to={to})", [steps, *describe_params(self.param_groups)])
        if self._consolidated is None or self._consolidated.to != to:
            copy_options(self.param_groups, self.optim.param_groups)
            self._consolidated = consolidate(self, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as the plain optimizer would, on the rank it was consolidated to.

        Raises: StateError (a RuntimeError) elsewhere, or if a step was made since.
        """
        state = self._consolidated.state if self._consolidated is not None else None
        if state is None:
            raise StateError(
                f"Optimizer state has not been consolidated on this rank since the last step. Please call "
                f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the global "
                "state, or save `.sharded()` with torch.distributed.checkpoint without consolidation."
            )
        indices = iter(range(len(self.share.params)))
        groups = [{**group, "params": [next(indices) for _ in group["params"]]} for group in self.param_groups]
        return {"state": {index: dict(values) for index, values in state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a whole state (ours, torch's or the plain optimizer's); this rank keeps copies of its share.

        Not collective; ``state_dict`` is not changed.  Raises: ConfigError (a ValueError) if groups do not match.
        """
        load_local(self, state_dict)
        self.adopt_options()

    def sharded(
        self, names: Mapping[str, torch.Tensor] | None = None, loading: bool | Checkpoint = False, flat: bool = False
    ) -> ShardedState:
        """Return this rank's share of the state for ``torch.distributed.checkpoint``; see :class:`ShardedState`."""
        return ShardedState(self, names, loading, flat)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that steps along on ranks without inputs; ``kwargs`` are not used.

        From here to the end of the ``Join`` every step costs one more small all-reduce: active ranks pass reduced
        gradients to the ranks that have joined, which could not update their share otherwise.
        """
        self.is_joining = self.world_size > 1
        return ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self.share.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    @property
    def all_params(self) -> Sequence[torch.Tensor]:
        """All parameters in the order of the groups: their index is the key in state dicts."""
        return self.share.params

    @property
    def pieces(self) -> Sequence[Piece]:
        """All ranks' pieces."""
        return self.share.pieces

    @property
    def local_pieces(self) -> Sequence[LocalPiece]:
        """This rank's pieces."""
        return self.share.local_pieces

    @property
    def state(self) -> Any:
        """The state that this rank holds, of each parameter; empty where others own it, empty for all before any step.

        torch's ``get_optimizer_state_dict`` steps on zero gradients where there is none, so it must be there on all ranks.
        """
        if not self._has_state:
            return defaultdict[torch.Tensor, Any](dict)
        return {
            param: self.optim.state.get(local[0].tensor, {}) if local else {}
            for param, local in zip(self.share.params, self.share.local_by_param, strict=True)
        }

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        del value  # torch's constructor and ``__setstate__`` assign it

    @property
    def layout(self) -> Layout:
        """Where parameters lay at the last look, and the broadcasts."""
        assert self._layout is not None
        return self._layout

    def refresh(self) -> None:
        """Follow changes made from outside: options, replaced memory, frozen or thawed parameters."""
        layout, params = self.layout, self.share.params
        moving = moving_of(params)
        if moving != layout.moving or trainable_of(params) != layout.trainable:
            facts = [f"parameter {i} {'changes' if moves else 'stays'} in a step" for i, moves in enumerate(moving)]
            self.board.agree("a step after requires_grad changed", [*describe_params(self.param_groups), *facts])
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self._is_compared = False
            del layout
            self._adopt_layout()
        elif addresses_of(params) != layout.addresses:
            del layout
            self._adopt_layout()
        copy_options(self.param_groups, self.optim.param_groups)

    def step_pieces(self, gradients: Sequence[tuple[LocalPiece, torch.Tensor]]) -> None:
        """Let the local optimizer update these pieces only, with these gradients; options are pulled back after it."""
        chosen = {id(local.tensor) for local, _ in gradients}
        before = [(local.tensor, local.tensor.grad) for local, _ in gradients]
        try:
            for local, gradient in gradients:
                local.tensor.grad = gradient
            with narrowed(self.optim.param_groups, chosen):
                self.optim.step()
        finally:
            for tensor, gradient in before:
                tensor.grad = gradient
        copy_options(self.optim.param_groups, self.param_groups)

    def adopt_options(self) -> None:
        """Take the options of the local optimizer after it has loaded a state."""
        copy_options(self.optim.param_groups, self.param_groups)
        self._has_state = True
        self._consolidated = None

    def mark_stepped(self) -> None:
        """Count a step: consolidated state is stale from here."""
        self.num_steps += 1
        self._has_state = True
        self._consolidated = None

    def _check_gradients(self, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> None:
        if self.world_size == 1 or check_averaged(self.share, what) or self._is_compared:
            return
        self._is_compared = are_same(self.share, self.board, what, has_inputs=has_inputs, only_warn=only_warn)

    def _local_step(
        self,
        closure: Callable[[], float] | None,
        kwargs: Mapping[str, Any],
        received: Mapping[Piece, torch.Tensor] | None,
    ) -> Any:
        if not callable(closure):
            with attached(self.share, received):
                loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        else:
            with ExitStack() as attachment:

                def closure_then_attach() -> float:
                    attachment.close()
                    result = closure()
                    self._check_gradients(f"the closure of step {self.num_steps + 1}", only_warn=True)
                    attachment.enter_context(attached(self.share, received))
                    return result

                loss = self.optim.step(closure=closure_then_attach, **kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _build(self, optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
        self.share = make_share(self.param_groups, self.partition, self.world_size, self.rank)
        groups = [self._local_group(number) for number in range(len(self.param_groups))]
        self.optim = optimizer_class(groups, **defaults)
        copy_options(self.optim.param_groups, self.param_groups)

    def _check_options(
        self, optimizer_class: type[Optimizer], given: Sequence[Any], defaults: Mapping[str, Any]
    ) -> None:
        if self.partition not in ("whole", "even"):
            raise ConfigError(f"partition is {self.partition!r}, expected 'whole' or 'even'")
        if self.partition == "even":
            first = given[0] if isinstance(given[0], dict) else {}
            options = {**defaults, **{key: value for key, value in first.items() if key != "params"}}
            plain = checked_optimizer_class(optimizer_class, self.overlap_with_ddp)
            check_elementwise(plain, options, flatten_groups(given)[0].device)

    def _local_group(self, number: int) -> dict[str, Any]:
        return {**self.param_groups[number], "params": self.share.tensors_of_group(number)}

    def _adopt_layout(self) -> None:
        packed = self._layout.packed if self._layout is not None else frozenset[int]()
        self._layout = None  # its views of parameters go first: they would count as somebody who holds them
        self._layout = make_layout(self.share, self.parameters_as_bucket_view, packed)
        self._consolidated = None
