"""A ZeRO step over all ranks: each rank updates its partition, then all partitions are broadcast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from shardwise import torch_private
from shardwise.collectives.owned import launch_broadcasts, ranks_that_are, receive_tensor, send_tensor
from shardwise.consistency.agreement import GroupAgreement
from shardwise.errors import DesyncError
from shardwise.layout import OwnedSlice
from shardwise.optim.slices import as_they_are
from shardwise.zero.compare import are_same, check_same_params
from shardwise.zero.partition import (
    LocalOptimizer,
    RankPartition,
    addresses_of,
    describe_params,
    elements_of,
    flat_view,
    gradient_for,
    make_layout,
    moving_of,
    trainable_of,
    with_gradients,
)
from shardwise.zero.state_dict import Consolidated, consolidate

# ---- Uneven inputs: how a ZeroRedundancyOptimizer takes part in torch's ``Join`` after a rank's inputs are exhausted.


class ZeroJoinHook(JoinHook):
    """Step with the active ranks.

    ``step`` takes part in their current step, with their gradients; ``end`` ends the exchange of gradients.
    """

    def __init__(self, step: Callable[[], object], end: Callable[[], object]) -> None:
        self._step, self._end = step, end

    def main_hook(self) -> None:
        """Update this rank's partition and send it."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the exchange of gradients: the inputs of all ranks are exhausted."""
        self._end()


def send_joined_gradients(
    rank_partition: RankPartition, agreement: GroupAgreement, is_active: bool, what: str
) -> dict[OwnedSlice, torch.Tensor] | None:
    """Send the gradients of their slices to ranks that have joined, from the first active rank.  Collective.

    Returns: the received gradients; None on active ranks, which have their own.  DDP leaves a joined rank with the
    gradients of its last input; steps on those, as torch's class makes them, would make its partition drift.
    """
    active = ranks_that_are(is_active, agreement, rank_partition.params[0].device, what)
    if not active:
        return None
    received: dict[OwnedSlice, torch.Tensor] | None = None
    for rank in range(agreement.size):
        if rank in active:
            continue
        if agreement.rank == active[0]:
            _send(rank_partition, rank, agreement, what)
        elif agreement.rank == rank:
            received = _receive(rank_partition, active[0], agreement, what)
    return received


def _send(rank_partition: RankPartition, to: int, agreement: GroupAgreement, what: str) -> None:
    theirs = [owned_slice for owned_slice in rank_partition.slices if owned_slice.owner == to]
    if not theirs:
        return
    gradients = [rank_partition.params[owned_slice.tensor].grad for owned_slice in theirs]
    is_present = [gradient is not None for gradient in gradients]
    send_tensor(
        torch.tensor(is_present, dtype=torch.uint8, device=rank_partition.params[0].device), to, agreement, what
    )
    for owned_slice, gradient in zip(theirs, gradients, strict=True):
        if gradient is not None:
            param = rank_partition.params[owned_slice.tensor]
            elements = elements_of(owned_slice, param, gradient).to(param.grad_dtype or param.dtype)
            send_tensor(elements.contiguous(), to, agreement, what)


def _receive(
    rank_partition: RankPartition, source: int, agreement: GroupAgreement, what: str
) -> dict[OwnedSlice, torch.Tensor]:
    received: dict[OwnedSlice, torch.Tensor] = {}
    if not rank_partition.local_slices:
        return received
    mask = torch.zeros(len(rank_partition.local_slices), dtype=torch.uint8, device=rank_partition.params[0].device)
    receive_tensor(mask, source, agreement, what)
    for local, is_present in zip(rank_partition.local_slices, mask.tolist(), strict=True):
        if is_present:
            # Fused optimizers pair parameter and gradient elements in memory order, so equal shapes are not enough.
            gradient = torch.empty_like(local.tensor, dtype=local.param.grad_dtype, requires_grad=False)
            receive_tensor(flat_view(gradient), source, agreement, what)
            received[local.owned_slice] = gradient
    return received


logger = logging.getLogger(__name__)


class ZeroBackend:
    """Make the steps of a rank's partition.  All methods are collective, except the properties and ``end_join``.

    Attributes:
        local: the partition and its optimizer; replaced when a group is added.
        agreement: where ranks agree and report failures.
        layout: the broadcasts, and where parameters were when they were planned.
        num_steps: steps so far.
        has_state: a step or a load has created state, on this rank or on others.
        consolidated: the state of the last consolidation; None once it is outdated.
        is_joining: inside ``Join``, where ranks without inputs take part in steps.
    """

    def __init__(self, local: LocalOptimizer, agreement: GroupAgreement) -> None:
        self.local, self.agreement = local, agreement
        self.num_steps = 0
        self.has_state = self.is_joining = False
        # Whether parameters were compared with other ranks', and gradients like those of the last step were equal on all.
        self._has_compared = self._knows_gradients = False
        self.consolidated: Consolidated | None = None
        self.layout = make_layout(self.rank_partition)

    @property
    def rank_partition(self) -> RankPartition:
        """This rank's partition."""
        return self.local.rank_partition

    # ---- what changes between steps ----

    def lay_out(self) -> None:
        """Plan the broadcasts for the current parameters."""
        self.layout = make_layout(self.rank_partition)
        self.consolidated = None

    def adopt_last_group(self) -> None:
        """Adopt the param group that users have added."""
        self.local = self.local.with_last_group()
        self._knows_gradients = False
        self.lay_out()

    def refresh(self) -> None:
        """Adapt to changes by users: replaced memory, frozen or unfrozen parameters.

        Raises: StateError if the parameters of param groups have changed.
        """
        layout, params = self.layout, self.rank_partition.params
        moving = moving_of(params)
        if moving != layout.moving or trainable_of(params) != layout.trainable:
            facts = [f"parameter {i} {'changes' if moves else 'stays'} in a step" for i, moves in enumerate(moving)]
            self.agreement.agree("a step after requires_grad changed", [*describe_params(self.local.groups), *facts])
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self._knows_gradients = False
            self.lay_out()
        elif addresses_of(params) != layout.addresses:
            self.lay_out()
        if not self._has_compared and self.agreement.size > 1 and not torch_private.are_threads():
            check_same_params(self.rank_partition, moving, self.agreement, f"step() number {self.num_steps + 1}")
            self._has_compared = True
        self.local.members.check(self.local.groups)

    def begin_join(self) -> None:
        """Start to send gradients to ranks whose inputs are exhausted."""
        self.is_joining = self.agreement.size > 1

    def end_join(self) -> None:
        """Stop that: all ranks have inputs again."""
        self.is_joining = False

    def check_gradients(self, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> None:
        """Check, unless known, that ranks have the same gradients; options as for :func:`are_same`.

        Raises: DesyncError on every rank if they differ between ranks.
        """
        if self.agreement.size > 1 and not self._knows_gradients:
            self._knows_gradients = are_same(
                self.rank_partition, self.agreement, what, has_inputs=has_inputs, only_warn=only_warn
            )

    # ---- the step ----

    def step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any], is_active: bool = True) -> Any:
        """Make one step; ``is_active`` is False on a rank whose inputs are exhausted (in ``Join``).

        Raises: DesyncError if another rank failed or did not take part, with its rank.
        """
        what = f"step() number {self.num_steps + 1}"
        self.agreement.track.note("step", what)
        received = (
            send_joined_gradients(self.rank_partition, self.agreement, is_active, what) if self.is_joining else None
        )
        self.refresh()
        error: Exception | None = None
        loss: Any = None
        try:
            if closure is None:
                self.check_gradients(what, has_inputs=is_active)
            loss = self._update(closure, kwargs, received)
        except DesyncError:  # all ranks raise it
            raise
        except Exception as found:
            error = found
        try:
            if closure is not None:
                self.agreement.agree(f"the closure of {what}", error=error)
            elif error is not None:
                raised = f"rank {self.agreement.name} raised {type(error).__name__} in {what}: {error}"
                self.agreement.report_failure(raised, may_be_caught=True)
                raise error
        finally:
            del error
        # Broadcasts do not bump version counters; bump them so that a stale backward raises on every rank.
        torch.autograd.graph.increment_version(list(self.rank_partition.params))
        for pending in launch_broadcasts(self.layout.broadcasts, self.agreement, what):
            pending.wait()
        self.mark_stepped()
        return loss

    def mark_stepped(self) -> None:
        """Count a step, after which consolidated state is outdated."""
        self.num_steps += 1
        self.mark_loaded()

    def mark_loaded(self) -> None:
        """Record that the state has changed."""
        self.has_state = True
        self.consolidated = None

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the step count and what is known of the state."""
        return as_they_are([self], "num_steps", "has_state", "consolidated")

    def renew(self) -> None:
        """Forget what is known of other ranks, after all have restored the state before a step."""
        self.agreement.renew()
        self._knows_gradients = False

    def _update(
        self,
        closure: Callable[[], float] | None,
        kwargs: Mapping[str, Any],
        received: Mapping[OwnedSlice, torch.Tensor] | None,
    ) -> Any:
        if closure is None:
            with attached(self.rank_partition, received):
                return self.local.step(None, kwargs)
        with ExitStack() as attachment:

            def closure_then_attach() -> float:
                attachment.close()
                result = closure()
                self.check_gradients(f"the closure of step {self.num_steps + 1}", only_warn=True)
                attachment.enter_context(attached(self.rank_partition, received))
                return result

            return self.local.step(closure_then_attach, kwargs)

    def consolidate(self, to: int) -> None:
        """Stream the full state to group rank ``to``, unless it is there already."""
        self.agreement.track.note("consolidation", f"to rank {to}")
        steps = f"{self.num_steps} step(s) so far"
        self.agreement.agree(f"consolidate_state_dict(to={to})", [steps, *describe_params(self.local.groups)])
        if self.consolidated is None or self.consolidated.to != to:
            self.local.push_options()
            self.consolidated = consolidate(self.local, self.agreement, to)


def attached(
    rank_partition: RankPartition, received: Mapping[OwnedSlice, torch.Tensor] | None
) -> AbstractContextManager[None]:
    """Return a context in which the local optimizer's tensors have their gradients; those that are parameters have them.

    ``received``: gradients from another rank, instead of this rank's.
    """
    slices = rank_partition.local_slices
    if received is not None:
        return with_gradients((local, received.get(local.owned_slice)) for local in slices)
    views = (local for local in slices if not local.is_param)
    return with_gradients(
        (local, None if local.param.grad is None else gradient_for(local, local.param.grad)) for local in views
    )
