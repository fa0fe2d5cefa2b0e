"""ZeroRedundancyOptimizer: every rank keeps and updates the optimizer state of its share of the parameters (ZeRO-1).

Source: ZeRO, arXiv 1910.02054; behaves as the class of this name in ``torch.distributed.optim`` where that works.
Design: docs/design/004-zero.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardwise.api.join import ZeroJoinHook, share_gradients
from shardwise.api.zero_checks import (
    Partition,
    check_dense,
    check_elementwise,
    checked_optimizer_class,
    checked_params,
    describe_params,
    flatten_groups,
)
from shardwise.api.zero_gradients import reduce_to_pieces
from shardwise.api.zero_pieces import (
    LocalPiece,
    copy_options,
    gradient_for,
    make_local,
    narrowed,
    owned_views,
    pack_params,
    partition_groups,
    view_of,
)
from shardwise.api.zero_sharded import ShardedState
from shardwise.api.zero_state import Consolidated, consolidate, load_local
from shardwise.comm.board import open_board
from shardwise.comm.buffers import BufferPool
from shardwise.comm.owners import Broadcast, launch_broadcasts, plan_broadcasts
from shardwise.comm.owners import broadcast_object as _broadcast_object
from shardwise.errors import ConfigError, StateError
from shardwise.layout.owners import Piece

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
        self._local_of: dict[Piece, LocalPiece] = {}
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
            check_dense([*self._all_params, *flatten_groups(given)], self._mixed_dtypes)
            facts = describe_params([*self.param_groups, *[item for item in given if isinstance(item, dict)]])
        except Exception as found:
            error = found
        try:
            self.board.agree("add_param_group", facts, error)
        finally:
            del error
        super().add_param_group(param_group)
        self._partition()
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
        if self.is_joining:
            share_gradients(self, is_active, what)
        self.refresh()
        error: Exception | None = None
        loss: Any = None
        try:
            loss = self._local_step(closure, kwargs)
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
        for pending in launch_broadcasts(self._broadcasts, self.board, what):
            pending.wait()
        self.mark_stepped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of all parameters, and of this rank's pieces."""
        super().zero_grad(set_to_none)
        for local in self.local_pieces:
            if not local.is_param:
                local.tensor.grad = None

    def staging(self, device: torch.device) -> BufferPool:
        """Return where the buffers of messages come from; on CPU they are kept for the next step."""
        return self._staging.setdefault(device, BufferPool(device))

    def reduce_gradients(self) -> None:
        """Average the gradients, each only on its owner, and free all others (ZeRO-2); then call :meth:`step`.

        For loops without DDP: one unit of volume instead of an all-reduce's two.  Collective: the same parameters must
        have gradients on all ranks.  Call :meth:`zero_grad` before the next backward.
        """
        reduce_to_pieces(self)

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
        indices = iter(range(len(self._all_params)))
        groups = [{**group, "params": [next(indices) for _ in group["params"]]} for group in self.param_groups]
        return {"state": {index: dict(values) for index, values in state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a whole state (ours, torch's or the plain optimizer's); this rank keeps copies of its share.

        Not collective; ``state_dict`` is not changed.  Raises: ConfigError (a ValueError) if groups do not match.
        """
        load_local(self, state_dict)
        self.adopt_options()

    def sharded(self, names: Mapping[str, torch.Tensor] | None = None, loading: bool = False) -> ShardedState:
        """Return this rank's share of the state for ``torch.distributed.checkpoint``; see :class:`ShardedState`."""
        return ShardedState(self, names, loading)

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
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    @property
    def all_params(self) -> Sequence[torch.Tensor]:
        """All parameters in the order of the groups: their index is the key in state dicts."""
        return self._all_params

    def refresh(self) -> None:
        """Follow changes made from outside: options, replaced memory, frozen or thawed parameters."""
        trainable = [param.requires_grad for param in self._all_params]
        if trainable != self._trainable:
            self.board.agree("a step after requires_grad changed", describe_params(self.param_groups))
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self._adopt_layout()
        elif [param.data_ptr() for param in self._all_params] != self._addresses:
            self._adopt_layout()
        copy_options(self.param_groups, self.optim.param_groups)

    def plan_broadcasts_of(self, indices: Sequence[int]) -> tuple[Broadcast, ...]:
        """Return the broadcasts of these parameters; planned once per layout."""
        key = tuple(indices)
        if key not in self._broadcasts_of:
            self._broadcasts_of[key] = plan_broadcasts(owned_views(self.pieces_of(indices), self._all_params))
        return self._broadcasts_of[key]

    def pieces_of(self, indices: Sequence[int]) -> list[Piece]:
        """Return all ranks' pieces of these parameters, in the order of :attr:`pieces`."""
        return [piece for index in sorted(indices) for piece in self.pieces_by_param[index]]

    def local_pieces_of(self, indices: Sequence[int]) -> list[LocalPiece]:
        """Return this rank's pieces of these parameters, in the order of :attr:`pieces`."""
        return [self._local_of[piece] for piece in self.pieces_of(indices) if piece.owner == self.rank]

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
        self._consolidated = None

    def mark_stepped(self) -> None:
        """Count a step: consolidated state is stale from here."""
        self.num_steps += 1
        self._consolidated = None

    def _local_step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> Any:
        if closure is None:
            attached = self._attach_gradients()
            loss = self.optim.step(**kwargs)
        else:
            attached = []

            def closure_then_attach() -> float:
                result = closure()
                attached.extend(self._attach_gradients())
                return result

            wrapped = closure_then_attach if callable(closure) and self.partition == "even" else closure
            loss = self.optim.step(closure=wrapped, **kwargs)
        for local in attached:
            local.tensor.grad = None
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _attach_gradients(self) -> list[LocalPiece]:
        attached = [local for local in self.local_pieces if not local.is_param and local.param.grad is not None]
        for local in attached:
            assert local.param.grad is not None
            local.tensor.grad = gradient_for(local, local.param.grad)
        return attached

    def _build(self, optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
        self._partition()
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

    def _partition(self) -> None:
        self._all_params = flatten_groups(self.param_groups)
        self._pieces_of_groups = partition_groups(self.param_groups, self.partition, self.world_size)
        self.pieces = [piece for pieces in self._pieces_of_groups for piece in pieces]
        self.pieces_by_param: list[list[Piece]] = [[] for _ in self._all_params]
        for piece in self.pieces:
            self.pieces_by_param[piece.tensor].append(piece)
        self.local_pieces = [
            self._local_of.get(piece) or make_local(piece, self._all_params[piece.tensor], self.partition)
            for piece in self.pieces
            if piece.owner == self.rank
        ]
        self._local_of = {local.piece: local for local in self.local_pieces}

    def _local_group(self, number: int) -> dict[str, Any]:
        in_group = set(self._pieces_of_groups[number])
        tensors = [local.tensor for local in self.local_pieces if local.piece in in_group]
        return {**self.param_groups[number], "params": tensors}

    def _adopt_layout(self) -> None:
        """Plan the broadcasts, and put memory and views in order, for the parameters as they are now."""
        if self.parameters_as_bucket_view:
            pack_params(self._pieces_of_groups, self._all_params, self.partition)
        for local in self.local_pieces:
            if not local.is_param:
                local.tensor.data = view_of(local.piece, local.param)
        self._trainable = [param.requires_grad for param in self._all_params]
        self._addresses = [param.data_ptr() for param in self._all_params]
        self._broadcasts = plan_broadcasts(owned_views(self.pieces, self._all_params)) if self.world_size > 1 else ()
        self._broadcasts_of: dict[tuple[int, ...], tuple[Broadcast, ...]] = {}
        self._consolidated = None
