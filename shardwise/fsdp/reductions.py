"""The reductions of an engine: from the end of each unit's backward to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from shardwise import torch_private
from shardwise.collectives.streams import Stream, back_at
from shardwise.consistency.failure_report import concerns_others
from shardwise.errors import StateError
from shardwise.fsdp.execution_order import ExecOrderTracker
from shardwise.fsdp.gradients import (
    Brought,
    EarlyBuckets,
    Reduction,
    ReductionTerms,
    launch_large,
    launch_reductions,
    shares,
    split,
)
from shardwise.fsdp.local_gradients import Gradients, add_gradients, take_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.transports import CommContext
from shardwise.fsdp.unit import Unit
from shardwise.observe import Op, begin, end, listeners, unit_in_words
from shardwise.plan.schedule import AgreedSchedule, UnitBucket, UnitPolicy

# ---- Split backwards of pipeline schedules: of the inputs first, of the weights later, by calls of the schedule.


def hold_assigned(units: Iterable[Unit]) -> None:
    """Prepare for one more backward without sync; call it outside of forward and backward.

    Gradients that a schedule has computed separately and assigned to full parameters are accumulated, so that sums follow the
    order of microbatches.  Units whose weight gradients are computed separately are unsharded before that backward begins,
    since the schedule reads their parameters first.
    """
    for unit in units:
        has_assigned = any(param.full is not None and param.full.grad is not None for param in unit.params)
        if unit.is_full and has_assigned and (assigned := unit.take_gradients()):
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


# ---- The buckets of a running backward: units add gradients, and complete buckets are launched in the same order on every
# rank.

T = TypeVar("T")


@dataclass(slots=True)
class _OpenBucket(Generic[T]):
    awaited: set[int]
    order: tuple[int, ...]
    brought: dict[int, T] = field(default_factory=dict[int, T])
    is_sent: bool = False

    def send(self) -> list[T]:
        self.is_sent = True
        brought, self.brought = self.brought, {}
        return [brought[unit] for unit in self.order if unit in brought]


class OpenBuckets(Generic[T]):
    """The contents of the buckets of one backward, by unit number.

    A bucket is complete when backward has ended all units that it waits for.  It is launched after the buckets before it, so
    ranks on which units end in different orders launch the same buckets in the same order.

    Attributes:
        is_planned: :meth:`plan` was called.
        ended: numbers of units whose backward has ended.
        unsent: open buckets, in the order of their launches.
    """

    def __init__(self) -> None:
        self.is_planned = False
        self.ended: set[int] = set()
        self.unsent: list[_OpenBucket[T]] = []
        self._of: dict[int, _OpenBucket[T]] = {}

    def plan(self, buckets: Sequence[UnitBucket]) -> None:
        """Open ``buckets``, each for the units that share it."""
        self.is_planned = True
        for bucket in buckets:
            made = _OpenBucket[T]({*bucket.awaited} - self.ended, bucket.units)
            self.unsent.append(made)
            self._of.update(dict.fromkeys(bucket.units, made))

    def bring(self, unit: int, brought: T) -> bool:
        """Add ``brought`` to the bucket of ``unit``.

        Returns: False if the unit has no bucket, its bucket was launched, or it has added something before; then the caller
        reduces ``brought`` separately.
        """
        bucket = self._of.get(unit)
        if bucket is None or bucket.is_sent or unit in bucket.brought:
            return False
        bucket.brought[unit] = brought
        return True

    def first_entry(self, unit: int) -> T | None:
        """Return one of the entries that are in the bucket of ``unit`` already, or None."""
        bucket = self._of.get(unit)
        return next(iter(bucket.brought.values()), None) if bucket is not None else None

    def end(self, unit: int) -> list[list[T]]:
        """Record that the backward of ``unit`` has ended; return the contents of the buckets to launch now."""
        self.ended.add(unit)
        bucket = self._of.get(unit)
        if bucket is not None:
            bucket.awaited.discard(unit)
        ready: list[list[T]] = []
        while self.unsent and not self.unsent[0].awaited:
            ready.append(self.unsent.pop(0).send())
        return [each for each in ready if each]

    def rest(self) -> list[list[T]]:
        """Return the contents of all open buckets, at the end of backward."""
        unsent, self.unsent = self.unsent, []
        return [brought for bucket in unsent if (brought := bucket.send())]


@dataclass(slots=True)
class _Launch:
    """Uncommitted reductions of a unit, and the earlier gradients that they include.

    Attributes:
        held, partial: gradients of earlier backwards that were taken from the unit.
        absorbed: pending launches of earlier backwards whose partial sums were taken, with the parameters of these sums.
        taken: parameters whose partial sums a later launch has taken from this one.
        others: other units whose gradients are in the same bucket.
        unused: parameters that have a gradient on no rank.
        factor: the gradients are multiplied by it.
    """

    unit: Unit
    held: Gradients
    partial: Gradients
    reductions: list[Reduction] = field(default_factory=list[Reduction])
    absorbed: list[tuple[_Launch, set[ShardedParam]]] = field(default_factory=list[tuple["_Launch", set[ShardedParam]]])
    taken: set[ShardedParam] = field(default_factory=set[ShardedParam])
    others: list[Unit] = field(default_factory=list["Unit"])
    unused: set[ShardedParam] = field(default_factory=set[ShardedParam])
    factor: float = 1.0

    @property
    def params(self) -> frozenset[ShardedParam]:
        """The parameters whose gradients are being reduced."""
        return frozenset([param for reduction in self.reductions for param in reduction.params])

    @property
    def whose(self) -> str:
        """The units, for messages."""
        names = [f"'{unit.name}'" for unit in (self.unit, *self.others)]
        if len(names) == 1:
            return f"gradients of unit {names[0]}"
        return f"gradients of units {', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}"


# The entry of a launch in a bucket, and the stream that computed its gradients; None without streams.
_InBucket = tuple[_Launch, Brought, Stream | None]


class Reductions:
    """The reductions of one engine: launched as units end, then committed together, or left pending for a later backward.

    No ``.grad`` changes before :meth:`commit`, so a backward that raises does not change gradients of earlier microbatches.

    Attributes:
        max_inputs: how many reduce-scatter inputs may be allocated at once.
        schedule: the schedule that ranks share; None unless they may take different ways.
        syncs_replicas: with a schedule, whether all ranks reduce over replicas in this backward.
        reach: ``reach(unit, gradients)`` is called before a reduction that is not next in the schedule, or not of all
            gradients.  It adds zeros to ``gradients`` and returns True, or keeps them for later and returns False.
        is_followed: parameters of the last commit have post-accumulate-grad hooks of users.
        failed_hook: the exception of a user's gradient hook in the last commit.
    """

    def __init__(self, exec_order: ExecOrderTracker, comm_ctx: CommContext) -> None:
        self._exec_order = exec_order
        self._comm_ctx = comm_ctx
        self.max_inputs = 1
        self._in_flight: list[Reduction] = []
        self._launched: list[_Launch] = []
        self._deferred: list[_Launch] = []
        self._fresh_held: list[tuple[Unit, Gradients]] = []
        self.schedule: AgreedSchedule | None = None
        self.syncs_replicas = True
        self._agreed: dict[
            UnitPolicy, UnitPolicy
        ] = {}  # by the policy on this rank, that with ``syncs_replicas`` of all
        self.reach: Callable[[Unit, Gradients], bool] = lambda _, __: True
        self.is_followed = False
        self.failed_hook: BaseException | None = None
        self._buckets = OpenBuckets[_InBucket]()
        self._split: tuple[object, EarlyBuckets] | None = None  # buckets of a single unit, and the key they depend on
        self._early: _Launch | None = None  # the launch of a unit whose backward still runs

    @property
    def has_launched(self) -> bool:
        """True if this backward has launched reductions."""
        return bool(self._launched)

    @property
    def has_deferred(self) -> bool:
        """True if reductions of earlier backwards are pending."""
        return bool(self._deferred)

    def have_launched(self, unit: Unit, since_commit: bool) -> bool:
        """Return True if reductions of ``unit`` were launched in this backward, or since the last commit."""
        since = [*self._deferred, *self._launched] if since_commit else self._launched
        return any(launch.unit is unit for launch in since)

    def hold(self, unit: Unit, gradients: Gradients) -> None:
        """Accumulate unsynced ``gradients`` of ``unit``; they count once this backward ends without an exception."""
        self._fresh_held.append((unit, gradients))
        self.skip(unit)

    def skip(self, unit: Unit) -> None:
        """Launch the buckets that waited for ``unit``, whose backward has ended.

        Where ranks may diverge, other ranks may have gradients of it: then only its reduction ends it.
        """
        if not self._exec_order.diverges:
            self._end_in_buckets(unit)

    def _end_in_buckets(self, unit: Unit) -> None:
        number, buckets = self._exec_order.numbers.get(unit, -1), self._buckets
        if buckets.unsent:
            self._send(buckets.end(number))
        else:
            buckets.ended.add(number)

    def launch(self, unit: Unit, fresh: Gradients) -> None:
        """Reduce ``fresh`` and the unit's gradients of earlier backwards.  Raises: DesyncError, TransportError."""
        schedule = self.schedule
        if schedule is not None:
            if fresh and schedule.reductions[schedule.cursor] == unit.number and len(fresh) == unit.backward.counted[0]:
                schedule.cursor += 1
                schedule.whole.append(unit.number)
            elif not self.reach(unit, fresh):
                return
        in_flight = self._in_flight
        while in_flight and self._is_next_due(in_flight[0]):
            self._advance(in_flight.pop(0))
        if self._exec_order.uncompared:
            self._exec_order.compare_deviation()
        earlier = unit.earlier
        launch, self._early = self._early, None
        sent, held = (frozenset[ShardedParam](), earlier.held) if launch is None else (launch.params, launch.held)
        # A set, since the order in which unsynced gradients arrived may differ between ranks.
        params = frozenset((*held, *fresh, *sent)) if held or sent else frozenset(fresh)
        if params not in self._exec_order.agreed:
            self._exec_order.agree_on_gradients(unit, params)
        if listeners:
            begin(self._exec_order.log.track.name, "reduce", unit.name)
        if launch is None:
            launch = _Launch(unit, *(earlier.take(fresh) if earlier.held or earlier.partial else ({}, {})))
            self._launched.append(launch)
        before = len(launch.reductions)
        held = {param: gradient for param, gradient in held.items() if param not in sent} if sent else launch.held
        gradients = add_gradients(held, fresh) if held else fresh
        added = self._absorb(launch, gradients) if self._deferred else launch.partial
        try:
            self._reduce(launch, gradients, added)
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._exec_order.explain(error, launch.whose) from error
        self._end_in_buckets(unit)
        unit.note(Op.REDUCE, lambda: (sum(r.num_bytes for r in launch.reductions if r.is_collective), False))
        self._in_flight += launch.reductions[before:]
        if listeners:
            end("reduce", unit.name, sum(each.num_bytes for each in launch.reductions if each.is_collective))

    def _reduce(self, launch: _Launch, gradients: Gradients, added: Gradients) -> None:
        unit = launch.unit
        groups = unit.groups
        terms = ReductionTerms(self._agreed_policy(unit), self._comm_ctx.streams, unit.all_reduce_hook)
        if not groups or groups[0].is_collective or not self._may_share(unit):
            for group in groups:
                mine = gradients
                if len(groups) > 1:
                    mine = {param: gradient for param, gradient in gradients.items() if param in group.members}
                launch.reductions += launch_reductions([Brought(group, mine, added, terms)])
        elif (split := self._split_of(unit)) is not None:
            for bucket in split.buckets:
                own = {param: gradients[param] for param in bucket if param in gradients}
                self._reduce_alone(launch, Brought(unit.groups[0], own, added, terms))
        else:
            self._share(launch, Brought(unit.groups[0], dict(gradients), added, terms))

    # ---- buckets of one unit: while its backward still runs ----

    @property
    def has_early(self) -> bool:
        """True while some gradients of a unit are being reduced and its backward still runs."""
        return self._early is not None

    @property
    def early_params(self) -> frozenset[ShardedParam]:
        """The parameters whose gradients are being reduced, of a unit whose backward still runs."""
        return frozenset() if self._early is None else self._early.params

    @property
    def partial_params(self) -> frozenset[ShardedParam]:
        """Parameters with pending sums of earlier backwards over the shard axis."""
        pending = [each for launch in self._deferred for each in launch.reductions if each.is_partial]
        return frozenset([param for each in pending for param in each.params])

    def scale_launched(self, factor: float) -> None:
        """Multiply the gradients of this backward by ``factor``."""
        for launch in self._launched:
            launch.factor = factor

    def note_unused(self, unused: set[ShardedParam]) -> None:
        """Drop what this backward has reduced of ``unused``: zeros, since no rank has a gradient."""
        for launch in self._launched:
            launch.unused = unused

    def early_buckets(self, unit: Unit) -> EarlyBuckets | None:
        """Return the buckets of ``unit`` that may be reduced before its backward ends; None if there are none."""
        are_reduced_as_they_come = unit.policy.sync and not unit.policy.reduces_unused and not unit.earlier.partial
        return self._split_of(unit) if are_reduced_as_they_come and unit.is_full else None

    def launch_early(self, unit: Unit, early: EarlyBuckets) -> None:
        """Reduce the buckets that are complete.  Raises: the same as :meth:`launch`."""
        if self._early is None:
            if self._exec_order.uncompared:
                self._exec_order.compare_deviation()
            if early.params not in self._exec_order.agreed:
                self._exec_order.agree_on_gradients(unit, early.params)
            self._early = _Launch(unit, *unit.earlier.take(()))
            self._launched.append(self._early)
        if listeners:
            begin(self._exec_order.log.track.name, "reduce", unit.name)
        launch, group = self._early, unit.groups[0]
        terms, before = ReductionTerms(self._agreed_policy(unit), self._comm_ctx.streams), len(launch.reductions)
        try:
            for bucket in early.take():
                held = {param: launch.held[param] for param in bucket if param in launch.held} if launch.held else {}
                gradients = add_gradients(held, take_gradients(group, bucket))
                self._reduce_alone(launch, Brought(group, gradients, {}, terms))
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._exec_order.explain(error, launch.whose) from error
        self._in_flight += launch.reductions[before:]
        if listeners:
            end("reduce", unit.name, 0)

    def _split_of(self, unit: Unit) -> EarlyBuckets | None:
        if len(self._exec_order.numbers) != 1 or not self._may_share(unit):
            return None
        group = unit.groups[0]
        dtypes = [group.dtypes.of_reduction(param) for param in group.params[:1]]
        made_from = [*group.params], [param.sharded.requires_grad for param in group.params], dtypes
        if self._split is None or self._split[0] != made_from:
            self._split = made_from, split(group)
        found = self._split[1]
        return found if len(found.buckets) > 1 else None

    def _reduce_alone(self, launch: _Launch, brought: Brought) -> None:
        launch.reductions += launch_large(brought, launch.held)
        if brought.gradients:
            launch.reductions += launch_reductions([brought])

    # ---- buckets: gradients of several units in one all-reduce ----

    def _agreed_policy(self, unit: Unit) -> UnitPolicy:
        """Return the policy of ``unit``; where ranks may diverge, all reduce over the replicas, or none."""
        policy = unit.policy
        if self.schedule is None or policy.syncs_replicas is self.syncs_replicas:
            return policy
        if policy not in self._agreed:
            self._agreed[policy] = replace(policy, syncs_replicas=self.syncs_replicas)
        return self._agreed[policy]

    def _may_share(self, unit: Unit) -> bool:
        """Return True if gradients of ``unit`` take one all-reduce and nothing else."""
        if len(unit.groups) != 1 or not shares(unit.groups[0]):
            return False
        return unit.all_reduce_hook is None and self._agreed_policy(unit).syncs_replicas

    def _share(self, launch: _Launch, brought: Brought) -> None:
        """Reduce large gradients now and add the others to the unit's bucket; without a bucket, reduce them now, too."""
        buckets = self._buckets
        if not buckets.is_planned:
            buckets.plan(self._exec_order.buckets())
        launch.reductions += launch_large(brought, launch.held)
        if not brought.gradients:
            return
        number, stream = self._exec_order.numbers.get(launch.unit, -1), self._comm_ctx.streams.replicas.here()
        first = buckets.first_entry(number)
        # A bucket is packed, and its memory freed, on the stream of its first entry.  Entries of another stream are not ordered
        # with that, so they are reduced separately.
        if (first is not None and first[2] != stream) or not buckets.bring(number, (launch, brought, stream)):
            launch.reductions += launch_reductions([brought])

    def _send(self, ready: Iterable[list[_InBucket]]) -> None:
        """Launch the all-reduces of complete buckets."""
        for bucket in ready:
            launch, _, stream = bucket[0]
            launch.others += [each.unit for each, _, _ in bucket[1:]]
            try:
                with back_at(stream):
                    reductions = launch_reductions([brought for _, brought, _ in bucket])
            except RuntimeError as error:
                if not concerns_others(error):
                    raise
                raise self._exec_order.explain(error, launch.whose) from error
            launch.reductions += reductions
            self._in_flight += reductions

    def _absorb(self, launch: _Launch, gradients: Gradients) -> Gradients:
        """Return the partial sums to add to ``gradients``: the unit's own, and those of pending launches."""
        added = launch.partial
        for earlier in self._deferred:
            if earlier.unit is launch.unit:
                for reduction in earlier.reductions:
                    taken = {p for p in reduction.params if p in gradients and p not in earlier.taken}
                    if reduction.is_partial and taken:
                        self._advance(reduction, earlier)
                        self._comm_ctx.streams.current_waits_for_reductions()
                        windows = reduction.windows()
                        added = add_gradients(added, {param: windows[param] for param in taken})
                        launch.absorbed.append((earlier, taken))
                        earlier.taken |= taken
        return added

    def _is_next_due(self, reduction: Reduction) -> bool:
        # A reduction that launches an all-reduce afterwards must not depend on whether its reduce-scatter happens to be done:
        # if all ranks leave this backward by an exception, they must have launched the same collectives, or some would hang.
        if reduction.awaits_all_reduce:
            return len(self._in_flight) >= self.max_inputs
        if len(self._in_flight) >= self.max_inputs:
            num_inputs = 0
            for each in self._in_flight:
                num_inputs += each.holds_input
            return num_inputs >= self.max_inputs or reduction.is_due
        return reduction.is_due

    def _advance(self, reduction: Reduction, launch: _Launch | None = None) -> None:
        """Wait for the next stage of ``reduction``; for all stages if ``launch`` is given, to which it belongs."""
        name = ""
        if listeners:
            launches = (*self._launched, *self._deferred)
            name = next((each.unit.name for each in launches if reduction in each.reductions), "")
            begin(self._exec_order.log.track.name, "wait for gradients", name)
        try:
            if launch is None:
                reduction.advance()
            else:
                reduction.finish()
        except RuntimeError as error:
            whose = f"gradients of {reduction.label}" if launch is None else launch.whose
            raise self._exec_order.explain(error, whose) from error
        if listeners:
            end("wait for gradients", name)

    # ---- the end of a backward; until then other ranks may read this rank's gradients ----

    def launch_rest(self) -> None:
        """Launch the open buckets: they wait for units that produced no gradient."""
        buckets = self._buckets
        if not buckets.is_planned:
            buckets.ended.clear()
            return
        self._buckets = OpenBuckets[_InBucket]()
        self._send(buckets.rest())

    def wait_for_inputs(self) -> None:
        """Wait until no other rank reads gradients of this rank."""
        self.launch_rest()
        for reduction in self._in_flight:
            self._advance(reduction)
        self._in_flight.clear()

    def defer(self) -> None:
        """Leave all launched reductions pending; a later backward commits them."""
        self._keep_held()
        self._deferred += self._launched
        self._launched = []

    def wait(self) -> None:
        """Wait for all reductions, pending ones of earlier backwards included."""
        self.launch_rest()
        for launch in (*self._deferred, *self._launched):
            for reduction in launch.reductions:
                if not reduction.is_over:
                    self._advance(reduction, launch)
        streams = self._comm_ctx.streams
        if streams.are_concurrent:
            streams.current_waits_for_reductions()
            streams.host_waits_for_copies()

    def commit(self) -> list[ShardedParam]:
        """Set the gradients of this backward and of pending ones; return the parameters that received any."""
        launched = [*self._deferred, *self._launched]
        self._keep_held()
        self._deferred, self._launched = [], []
        self._in_flight.clear()
        params = [
            param
            for launch in launched
            for each in launch.reductions
            if not each.is_partial
            for param in each.params
            if param not in launch.unused
        ]
        is_hooked, self.is_followed = torch_private.have_gradient_hooks([param.sharded for param in params])
        self.failed_hook = None
        for launch in launched:
            for reduction in launch.reductions:
                if not reduction.is_partial:
                    if launch.factor != 1.0:  # partial sums wait for the factor of their last backward
                        reduction.scale_result(launch.factor)
                    failed = reduction.set_gradients(is_hooked, launch.unused)
                    self.failed_hook = self.failed_hook or failed
                else:
                    gone = launch.taken | launch.unused
                    left = {p: value for p, value in reduction.windows().items() if p not in gone}
                    launch.unit.earlier.keep_partial(left)
            launch.unit.num_commits += 1
            launch.unit.note(Op.COMMIT)
        return params

    def _keep_held(self) -> None:
        self._early = None
        for unit, gradients in self._fresh_held:
            unit.earlier.hold(gradients)
        self._fresh_held.clear()

    # ---- gradients that wait for a later backward ----

    def show_waiting(self, units: Sequence[Unit]) -> None:
        """Show in ``.grad`` of shards that their gradients wait for a later backward."""
        for unit in units:
            if unit.earlier.held or unit.earlier.partial:
                unit.earlier.show()
        for launch in self._deferred:
            launch.unit.earlier.show(launch.params - launch.taken - launch.unused)

    def withdraw_waiting(self, units: Sequence[Unit]) -> None:
        """Undo :meth:`show_waiting`, and drop the gradients that user code has cleared since."""
        for unit in (each for each in units if each.earlier.waiting):
            if cleared := unit.earlier.withdraw():
                for launch in (each for each in self._deferred if each.unit is unit):
                    launch.taken |= cleared
                    launch.unused |= cleared

    # ---- failure ----

    def cancel(self) -> None:
        """Cancel the reductions of a backward that raised, and return to units the earlier gradients that it had taken."""
        self._fresh_held.clear()
        launched, self._launched = self._launched, []
        self._early = None
        self._buckets = OpenBuckets()
        self._in_flight.clear()
        if launched:
            self._comm_ctx.streams.current_waits_for_results()
        for launch in reversed(launched):
            for reduction in launch.reductions:
                reduction.cancel()
            for earlier, taken in launch.absorbed:
                earlier.taken -= taken
            launch.unit.earlier.put_back(launch.held, launch.partial)

    def forget_deferred(self) -> None:
        """Drop the pending reductions of earlier backwards."""
        if self._deferred:
            self._comm_ctx.streams.current_waits_for_results()
        self._deferred = []
