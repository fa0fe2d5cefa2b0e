"""The reductions of an engine: from the end of each unit's backward to ``.grad``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from shardwise import torch_private
from shardwise.collectives.streams import Stream, back_at
from shardwise.consistency.failure_report import concerns_others
from shardwise.errors import StateError
from shardwise.fsdp.comm_context import CommContext
from shardwise.fsdp.execution_order import ExecOrderTracker
from shardwise.fsdp.gradients import (
    Entry,
    Launch,
    Reduction,
    early_readers,
    is_summed,
    launch_large,
    launch_reductions,
    split,
)
from shardwise.fsdp.local_gradients import Gradients, add_gradients, take_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import FULL, Unit
from shardwise.fsdp.waiting_gradients import is_summed_later
from shardwise.observe import Op, begin, end, listeners, unit_in_words
from shardwise.plan.schedule import Buckets, UnitBucket

# ---- Split backwards of pipeline schedules: of the inputs first, of the weights later, by calls of the schedule.


def hold_assigned(units: Iterable[Unit]) -> None:
    """Prepare for one more backward without sync; call it outside of forward and backward.

    Gradients that a schedule has computed separately and assigned to full parameters are accumulated, so that sums follow the
    order of microbatches.  Units whose weight gradients are computed separately are unsharded before that backward begins,
    since the schedule reads their parameters first.
    """
    for unit in units:
        has_assigned = any(param.full is not None and param.full.grad is not None for param in unit.params)
        if unit.state is FULL and has_assigned and (assigned := unit.take_gradients()):
            unit.earlier.hold(assigned)
        if unit.backward.owes_weights and not unit.diverges:  # then other ranks would not know of this gather
            unit.wait_with_tied(None)
            unit.keep()


def check_weights(unit: Unit) -> None:
    """Raise StateError if gradients of the unit's weights are lost, since it was sharded when backward began."""
    if not unit.backward.has_lost_weights:
        return
    unit.backward.has_lost_weights = False
    raise StateError(
        f"{unit_in_words(unit.name)} was sharded when a backward of its inputs alone began, so the gradients of its weights "
        "are lost. A schedule that computes them separately (zero bubble) needs stages sharded with reshard_after_forward=False"
    )


_HOLDS_INPUT = operator.attrgetter("holds_input")
_NONE: tuple[Gradients, Gradients] = {}, {}  # no code writes to what a launch has taken


def _gradients_of(units: Iterable[Unit]) -> str:
    """Return the gradients of ``units``, for messages."""
    names = [f"'{unit.name}'" for unit in units]
    if len(names) == 1:
        return f"gradients of unit {names[0]}"
    return f"gradients of units {', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}"


class Reductions:
    """The reductions of one engine: launched as units end, then committed together, or left pending for a later backward.

    No ``.grad`` changes before :meth:`commit`, so a backward that raises does not change gradients of earlier microbatches.

    Small gradients of several units share a bucket, if nothing is sharded; a unit that is alone is split into buckets.  Every
    rank launches them in the same order, which the plan says (:class:`Buckets`): a backend pairs collectives by their order.

    Attributes:
        max_inputs: how many reduce-scatter inputs may be allocated at once.
        syncs_replicas: where ranks may take different ways, whether all reduce over replicas in this backward; None: as the
            policy of each unit says.
        launched, deferred: reductions of this backward, and pending ones of earlier backwards.
        early: the launch of a unit whose backward still runs.
        is_followed: parameters of the last commit have post-accumulate-grad hooks of users.
        failed_hook: the exception of a user's gradient hook in the last commit.
        summed: parameters whose gradients ``Reproducible`` sums, once they were reduced in its loop over microbatches.
    """

    def __init__(self, exec_order: ExecOrderTracker, comm_ctx: CommContext) -> None:
        self._exec_order = exec_order
        self._comm_ctx = comm_ctx
        self.max_inputs = 1
        self.syncs_replicas: bool | None = None
        self._in_flight: list[Reduction] = []
        self.launched: list[Launch] = []
        self.deferred: list[Launch] = []
        self._fresh_held: list[tuple[Unit, Gradients]] = []
        self.early: Launch | None = None
        self.is_followed = False
        self.failed_hook: BaseException | None = None
        self.summed: set[ShardedParam] = set()
        # Of this backward: numbers of units that it has ended, buckets once one is needed, and what these contain so far, with
        # the stream that computed it (None without streams).
        self._ended: set[int] = set()
        self._buckets: Buckets | None = None
        self._entries: dict[int, tuple[Entry, Stream | None]] = {}
        # The buckets of a single unit, and what they depend on.
        self._split: tuple[object, tuple[UnitBucket, ...]] = (None, ())

    def hold(self, unit: Unit, gradients: Gradients) -> None:
        """Accumulate unsynced ``gradients`` of ``unit``; they count once this backward ends without an exception."""
        self._fresh_held.append((unit, gradients))
        self.skip(unit)

    def skip(self, unit: Unit) -> None:
        """Launch the buckets that waited for ``unit``, whose backward has ended.

        Where ranks may diverge, other ranks may have gradients of it: then only its reduction ends it.
        """
        if not self._exec_order.diverges:
            self._ended.add(unit.number)  # also a unit without a gradient ends: a bucket waits for all of its units
            if self._buckets is not None:
                self._send_buckets(self._buckets.take())

    def launch(self, unit: Unit, fresh: Gradients) -> None:
        """Reduce ``fresh`` and the unit's gradients of earlier backwards.  Raises: DesyncError, TransportError."""
        # First advance what was launched before: it frees the inputs of reductions, of which few may be allocated at once.
        in_flight = self._in_flight
        while in_flight and self._is_next_due(in_flight[0]):
            self._advance(in_flight.pop(0))
        # ``gradients`` are what is still to be sent, ``params`` what ranks compare: all that this unit reduces.
        launch, self.early = self.early, None
        gradients, params = fresh, frozenset(fresh)
        if launch is not None:
            sent = launch.params
            params |= sent.union(launch.held)
            gradients = add_gradients({p: value for p, value in launch.held.items() if p not in sent}, fresh)
        else:
            launch = self._new_launch(unit, fresh)
            if launch.held:
                gradients = add_gradients(launch.held, fresh)
                params = frozenset(gradients)
        if self._exec_order.uncompared or params not in self._exec_order.agreed:
            self._compare(unit, params)
        if listeners:
            begin(self._exec_order.track.name, "reduce", unit.name)
        groups = unit.groups
        if not groups or groups[0].is_collective or not self._may_share(unit):
            for group in groups:
                mine = gradients
                if len(groups) > 1:
                    mine = {param: gradient for param, gradient in gradients.items() if param in group.members}
                self._send([(launch, group, mine)])
        elif buckets := self._split_of(unit):
            self._send_parts(launch, buckets, gradients)
        else:
            self._share(launch, gradients)
        self._ended.add(unit.number)
        if self._buckets is not None:
            self._send_buckets(self._buckets.take())
        if listeners:
            unit.emit(Op.REDUCE, sum(each.staging_bytes for each in launch.reductions))

    def _new_launch(self, unit: Unit, params: Iterable[ShardedParam]) -> Launch:
        """Return a new launch of ``unit``, with its gradients of earlier backwards; the partial sums of ``params`` alone."""
        earlier, syncs_replicas = unit.earlier, self.syncs_replicas
        held, partial = earlier.take(params) if earlier.held or earlier.partial else _NONE
        launch = Launch(unit, unit.policy.syncs_replicas if syncs_replicas is None else syncs_replicas, held, partial)
        self.launched.append(launch)
        return launch

    def _compare(self, unit: Unit, params: frozenset[ShardedParam]) -> None:
        """Compare with the other ranks what was not compared yet.  Raises: DesyncError if they differ."""
        if self._exec_order.uncompared:
            self._exec_order.compare_deviation()
        # A set, since the order in which unsynced gradients arrived may differ between ranks.
        if params not in self._exec_order.agreed:
            self._exec_order.agree_on_gradients(unit, params)

    def _send(self, entries: Sequence[Entry], large: bool = False) -> None:
        """Launch the reductions of ``entries``, or those of the large gradients of the only one."""
        try:
            launched = launch_large(*entries[0]) if large else launch_reductions(entries)
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._exec_order.explain(error, _gradients_of([launch.unit for launch, _, _ in entries])) from error
        entries[0][0].reductions += launched
        self._in_flight += launched

    # ---- buckets of a unit that is alone: they are launched while its backward still runs ----

    def early_buckets(self, unit: Unit) -> Buckets | None:
        """Return the buckets of ``unit`` that may be reduced before its backward ends; None if there are none."""
        are_reduced_as_they_come = unit.policy.sync and not unit.policy.reduces_unused and not unit.earlier.partial
        if not (are_reduced_as_they_come and unit.state is FULL and (buckets := self._split_of(unit))):
            return None
        return Buckets(buckets, unit.backward.arrived)

    def launch_early(self, unit: Unit, early: Buckets) -> None:
        """Reduce the buckets that are complete.  Raises: the same as :meth:`launch`."""
        group = unit.groups[0]
        if self.early is None:
            self._compare(unit, frozenset([param for param in group.params if param.sharded.requires_grad]))
            self.early = self._new_launch(unit, ())
        if listeners:
            begin(self._exec_order.track.name, "reduce", unit.name)
        buckets, held = list(early.take()), self.early.held
        params = [group.params[ordinal] for bucket in buckets for ordinal in bucket.units]
        gradients = take_gradients(group, params)
        if held:
            gradients = add_gradients({param: held[param] for param in params if param in held}, gradients)
        self._send_parts(self.early, buckets, gradients)
        if listeners:
            end(self._exec_order.track.name, "reduce", unit.name)

    def _split_of(self, unit: Unit) -> tuple[UnitBucket, ...]:
        """Return the buckets of ``unit`` if it is alone and has several."""
        if len(self._exec_order.units) != 1 or not self._may_share(unit):
            return ()
        group = unit.groups[0]
        made_from = group.num_packs, [param.sharded.requires_grad for param in group.params]
        if self._split[0] != made_from:
            self._split = made_from, split(group)
        return self._split[1] if len(self._split[1]) > 1 else ()

    def _send_parts(self, launch: Launch, buckets: Iterable[UnitBucket], gradients: Gradients) -> None:
        group = launch.unit.groups[0]
        for bucket in buckets:
            params = [group.params[ordinal] for ordinal in bucket.units]
            own = {param: gradients.pop(param) for param in params if param in gradients}
            self._send([(launch, group, own)], large=True)
            if own:
                self._send([(launch, group, own)])

    # ---- buckets that several units share ----

    def _may_share(self, unit: Unit) -> bool:
        """Return True if gradients of ``unit`` take one all-reduce and nothing else."""
        if len(unit.groups) != 1 or not is_summed(unit.groups[0]) or unit.all_reduce_hook is not None:
            return False
        return unit.policy.syncs_replicas if self.syncs_replicas is None else self.syncs_replicas

    def _share(self, launch: Launch, gradients: Gradients) -> None:
        """Reduce large gradients now and add the others to the unit's bucket; without a bucket, reduce them now, too."""
        if self._buckets is None:
            self._buckets = Buckets(self._exec_order.buckets(), self._ended)
        number, entry = launch.unit.number, (launch, launch.unit.groups[0], gradients)
        self._send([entry], large=True)
        if not gradients:
            return
        bucket, stream = self._buckets.of(number), self._comm_ctx.streams.replicas.here()
        # A bucket is packed, and its memory freed, on the stream of its entries.  Gradients of another stream are not ordered
        # with that, so they are reduced separately.
        if (
            bucket is None
            or number in self._entries
            or any(unit in self._entries and self._entries[unit][1] != stream for unit in bucket.units)
        ):
            self._send([entry])
        else:
            self._entries[number] = entry, stream

    def _send_buckets(self, buckets: Iterable[UnitBucket]) -> None:
        for bucket in buckets:
            found = [self._entries.pop(unit) for unit in bucket.units if unit in self._entries]
            if found:
                with back_at(found[0][1]):
                    self._send([entry for entry, _ in found])

    # ---- waiting ----

    def _is_next_due(self, reduction: Reduction) -> bool:
        # A reduction with a next stage must not depend on whether its reduce-scatter happens to be done: if all ranks leave
        # this backward by an exception, they must have launched the same collectives, or some would hang.
        is_full = len(self._in_flight) >= self.max_inputs
        if reduction.has_next:
            return is_full
        if is_full and sum(map(_HOLDS_INPUT, self._in_flight)) >= self.max_inputs:
            return True
        return reduction.is_due

    def _advance(self, reduction: Reduction, whole: bool = False) -> None:
        """Wait for the next stage of ``reduction``; for all stages if ``whole``."""
        name = reduction.units[0].name
        if listeners:
            begin(self._exec_order.track.name, "wait for gradients", name)
        try:
            if whole:
                reduction.finish()
            else:
                reduction.advance()
        except RuntimeError as error:
            raise self._exec_order.explain(error, _gradients_of(reduction.units)) from error
        if early_readers and reduction.is_over and not self._comm_ctx.streams.are_concurrent:
            reduction.show()
        if listeners:
            end(self._exec_order.track.name, "wait for gradients", name)

    # ---- the end of a backward; until then other ranks may read this rank's gradients ----

    def launch_open_buckets(self) -> None:
        """Launch the open buckets: they wait for units that produced no gradient."""
        if self._buckets is not None:
            self._send_buckets(self._buckets.rest())
        self._buckets = None
        self._ended.clear()

    def note_end(self, unused: set[ShardedParam], factor: float) -> None:
        """Leave ``.grad`` of ``unused`` as it is, since no rank has a gradient; multiply the other gradients by ``factor``."""
        for launch in self.launched:
            launch.unused, launch.factor = unused, factor

    def wait_for_inputs(self) -> None:
        """Wait until no other rank reads gradients of this rank."""
        self.launch_open_buckets()
        for reduction in self._in_flight:
            self._advance(reduction)

    def defer(self) -> None:
        """Leave all launched reductions to a later backward, which commits them."""
        if self._partial():
            self._comm_ctx.streams.current_waits_for_reductions()
        self._leave()

    def wait(self) -> None:
        """Wait for all reductions, pending ones of earlier backwards included."""
        self.launch_open_buckets()
        for launch in (*self.deferred, *self.launched):
            for reduction in launch.reductions:
                if not reduction.is_over:
                    self._advance(reduction, whole=True)
        streams = self._comm_ctx.streams
        if streams.are_concurrent:
            streams.current_waits_for_reductions()
            streams.host_waits_for_copies()

    def commit(self) -> list[ShardedParam]:
        """Set the gradients of this backward and of pending ones; return the parameters that received any."""
        self._leave()
        launched, self.deferred = self.deferred, []
        for launch in launched:
            for group in launch.unit.groups[:1]:
                if group.sums is not None and (is_last := group.sums.is_last) is not None:
                    self.summed |= launch.params
                    if not is_last:
                        launch.unused = {*launch.params}  # only whole sums are set, and hooks see them
        params: list[ShardedParam] = []
        for launch in launched:
            for lot in [reduction.params for reduction in launch.reductions]:
                params += [param for param in lot if param not in launch.unused] if launch.unused else lot
        is_hooked, self.is_followed = torch_private.have_gradient_hooks([param.sharded for param in params])
        self.failed_hook = None
        for launch in launched:
            for reduction in launch.reductions:
                if early_readers:
                    reduction.show()
                failed = reduction.set_gradients(is_hooked, launch)
                self.failed_hook = self.failed_hook or failed
            launch.unit.num_commits += 1  # an optimizer changes the shards next: the unit is gathered again
            if listeners:
                launch.unit.emit(Op.COMMIT)
        return params

    def _leave(self) -> None:
        """Leave to units what a later backward reduces: unsynced gradients, and sums over the shard axis alone."""
        self.early = None
        self._in_flight.clear()
        for unit, gradients in self._fresh_held:
            unit.earlier.hold(gradients)
        self._fresh_held.clear()
        for launch, each in self._partial():
            launch.reductions.remove(each)
            left = {param: value for param, value in each.windows().items() if param not in launch.unused}
            launch.unit.earlier.keep_partial(left)
        self.deferred += self.launched
        self.launched = []

    def _partial(self) -> list[tuple[Launch, Reduction]]:
        return [(launch, each) for launch in self.launched for each in launch.reductions if each.is_partial]

    # ---- gradients that wait for a later backward ----

    def show_waiting(self, units: Sequence[Unit]) -> None:
        """Show in ``.grad`` of shards that their gradients wait for a later backward."""
        # The launch of one unit also reduces parameters of other units that share its bucket.
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
        self.early = self._buckets = None
        for each in (self._fresh_held, self._in_flight, self._ended, self._entries):
            each.clear()
        if launched:
            self._comm_ctx.streams.current_waits_for_results()
        for launch in reversed(launched):
            for reduction in launch.reductions:
                reduction.cancel()
            launch.unit.earlier.put_back(launch.held, launch.partial)

    def forget_deferred(self) -> None:
        """Drop the pending reductions of earlier backwards."""
        if self.deferred:
            self._comm_ctx.streams.current_waits_for_results()
        self.deferred = []
