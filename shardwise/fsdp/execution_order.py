"""What a step has done so far, what the plan says comes next, and where this rank is for the others to know."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardwise.consistency.agreement import MismatchCheck, Position
from shardwise.consistency.store import digest_of
from shardwise.errors import DesyncError, StateError
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.user_writes import Written
from shardwise.observe import (
    EventLog,
    Op,
    OrderChanged,
    begin,
    end,
    hearers,
    listeners,
    next_track,
    now,
    remember,
    tell,
    thread,
    unit_in_words,
)
from shardwise.plan.schedule import (
    ExecutionOrder,
    OrderEntry,
    PrefetchBudget,
    StepEvent,
    StepPlan,
    UnitBucket,
    UnitFacts,
    UnitPolicy,
    form_buckets,
    plan_step,
)

_MOST_BUCKETS = 256
_IN_WORDS = {
    Op.UNSHARD: "all-gather of",
    Op.WAIT: "wait for",
    Op.RESHARD: "reshard of",
    Op.REDUCE: "reduction of",
    Op.HOLD: "unsynced gradients of",
    Op.COMMIT: "new .grad of",
}


class ExecOrderTracker:
    """The execution order of the running step beside the plan that was made from an earlier one.

    Attributes:
        plan: the prediction made from the last step's order; None until a step has shown one.
        budget: how far ahead of their use units may be unsharded.
        log: what units have done last; its instruments hear every event.
        mismatch_check: where ranks compare plans and say where they are when a collective fails; None without other ranks.
        agreed: which parameters' gradients may be reduced together: the ranks have agreed on each of these sets.
        numbers: of units, in plans.
        gathers: forward needs other ranks.  Else one may go forward, or backward without sync, alone: ranks compare where
            gradients are reduced.
        unsaid: how this rank has left the plan since, and has not told the others.
    """

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.budget = PrefetchBudget()
        self.log = EventLog(next_track("engine"))
        self.instruments = self.log.instruments
        self.mismatch_check: MismatchCheck | None = None
        self.agreed: set[frozenset[ShardedParam]] = set()
        self._units: Sequence[Unit] = ()
        self.numbers: dict[Unit, int] = {}
        self.gathers = True
        self.unsaid = ""
        self._agreed_buckets: set[tuple[tuple[int, ...], ...]] = set()
        self._prefetches: list[list[Unit]] = []  # as in the plan
        self._entries: list[OrderEntry] = []
        self._follows_plan = False
        self._planned_from: tuple[PrefetchBudget, tuple[UnitPolicy, ...]] = self.budget, ()
        self._left_order = ""
        self._aside: tuple[list[OrderEntry], bool, str, str] | None = None  # the step that an evaluation has come into

    def adopt(self, units: Sequence[Unit]) -> None:
        """Write down what ``units`` do from here on; ``units[i]`` is number i."""
        self._units = units
        self.numbers = {unit: number for number, unit in enumerate(units)}
        self.gathers = any(group.is_collective for unit in units for group in unit.groups)
        self.plan = None
        self.agreed = set()
        self._agreed_buckets = set()

    # ---- events ----

    def position(self, note: str = "") -> Position:
        """Return where this rank is, for the others to read."""
        recent = tuple(f"{_IN_WORDS[op]} {unit_in_words(unit)}" for op, unit in self.log.recent)
        return Position(self.log.num_calls, recent, note or self._left_order)

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Return ``error`` with the position of every rank, as far as they can be known."""
        if self.mismatch_check is None or isinstance(error, DesyncError):
            return error
        return self.mismatch_check.explain(error, self.position(f"waiting for {where}"))

    # ---- order ----

    def begin(self, aside: bool = False) -> None:
        """Start a step; ``aside``: an evaluation that may be this rank's alone, after which the step before goes on."""
        self._aside = (self._entries, self._follows_plan, self.unsaid, self._left_order) if aside else None
        self._entries = []
        self._follows_plan = self.plan is not None
        self.unsaid = ""

    def go_on(self) -> None:
        """Come back to the step that an evaluation has come into."""
        if self._aside is not None:
            self._entries, self._follows_plan, self.unsaid, self._left_order = self._aside
            self._aside = None

    def forget(self) -> None:
        """Drop the order of a step that has failed."""
        self._aside = None
        self._entries = []
        self._follows_plan = False
        self.unsaid = ""

    def record(self, unit: Unit, event: StepEvent) -> Sequence[Unit]:
        """Write down that ``unit`` reaches ``event``, before anything is done about it.

        Returns: the units that the plan wants unsharded right after.
        Raises: DesyncError if this leaves the plan and other ranks do not leave it so.
        """
        number = self.numbers.get(unit)
        if number is None:
            return ()
        track = self.log.track
        track.count += 1
        remember((now(), thread(), track.name, track.count, event, unit.name))
        if hearers:
            tell(event, unit.name)
        if listeners:
            _tell_computation(track.name, unit.name, event)
        position = len(self._entries)
        if not self._follows_plan or self.plan is None:
            self._entries.append(OrderEntry(number, event))
            return ()
        expected = self.plan.order.entries
        if position < len(expected):
            planned = expected[position]
            if planned.unit == number and planned.event is event:
                self._entries.append(planned)
                return self._prefetches[position]
        self._entries.append(OrderEntry(number, event))
        self._follows_plan = False
        name = self._units[expected[position].unit].name if position < len(expected) else "end of step"
        self._left_order = f"expected {unit_in_words(name)}, found {unit_in_words(unit.name)}"
        for instrument in self.instruments:
            instrument.on_event(OrderChanged(name, unit.name))
        self.unsaid = f"{self._left_order} to {event.value}"
        if self.gathers:
            self.compare_deviation()
        return ()

    def compare_deviation(self) -> None:
        """Let the ranks compare how they have left the plan.  Raises: DesyncError if other ranks do not leave it so."""
        unsaid, self.unsaid = self.unsaid, ""
        if self.mismatch_check is not None:
            self.mismatch_check.check_deviation(unsaid, self.position())

    def agree_on_gradients(self, unit: Unit, params: frozenset[ShardedParam]) -> None:
        """Let the ranks compare what they are about to reduce, unless the way there compares it in every message.

        The first time that is all that can be trained, so that most runs never come here again.

        Raises: DesyncError on every rank if ranks differ.
        """
        if self.mismatch_check is not None and any(not group.compares_reductions for group in unit.groups):
            if not self.agreed:
                self.compare_parameters()
                for each in self._units:
                    self.agreed.add(frozenset([param for param in each.params if param.sharded.requires_grad]))
            if params not in self.agreed:
                what = f"gradients of {unit_in_words(unit.name)}"
                facts = [_fact_of(param) for param in unit.params if param in params]
                self.mismatch_check.check_facts(what, facts, self.position())
        self.agreed.add(params)

    def compare_parameters(self) -> None:
        """Let the ranks compare what they have to train.

        Raises: DesyncError on every rank if ranks differ.
        """
        if self.mismatch_check is not None:
            facts = [_fact_of(param) for each in self._units for param in each.params]
            self.mismatch_check.check_facts("parameters", facts, self.position())

    def buckets(self) -> tuple[UnitBucket, ...]:
        """Return which units' gradients are reduced together in this backward: as planned, or after the forward that has run.

        Raises: DesyncError on every rank if ranks differ.
        """
        if self._follows_plan and self.plan is not None:
            return self.plan.buckets
        sharing = [unit.sharing for unit in self._units]
        buckets = form_buckets(ExecutionOrder(ExecutionOrder(tuple(self._entries)).forward), sharing)
        key = tuple([bucket.units for bucket in buckets if len(bucket.units) > 1])
        if key and key not in self._agreed_buckets:
            if self.mismatch_check is not None:
                self.mismatch_check.check_facts(
                    "units whose gradients travel together", self._shown(buckets), self.position()
                )
            self._agree_on_buckets(key)
        return buckets

    def _agree_on_buckets(self, key: tuple[tuple[int, ...], ...]) -> None:
        if len(self._agreed_buckets) >= _MOST_BUCKETS:  # of a model that goes ever new ways
            self._agreed_buckets.clear()
        self._agreed_buckets.add(key)

    def _shown(self, buckets: Sequence[UnitBucket]) -> list[str]:
        """Return the buckets of several units, the same text on every rank."""
        names = [[f"'{self._units[unit].name}'" for unit in bucket.units] for bucket in buckets]
        return [f"one reduction of units {', '.join(each)}" for each in names if len(each) > 1]

    def has_planned_forward(self) -> bool:
        """True if the entries so far are the forward part of the plan."""
        return self.plan is not None and self.plan.order.forward == tuple(self._entries)

    def replan(self) -> None:
        """Plan the next step from the order of this one, unless the plan is that already.

        Raises: DesyncError if ranks would plan different collectives.
        """
        order = ExecutionOrder(tuple(self._entries))
        made_from = self.budget, tuple([unit.policy for unit in self._units])
        if self.plan is not None and self.plan.order == order and made_from == self._planned_from:
            return
        plan = plan_step(order, self.facts(), self.budget)
        if self.mismatch_check is not None:
            apart = {unit.name for unit in self._units if unit.keeps_sums}
            calls = [
                f"{c.op.value} of {unit_in_words(c.unit)}{' without its replicas' * (c.op is Op.REDUCE and c.unit in apart)}"
                for c in plan.calls
                if c.op in (Op.UNSHARD, Op.REDUCE)
            ]
            if plan.ahead_bytes is not None:
                calls.append(f"gathers ahead within {plan.ahead_bytes} bytes")
            self.mismatch_check.check_plan([*calls, *self._shown(plan.buckets)], self.position())
        self._agree_on_buckets(tuple([bucket.units for bucket in plan.buckets if len(bucket.units) > 1]))
        self.plan, self._planned_from, self._left_order = plan, made_from, ""
        self._prefetches = [[self._units[number] for number in numbers] for numbers in plan.prefetches]

    def facts(self) -> tuple[UnitFacts, ...]:
        """Return what planning needs to know of every unit."""
        return tuple(self._facts_of(unit) for unit in self._units)

    def _facts_of(self, unit: Unit) -> UnitFacts:
        gather_bytes, in_place = unit.gather_staging
        return UnitFacts(
            name=unit.name,
            policy=unit.policy,
            gather_bytes=gather_bytes,
            in_place=in_place,
            full_bytes=unit.full_bytes,
            reduce_bytes=unit.reduce_bytes,
            route=unit.route,
            sharing=unit.sharing,
            tied_units=tuple(self.numbers[other] for other in unit.tied_units),
            forward_prefetch=_numbers_of(unit.forward_prefetch, self.numbers),
            backward_prefetch=_numbers_of(unit.backward_prefetch, self.numbers),
        )


def _tell_computation(track: str, unit: str, event: StepEvent) -> None:
    word = {
        StepEvent.PRE_FORWARD: "forward",
        StepEvent.PRE_BACKWARD: "backward",
        StepEvent.PRE_RECOMPUTE: "recompute",
    }.get(event)
    if word is not None:
        begin(track, word, unit)
    elif event is StepEvent.POST_FORWARD:
        end("forward", unit)
    else:
        end("recompute" if event is StepEvent.POST_RECOMPUTE else "backward", unit)


def _fact_of(param: ShardedParam) -> str:
    """Return what must be the same on all ranks of a parameter whose gradient is reduced."""
    kind = "" if param.sharded.requires_grad else ", frozen"
    return f"{param.fqn} of shape {tuple(param.sharded.shape)}, {param.dtype}{kind}"


def _numbers_of(refs: list[weakref.ref[Unit]] | None, numbers: dict[Unit, int]) -> tuple[int, ...] | None:
    if refs is None:
        return None
    units = [unit for ref in refs if (unit := ref()) is not None]
    return tuple(numbers[unit] for unit in units if unit in numbers)


# ---- Have all ranks written the same to parameters in forward?  Asked of the first forwards in which a module does
# so.
# Every rank takes its own rows of what it has written to a full parameter.  Where ranks have not written the same, those of
# others are lost without a word.  Nobody waits in forward: digests are posted there, and read when the gradients of the next
# backward have come, for which every rank has left that forward behind.

_MAX_COMPARED = 2  # forwards per unit


class WrittenAlike:
    """What this rank has posted.

    Attributes:
        posted: places, each of one unit in one forward, and the digests that were left there.
    """

    def __init__(self) -> None:
        self.posted: list[tuple[str, list[str]]] = []

    def post(self, unit: Unit, written: Written, place: str, mismatch_check: MismatchCheck | None) -> None:
        """Leave what a forward has written to the full parameters of ``unit`` for the other ranks to read."""
        if mismatch_check is not None and unit.writes.num_compared < _MAX_COMPARED:
            values = unit.writes.values(written)
            if values:
                unit.writes.num_compared += 1
                mismatch_check.post_writes(place, values)
                self.posted.append((place, values))

    def check(self, exec_order: ExecOrderTracker) -> None:
        """Raise DesyncError if another rank has written something else."""
        posted, self.posted = self.posted, []
        for place, values in posted:
            assert exec_order.mismatch_check is not None
            exec_order.mismatch_check.check_writes(place, values, exec_order.position())


# ---- Conversions of shards that forwards have gathered: what has other values after them, on any rank.
# On one process a conversion puts other memory in place, which leaves what a graph holds as it is.  Here backward gathers
# shards anew: values that a conversion has rounded, or that were written to it through ``.data``, which torch does not count,
# are not those that the graph was made with.


def _has_bits(local: torch.Tensor) -> bool:
    return type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta


class Converted:
    """What was converted since shards were last put together.

    Attributes:
        before: dtypes and digests of the shards before the first conversion.
        awaits_backward: a forward had built a graph then of which no backward had come.
    """

    def __init__(self) -> None:
        self.before: dict[ShardedParam, tuple[torch.dtype, int]] = {}
        self.awaits_backward = False

    def note(self, params: Iterable[ShardedParam], awaits_backward: bool) -> None:
        """Remember what ``params`` are: they are about to be converted.

        Those that nobody gathers stay in the graph.  What was replaced is named where its gradient comes.  Tensors of users'
        classes need have no bits to look at: they count as written.
        """
        self.awaits_backward = awaits_backward
        for param in params:
            is_gathered = param.full is not None and param.full is not param.sharded
            if is_gathered and param.is_registered and param not in self.before and _has_bits(param.local):
                self.before[param] = param.local.dtype, digest_of(param.local)

    def settle(self, exec_order: ExecOrderTracker, is_backward: bool) -> None:
        """Tell what has kept its values on all ranks from what is to count as written.

        Ranks ask each other about what is cut over them alone: of the rest each has all, and one may run a forward alone.

        Raises: StateError on every rank where a backward begins that needs what was; DesyncError unless all ranks convert.
        """
        before, self.before = self.before, {}
        changed = {param.fqn for param, was in before.items() if was != (param.local.dtype, digest_of(param.local))}
        if exec_order.mismatch_check is not None and any(param.shard.num_shards > 1 for param in before):
            changed = exec_order.mismatch_check.union(
                "conversions of parameters", sorted(changed), exec_order.position()
            )
        for param, (dtype, _) in before.items():
            if param.fqn not in changed:
                param.count.has_kept_values = param.local is not param.count.local()
            elif is_backward and self.awaits_backward and param.local.dtype is dtype:
                raise StateError(
                    f"{param.fqn} was converted between a forward and its backward, and has other values now: written to "
                    "through .data, or rounded. Backward wants those of the forward, which are gone. Convert parameters, "
                    "and write to them, before forward or after backward"
                )
