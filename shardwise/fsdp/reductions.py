"""The reductions of an engine: from the end of each unit's backward to ``.grad``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.comm_context import CommContext
from shardwise.fsdp.execution_order import ExecOrderTracker
from shardwise.fsdp.gradients import Launch, Reduction, early_readers, is_summed, launch_reductions, split
from shardwise.fsdp.local_gradients import Gradients, add_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import HELD, Unit
from shardwise.fsdp.waiting_gradients import is_summed_later
from shardwise.observe import Op, begin, end, listeners
from shardwise.plan.schedule import Buckets

_HOLDS_INPUT = operator.attrgetter("holds_input")
_NONE: tuple[Gradients, Gradients] = {}, {}  # no code writes to what a launch has taken


class Reductions:
    """The reductions of one engine: launched as units end, then committed together, or left pending for a later backward.

    No ``.grad`` changes before :meth:`commit`, so a backward that raises does not change gradients of earlier microbatches.

    A unit that is alone is split into buckets, if nothing is sharded.  Every rank launches them in the same order
    (:class:`Buckets`): a backend pairs collectives by their order.

    Attributes:
        max_inputs: how many reduce-scatter inputs may be allocated at once.
        syncs_replicas: where ranks may take different ways, whether all reduce over replicas in this backward; None: as the
            policy of each unit says.
        in_flight: in the order of their launches; those that are over leave it from the front, and ``launched`` keeps them.
        launched, deferred: reductions of this backward, and pending ones of earlier backwards.
        open_launch: the launch of a unit whose backward still runs.
        fresh_held: unsynced gradients of this backward, which count once it ends without an exception.
        summed: parameters whose gradients ``Reproducible`` sums, once they were reduced in its loop over microbatches.
    """

    def __init__(self, exec_order: ExecOrderTracker, comm_ctx: CommContext) -> None:
        self._exec_order, self._comm_ctx = exec_order, comm_ctx
        self.max_inputs = 1
        self.syncs_replicas: bool | None = None
        self.in_flight: list[Reduction] = []
        self.launched, self.deferred = list[Launch](), list[Launch]()
        self.fresh_held: list[tuple[Unit, Gradients]] = []
        self.open_launch: Launch | None = None
        self.summed: set[ShardedParam] = set()

    def launch(self, unit: Unit, fresh: Gradients) -> None:
        """Reduce ``fresh`` and the unit's gradients of earlier backwards.  Raises: DesyncError, TransportError."""
        # First advance what was launched before: it frees the inputs of reductions, of which few may be allocated at once.
        in_flight = self.in_flight
        while in_flight and self._is_next_due(in_flight[0]):
            self.advance(in_flight.pop(0))
        # ``gradients`` are what is still to be sent, ``params`` what ranks compare: all that this unit reduces.
        launch, self.open_launch = self.open_launch or self._new_launch(unit, fresh), None
        gradients, sent = fresh, launch.params if launch.reductions else frozenset[ShardedParam]()
        if launch.held:
            gradients = add_gradients({p: value for p, value in launch.held.items() if p not in sent}, fresh)
        params = sent.union(launch.held, fresh)
        if self._exec_order.uncompared or params not in self._exec_order.agreed:
            self._compare(unit, params)
        if listeners:
            begin(self._exec_order.track.name, "reduce", unit.name)
        if buckets := () if len(self._exec_order.units) > 1 else self._split_of(unit):
            self._send_parts(launch, buckets, gradients)
        else:
            self._send(launch, gradients)
        if listeners:
            unit.emit(Op.REDUCE, sum(each.staging_bytes for each in launch.reductions))

    def _new_launch(self, unit: Unit, params: Iterable[ShardedParam]) -> Launch:
        """Return a new launch of ``unit``, with its gradients of earlier backwards; the partial sums of ``params`` alone."""
        earlier, syncs_replicas = unit.earlier, self.syncs_replicas
        held, partial = earlier.take(params) if earlier.held or earlier.partial else _NONE
        launch = Launch(unit, unit.policy.syncs_replicas if syncs_replicas is None else syncs_replicas, held, partial)
        # Before anything is sent: whatever raises from here on, ``cancel`` finds it and gives back what was taken.
        self.launched.append(launch)
        return launch

    def _compare(self, unit: Unit, params: frozenset[ShardedParam]) -> None:
        """Compare with the other ranks what was not compared yet.  Raises: DesyncError if they differ."""
        if self._exec_order.uncompared:
            self._exec_order.compare_deviation()
        # A set, since the order in which unsynced gradients arrived may differ between ranks.
        if params not in self._exec_order.agreed:
            self._exec_order.agree_on_gradients(unit, params)

    def _send(self, launch: Launch, gradients: Gradients) -> None:
        """Launch the reductions of ``gradients``, those of large ones apart."""
        apart = not launch.unit.memory.is_collective and self._is_all_reduced(launch.unit)
        try:
            self.in_flight += launch_reductions(launch, gradients, apart)
        except RuntimeError as error:
            self._exec_order.explain(error, f"gradients of unit '{launch.unit.name}'")

    # ---- buckets of a unit that is alone: they are launched while its backward still runs ----

    def early_buckets(self, unit: Unit) -> Buckets | None:
        """Return the buckets of ``unit`` that may be reduced before its backward ends; None if there are none."""
        are_reduced_as_they_come = unit.policy.sync and not unit.policy.reduces_unused and not unit.earlier.partial
        buckets = self._split_of(unit) if are_reduced_as_they_come and unit.held is HELD else ()
        return Buckets(buckets, unit.backward.arrived) if buckets else None

    def launch_early(self, unit: Unit, buckets: Buckets) -> None:
        """Reduce the buckets that are complete.  Raises: the same as :meth:`launch`."""
        if self.open_launch is None:
            self._compare(unit, frozenset([param for param in unit.params if param.sharded.requires_grad]))
            self.open_launch = self._new_launch(unit, ())
        if listeners:
            begin(self._exec_order.track.name, "reduce", unit.name)
        complete, held = list(buckets.take()), self.open_launch.held
        params = [unit.params[ordinal] for bucket in complete for ordinal in bucket]
        gradients = unit.take_gradients(params)
        if held:
            gradients = add_gradients({param: held[param] for param in params if param in held}, gradients)
        self._send_parts(self.open_launch, complete, gradients)
        if listeners:
            end(self._exec_order.track.name, "reduce", unit.name)

    def _split_of(self, unit: Unit) -> tuple[tuple[int, ...], ...]:
        """Return the buckets of ``unit``, which is alone, if it has several."""
        if not self._is_all_reduced(unit):
            return ()
        made_from = unit.memory.packs.count, [param.sharded.requires_grad for param in unit.params]
        if unit.reduction.split[0] != made_from:
            unit.reduction.split = made_from, split(unit)
        found = unit.reduction.split[1]
        return found if len(found) > 1 else ()

    def _send_parts(self, launch: Launch, buckets: Iterable[tuple[int, ...]], gradients: Gradients) -> None:
        for bucket in buckets:
            params = [launch.unit.params[ordinal] for ordinal in bucket]
            self._send(launch, {param: gradients.pop(param) for param in params if param in gradients})

    def _is_all_reduced(self, unit: Unit) -> bool:
        """Return True if gradients of ``unit`` take one all-reduce and nothing else."""
        if not is_summed(unit) or unit.settings.all_reduce_hook is not None:
            return False
        return unit.policy.syncs_replicas if self.syncs_replicas is None else self.syncs_replicas

    # ---- waiting ----

    def _is_next_due(self, reduction: Reduction) -> bool:
        # A reduction with a next stage must not depend on whether its reduce-scatter happens to be done: if all ranks leave
        # this backward by an exception, they must have launched the same collectives, or some would hang.
        is_full = len(self.in_flight) >= self.max_inputs
        if reduction.has_next:
            return is_full
        return (is_full and sum(map(_HOLDS_INPUT, self.in_flight)) >= self.max_inputs) or reduction.is_due

    def advance(self, reduction: Reduction, whole: bool = False) -> None:
        """Wait for the next stage of ``reduction``; for all stages if ``whole``."""
        name = reduction.unit.name
        if listeners:
            begin(self._exec_order.track.name, "wait for gradients", name)
        try:
            if whole:
                reduction.finish()
            else:
                reduction.advance()
        except RuntimeError as error:
            self._exec_order.explain(error, f"gradients of unit '{name}'")
        if early_readers and reduction.is_over and not self._comm_ctx.streams.are_concurrent:
            reduction.show()
        if listeners:
            end(self._exec_order.track.name, "wait for gradients", name)

    # ---- the end of a backward; until then other ranks may read this rank's gradients ----

    def wait(self) -> None:
        """Wait for all reductions, pending ones of earlier backwards included."""
        launched = (*self.deferred, *self.launched)
        for reduction in [each for launch in launched for each in launch.reductions if not each.is_over]:
            self.advance(reduction, whole=True)
        streams = self._comm_ctx.streams
        if streams.are_concurrent:
            streams.current_waits_for_reductions()
            streams.host_waits_for_copies()

    def commit(self) -> tuple[list[ShardedParam], tuple[bool, BaseException | None]]:
        """Set the gradients of this backward and of pending ones.

        Returns: the parameters that received any; whether these have post-accumulate-grad hooks of users, and the exception of
            a gradient hook of users.
        """
        self.defer()
        launched, self.deferred = self.deferred, []
        for launch in launched:
            if (sums := launch.unit.settings.sums) is not None:
                self.summed |= launch.params
                if not sums.is_last:
                    launch.unused = {*launch.params}  # only whole sums are set, and hooks see them
        lots = [(launch, each) for launch in launched for each in launch.reductions]
        params = [param for launch, each in lots for param in each.params if param not in launch.unused]
        # Asked once for all parameters: most programs have no hook, and each question costs as much as setting a gradient.
        is_hooked, is_followed = torch_private.have_gradient_hooks([param.sharded for param in params])
        failed: BaseException | None = None
        for launch, reduction in lots:
            if early_readers:
                reduction.show()
            try:
                error = reduction.set_gradients(is_hooked, launch)
            except Exception as cause:  # gradients are added in place: what came before cannot be taken back
                text = "and may have this backward's gradients for some parameters only: zero_grad(), and run the step again"
                raise StateError(f".grad could not be set ({type(cause).__name__}: {cause}), {text}") from cause
            failed = failed or error
        for launch in launched:
            launch.unit.reduction.num_commits += 1  # an optimizer changes the shards next: the unit is gathered again
            if listeners:
                launch.unit.emit(Op.COMMIT)
        return params, (is_followed, failed)

    def defer(self) -> None:
        """Leave what was launched to a later commit, and to units what a later backward reduces.

        That is unsynced gradients, and sums over the shard axis alone.  No other rank reads inputs of reductions any more.
        """
        self.open_launch = None
        self.in_flight.clear()
        for unit, gradients in self.fresh_held:
            unit.earlier.held = add_gradients(unit.earlier.held, gradients)
        self.fresh_held.clear()
        partial = [(launch, each) for launch in self.launched for each in launch.reductions if each.is_partial]
        if partial:
            self._comm_ctx.streams.current_waits_for_reductions()
        for launch, each in partial:
            launch.reductions.remove(each)
            left = {param: value for param, value in each.windows().items() if param not in launch.unused}
            earlier = launch.unit.earlier  # what it has is in these sums, unless a backward has reduced a unit twice
            earlier.partial = add_gradients(earlier.partial, left)
        self.deferred += self.launched
        self.launched = []

    # ---- gradients that wait for a later backward ----

    def show_waiting(self, units: Sequence[Unit]) -> None:
        """Show in ``.grad`` of shards that their gradients wait for a later backward."""
        # Only what a user could take for a gradient is hidden: of most units nothing waits, and their ``.grad`` is as the
        # commit left it.
        deferred = {param for launch in self.deferred for param in launch.params - launch.unused}
        for unit in units:
            if deferred or self.summed or unit.earlier.held or unit.earlier.partial:
                unit.earlier.show(deferred.intersection(unit.params), self.summed.intersection(unit.params))

    def withdraw_waiting(self, units: Sequence[Unit]) -> None:
        """Undo :meth:`show_waiting`, and drop the gradients that user code has cleared since.

        Raises: StateError if ``Reproducible`` sums one of these: other ranks have other microbatches behind them.
        """
        for unit in (each for each in units if each.earlier.waiting):
            cleared = unit.earlier.withdraw()
            for launch in self.deferred:
                launch.unused = launch.unused | cleared
            for param in cleared & self.summed:
                raise StateError(is_summed_later(param.fqn))

    # ---- failure ----

    def cancel(self) -> None:
        """Cancel the reductions of a backward that raised, and return to units the earlier gradients that it had taken."""
        launched, self.launched = self.launched, []
        self.open_launch = None
        self.fresh_held.clear()
        self.in_flight.clear()
        if launched:
            self._comm_ctx.streams.current_waits_for_results()
        for launch in reversed(launched):
            for reduction in launch.reductions:
                reduction.cancel()
            launch.unit.earlier.put_back(launch.held, launch.partial)
