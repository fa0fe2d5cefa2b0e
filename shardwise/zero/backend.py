"""A ZeRO step over all ranks: each rank updates its partition, then all partitions are broadcast."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from shardwise import torch_private
from shardwise.collectives.buffer_pool import BufferPool
from shardwise.collectives.owned import (
    BroadcastHandle,
    launch_broadcasts,
    ranks_that_are,
    receive_tensor,
    send_tensor,
    sum_of,
)
from shardwise.consistency.agreement import GroupAgreement
from shardwise.errors import DesyncError, StateError
from shardwise.layout import OwnedSlice
from shardwise.optim.slices import as_they_are
from shardwise.zero.gradients import (
    Averaging,
    AveragingContext,
    EarlySends,
    KnownGradients,
    attached,
    check_same_params,
)
from shardwise.zero.partition import (
    Layout,
    LocalOptimizer,
    RankPartition,
    addresses_of,
    describe_params,
    elements_of,
    flat_view,
    make_layout,
    moving_of,
    trainable_of,
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


# ---- Parameters whose new values are in flight: a reader waits for the values first.
# Until they arrive, a parameter has a temporary class whose ``__torch_function__`` waits, restores the original class,
# and proceeds. So every access through torch's functions gets the new values, in modules, ``state_dict()`` and user
# code. Views and arrays on the same memory that were made before do not wait.


class Arrivals:
    """Values in flight to parameters of one optimizer, in runs."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # id of a parameter -> its run; runs keep parameters alive, so ids stay valid
        self._classes: dict[type, type] = {}

    @property
    def are_all_here(self) -> bool:
        """True if no values are in flight."""
        return not self._runs

    def expect(self, params: Sequence[torch.Tensor], pending: Sequence[BroadcastHandle]) -> None:
        """Make readers of any of ``params`` wait for ``pending`` first."""
        if not pending:
            return
        run = _Run(params, pending)
        for param in params:
            self._runs[id(param)] = run
        try:
            for param in params:
                param.__class__ = self._class_for(type(param))
        except TypeError:  # the class cannot be replaced for a while
            self._receive(run)

    def wait(self) -> None:
        """Wait for all values in flight.  Raises: DesyncError if the owner or another rank did not take part."""
        while self._runs:
            self._receive(next(iter(self._runs.values())))

    def wait_for(self, values: object) -> None:
        """Wait for the parameters among the leaves of ``values``; for all parameters if there are none."""
        runs = [run for leaf in torch_private.leaves_of(values) if (run := self._runs.get(id(leaf))) is not None]
        for run in runs:
            if not run.has_arrived:
                self._receive(run)
        if not runs:
            self.wait()

    def _receive(self, run: _Run) -> None:
        for pending in run.pending:
            pending.wait()
        run.has_arrived = True
        for param, kind in zip(run.params, run.kinds, strict=True):
            self._runs.pop(id(param), None)
            param.__class__ = kind

    def _class_for(self, kind: type) -> type:
        if kind not in self._classes:
            self._classes[kind] = _awaited_class(kind, self)
        return self._classes[kind]


class _Run:
    """Broadcasts of the new values of ``params``; ``kinds``: the original classes of these."""

    __slots__ = ("has_arrived", "kinds", "params", "pending")

    def __init__(self, params: Sequence[torch.Tensor], pending: Sequence[BroadcastHandle]) -> None:
        self.params, self.pending, self.kinds = params, pending, [type(param) for param in params]
        self.has_arrived = False


def _awaited_class(kind: Any, arrivals: Arrivals) -> type:
    class Awaited(kind):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if func in _READ_NO_VALUES:
                with torch_private.without_torch_function():
                    return func(*args, **(kwargs or {}))
            arrivals.wait_for((args, kwargs))
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            arrivals.wait_for(self)
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            arrivals.wait_for(self)
            return self.__reduce_ex__(protocol)

    Awaited.__name__, Awaited.__qualname__, Awaited.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Awaited


def _accessors(*names: str) -> set[Any]:
    found = {getattr(torch.Tensor, name) for name in names}
    return {each for accessor in found for each in (accessor.__get__, accessor.__set__)}


# Loops access these between a step and the next forward, to drop gradients or check for them; they read no values.
_READ_NO_VALUES = _accessors("grad", "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """What overlaps computation: the reduction of gradients in backward, the broadcast of parameters in the next forward."""

    reduces: bool = False
    gathers: bool = False


class ZeroBackend:
    """Make the steps of a rank's partition.  All methods are collective, except the properties and ``end_join``.

    It also owns the gradients that :meth:`reduce` has averaged.

    Attributes:
        local: the partition and its optimizer; replaced when a group is added.
        agreement: where ranks agree and report failures.
        arrivals: parameters whose new values are in flight.
        sends: sends gradients during backward; None if they are sent after it.
        known: what ranks have agreed on about each other's gradients.
        num_steps: steps so far.
        has_state: a step or a load has created state, on this rank or on others.
        consolidated: the state of the last consolidation; None once it is outdated.
        is_joining: inside ``Join``, where ranks without inputs take part in steps.
    """

    def __init__(
        self, local: LocalOptimizer, agreement: GroupAgreement, packs: bool, overlap: Overlapped = Overlapped()
    ) -> None:
        self.local, self.agreement = local, agreement
        self.arrivals = Arrivals()
        self.sends = (
            EarlySends(weakref.WeakMethod(self._open_averaging)) if overlap.reduces and agreement.size > 1 else None
        )
        self._arrives_late = overlap.gathers and agreement.size > 1
        self._averaging: Averaging | None = None
        self.known = KnownGradients()
        self.num_steps = 0
        self.has_state = self.is_joining = False
        self._has_compared = False  # whether parameters were compared with other ranks'
        self.consolidated: Consolidated | None = None
        self._packs = packs
        self._layout: Layout | None = None
        self._staging: dict[torch.device, BufferPool] = {}

    @property
    def rank_partition(self) -> RankPartition:
        """This rank's partition."""
        return self.local.rank_partition

    @property
    def layout(self) -> Layout:
        """The broadcasts, and where parameters were when they were planned."""
        assert self._layout is not None
        return self._layout

    def staging(self, device: torch.device) -> BufferPool:
        """Return the pool for message buffers on ``device``; on CPU it keeps them for the next step."""
        return self._staging.setdefault(device, BufferPool(device))

    def sum_over_ranks(self, value: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the sum (or maximum) of ``value`` over the ranks, bitwise equal on all.  Collective."""
        return sum_of(value, self.agreement.group, is_max)

    def report_failure(self, text: str) -> None:
        """In Join, report a failure to ranks without inputs, which wait for this one; outside, all ranks get the same error."""
        if self.is_joining:
            self.agreement.report_failure(f"rank {self.agreement.name}: {text}")

    # ---- what changes between steps ----

    def lay_out(self) -> None:
        """Plan the broadcasts for the current parameters."""
        packed = self._layout.packed if self._layout is not None else frozenset[int]()
        self._layout = None  # drop its views of parameters first: make_layout counts references
        self._layout = make_layout(self.rank_partition, self._packs, packed)
        if self.sends is not None:
            self.sends.listen(self.rank_partition)
        self.consolidated = None

    def adopt_last_group(self) -> None:
        """Adopt the param group that users have added."""
        self.arrivals.wait()
        self.drop_averaging()
        self.local = self.local.with_last_group()
        self.known.is_compared = False
        self.lay_out()

    def refresh(self) -> None:
        """Adapt to changes by users: replaced memory, frozen or unfrozen parameters.

        Raises: StateError if the parameters of param groups have changed.
        """
        self.arrivals.wait()
        layout, params = self.layout, self.rank_partition.params
        moving = moving_of(params)
        if moving != layout.moving or trainable_of(params) != layout.trainable:
            facts = [f"parameter {i} {'changes' if moves else 'stays'} in a step" for i, moves in enumerate(moving)]
            self.agreement.agree("a step after requires_grad changed", [*describe_params(self.local.groups), *facts])
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self.known.is_compared = False
            del layout
            self.lay_out()
        elif addresses_of(params) != layout.addresses:
            del layout
            self.lay_out()
        if not self._has_compared and self.agreement.size > 1 and not torch_private.are_threads():
            check_same_params(self.rank_partition, moving, self.agreement, f"step() number {self.num_steps + 1}")
            self._has_compared = True
        self.local.members.check(self.local.groups)

    def begin_join(self) -> None:
        """Start to send gradients to ranks whose inputs are exhausted."""
        self.is_joining = self.agreement.size > 1
        if self.sends is not None:
            self.sends.expect(())

    def end_join(self) -> None:
        """Stop that: all ranks have inputs again."""
        self.is_joining = False

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
                self.known.check(self.rank_partition, self.agreement, what, has_inputs=is_active)
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
        self._send_params(what)
        self.mark_stepped()
        return loss

    def _send_params(self, what: str) -> None:
        rank_partition, layout = self.rank_partition, self.layout
        # Broadcasts do not bump version counters; bump them so that a stale backward raises on every rank.
        torch.autograd.graph.increment_version(list(rank_partition.params))
        if not self._arrives_late:
            for pending in launch_broadcasts(layout.broadcasts, self.agreement, what):
                pending.wait()
            return
        for run in rank_partition.runs:
            self.expect(run, launch_broadcasts(layout.broadcasts_of(run), self.agreement, what))

    def expect(self, indices: Sequence[int], pending: Sequence[BroadcastHandle]) -> None:
        """Wait for ``pending``, which brings new values of these parameters: now, or when they are read."""
        if self._arrives_late:
            self.arrivals.expect([self.rank_partition.params[index] for index in indices], pending)
            return
        for each in pending:
            each.wait()

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
        self.known = KnownGradients()
        self._averaging = None
        self._staging.clear()

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
                what = f"the closure of step {self.num_steps + 1}"
                self.known.check(self.rank_partition, self.agreement, what, only_warn=True)
                attachment.enter_context(attached(self.rank_partition, received))
                return result

            return self.local.step(closure_then_attach, kwargs)

    # ---- gradients and state ----

    def reduce(self) -> None:
        """Average the gradients, each on its owner only, and free all others.

        Raises: DesyncError on all ranks if they have gradients of different parameters; StateError in ``Join``.
        """
        what = f"reduce_gradients() for step {self.num_steps + 1}"
        if self.is_joining:
            raise StateError(
                f"{what}: ranks that have run out of inputs in Join do not take part; wrap the model in "
                "DistributedDataParallel, or do without Join"
            )
        averaging, self._averaging = self._open_averaging(), None
        presence = averaging.presence()
        try:
            self.known.agree_on_presence(averaging, presence)
            averaging.end()
        finally:
            if self.sends is not None:
                self.sends.expect(())
        if self.sends is not None:
            self.sends.expect(presence)
        self.known.is_compared = False

    def _open_averaging(self) -> Averaging:
        if self._averaging is None:
            context = AveragingContext(self.rank_partition, self.agreement, self.staging, weakref.ref(self))
            self._averaging = Averaging(context, f"reduce_gradients() for step {self.num_steps + 1}")
        return self._averaging

    def drop_averaging(self) -> None:
        """Discard what backward has sent since the last averaging."""
        averaging, self._averaging = self._averaging, None
        if averaging is not None:
            averaging.receive_all()
        if self.sends is not None:
            self.sends.expect_again()

    def consolidate(self, to: int) -> None:
        """Stream the full state to group rank ``to``, unless it is there already."""
        self.agreement.track.note("consolidation", f"to rank {to}")
        steps = f"{self.num_steps} step(s) so far"
        self.agreement.agree(f"consolidate_state_dict(to={to})", [steps, *describe_params(self.local.groups)])
        if self.consolidated is None or self.consolidated.to != to:
            self.local.push_options()
            self.consolidated = consolidate(self.local, self.agreement, to)
