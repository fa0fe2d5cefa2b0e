"""One engine per root module: it runs the step, event by event, through forward and backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.collectives.routes import PassKind
from shardwise.consistency.failure_report import in_short, publish_failure
from shardwise.errors import ShardwiseError, StateError
from shardwise.fsdp.backward import Place, UnitBackward
from shardwise.fsdp.comm_context import CommContext
from shardwise.fsdp.divergence import Divergence
from shardwise.fsdp.execution_order import ExecOrderTracker
from shardwise.fsdp.local_gradients import add_gradients, run_gradient_hooks
from shardwise.fsdp.manual_finalization import ManualFinalization
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.reductions import Reductions
from shardwise.fsdp.unit import COMING, HELD, SHARDS, SUB, StepChecks, Unit, UnitForward, is_in_backward
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.observe import Op, listeners, logger, unit_in_words
from shardwise.plan.schedule import StepEvent
from shardwise.torch_private import innermost_transform


class BackwardEnd:
    """The callback that autograd runs when a backward ends.

    When the backward raises, autograd destroys the callback without running it, which is the only sign of that.  So the
    engine has a weak reference to it, and a backward runs as long as that is alive.
    """

    __slots__ = ("__weakref__", "_engine", "_was_put_off")

    def __init__(self, engine: Engine) -> None:
        self._engine, self._was_put_off = weakref.ref(engine), False

    def __call__(self) -> None:
        if (engine := self._engine()) is None:
            return
        # A rank that takes another way waits until this one serves it, which it does in the end of that engine's backward.
        others = () if self._was_put_off or engine.divergence is not None else live_engines
        if any(other.divergence is not None and other.runs_backward for other in others):
            self._was_put_off = True
            torch_private.call_after_backward(self)
        else:
            with nullcontext() if innermost_transform() is None else torch_private.beside_transforms():
                engine.finish()

    def __del__(self) -> None:
        engine = self._engine()
        if engine is not None and engine.end is not None and engine.end() in (None, self):  # a later one has not begun
            engine.abort_backward()


live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
# Called when a unit or an engine is made: packages above this one watch what these need to know of.
on_new_units: list[Callable[[], None]] = []


class Engine:
    """Runs the steps of one root module.  It decides the order; units and reductions do the work on tensors.

    Attributes:
        units: the units of the root's module tree, root first; ``units[i]`` is number i of every plan.
        comm_ctx: streams, links and buffer pools of the collectives.
        exec_order: the execution order of the running step, and the plan made from an earlier step.
        forwards: the forwards that have begun and not ended, outermost first: the unit, and the exception that was being
            handled at that time, which tells a forward that raised from one that runs inside an ``except`` block.  An
            interrupt (BaseException) skips torch's always-called hooks, so its forwards stay until ``reset_iter_state()``,
            without which an optimizer step raises.
        end: weak reference to the callback of the running backward; None if none runs.  Dead: the backward has raised.
        makes_graph: the running backward runs with ``create_graph=True``.
        reductions: launched and unsynced gradients.
        hooked: whether parameters of the last commit have post-accumulate-grad hooks of users, and the exception of a hook.
        manual: state of manual backward finalization.
        is_last_backward: False delays the wait for reductions to a later backward.
        checks: checks of user programs, which listen to the events of this engine.
        refuse: raises when a pass begins, while parameters are away (``asleep``); else None.
        awaits_backward: a forward has built a graph since the last backward.
        left_at: at which event an exception has ended a pass in which a backend gathers; None: at none since ranks compared.
        post_optim_event: the event that the next step waits for instead of all earlier work; used once.
        logs: ``TORCH_LOGS=fsdp`` was on when the last forward of the root began.  divergence: None if ranks run the same units.
    """

    def __init__(self, comm_ctx: CommContext) -> None:
        self.units: list[Unit] = []
        self.comm_ctx, self.exec_order = comm_ctx, ExecOrderTracker()
        self.forwards: list[tuple[Unit, BaseException | None]] = []
        self.hooked: tuple[bool, BaseException | None] = False, None
        self.end: weakref.ref[BackwardEnd] | None = None
        self.makes_graph = self.awaits_backward = self.logs = self._has_reported = False
        self.reductions = Reductions(self.exec_order, comm_ctx)
        self.manual, self.checks = ManualFinalization(), StepChecks()
        self.is_last_backward = True
        self.post_optim_event: torch.Event | None = None
        self.refuse: Callable[[], None] | None = None
        self._running: list[Unit] = []  # units through which backward runs, outermost first
        self._owners: set[Unit] = set()  # units with tied parameters that other units use
        self._plain: list[Unit] = []  # units whose parameters may stay registered while they are sharded
        self.left_at: int | None = None
        self.divergence: Divergence | None = None
        live_engines.add(self)
        for tell in on_new_units:
            tell()

    def adopt(self, units: Iterable[Unit]) -> None:
        """Run the steps of ``units`` from now on."""
        self.units = list(units)
        self.exec_order.adopt(self.units)
        self._plain = [unit for unit in self.units if unit.settings.keeps_plain]
        self._owners = {owner for unit in self.units for owner in unit.tied_units}
        for unit in self.units:
            unit.engine_side.engine_ref = unit.engine_side.engine_for_gradient = weakref.ref(self)
            if len(self.units) == 1:
                unit.listen()  # its gradients are reduced in buckets as they come

    # ---- forward ----

    def before_forward(self, unit: Unit, module: nn.Module) -> None:
        """Wait for the full parameters of ``unit`` and launch the prefetches of the plan."""
        if torch_private.graph_task_id() != -1:  # a checkpoint recomputes this forward in backward
            self.exec_order.record(unit, StepEvent.PRE_RECOMPUTE)
            unit.wait_with_tied(self.comm_ctx.pass_tracker.number)
            return
        if not self.forwards:
            self._begin_forward()
        # The forward hooks run also after an exception, and cannot see it; the one that is being handled then is another than
        # now.
        self.forwards.append((unit, sys.exc_info()[1]))
        # A forward of the unit starts with the first of its modules; it goes on while others of them are awaited.
        use, number = unit.forward, self.comm_ctx.pass_tracker.number
        starts = not use.awaited and not use.holders
        prefetches = self.exec_order.record(unit, StepEvent.PRE_FORWARD) if starts else ()
        if starts:
            use.begun_by = id(module)
            use.awaited = {id(module)} if len(unit.module_refs) == 1 else {id(each) for each in unit.modules}
        for member in (unit, *unit.others):  # until its end no other forward reshards what this one uses
            member.forward.holders += 1
        for member in (unit, *unit.others):
            member.wait(number)
            if torch_private.saved_tensor_hooks(True) is not None:
                member.forward.num_aliases = member.count_aliases()
        # Prefetches come last: on the gather stream, what this unit waits for is then in front of them.
        if starts and unit.settings.forward_prefetch is not None:
            prefetches = [target for ref in unit.settings.forward_prefetch if (target := ref()) is not None]
        for target in prefetches:
            for member in (target, *target.beside):
                member.unshard(number)

    def after_forward(self, unit: Unit, module: nn.Module) -> bool:
        """Reshard ``unit`` if its policy says so and all its modules have run.

        Returns: True if the output of this forward needs :meth:`before_backward` hooks, False if forward has raised.
        """
        if torch_private.graph_task_id() != -1:  # a checkpoint has recomputed this forward in backward
            # While its backward runs, the unit stays full: that backward reads the parameters next.
            if not unit.backward.is_running and unit not in self._owners:
                for member in (unit, *unit.beside):
                    member.reshard_after_forward()
            self.exec_order.record(unit, StepEvent.POST_RECOMPUTE)
            return True
        if not self.forwards or self.forwards[-1][0] is not unit:
            return True
        raised, family = sys.exc_info()[1], (unit, *unit.others)
        for member in family:
            member.forward.holders -= 1
        if raised is not self.forwards.pop()[1]:  # forward has raised
            unit.forward.awaited = set()
            for member in family:
                if not member.forward.holders:
                    member.reshard(in_pass=True)  # a caller may catch the exception, and its forward goes on
            if not self.forwards:
                # Errors of shardwise have reported themselves.
                if isinstance(raised, Exception) and not isinstance(raised, ShardwiseError):
                    publish_failure(f"{type(raised).__name__}: {in_short(raised)}")
                    self._has_reported = True
                self.reset()
            return False
        unit.forward.awaited.discard(id(module))
        if not unit.forward.awaited:
            if not unit.forward.holders:
                self.exec_order.record(unit, StepEvent.POST_FORWARD)
            for member in family:
                if not member.forward.holders:
                    member.reshard_after_forward()
        if not self.forwards:
            self._end_forward(unit)
        return True

    def drop_forward(self, unit: Unit) -> None:
        """Clean up after a hook of a forward of ``unit`` has raised; forwards around it learn of that from torch."""
        if self.forwards and self.forwards[-1][0] is unit:
            self.forwards.pop()
        if not self.forwards and not self.runs_backward:  # a backward that recomputes it cleans up when it has raised
            self.reset()

    @property
    def is_in_step(self) -> bool:
        """True in a forward or backward of these units: other ranks may be reading the shards then."""
        return bool(self.forwards) or self.runs_backward

    @property
    def runs_backward(self) -> bool:
        """True until the backward has ended or raised."""
        return self.end is not None and self.end() is not None

    def _begin_forward(self) -> None:
        self.manual.check_completed("a forward")
        logger.debug("FSDP::root_pre_forward")
        self.checks.begin_forward()
        # Without gathers and without gradients a forward takes no collective: one rank may run it alone, so ranks do not
        # compare it.
        is_aside = not (self.exec_order.gathers or torch.is_grad_enabled())
        if not is_aside and self.exec_order.mismatch_check is not None and not dist.is_initialized():
            raise StateError(
                "a forward of a sharded model after destroy_process_group(), which is the last thing to call, on every rank"
            )
        if self.divergence is not None and self.exec_order.gathers:
            self.divergence.begin("forward")
        self.exec_order.begin(is_aside)
        if not is_aside:
            track = self.exec_order.track
            track.num_forwards, track.running = track.num_forwards + 1, "forward"
            self._compare_left()
        try:
            self.enter_pass("forward")
        except BaseException:
            self.reset()
            raise
        event, self.post_optim_event = self.post_optim_event, None
        # The optimizer has written shards on the current stream; gathers run on another, and must come after it.
        if event is None:
            self.comm_ctx.streams.gather.wait_current()
        else:
            self.comm_ctx.streams.gather.wait_event(event)

    def enter_pass(self, kind: PassKind) -> None:
        """Begin a forward or backward: copy writes to full parameters into the shards, and repack what user code changed."""
        for unit in self.units if self.comm_ctx.pass_tracker.number is None else ():
            if unit.held is HELD:
                unit.take_writes()
        # Before the pass begins, since repacking moves shards, which peers may read from then on.
        if self.refuse is not None:
            self.refuse()
        for unit in self.units:
            if not unit.tables.check(kind == "backward"):
                unit.ensure_packed(has_changed=True)
        self.comm_ctx.pass_tracker.begin(kind)
        if self.divergence is not None and (kind == "backward" or self.exec_order.gathers):
            self.divergence.enter(kind)

    def _end_forward(self, outermost: Unit) -> None:
        for unit in self.units:
            if unit.held is COMING:  # prefetched, but forward did not use it
                unit.discard()
            if unit.forward.awaited:  # some of its modules did not run: a later call of one is a forward of its own
                unit.forward.awaited = set()
                if unit is not outermost:
                    for member in (unit, *unit.beside):
                        member.reshard_after_forward()
            if unit.registered is SUB and not torch.is_grad_enabled():  # no backward will need it
                unit.reshard()
        if self.divergence is not None and self.divergence.is_open:
            self.divergence.end()
        is_graphless = not torch.is_grad_enabled()
        self.awaits_backward = not is_graphless
        if is_graphless and self.comm_ctx.streams.are_concurrent:  # else the end of backward waits
            # User code on the host may write to offloaded shards next, while copies on a stream still read them.
            self.comm_ctx.streams.host_waits_for_copies()
        self.leave_pass(is_graphless)
        if is_graphless:
            # Between passes, modules have the parameters that optimizers have.  Units whose user has asked for full parameters
            # after forward keep those that take a collective to gather.
            for unit in self.units:
                if unit.held is HELD and (unit.settings.keeps_for_backward or not unit.memory.is_collective):
                    unit.reshard()
        if self._has_reported:  # a forward takes all ranks, so user code has handled the exception
            publish_failure("")
            self._has_reported = False
        exec_order = self.exec_order
        if is_graphless and exec_order.gathers and not exec_order.diverges and not exec_order.has_planned_forward():
            exec_order.replan()
        exec_order.is_aside, exec_order.track.running = False, ""

    def leave_pass(self, no_backward_follows: bool = True) -> None:
        """End a forward or backward: wait until no rank reads the shards, then copy writes to full parameters into them.

        ``no_backward_follows``: units that stay unsharded have the shards registered, with which user code goes on.
        """
        try:
            self.comm_ctx.pass_tracker.end()
        except RuntimeError as error:
            self.comm_ctx.pass_tracker.abort()
            self.exec_order.explain(error, "the other ranks at the end of forward or backward")
        if self.comm_ctx.pass_tracker.number is None:
            # In a pass other ranks may read the shards, so writes of modules to full parameters are copied only now.
            for unit in self.units:
                if unit.reshards_late:
                    unit.reshards_late = False
                    unit.take_writes()
                    unit.reshard()
                elif unit.held is HELD:
                    unit.keep()
                    if no_backward_follows and not (self._leaves_full(unit) or unit.backward.keeps_for_graph):
                        unit.tables.register_sharded()  # user code then finds what optimizers have
                        unit.registered = SHARDS

    # ---- backward ----

    def before_backward(self, unit: Unit, num_packs: int, begun_at: Place, place: Place) -> None:
        """Wait for the full parameters of ``unit``, which its backward reads, and launch prefetches.

        Args:
            num_packs: ``unit.memory.packs.count`` at the forward whose backward begins.
            begun_at: where in the graph that forward began.
            place: of the node that has made the output.
        """
        self.reach(place)
        backward = unit.backward
        if self.end is None or self.end() is None:
            self._begin_backward()
        if unit.memory.packs.count != num_packs:
            raise StateError(
                f"parameters of {unit_in_words(unit.name)} were replaced, moved or given another dtype after the forward "
                "whose backward runs now. Make such changes before forward or after backward"
            )
        if torch.is_grad_enabled():
            self.makes_graph = True
            for member in (unit, *unit.beside):
                member.backward.keeps_for_graph = True
        # A node's number alone does not say where autograd is: a reentrant checkpoint runs a backward of its own inside of
        # this one, whose nodes are newer than all of this one's.
        task = torch_private.graph_task_id()
        if backward.is_running and backward.task == task and backward.began_at[0] == begun_at[0]:
            backward.began_at = min(backward.began_at, begun_at)  # of several uses at once the first one ends last
        elif not backward.is_running or len(unit.module_refs) > 1:
            # Checkpoints recompute several modules one by one, each in a backward of its own.
            backward.began_at, backward.task = begun_at, task
        if backward.is_running and (unit.held is HELD or not unit.policy.unshard_in_backward):
            return  # another output of the unit: its backward has begun, and there is nothing to gather
        prefetches = self.exec_order.record(unit, StepEvent.PRE_BACKWARD)
        if not backward.is_running:
            backward.is_running = True
            # Other units may bring more gradients of tied parameters, so their owner ends with the whole backward.
            if unit not in self._owners:
                self._running.append(unit)
        if len(self.units) == 1 and not self.manual.is_on:
            backward.buckets = self.reductions.early_buckets(unit)
        # What waits comes first, what is prefetched after it: collectives of one stream run in the order of their launches.
        number = self.comm_ctx.pass_tracker.number
        if unit.policy.unshard_in_backward:
            for member in (unit, *unit.others):
                member.wait(number)
        if unit.settings.backward_prefetch is not None:
            prefetches = [target for ref in unit.settings.backward_prefetch if (target := ref()) is not None]
        for target in prefetches:
            for member in (target, *target.beside):
                member.unshard(number)

    def gradient_arrived(self, unit: Unit, ordinal: int) -> None:
        """Begin a backward if no hook of an output has, and launch the buckets of a lone unit that are complete."""
        if self.end is None or self.end() is None:
            self._begin_backward(unit.params[ordinal])
        if unit.backward.buckets is not None:
            self.reductions.launch_early(unit, unit.backward.buckets)

    def reach(self, place: Place, _: object = None) -> None:
        """End the backwards of units whose forwards began after the node at ``place`` was made, which autograd runs now.

        It is the hook of the gradients of units' inputs, too.
        A backward that runs inside of another one, perhaps through an older graph, ends no unit of that.  It is over, with all
        its units, when the other one goes on.
        """
        (thread, number), task = place, torch_private.graph_task_id()
        # Innermost first, since ending a unit launches its reduction, and ranks pair these by their order.  A copy of the
        # list: a unit that ends leaves it.
        for unit in reversed(self._running[:]):
            (began_on, began_at), began_in = unit.backward.began_at, unit.backward.task
            if began_in > task or (began_in == task and began_on == thread and began_at > number):
                for member in (unit, *unit.beside):
                    self.after_backward(member)

    def after_backward(self, unit: Unit, reduces: bool = True) -> None:
        """Reshard ``unit`` and launch the reduction of its gradients, or accumulate them unsynced (``no_sync``)."""
        if self.logs:
            logger.debug("FSDP::post_backward (%s)", unit.name)
        if unit in self._running:
            self._running.remove(unit)
        gradients = unit.end_backward()
        # Before the reduction, so that its input can take the memory that the full parameters leave.
        if unit.policy.reshard_after_backward and not unit.backward.keeps_for_graph:
            unit.reshard(in_pass=True)
        if not (unit.policy.sync and reduces):
            if gradients:
                self.reductions.fresh_held.append((unit, gradients))
                self.exec_order.track.note(Op.HOLD, unit.name)  # records show it, in case other ranks reduce
                if listeners:
                    unit.emit(Op.HOLD)
            is_as_planned = gradients and not unit.policy.sync
            self.exec_order.record(unit, StepEvent.POST_BACKWARD if is_as_planned else StepEvent.RELEASE_IN_BACKWARD)
            return
        if gradients or unit.earlier.held or self.reductions.open_launch is not None:
            self.exec_order.record(unit, StepEvent.POST_BACKWARD)
            # Where ranks may take different ways, ``Divergence`` launches what other ranks need first, then this.
            (self.divergence or self.reductions).launch(unit, gradients)
        else:
            self.exec_order.record(unit, StepEvent.RELEASE_IN_BACKWARD)

    def _begin_backward(self, first: ShardedParam | None = None) -> None:
        """Begin a backward; clean up first after one that raised.

        ``first``: the parameter whose gradient was accumulated before any hook of an output ran.
        """
        if self.end is not None:
            self.abort_backward()
        self.awaits_backward = False
        self._compare_left()
        self.manual.check_completed("a backward")
        if self.divergence is not None:
            self.divergence.begin("backward")
        self.manual.was_open, self.manual.is_open = self.manual.is_open, self.manual.is_on
        new_end = BackwardEnd(self)
        # Weak, or autograd's dropping of the callback, the sign of a backward that raised, would never be seen.
        self.end, self.makes_graph = weakref.ref(new_end), False
        track = self.exec_order.track
        track.num_backwards, track.running = track.num_backwards + 1, "backward"
        try:
            self.stash_gradients(first)
            self.enter_pass("backward")
            torch_private.call_after_backward(new_end)
        finally:
            del new_end  # a stored traceback would keep it alive, and a backward that raised would seem to run

    def finish(self) -> None:
        """End a backward: reduce the remaining gradients, reshard units that are full, set ``.grad``, plan the next step."""
        logger.debug("FSDP::root_post_backward")
        if not self.makes_graph:
            for unit in self.units:
                unit.backward.keeps_for_graph = False
        try:
            # Units that are still open end here, in an order that does not depend on what this rank's backward has used: ranks
            # pair their collectives by it.
            for unit in reversed(self.units):
                # Gradients of earlier backwards are reduced now, even if this backward used no parameter of the unit.
                may_be_due = unit.earlier.held or unit.earlier.partial or unit.policy.reduces_unused
                is_due = bool(may_be_due) and not self.manual.is_on and self.is_due(unit)
                is_idle = unit.held is HELD and not unit.forward.holders
                if unit.backward.is_running or unit.backward.arrived or is_due or unit.has_gradients:
                    self.after_backward(unit, reduces=not self.manual.is_on)
                elif unit.held is COMING:  # prefetched, but backward did not use it
                    unit.discard()
                elif is_idle and unit.policy.reshard_after_backward and not unit.backward.keeps_for_graph:
                    unit.reshard(in_pass=True)
                    self.exec_order.record(unit, StepEvent.RELEASE_IN_BACKWARD)
            if self.divergence is not None:
                self.divergence.end()
            # From here on a second backward may begin, in a hook of user code that runs below.
            self.end = None
            # All ranks take part in a backward with collectives, so all can plan the next step from its order.  One without
            # any (replicas without sync) may be of this rank alone: planning compares ranks, and would hang.
            is_joint = self.exec_order.gathers or bool(self.reductions.launched)
            params = self.commit() if self.is_last_backward and not self.manual.is_on else self.defer()
            if is_joint and not self.exec_order.diverges:
                self.exec_order.replan()
            self.exec_order.track.running = ""
        except BaseException:
            self.abort_backward()
            raise
        # User code runs last: if it raises, all gradients are set and the ranks agree on the plan.
        self.run_hooks(params)

    def run_hooks(self, params: Sequence[ShardedParam]) -> None:
        """Run the post-accumulate-grad hooks that user code has registered on ``params``."""
        is_followed, failed = self.hooked
        self.hooked = False, None  # the traceback of ``failed`` would keep the model alive
        if is_followed or failed is not None:
            with withdrawn([unit.earlier.waiting for unit in self.units] if self.reductions.summed else []):
                run_gradient_hooks(params, failed)

    def is_due(self, unit: Unit) -> bool:
        """Return True if a backward has to reduce ``unit`` even if it produced none of its gradients."""
        held, policy, is_manual = unit.earlier.held, unit.policy, self.manual.is_on
        has_sums = unit.earlier.partial and policy.syncs_replicas  # over shards, of earlier backwards
        if not policy.sync or not (held or has_sums or policy.reduces_unused):
            return False
        launched = [*self.reductions.launched, *(self.reductions.deferred if is_manual else ())]
        return (is_manual and bool(held)) or all(launch.unit is not unit for launch in launched)

    def defer(self) -> list[ShardedParam]:
        """End a backward whose gradients are set together with those of a later one; return no parameters."""
        for reduction in self.reductions.in_flight:  # until then other ranks may read this rank's gradients
            self.reductions.advance(reduction)
        self.leave_pass()
        self.reductions.defer()
        self.unstash_gradients()
        return []

    def commit(self) -> list[ShardedParam]:
        """Set the gradients of this backward and of earlier pending ones; return the parameters that received any."""
        self.reductions.wait()
        self.leave_pass()
        params, self.hooked = self.reductions.commit()
        self.unstash_gradients()
        if params:
            self.checks.end_backward()
        return params

    def stash_gradients(self, first: ShardedParam | None = None) -> None:
        """Stash ``.grad`` of parameters that stay registered, so that this backward accumulates from zero.

        Gradients that wait and that user code has cleared since are dropped.
        """
        self.reductions.withdraw_waiting(self.units)
        for unit in self._plain:
            unit.earlier.stash(unit.memory.in_place, first)
        for unit in self._plain:  # when all are stashed, which the end of the refused backward gives back
            if unit.policy.divide_factor is not None and unit.memory.in_place:
                raise StateError(
                    f"set_gradient_divide_factor on {unit_in_words(unit.name)}, whose parameters are plain: what .grad has "
                    "would be divided twice. Divide the loss, or call replicate() without arguments of DDP"
                )

    def unstash_gradients(self) -> None:
        """Restore stashed gradients, with those of this backward added, and show which gradients wait."""
        for unit in self._plain:
            unit.earlier.unstash(unit.memory.in_place, unit.settings.sums is None)
        self.reductions.show_waiting(self.units)

    def abort_backward(self) -> None:
        """Clean up after a backward that raised: drop its gradients and reductions, and reshard what no forward uses."""
        self.end = None  # first, so that the destructor of the callback does not clean up a second time
        self.manual.is_open = self.manual.was_open
        self._note_left()
        self.comm_ctx.pass_tracker.abort()
        self.reductions.cancel()
        self._running.clear()
        for unit in self.units:
            # Autograd has accumulated some of them already; the next backward must not add to these.
            for param in unit.params:
                if param.full is not None:
                    param.full.grad = None
            unit.backward.is_running, unit.backward.buckets = False, None
            unit.backward.arrived.clear()
            if unit.held is COMING:  # its gather has ended with the pass
                unit.discard()
        self.unstash_gradients()
        if not self.forwards:
            self.reset()

    # ---- explicit ends of a step: ``finalize_backward``, and pipeline stages after their last microbatch ----

    @property
    def is_in_backward(self) -> bool:
        """True in a backward of these units, or in any other of this thread."""
        return self.runs_backward or is_in_backward()

    def end_step(self) -> None:
        """Reduce unsynced gradients and set ``.grad``; they include what a pipeline schedule has assigned to full parameters.

        Raises: StateError in a backward.
        """
        if self.is_in_backward:
            raise StateError("a step cannot be ended during backward; end it after the last backward()")
        self.run_hooks(self._after_rest(self.commit))

    def launch_rest(self) -> object | None:
        """Launch the reductions of unsynced gradients; return a token for :meth:`complete`, None if there was no backward.

        Raises: StateError in a backward, without manual finalization, or before an earlier call has been completed.
        """
        self.manual.check_launch(self.is_in_backward)
        if not self.manual.is_open:
            return None
        self._after_rest(self.defer)
        self.manual.completion = object()
        return self.manual.completion

    def _after_rest(self, end: Callable[[], list[ShardedParam]]) -> list[ShardedParam]:
        """Launch the reductions of unsynced gradients, then call ``end``."""
        try:
            self.stash_gradients()
            self.enter_pass("backward")
            for unit in reversed(self.units):
                gradients = unit.end_backward()
                if unit.policy.sync and (gradients or self.is_due(unit)):
                    (self.divergence or self.reductions).launch(unit, gradients)
                elif gradients:
                    self.reductions.fresh_held.append((unit, gradients))
                if unit.policy.reshard_after_backward and unit.held is HELD:
                    unit.reshard(in_pass=True)
            return end()
        except BaseException:
            self.abort_backward()
            raise

    def complete(self, completion: object) -> None:
        """Wait for reductions and set gradients.  Raises: StateError if ``completion`` was invalidated."""
        if completion is not self.manual.completion:
            raise StateError("This gradient reduction handle was invalidated by reset_iter_state()")
        self.stash_gradients()
        try:
            params = self.commit()
        except BaseException:
            self.unstash_gradients()
            raise
        self.manual.forget()
        self.run_hooks(params)

    # ---- backwards of pipeline stages, and passes that only other ranks run ----

    def hold_assigned(self) -> None:
        """Prepare for one more backward without sync, perhaps of a pipeline schedule.

        Gradients of weights that a schedule has computed separately and assigned to full parameters are accumulated, so that
        sums follow the order of microbatches.  Where such a backward leaves parameters unsharded, the schedule looks for them
        on the modules before it computes gradients of inputs alone.
        """
        for unit in self.units if not self.is_in_step else ():
            if unit in self._plain:
                continue
            if unit.held is HELD and unit.has_gradients:
                unit.earlier.held = add_gradients(unit.earlier.held, unit.end_backward())
            # Where ranks may take different ways the others would not know of this gather.
            if self._leaves_full(unit) and not unit.engine_side.diverges:
                unit.wait_with_tied(None)
                unit.keep()

    def _leaves_full(self, unit: Unit) -> bool:
        """Return True if user code has said that backward leaves parameters of ``unit`` unsharded for those that follow."""
        return not (unit.policy.reshard_after_backward or self.is_last_backward)

    def serve_pass(self, kind: PassKind) -> None:
        """Take part in a pass that only other ranks run: serve this rank's shards, with gradients of zero."""
        divergence = self.divergence
        assert divergence is not None
        params: list[ShardedParam] = []
        try:
            if kind == "backward":
                self.stash_gradients()
            self.enter_pass(kind)
            divergence.end(ran_here=False)
            if kind == "forward":
                self.leave_pass()
            else:
                params = self.commit() if self.is_last_backward else self.defer()
        except BaseException:
            self.abort_backward()
            raise
        self.run_hooks(params if kind == "backward" else ())

    # ---- recovery ----

    def forget_step(self) -> None:
        """Reshard every unit and drop all gradients that have not reached ``.grad``."""
        self.abort_backward()
        if self.reductions.deferred:
            self.comm_ctx.streams.current_waits_for_results()
        self.reductions.deferred = []
        self.manual.forget()
        self.reset()
        for unit in self.units:
            unit.earlier.held, unit.earlier.partial = {}, {}
            unit.earlier.withdraw()  # ``.grad`` of plain parameters stays

    def reset(self) -> None:
        """Reshard every unit; unsynced gradients of earlier backwards stay."""
        self._note_left()
        self.exec_order.track.running = ""
        self.forwards.clear()
        self.comm_ctx.pass_tracker.abort()
        if self.divergence is not None:
            self.divergence.is_open = False
        for unit in self.units:
            unit.forward, unit.backward, unit.reshards_late = UnitForward(), UnitBackward(), False
            unit.discard()
        self.exec_order.forget()

    def _note_left(self) -> None:
        """Note where an exception ends a pass in which a backend gathers: it pairs gathers by how many ranks have launched."""
        in_pass = self.comm_ctx.pass_tracker.number is not None and self.divergence is None
        if in_pass and any(unit.memory.is_collective and unit.memory.link is None for unit in self.units):
            self.left_at = self.exec_order.track.count

    def _compare_left(self) -> None:
        """Raise DesyncError if other ranks have left no pass since, or at another place: gathers would be of other units."""
        if self.left_at is not None and self.exec_order.mismatch_check is not None:
            place = f"after event {self.left_at} of its forwards and backwards"
            self.exec_order.mismatch_check.check_facts("places where an exception was caught", [place])
        self.left_at = None


def engine_of(unit: Unit) -> Engine | None:
    """Return the engine that runs the steps of ``unit``; None before there is one."""
    return unit.engine_side.engine_ref()
