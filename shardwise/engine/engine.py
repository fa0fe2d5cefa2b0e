"""One engine per root module: what happens at each edge of forward and backward."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool
from shardwise.comm.lanes import Lane
from shardwise.comm.links.link import SpanKind, Spans, Transport
from shardwise.engine.group_links import GroupLink
from shardwise.engine.journal import Journal
from shardwise.engine.notes import note
from shardwise.errors import StateError, TransportError
from shardwise.events import Op
from shardwise.plan.visits import Edge
from shardwise.units.gradients import (
    Gradients,
    Reduction,
    Terms,
    add_gradients,
    launch_reductions,
    run_gradient_hooks,
)
from shardwise.units.param import UnitParam
from shardwise.units.unit import Unit, is_in_backward


@dataclass(slots=True)
class Lanes:
    """The streams of an engine; engines of pipeline stages may share one set."""

    gather: Lane
    reduce: Lane

    @classmethod
    def on(cls, device: torch.device) -> Lanes:
        """Return new lanes for ``device``."""
        return cls(Lane(device), Lane(device))


@dataclass(slots=True)
class _Frame:
    """A forward that has begun: of which unit, under which handled exception, in which Python frame."""

    unit: Unit
    exception: BaseException | None
    frame_id: int


@dataclass(slots=True)
class _Launch:
    """Reductions of a unit that have not been committed, and what they consumed.

    Attributes:
        held, partial: gradients of earlier backwards that they took from the unit.
        absorbed: deferred launches whose partial sums they took, and of which parameters.
        taken: parameters whose partial sums a later launch has taken from this one.
    """

    unit: Unit
    reductions: list[Reduction]
    held: Gradients
    partial: Gradients
    absorbed: list[tuple[_Launch, set[UnitParam]]]
    taken: set[UnitParam]


class _BackwardEnd:
    """The callback that autograd runs when a backward ends; its death without a run means that backward raised."""

    __slots__ = ("__weakref__", "_engine")

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.finish()


live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Carries out the steps of one root module.

    Attributes:
        units: the units of the root's module tree, root first; ``units[i]`` is number i of every plan.
        lanes, pool: where collectives run and where their memory comes from.
        spans: when links between ranks may be used.  links: those links, by name of their process group.
        transport: which links this rank wants.
        journal: the order of the running step, and the plan made from an earlier one.
        is_last_backward: False defers waiting for reductions to a later backward.
        is_manual: gradients are set by :meth:`complete`, after any number of backwards, not at the end of one.
        max_reductions: reduce-scatter inputs that may live at once.
    """

    def __init__(self, device: torch.device, lanes: Lanes, pool: BufferPool) -> None:
        self.units: list[Unit] = []
        self.device = device
        self.lanes = lanes
        self.pool = pool
        self.journal = Journal()
        self.emit = self.journal.emit
        self.spans = Spans()
        self.links: dict[str, GroupLink] = {}
        self.transport: Transport = "auto"
        self.is_last_backward = True
        self.is_manual = False
        self.max_reductions = 1
        self.post_optim_event: torch.Event | None = None
        self._borrowers: dict[Unit, list[Unit]] = {}  # of units that lend parameters
        self._stack: list[_Frame] = []
        self._backward: weakref.ref[_BackwardEnd] | None = None
        self._backward_task = -1
        self._in_flight: list[Reduction] = []
        self._launched: list[_Launch] = []
        self._deferred: list[_Launch] = []
        self._fresh_held: list[tuple[Unit, Gradients]] = []
        self._late: list[Unit] = []
        self._is_graphless = False
        self._is_open = self._was_open = False  # a backward has begun, by hand, whose gradients are not complete
        self._completion: object | None = None  # launched, not waited for
        live_engines.add(self)

    def adopt(self, units: Iterable[Unit]) -> None:
        """Carry out the steps of ``units`` from here on."""
        self.units = list(units)
        self.journal.adopt(self.units)
        self._borrowers = {
            lender: [u for u in self.units if lender in u.borrows] for u in self.units for lender in u.borrows
        }
        for unit in self.units:
            unit.host_ref = weakref.ref(self)

    # ---- what units ask for ----

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Return ``error`` with the position of every rank, as far as they can be known."""
        return self.journal.explain(error, where)

    def before_gather(self) -> None:
        """Order the next all-gather after what has been done to shards."""
        self.lanes.gather.wait_current()

    # ---- forward ----

    def before_forward(self, unit: Unit) -> None:
        """Make the full parameters of ``unit`` readable and start what the plan wants ahead."""
        if torch_private.graph_task_id() != -1:  # in backward
            self.journal.visit(unit, Edge.ENTER_RECOMPUTE)
            for member in unit.family:
                member.wait(self.spans.number)
            return
        if not self._stack or self._is_stale(unit):
            self._begin_forward()
        self._stack.append(_Frame(unit, sys.exc_info()[1], _module_frame_id()))
        starts = not unit.awaited and not unit.holders
        if starts:
            unit.awaited = unit.module_ids()
            self.journal.visit(unit, Edge.ENTER_FORWARD)
        span = self.spans.number
        for member in unit.family:
            member.holders += 1
            member.wait(span)
        if starts:
            self._run_ahead(unit.forward_prefetch)

    def after_forward(self, unit: Unit, module: nn.Module) -> bool:
        """Reshard ``unit`` if its policy says so and all its modules have run.

        Returns: True if the output of this forward needs :meth:`before_backward` hooks, False if forward has raised.
        """
        if torch_private.graph_task_id() != -1:  # in backward
            if not unit.in_backward:
                self._reshard(unit, after_forward=True)
            self.journal.visit(unit, Edge.EXIT_RECOMPUTE)
            return True
        if not self._stack or self._stack[-1].unit is not unit:
            return True
        frame = self._stack.pop()
        if sys.exc_info()[1] is not frame.exception:
            self._abort_forward(unit)
            return False
        unit.awaited.discard(id(module))
        members = unit.family
        for member in members:
            member.holders -= 1
        if not unit.awaited:
            if not unit.holders:
                self.journal.visit(unit, Edge.EXIT_FORWARD)
            for member in members:
                if not member.holders:
                    self._reshard(member, after_forward=True)
        if not self._stack:
            self._end_forward(unit)
        return True

    @property
    def is_in_forward(self) -> bool:
        """True between the outermost before_forward and its after_forward."""
        return bool(self._stack)

    @property
    def is_in_step(self) -> bool:
        """True in forward, and in a backward of these units: nobody changes shards then."""
        return bool(self._stack) or (self._backward is not None and self._backward() is not None)

    def expect_nested_backwards(self) -> None:
        """Let no unit's backward end with its last gradient before one has shown which gradients are the last."""
        for unit in self.units:
            unit.counts_gradients = False

    @property
    def has_full_units(self) -> bool:
        """True when full parameters are registered."""
        return any(unit.is_full for unit in self.units)

    def reshard_stepped(self, stepped: set[int]) -> None:
        """Reshard units that have a parameter with an id in ``stepped``; not in forward or backward."""
        for unit in self.units:
            if unit.is_full and any(id(param.sharded) in stepped for param in unit.params):
                unit.reshard()

    def _is_stale(self, unit: Unit) -> bool:
        # An interrupt (BaseException) skips torch's always-called hooks and leaves frames behind: they are not on the
        # Python stack any more when the same root starts again.
        if unit is not self._stack[0].unit:
            return False
        frame: FrameType | None = inspect.currentframe()
        wanted = self._stack[0].frame_id
        while frame is not None:
            if id(frame) == wanted:
                return False
            frame = frame.f_back
        self.reset()
        return True

    def _begin_forward(self) -> None:
        self._check_completed("a forward")
        if self._backward is not None and self._backward() is None:
            self._abort_backward()
        note("root_pre_forward")
        self.journal.begin()
        if self._is_graphless:
            # Nothing needs what an evaluation has left unsharded, and what has been written to shards since may not show.
            for unit in self.units:
                if unit.uses_default_reshard:
                    unit.reshard()
        self._enter_span("forward")
        event, self.post_optim_event = self.post_optim_event, None
        for lane in (self.lanes.gather, self.lanes.reduce):
            if event is None:
                lane.wait_current()
            else:
                lane.wait_event(event)

    def _enter_span(self, kind: SpanKind) -> None:
        for unit in self.units:
            if unit.is_full and self.spans.number is None:
                unit.take_writes()
            for group in unit.groups:
                group.ensure_packed()
        self.spans.begin(kind)

    def _end_forward(self, outermost: Unit) -> None:
        for unit in self.units:
            if unit.is_gathering:  # ahead, but forward went another way
                unit.discard()
            if unit.awaited:  # some of its modules did not run: a later call of them stands alone
                unit.awaited = set()
                if unit is not outermost:
                    self._reshard(unit, after_forward=True)
            if unit.is_subsharded and not torch.is_grad_enabled():  # no backward will need it
                unit.reshard()
        self._is_graphless = not torch.is_grad_enabled()
        self._leave_span()
        if self._is_graphless and not self.journal.has_planned_forward():
            self.journal.replan()

    def _leave_span(self) -> None:
        try:
            self.spans.end()
        except RuntimeError as error:
            self.spans.abort()
            raise self.journal.explain(error, "the other ranks at the end of forward or backward") from error
        if self.spans.number is None:
            # In a span others read the shards: what modules have written to full parameters goes there only now.
            late, self._late = self._late, []
            for unit in late:
                unit.reshard()
            for unit in self.units:
                if unit.is_full:
                    unit.keep()

    def _reshard(self, unit: Unit, after_forward: bool = False) -> None:
        is_done = unit.reshard_after_forward() if after_forward else unit.reshard(in_span=True)
        if not is_done:
            self._late.append(unit)

    def _abort_forward(self, unit: Unit) -> None:
        unit.awaited = set()
        for member in unit.family:
            member.holders -= 1
            if not member.holders:
                member.reshard()
        if not self._stack:
            self.reset()

    # ---- backward ----

    def before_backward(self, unit: Unit, through: object, made_of: int) -> None:
        """Make the full parameters of ``unit`` readable for its backward.

        ``through``: the pass that backward comes to, None if its end is not watched.  ``made_of``: what
        :attr:`Unit.num_packs` was in that forward.
        """
        self._begin_backward()
        unit.check_packing(made_of)
        if through is not None:
            unit.open_passes.add(through)
        if unit.in_backward and (unit.is_full or not unit.policy.unshard_in_backward):
            return
        unit.in_backward = True
        self.journal.visit(unit, Edge.ENTER_BACKWARD)
        unit.backward_task = torch_private.graph_task_id()
        if unit.policy.unshard_in_backward:
            for member in unit.family:
                member.wait(self.spans.number)
        self._run_ahead(unit.backward_prefetch)

    def gradient_arrived(self, unit: Unit, ordinal: int) -> None:
        """Take note of one gradient; reduce the unit when its last one is there."""
        self._begin_backward()
        unit.gradient_arrived.add(ordinal)
        if not unit.in_backward and torch_private.graph_task_id() != self._backward_task:
            unit.is_nested = True  # of a weight that it lends, from a checkpoint's own backward: there may be more
        if unit.has_all_gradients and not unit.policy.reduces_unused:
            self.after_backward(unit)

    def inputs_done(self, unit: Unit, through: object) -> None:
        """End the backward of ``unit`` as far as gradients have come: autograd has left the pass ``through`` its modules.

        A unit that was called more than once may be in another pass still, have trainable parameters without any gradient
        yet, or lend parameters to a unit whose backward goes on: it ends later.
        """
        unit.open_passes.discard(through)
        if not unit.in_backward or unit.open_passes or any(each.in_backward for each in self._borrowers.get(unit, ())):
            return
        if unit.gradient_arrived or not unit.num_expected:
            self.after_backward(unit)

    def after_backward(self, unit: Unit, reduces: bool = True) -> None:
        """Give the full parameters back and reduce, or hold, the gradients that have come."""
        self._begin_backward()
        note("post_backward", unit.name)
        gradients = unit.take_gradients()
        unit.in_backward = False
        unit.open_passes.clear()
        if unit.policy.reshard_after_backward:
            self._reshard(unit)
        if not (unit.policy.sync and reduces):
            if gradients:
                self._fresh_held.append((unit, gradients))
                unit.note(Op.HOLD)
            is_as_planned = gradients and not unit.policy.sync
            self.journal.visit(unit, Edge.EXIT_BACKWARD if is_as_planned else Edge.RELEASE_BACKWARD)
            return
        if gradients or unit.held:
            self.journal.visit(unit, Edge.EXIT_BACKWARD)
            self._reduce(unit, gradients)
        else:
            self.journal.visit(unit, Edge.RELEASE_BACKWARD)

    def _reduce(self, unit: Unit, fresh: Gradients) -> None:
        while self._in_flight and (self._in_flight[0].is_due or self._num_held_inputs() >= self.max_reductions):
            self._advance(self._in_flight.pop(0))
        gradients = add_gradients(unit.held, fresh)
        # A set: in which order gradients that were held have come is each rank's own affair.
        if (params := frozenset(gradients)) not in self.journal.agreed:
            self.journal.agree_on_gradients(unit, params)
        partial = {p: unit.partial[p] for p in gradients if p in unit.partial}
        launch = _Launch(unit, [], unit.held, partial, [], set())
        unit.held = {}
        self._launched.append(launch)
        added = self._absorb(launch, gradients)
        terms = Terms(unit.policy, self.lanes.reduce, unit.all_reduce_hook)
        for group in unit.groups:
            mine = {param: gradient for param, gradient in gradients.items() if param in group.members}
            try:
                launch.reductions += launch_reductions(group, mine, terms, added, launch.held)
            except TransportError as error:
                raise self.journal.explain(error, f"gradients of unit '{unit.name}'") from error
        for param in launch.partial:
            del unit.partial[param]
        unit.note(Op.REDUCE, sum([r.num_bytes for r in launch.reductions if r.is_collective]))
        self._in_flight += launch.reductions

    def _absorb(self, launch: _Launch, gradients: Gradients) -> Gradients:
        """Return the partial sums to add to ``gradients``: the unit's, and those that deferred backwards have left."""
        added = launch.partial
        for earlier in self._deferred:
            if earlier.unit is launch.unit:
                for reduction in earlier.reductions:
                    taken = {p for p in reduction.params if p in gradients and p not in earlier.taken}
                    if reduction.is_partial and taken:
                        self._finish(earlier.unit, reduction)
                        windows = reduction.windows()
                        added = add_gradients(added, {param: windows[param] for param in taken})
                        launch.absorbed.append((earlier, taken))
                        earlier.taken |= taken
        return added

    def _num_held_inputs(self) -> int:
        return sum([reduction.holds_input for reduction in self._in_flight])

    def _advance(self, reduction: Reduction) -> None:
        try:
            reduction.advance()
        except RuntimeError as error:
            raise self.journal.explain(error, f"gradients of {reduction.label}") from error

    def _begin_backward(self) -> None:
        if self._backward is not None:
            if self._backward() is not None:
                return
            self._abort_backward()
        self._check_completed("a backward")
        self._was_open, self._is_open = self._is_open, self.is_manual
        end = _BackwardEnd(self)
        ref = weakref.ref(self)

        def on_death(dead: weakref.ref[_BackwardEnd]) -> None:
            engine = ref()
            if engine is not None and engine._backward is dead:
                engine._abort_backward()

        self._backward = weakref.ref(end, on_death)
        self._backward_task = torch_private.graph_task_id()
        for unit in self.units:
            unit.hide_gradients()
        self._enter_span("backward")
        torch_private.call_after_backward(end)

    def finish(self) -> None:
        """End a backward: reduce what came only in part, reshard what is left, set gradients, plan the next step."""
        note("root_post_backward")
        try:
            for unit in reversed(self.units):
                # Gradients held from earlier backwards must go out with this one, even if this one brought none.
                is_due = not self.is_manual and self._is_due(unit)
                if unit.gradient_arrived or unit.in_backward or is_due:
                    unit.ended_late = unit.ended_late or unit.counts_gradients
                    self.after_backward(unit, reduces=not self.is_manual)
                elif unit.is_gathering:  # ahead, but backward went another way
                    unit.discard()
                elif unit.policy.reshard_after_backward and unit.is_full and not unit.holders:
                    self._reshard(unit)
                    self.journal.visit(unit, Edge.RELEASE_BACKWARD)
            self._backward = None
            if self.is_last_backward and not self.is_manual:
                params = self._commit()
            else:
                params = self._defer()
            self.journal.replan()
        except BaseException:
            self._abort_backward()
            raise
        # Last: when one raises, all gradients are there, and the ranks have agreed on the plan.
        run_gradient_hooks(params)

    def _is_due(self, unit: Unit) -> bool:
        since = [*self._deferred, *self._launched] if self.is_manual else self._launched
        if self.is_manual and unit.held and unit.policy.sync:
            return True
        if not unit.policy.sync or not (unit.held or unit.policy.reduces_unused):
            return False
        return all(launch.unit is not unit for launch in since)

    # ---- backward whose end the user says ----

    @property
    def awaits_completion(self) -> bool:
        """True when gradients of a backward wait for :meth:`launch_rest` or :meth:`complete`."""
        return self._is_open or self._completion is not None

    def set_manual(self, is_manual: bool) -> None:
        """Let :meth:`complete` set gradients, or the end of every backward.

        Raises: StateError if that would change while gradients of a backward are on their way.
        """
        if is_manual == self.is_manual:
            return
        if self._is_backward_running or is_in_backward():
            raise StateError("set_manual_backward_finalization cannot change mode during backward; call it before")
        if self.awaits_completion or self._deferred:
            raise StateError(
                "set_manual_backward_finalization cannot change mode after backward starts: gradients of an earlier backward "
                f"wait for {'finalize_backward()' if self.is_manual else 'a last backward'}; let them be set first"
            )
        self.is_manual = is_manual

    def launch_rest(self) -> object | None:
        """Reduce what backwards have left; return what :meth:`complete` takes, None if no backward has come.

        Raises: StateError in a backward, without manual finalization, or before an earlier call has been completed.
        """
        if self._is_backward_running or is_in_backward():
            raise StateError(
                "finalize_backward must be called after backward completes; call it after the last backward()"
            )
        if self._completion is not None:
            raise StateError(
                "The previous gradient reduction must be waited on before finalizing backward again; call wait() on its handle"
            )
        if not self.is_manual:
            raise StateError(
                "finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) on the "
                "root before forward"
            )
        if self._backward is not None:
            self._abort_backward()
        if not self._is_open:
            return None
        self._was_open = True
        for unit in self.units:
            unit.hide_gradients()
        self._enter_span("backward")
        try:
            for unit in reversed(self.units):
                if self._is_due(unit):
                    self._reduce(unit, unit.take_gradients())
            self._defer()
        except BaseException:
            self._abort_backward()
            raise
        self._completion = object()
        return self._completion

    def complete(self, completion: object) -> None:
        """Wait for reductions and set gradients.  Raises: StateError if ``completion`` has been forgotten."""
        if completion is not self._completion:
            raise StateError(
                "This gradient reduction handle was invalidated by reset_iter_state(); its gradients are gone"
            )
        for unit in self.units:
            unit.hide_gradients()
        try:
            params = self._commit()
        except BaseException:
            self._show_gradients()
            raise
        self._is_open, self._completion = False, None
        run_gradient_hooks(params)

    @property
    def _is_backward_running(self) -> bool:
        return self._backward is not None and self._backward() is not None

    def _check_completed(self, what: str) -> None:
        if self._completion is not None:
            raise StateError(
                f"The previous gradient reduction must be waited on before {what}: call wait() on the handle that "
                "finalize_backward(async_op=True) has returned"
            )

    def check_step(self, stepped: set[int]) -> None:
        """Raise StateError if gradients are not complete of a parameter with an id in ``stepped``."""
        if not self.awaits_completion:
            return
        for unit in self.units:
            for param in unit.params:
                if id(param.sharded) in stepped:
                    missing = (
                        "call finalize_backward()" if self._completion is None else "wait() for finalize_backward()"
                    )
                    raise StateError(
                        f"an optimizer steps on {param.fqn} (unit '{unit.name}') before the gradients of its last backward "
                        f"are complete, in manual backward finalization; {missing} on the root module first"
                    )

    def _keep_held(self) -> None:
        for unit, gradients in self._fresh_held:
            unit.held = add_gradients(unit.held, gradients)
        self._fresh_held.clear()

    def _defer(self) -> list[UnitParam]:
        """End a backward whose gradients are to be set with those of a later one."""
        for reduction in self._in_flight:  # while the others' gradients are there to be read
            self._advance(reduction)
        self._in_flight.clear()
        self._leave_span()
        self._keep_held()
        self._deferred += self._launched
        self._launched = []
        self._show_gradients()
        return []

    def _show_gradients(self) -> None:
        for unit in self.units:
            unit.show_gradients()

    def _commit(self) -> list[UnitParam]:
        """Set the gradients of this backward and of deferred ones; return the parameters that have got any.

        Nothing of a backward is visible before this point: one that raises leaves earlier microbatches as they were.
        """
        launched = [*self._deferred, *self._launched]
        for launch in launched:
            for reduction in launch.reductions:
                self._finish(launch.unit, reduction)
        self._leave_span()
        self._keep_held()
        self._deferred, self._launched = [], []
        self._in_flight.clear()
        params: list[UnitParam] = []
        for launch in launched:
            for reduction in launch.reductions:
                if not reduction.is_partial:
                    reduction.set_gradients()
                    params += reduction.params
                else:
                    left = {p: value for p, value in reduction.windows().items() if p not in launch.taken}
                    launch.unit.partial.update(left)
            launch.unit.num_commits += 1
            launch.unit.note(Op.COMMIT)
        self._show_gradients()
        return params

    def _finish(self, unit: Unit, reduction: Reduction) -> None:
        try:
            reduction.finish()
        except RuntimeError as error:
            raise self.journal.explain(error, f"gradients of unit '{unit.name}'") from error

    def _abort_backward(self) -> None:
        """Forget a backward that raised: its gradients, its reductions, its full parameters."""
        self._backward = None
        self._is_open = self._was_open
        self._fresh_held.clear()
        self.spans.abort()
        launched, self._launched = self._launched, []
        self._in_flight.clear()
        for launch in reversed(launched):
            for reduction in launch.reductions:
                reduction.cancel()
            for earlier, taken in launch.absorbed:
                earlier.taken -= taken
            launch.unit.held = {**launch.unit.held, **launch.held}
            launch.unit.partial = {**launch.unit.partial, **launch.partial}
        for unit in self.units:
            unit.drop_gradients()
            unit.show_gradients()
        if not self._stack:
            self.reset()

    def _run_ahead(self, explicit: list[weakref.ref[Unit]] | None) -> None:
        targets = self.journal.ahead() if explicit is None else [ref() for ref in explicit]
        for target in targets:
            if target is not None:
                target.unshard(self.spans.number)

    # ---- recovery ----

    def forget_step(self) -> None:
        """Bring every unit back to its shards and drop all gradients that have not reached ``.grad``."""
        self._abort_backward()
        self._deferred = []
        self._is_open = self._was_open = False
        self._completion = None
        self.reset()
        for unit in self.units:
            unit.held, unit.partial = {}, {}

    def reset(self) -> None:
        """Bring every unit back to its shards; gradients held from earlier backwards stay."""
        self._stack.clear()
        self.spans.abort()
        for unit in self.units:
            unit.holders = 0
            unit.awaited = set()
            unit.in_backward = False
            unit.open_passes.clear()
            unit.abandon()
        self.journal.forget()


def _module_frame_id() -> int:
    """Return the id of the frame that runs the module which is about to start its forward."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_name not in ("_call_impl", "forward_method"):
        frame = frame.f_back
    return id(frame)


def engine_of(unit: Unit) -> Engine | None:
    """Return the engine that carries out the steps of ``unit``; None before there is one."""
    host = unit.host_ref()
    return host if isinstance(host, Engine) else None
