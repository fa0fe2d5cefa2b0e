"""A step over all ranks: each updates its share, then every rank's share goes to all."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import torch_private
from shardwise.comm.board import Board
from shardwise.comm.buffers import BufferPool
from shardwise.comm.matrices import sum_of
from shardwise.comm.owned import PendingBroadcast, launch_broadcasts
from shardwise.errors import DesyncError, StateError
from shardwise.layout.owners import OwnedSlice
from shardwise.zero.arrivals import Arrivals
from shardwise.zero.averaging import Averaging, AveragingContext, EarlySends
from shardwise.zero.checks import describe_params
from shardwise.zero.consolidate import Consolidated, consolidate
from shardwise.zero.gradients import KnownGradients, attached
from shardwise.zero.join import share_gradients
from shardwise.zero.local import LocalOptimizer
from shardwise.zero.same_gradients import check_same_params
from shardwise.zero.share import Layout, Share, addresses_of, make_layout, moving_of, trainable_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """What travels while other things are computed: gradients in backward, parameters in the next forward."""

    reduces: bool = False
    gathers: bool = False


class ShareStepper:
    """Makes the steps of a rank's share; every method but the properties and ``end_join`` is made by all ranks together.

    It is also the owner of the gradients that :meth:`reduce` has averaged.

    Attributes:
        local: the share and its optimizer; another value when a group is added.
        board: where ranks agree, and say why they failed.
        arrivals: parameters whose new values are on their way.
        sends: what sends gradients in backward; None: nothing does.
        known: what the ranks know of each other's gradients.
        num_steps: made so far.
        has_state: a step or a load has made state, on this rank or on others.
        consolidated: the state that the last consolidation brought together; None once it is out of date.
        is_joining: in ``Join``, where ranks that have run out of inputs step along.
    """

    def __init__(self, local: LocalOptimizer, board: Board, packs: bool, overlap: Overlapped = Overlapped()) -> None:
        self.local, self.board = local, board
        self.arrivals = Arrivals()
        self.sends = (
            EarlySends(weakref.WeakMethod(self._open_averaging)) if overlap.reduces and board.size > 1 else None
        )
        self._arrives_late = overlap.gathers and board.size > 1
        self._averaging: Averaging | None = None
        self.known = KnownGradients()
        self.num_steps = 0
        self.has_state = self.is_joining = False
        self._has_compared = False  # the parameters, with those of other ranks
        self.consolidated: Consolidated | None = None
        self._packs = packs
        self._layout: Layout | None = None
        self._staging: dict[torch.device, BufferPool] = {}

    @property
    def share(self) -> Share:
        """This rank's share."""
        return self.local.share

    @property
    def layout(self) -> Layout:
        """Where parameters lay at the last look, and the broadcasts."""
        assert self._layout is not None
        return self._layout

    def staging(self, device: torch.device) -> BufferPool:
        """Return where the buffers of messages come from; on CPU they are kept for the next step."""
        return self._staging.setdefault(device, BufferPool(device))

    def sum_over_ranks(self, value: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the sum (or maximum) of ``value`` over the ranks, the same bits on each.  Collective."""
        return sum_of(value, self.board.group, is_max)

    def report_failure(self, text: str) -> None:
        """Tell the ranks whose inputs ran out in Join, which wait for this one; without Join all meet the same error."""
        if self.is_joining:
            self.board.report_failure(f"rank {self.board.name}: {text}")

    # ---- what changes between steps ----

    def lay_out(self) -> None:
        """Plan the broadcasts for the parameters as they are now."""
        packed = self._layout.packed if self._layout is not None else frozenset[int]()
        self._layout = None  # its views of parameters go first: they would count as somebody who holds them
        self._layout = make_layout(self.share, self._packs, packed)
        if self.sends is not None:
            self.sends.listen(self.share)
        self.consolidated = None

    def add_last_group(self) -> None:
        """Take up the param group that users have added."""
        self.arrivals.wait()
        self.drop_averaging()
        self.local = self.local.with_last_group()
        self.known.is_compared = False
        self.lay_out()

    def refresh(self) -> None:
        """Follow changes that users made: replaced memory, frozen or thawed parameters.

        Raises: StateError if the parameters of param groups have changed.
        """
        self.arrivals.wait()
        layout, params = self.layout, self.share.params
        moving = moving_of(params)
        if moving != layout.moving or trainable_of(params) != layout.trainable:
            facts = [f"parameter {i} {'changes' if moves else 'stays'} in a step" for i, moves in enumerate(moving)]
            self.board.agree("a step after requires_grad changed", [*describe_params(self.local.groups), *facts])
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self.known.is_compared = False
            del layout
            self.lay_out()
        elif addresses_of(params) != layout.addresses:
            del layout
            self.lay_out()
        if not self._has_compared and self.board.size > 1 and not torch_private.are_threads():
            check_same_params(self.share, moving, self.board, f"step() number {self.num_steps + 1}")
            self._has_compared = True
        self.local.members.check(self.local.groups)

    def begin_join(self) -> None:
        """From here on hand gradients to the ranks that have run out of inputs."""
        self.is_joining = self.board.size > 1
        if self.sends is not None:
            self.sends.expect(())

    def end_join(self) -> None:
        """All ranks have inputs again."""
        self.is_joining = False

    # ---- the step ----

    def step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any], is_active: bool = True) -> Any:
        """Make one step; ``is_active`` is False on a rank that has run out of inputs (in ``Join``).

        Raises: DesyncError where another rank failed or did not take part, naming it.
        """
        what = f"step() number {self.num_steps + 1}"
        self.board.track.note("step", what)
        received = share_gradients(self.share, self.board, is_active, what) if self.is_joining else None
        self.refresh()
        error: Exception | None = None
        loss: Any = None
        try:
            if closure is None:
                self.known.check(self.share, self.board, what, has_inputs=is_active)
            loss = self._update(closure, kwargs, received)
        except DesyncError:  # known to all ranks
            raise
        except Exception as found:
            error = found
        try:
            if closure is not None:
                self.board.agree(f"the closure of {what}", error=error)
            elif error is not None:
                raised = f"rank {self.board.name} raised {type(error).__name__} in {what}: {error}"
                self.board.report_failure(raised, may_be_caught=True)
                raise error
        finally:
            del error
        self._send_params(what)
        self.mark_stepped()
        return loss

    def _send_params(self, what: str) -> None:
        share, layout = self.share, self.layout
        # What an owner sends is written without a count: a backward through a graph of before would go on, on others alone.
        torch.autograd.graph.increment_version(list(share.params))
        if not self._arrives_late:
            for pending in launch_broadcasts(layout.broadcasts, self.board, what):
                pending.wait()
            return
        for run in share.runs:
            self.expect(run, launch_broadcasts(layout.broadcasts_of(run), self.board, what))

    def expect(self, indices: Sequence[int], pending: Sequence[PendingBroadcast]) -> None:
        """Wait for ``pending``, which brings new values of these parameters: now, or when somebody reads them."""
        if self._arrives_late:
            self.arrivals.expect([self.share.params[index] for index in indices], pending)
            return
        for each in pending:
            each.wait()

    def mark_stepped(self) -> None:
        """Count a step: consolidated state is out of date from here."""
        self.num_steps += 1
        self.mark_loaded()

    def mark_loaded(self) -> None:
        """Say that there is other state than before."""
        self.has_state = True
        self.consolidated = None

    def mark(self) -> Callable[[], None]:
        """Return what brings the count of steps back, and what is known of the state."""
        was = self.num_steps, self.has_state
        consolidated = self.consolidated

        def put_back() -> None:
            self.num_steps, self.has_state = was
            self.consolidated = consolidated

        return put_back

    def renew(self) -> None:
        """Know nothing of the other ranks any more: after all have gone back to the state before a step."""
        self.board.renew()
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
            with attached(self.share, received):
                return self.local.step(None, kwargs)
        with ExitStack() as attachment:

            def closure_then_attach() -> float:
                attachment.close()
                result = closure()
                what = f"the closure of step {self.num_steps + 1}"
                self.known.check(self.share, self.board, what, only_warn=True)
                attachment.enter_context(attached(self.share, received))
                return result

            return self.local.step(closure_then_attach, kwargs)

    # ---- gradients and state ----

    def reduce(self) -> None:
        """Average the gradients, each only on its owner, and free all others.

        Raises: DesyncError on all ranks if they have gradients of other parameters; StateError in ``Join``.
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
            means = AveragingContext(self.share, self.board, self.staging, weakref.ref(self))
            self._averaging = Averaging(means, f"reduce_gradients() for step {self.num_steps + 1}")
        return self._averaging

    def drop_averaging(self) -> None:
        """Let nothing come of what backward has sent since the last averaging."""
        averaging, self._averaging = self._averaging, None
        if averaging is not None:
            averaging.receive_all()
        if self.sends is not None:
            self.sends.expect_again()

    def consolidate(self, to: int) -> None:
        """Bring the whole state to group rank ``to``, unless it is there."""
        self.board.track.note("consolidation", f"to rank {to}")
        steps = f"{self.num_steps} step(s) so far"
        self.board.agree(f"consolidate_state_dict(to={to})", [steps, *describe_params(self.local.groups)])
        if self.consolidated is None or self.consolidated.to != to:
            self.local.push_options()
            self.consolidated = consolidate(self.local, self.board, to)
