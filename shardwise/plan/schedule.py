"""Predict a step: every call in order, and what to prefetch; the plans of the last steps.  Pure; no function takes a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from shardwise.observe import Call, Op

# ---- Bytes over a plan.


def peak_bytes(calls: Iterable[Call], reductions_in_flight: int = 1) -> int:
    """Return the most bytes of staging buffers and full parameters that there are at once.

    ``reductions_in_flight``: how many reduce-scatter inputs may live at once.  Shards, gradients and optimizer states
    do not count, because they are constant during a step.
    """
    live = peak = 0
    staged: dict[str, Call] = {}
    reducing: list[int] = []
    for call in calls:
        if call.op is Op.UNSHARD:
            staged[call.unit] = call
            live += call.num_bytes
        elif call.op is Op.RESHARD:
            live -= call.num_bytes
        elif call.op is Op.REDUCE:
            while len(reducing) >= reductions_in_flight:
                live -= reducing.pop(0)
            reducing.append(call.num_bytes)
            live += call.num_bytes
        elif call.op is Op.COMMIT:
            live -= sum(reducing)
            reducing.clear()
        elif call.op is Op.WAIT:  # full parameters, and the staging that is free as soon as they are copied out of it
            launch = staged.pop(call.unit)
            peak = max(peak, live if launch.in_place else live + call.num_bytes)
            live += call.num_bytes - launch.num_bytes
        peak = max(peak, live)
    return peak


# ---- The policy of a unit for its parameters and gradients: values, replaced as a whole, never changed in place.


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The behaviour of one unit.

    Attributes:
        reshard_after_forward: True: free full parameters after forward; False: keep them until backward has used them;
            an int: keep shards on a mesh of that many ranks.
        reshard_after_backward: free full parameters after backward.
        keeps_full_memory: keep the memory of freed full parameters, so that the next ones are at the same address.
        unshard_in_backward: False if backward of this unit reads no parameter (an embedding).
        sync: reduce gradients in this backward; False keeps them unsynced for a later one.
        syncs_replicas: on a mesh with a replica axis, reduce over it too; False leaves sums over the shard axis only.
        divide_factor: the divisor of summed gradients; None: the number of data-parallel ranks.
        sum_only: collectives may use plain sums only.
        reduces_unused: send zeros for trainable parameters without a gradient, so that ranks may use different
            parameters.
    """

    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    keeps_full_memory: bool = False
    unshard_in_backward: bool = True
    sync: bool = True
    syncs_replicas: bool = True
    divide_factor: float | None = None
    sum_only: bool = False
    reduces_unused: bool = False


# ---- The execution order of a step, as recorded.


class StepEvent(str, Enum):
    """The start or the end of a part of a step."""

    PRE_FORWARD = "enter forward"
    POST_FORWARD = "exit forward"
    PRE_BACKWARD = "enter backward"
    POST_BACKWARD = "exit backward"  # its gradients have arrived
    RELEASE_IN_BACKWARD = "release in backward"  # no gradient arrived
    PRE_RECOMPUTE = "enter recompute"  # forward again, inside backward
    POST_RECOMPUTE = "exit recompute"


FORWARD = (StepEvent.PRE_FORWARD, StepEvent.POST_FORWARD)


class OrderEntry(NamedTuple):
    """The step reached ``event`` of unit number ``unit``."""

    unit: int
    event: StepEvent


# All entries of one step: one forward of the root and its backward, if there was one.
ExecutionOrder = tuple[OrderEntry, ...]


def forward_of(order: ExecutionOrder) -> ExecutionOrder:
    """Return the entries of the forward part."""
    return tuple(entry for entry in order if entry.event in FORWARD)


def in_module_order(num_units: int) -> ExecutionOrder:
    """Return the order of a step that runs every unit once, as its module lies in the root, which is unit 0."""
    entries: list[OrderEntry] = []
    backward, inner = (StepEvent.PRE_BACKWARD, StepEvent.POST_BACKWARD), range(1, num_units)
    for (begin, end), units in ((FORWARD, inner), (backward, reversed(inner))):
        within = [OrderEntry(unit, event) for unit in units for event in (begin, end)]
        entries += [OrderEntry(0, begin), *within, OrderEntry(0, end)]
    return tuple(entries)


# ---- Buckets: which gradients of a unit that is alone share a collective, if they are only summed over replicas.

LEAST_BYTES = 1 << 20  # below this size, the overhead of a collective on its ranks exceeds the cost of its bytes
_LATENCIES = 10
_MOST_OF_UNIT = 32  # buckets of one unit: each takes two or three Python calls


def bucket_bytes(latency_s: float, bytes_per_s: float) -> int:
    """Return the size from which a bucket is full: sending it takes ten times the latency, which then costs a tenth."""
    return max(LEAST_BYTES, round(_LATENCIES * latency_s * bytes_per_s))


def split_unit(num_bytes: Sequence[int | None], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of a unit that is alone in its model: ordinals of its parameters, the last one first.

    In backward the gradients of later parameters arrive first.  Only the sizes decide: sums over more than two ranks depend on
    the position of an element in its bucket, so a run that restarts from a checkpoint must form the same buckets.

    Args:
        num_bytes: of every gradient, in the order of the parameters; None: it is in no bucket.
        limit: a bucket of that many bytes is full; the limit grows if there were too many buckets.
    """
    limit = max(limit, -(-sum(filter(None, num_bytes)) // _MOST_OF_UNIT))
    buckets: list[list[int]] = []
    filled = limit
    for ordinal, size in reversed([*enumerate(num_bytes)]):
        if size is not None:
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append(ordinal)
            filled += size
    return tuple(map(tuple, buckets))


class Buckets:
    """The progress of one backward through ``buckets`` of parameters, which every rank launches in their order.

    A bucket is launched once its gradients have arrived and the buckets before it are launched, so ranks on which gradients
    arrive in different orders launch the same buckets in the same order.

    Attributes:
        arrived: ordinals of the parameters whose gradients have arrived; the caller adds to it.
    """

    def __init__(self, buckets: Sequence[tuple[int, ...]], arrived: set[int]) -> None:
        self._unsent, self.arrived = list(buckets), arrived

    def is_ready(self) -> bool:
        """Return True if the next bucket may be launched."""
        # The last is checked first: gradients arrive in about this order.
        return bool(self._unsent) and self.arrived.issuperset(reversed(self._unsent[0]))

    def take(self) -> Iterator[tuple[int, ...]]:
        """Yield the buckets to launch now."""
        while self.is_ready():
            yield self._unsent.pop(0)


_TRIES = 4  # until a plan stays within its bytes; each time with a limit lowered by the last excess


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What planning needs to know about a unit.

    Attributes:
        name: path of its module in the root.
        policy: its behaviour.
        gather_bytes: bytes of its launched all-gather.  in_place: they include its full parameters.
        full_bytes: its full parameters.  reduce_bytes: staging of its reduction.
        tied_units: units whose parameters its modules use too (weights tied across units).
        beside: units of its modules on other meshes, which are used and end with it.
        forward_prefetch, backward_prefetch: units that the user wants unsharded when this one starts; None: as planned.
    """

    name: str
    policy: UnitPolicy = field(default_factory=UnitPolicy)
    gather_bytes: int = 0
    in_place: bool = False
    full_bytes: int = 0
    reduce_bytes: int = 0
    tied_units: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PrefetchBudget:
    """How far ahead of their use units may be unsharded.

    Attributes:
        depth: that many units in any case.
        num_bytes: more units, as long as full parameters and staging stay within it; at least the peak with ``depth``.
            None: no more.
        max_reductions: inputs of reductions that may live at once.
    """

    depth: int = 1
    num_bytes: int | None = None
    max_reductions: int = 1


MadeFrom = tuple[PrefetchBudget, tuple[UnitPolicy, ...]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A predicted step.

    Attributes:
        order: the order that it was predicted from.
        calls: the calls of the engine, in order.
        prefetches: for each entry, the units to unshard right after it.
        starts: for each entry, the number of calls before its own; last, the number of calls before the commits.
        made_from: what it depends on besides the order.
    """

    order: ExecutionOrder
    calls: tuple[Call, ...]
    prefetches: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    made_from: MadeFrom


class _Simulation:
    """The states of units, as the engine would have them, event by event.

    Each branch of :meth:`entry` is the engine's method for that event, reduced to its calls: change both together.
    ``tests/inproc/test_any_rank.py`` compares them.

    Args:
        limit: the bytes with which more units than ``depth`` of ``budget`` are unsharded ahead; -1: no more.
    """

    def __init__(self, order: ExecutionOrder, units: Sequence[UnitFacts], budget: PrefetchBudget, limit: int) -> None:
        self.order, self.units, self.budget = order, units, replace(budget, num_bytes=limit)
        self.calls: list[Call] = []
        self.prefetches: list[tuple[int, ...]] = [()] * len(order)
        self.starts: list[int] = []
        self.holders = [0] * len(units)
        self.is_gathering, self.is_full, self.in_backward = set[int](), set[int](), set[int]()

    def call(self, op: Op, unit: int, num_bytes: int = 0, in_place: bool = False) -> None:
        self.calls.append(Call(op, self.units[unit].name, num_bytes, in_place))

    def unshard(self, unit: int) -> None:
        if unit not in self.is_full and unit not in self.is_gathering:
            self.is_gathering.add(unit)
            self.call(Op.UNSHARD, unit, self.units[unit].gather_bytes, self.units[unit].in_place)

    def need(self, unit: int) -> None:
        self.unshard(unit)
        if unit in self.is_gathering:
            self.is_gathering.discard(unit)
            self.is_full.add(unit)
            self.call(Op.WAIT, unit, self.units[unit].full_bytes)

    def reshard(self, unit: int) -> None:
        if unit in self.is_full:
            self.is_full.discard(unit)
            self.call(Op.RESHARD, unit, self.units[unit].full_bytes)

    def upcoming(self, position: int, event: StepEvent) -> list[int]:
        """Return the next units that reach ``event`` and are not full, as many as depth and limit allow."""
        found: list[int] = []
        is_forward = event is StepEvent.PRE_FORWARD
        for unit, reached in self.order[position + 1 :]:
            if is_forward and reached is StepEvent.PRE_BACKWARD:
                break
            is_wanted = reached is event and (is_forward or self.units[unit].policy.unshard_in_backward)
            if is_wanted and unit not in self.is_full and unit not in found:
                if len(found) >= self.budget.depth and self.exceeds([*found, unit], event):
                    break
                found.append(unit)
        return found

    def exceeds(self, prefetches: Sequence[int], event: StepEvent) -> bool:
        """Return True if the limit is exceeded once ``prefetches`` are full in addition to what is full now."""
        held = sum(self.units[unit].full_bytes for unit in self.is_full)
        for facts in (self.units[unit] for unit in self.is_gathering.union(prefetches)):
            held += facts.gather_bytes + (0 if facts.in_place else facts.full_bytes)
        if event is StepEvent.PRE_BACKWARD:
            held += self.budget.max_reductions * max(facts.reduce_bytes for facts in self.units)
        return held > (self.budget.num_bytes or 0)

    def prefetch(self, position: int, explicit: tuple[int, ...] | None, event: StepEvent) -> None:
        wanted = self.upcoming(position, event) if explicit is None else explicit
        chosen = [unit for unit in wanted if unit not in self.is_full and unit not in self.is_gathering]
        for member in (each for unit in chosen for each in (unit, *self.units[unit].beside)):
            self.unshard(member)
        self.prefetches[position] = tuple(chosen)

    def plan(self, made_from: MadeFrom) -> StepPlan:
        for position, (unit, event) in enumerate(self.order):
            self.starts.append(len(self.calls))
            self.entry(position, unit, event)
        self.starts.append(len(self.calls))
        self.calls += [Call(Op.COMMIT, call.unit) for call in self.calls if call.op is Op.REDUCE]
        return StepPlan(self.order, tuple(self.calls), tuple(self.prefetches), tuple(self.starts), made_from)

    def entry(self, position: int, unit: int, event: StepEvent) -> None:
        facts = self.units[unit]
        policy, family = facts.policy, (unit, *facts.beside, *facts.tied_units)
        if event is StepEvent.PRE_FORWARD:
            for member in family:
                self.holders[member] += 1
                self.need(member)
            self.prefetch(position, facts.forward_prefetch, event)
        elif event is StepEvent.POST_FORWARD:
            for member in family:
                self.holders[member] -= 1
                if not self.holders[member] and self.units[member].policy.reshard_after_forward is not False:
                    self.reshard(member)
        elif event is StepEvent.PRE_BACKWARD:
            self.in_backward.add(unit)
            for member in family if policy.unshard_in_backward else ():
                self.need(member)
            self.prefetch(position, facts.backward_prefetch, event)
        elif event in (StepEvent.POST_BACKWARD, StepEvent.RELEASE_IN_BACKWARD):
            self.in_backward.discard(unit)
            if policy.reshard_after_backward:
                self.reshard(unit)
            if event is StepEvent.POST_BACKWARD:
                self.call(Op.REDUCE if policy.sync else Op.HOLD, unit, facts.reduce_bytes if policy.sync else 0)
        elif event is StepEvent.PRE_RECOMPUTE:
            for member in family:
                self.need(member)
        elif policy.reshard_after_forward is not False and not self.is_read_in_backward(unit):
            self.reshard(unit)  # the end of a recomputation

    def is_read_in_backward(self, unit: int) -> bool:
        return any(unit == reader or unit in self.units[reader].tied_units for reader in self.in_backward)


def plan_step(order: ExecutionOrder, units: Sequence[UnitFacts], budget: PrefetchBudget = PrefetchBudget()) -> StepPlan:
    """Predict the step that uses ``units`` in ``order``.

    Args:
        order: the entries, as recorded in an earlier step.
        units: facts of every unit, by number.
        budget: how far ahead of their use they may be unsharded.
    """
    made_from = budget, tuple(facts.policy for facts in units)
    plan = _Simulation(order, units, budget, limit=-1).plan(made_from)
    if budget.num_bytes is None:
        return plan
    bound = limit = max(budget.num_bytes, peak_bytes(plan.calls, budget.max_reductions))
    for _ in range(_TRIES):
        found = _Simulation(order, units, budget, limit).plan(made_from)
        excess = peak_bytes(found.calls, budget.max_reductions) - bound
        if excess <= 0:
            return found
        limit -= excess
    return plan


# ---- The plans of the last steps: a step whose order is known needs no new plan, and may tell which order comes next.

_MOST = 16


@dataclass(slots=True, eq=False)
class KnownPlan:
    """A plan; ``then``: that of the step that came next last time."""

    plan: StepPlan
    then: KnownPlan | None = None


class KnownPlans:
    """At most 16 plans, so that a model of many orders (stochastic depth) keeps few of them."""

    def __init__(self) -> None:
        self._known: list[KnownPlan] = []  # the newest last
        self._last: KnownPlan | None = None  # that of the last step

    def find(self, order: ExecutionOrder, made_from: MadeFrom, likely: StepPlan | None) -> KnownPlan | None:
        """Return the plan of ``order``; ``likely`` is compared first, which is fast where the order has its entries."""
        in_turn = sorted(self._known, key=lambda each: each.plan is not likely)
        found = (each for each in in_turn if each.plan.made_from == made_from)
        return next((each for each in found if each.plan.order == order), None)

    def find_branch(self, begun: Sequence[OrderEntry], made_from: MadeFrom) -> KnownPlan | None:
        """Return the newest plan that begins with the entries ``begun``."""
        found = (each for each in reversed(self._known) if each.plan.made_from == made_from)
        return next((each for each in found if each.plan.order[: len(begun)] == tuple(begun)), None)

    def add(self, plan: StepPlan) -> KnownPlan:
        """Keep a plan, in place of the oldest one if there are too many."""
        self._known = [*self._known[1 - _MOST :], KnownPlan(plan)]
        return self._known[-1]

    def end_step(self, known: KnownPlan) -> KnownPlan:
        """Return the plan of the next step after one of the plan ``known``: what came next last time, or the same."""
        if self._last is not None:
            self._last.then = known
        self._last, then = known, known.then
        return then if then is not None and then.plan.made_from == known.plan.made_from else known

    def forget_last(self) -> None:
        """Forget which step was the last: it has failed, and other ranks may have ended it."""
        self._last = None
