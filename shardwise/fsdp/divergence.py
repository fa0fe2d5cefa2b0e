"""Ranks that take different ways (``set_allow_rank_divergence``): all of them launch the collectives of one schedule.

A gather or a reduction takes all ranks of its group, also those whose own modules do not need it.  So the collectives of a
forward or backward (a pass) follow a schedule that all ranks share.  A rank that needs a later entry launches the entries
before it first, for the others alone: it gives its shards and drops what it receives, and its gradients are zeros.  At the end
of the pass it launches the rest.  A collective that is not in the rest of the schedule is a request: the rank launches the
rest and waits until the others have done so, too, and all append the requests of all ranks to the schedule, in the order of
the units.  The pass is over when no rank requests anything.  The schedule of the next pass of this kind is the union of what
the ranks did.

Before a pass ranks tell each other which kind they begin.  Where they differ, a backward comes before a forward and a forward
before an optimizer step; ranks that begin something else serve it.

Ranks speak through one small all-reduce of a group of its own on the host, so that it waits for no stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from difflib import SequenceMatcher
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from shardwise import torch_private
from shardwise.collectives.protocol import Handle
from shardwise.collectives.routes import PassKind
from shardwise.consistency.process_groups import gather_objects, largest_words
from shardwise.errors import StateError, TransportError
from shardwise.formatting import format_ranks
from shardwise.fsdp.execution_order import ExecOrderTracker
from shardwise.fsdp.full_buffer import FullBuffer
from shardwise.fsdp.local_gradients import Gradients, add_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.reductions import Reductions
from shardwise.fsdp.transports import CommContext
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.waiting_gradients import waits_for_sync
from shardwise.observe import Op
from shardwise.plan.schedule import FORWARD, AgreedSchedule, ExecutionOrder, OrderEntry, StepEvent

# ---- The union of the orders of all ranks.

_MOST_TIMES = 4  # a schedule that is this many times as long as the order of any rank is made again from this step


def union_of(known: Sequence[OrderEntry], orders: Sequence[Sequence[OrderEntry]]) -> list[OrderEntry]:
    """Return an order that contains ``known`` and each of ``orders`` as a subsequence, unless it would grow too long.

    All orders belong to forwards, or all to backwards.
    """
    found = list(known)
    for order in orders:
        found = _merged(found, order)
    longest = max(map(len, orders), default=0)
    if known and len(found) > _MOST_TIMES * longest > 0:
        return union_of((), orders)
    return found


def _merged(known: Sequence[OrderEntry], order: Sequence[OrderEntry]) -> list[OrderEntry]:
    found: list[OrderEntry] = []
    for what, begin, end, other_begin, other_end in SequenceMatcher(None, known, order, False).get_opcodes():
        found += known[begin:end]
        found += order[other_begin:other_end] if what != "equal" else ()
    return found


# ---- Serving other ranks.

_MOST_GIVEN = 2  # gathers for the others alone whose buffers are allocated at once
_BEGIN, _WITHIN = 1, 2  # what ranks speak about
# The places of words in the vector that ranks exchange; the largest word of all ranks counts.
_COUNT, _LESS_COUNT, _ABOUT, _LESS_ABOUT, _FORWARD, _BACKWARD, _SYNCS, _SYNCS_REPLICAS, _IS_SHORT, _WAITS = range(10)
_NUM_FLAGS = 10


def _nothing() -> None:
    return None


class Divergence:
    """The part of an engine that lets ranks take different ways.

    Args:
        exec_order, reductions, comm_ctx: those of the engine.
        group: a gloo group of all ranks of the engine.
        calls: of the engine, which they do not keep alive: ``serve_pass(kind)``, which takes part in a pass that only other
            ranks run and calls :meth:`enter` and :meth:`end`; ``reset()``, which cleans up after a failure and calls
            :meth:`abort`.

    Attributes:
        schedule: the schedule of the running pass.
        is_open: a pass runs.
        notify: called before ranks tell each other what they begin; a ``Join`` counts these calls.
        divides_by_all: gradients are averaged over all ranks, not only over those that are still in a ``Join``.
    """

    def __init__(
        self,
        exec_order: ExecOrderTracker,
        reductions: Reductions,
        comm_ctx: CommContext,
        group: dist.ProcessGroup,
        calls: tuple[Callable[[PassKind], None], Callable[[], None]],
    ) -> None:
        self._exec_order, self._reductions, self._comm_ctx, self.group = exec_order, reductions, comm_ctx, group
        self._serve_pass, self._reset = calls
        self._units: Sequence[Unit] = exec_order.units
        params = [param for unit in self._units for param in unit.params]
        self._places = {param: place for place, param in enumerate(params)}
        this = weakref.proxy(self)  # units have the schedule, and must not own what has them
        self.schedule = AgreedSchedule(lambda number: this._reach_gather(number), lambda: this._serve_next())
        self.is_open = False
        self.notify: Callable[[], object] = _nothing
        self.divides_by_all = True
        self._count = 0
        self._kind: PassKind = "forward"
        self._syncs = self._is_short = False
        self._late: dict[Unit, Gradients] = {}
        self._used: set[ShardedParam] = set()
        # Gathers that this rank has launched for the others alone, and the buffers for what it receives.
        self._given: deque[tuple[Handle, Sequence[FullBuffer]]] = deque()
        self._planned: tuple[object, dict[tuple[PassKind, bool], tuple[list[int], list[int]]]] = None, {}
        self._left: list[int] = []  # ranks that have left a Join
        self._length = _NUM_FLAGS + 3 * len(self._units) + max(len(params), group.size())

    # ---- what ranks tell each other ----

    def _exchange(self, about: int, flags: Sequence[int], places: Sequence[int] = (), waiting: int = 0) -> list[int]:
        """Return the largest word of all ranks at each place; this rank says 1 at ``flags`` and ``places``."""
        mine = torch.zeros(self._length, dtype=torch.int32, device="cpu")
        mine[_COUNT], mine[_LESS_COUNT], mine[_ABOUT], mine[_LESS_ABOUT] = self._count, -self._count, about, -about
        mine[[*flags, *places]] = 1
        mine[_WAITS] = waiting
        try:
            largest_words(mine, self.group)
        except RuntimeError as error:
            raise self._exec_order.explain(error, f"the other ranks in a {self._kind}") from error
        said: list[int] = mine.tolist()
        if said[_COUNT] != -said[_LESS_COUNT] or said[_ABOUT] != -said[_LESS_ABOUT]:
            error = TransportError(
                f"a rank has left a {self._kind} that others still run, by an exception; see the error of that rank"
            )
            raise self._exec_order.explain(error, f"the other ranks in a {self._kind}")
        return said

    def begin(self, wanted: PassKind | None, changed: Container[int] | None = None) -> None:
        """Return when no rank begins anything that comes before ``wanted``; serve what does.

        Args:
            wanted: what this rank begins; None: a step or clip of the parameters with the ids ``changed``.

        Raises: StateError inside of a pass, and for a step or clip in a ``Join`` that a rank has left.
        """
        if self.is_open:
            raise StateError(
                f"a {wanted or 'step of an optimizer'} began inside of a {self._kind}, which set_allow_rank_divergence does "
                "not support: other ranks could not know when to serve it. Run it before or after"
            )
        while True:
            self.notify()
            kind = self._begin_next(wanted, True, changed)
            if kind is None and self._left:
                self._refuse_change()
            if kind is None or kind == wanted:
                return
            self._serve_pass(kind)

    def _refuse_change(self) -> NoReturn:
        raise StateError(
            f"gradients are clipped or an optimizer steps inside of a Join that {format_ranks(self._left)} has left: its "
            "shards would stay as they are. Put Join around the forwards and backwards of one step, and clip and step after it"
        )

    def _place_of_waiting(self, changed: Container[int] | None) -> int:
        """Return 1 + the place of a parameter, one of ``changed``, whose gradients wait on this rank; else 0."""
        shown = [(param, mark) for unit in self._units for param, mark in unit.earlier.waiting.items()]
        waiting = [param for param, mark in shown if param.sharded.grad is mark]
        return max(
            (1 + self._places[each] for each in waiting if changed is None or id(each.sharded) in changed), default=0
        )

    def leave_join(self) -> None:
        """End a ``Join``: all ranks have left its body."""
        self.notify, self.divides_by_all = _nothing, True
        for unit in self._units:
            unit.reshard()  # ranks may differ in what they have left unsharded

    def serve_one(self) -> None:
        """Serve the next pass of the other ranks; this rank begins none (``Join``)."""
        kind = self._begin_next(None, False)
        if kind is None:
            self._refuse_change()
        self._serve_pass(kind)

    def _begin_next(
        self, wanted: PassKind | None, is_active: bool, changed: Container[int] | None = None
    ) -> PassKind | None:
        flags: list[int] = []
        if wanted is not None:
            flags.append(_BACKWARD if wanted == "backward" else _FORWARD)
        if wanted == "backward":
            syncing = [unit.policy for unit in self._units if unit.policy.sync]
            flags += [_SYNCS] * bool(syncing) + [_SYNCS_REPLICAS] * any(each.syncs_replicas for each in syncing)
        places = [_NUM_FLAGS + self.group.rank()] if is_active else []
        said = self._exchange(_BEGIN, flags, places, self._place_of_waiting(changed))
        self._count += 1
        self._syncs, self._reductions.syncs_replicas = bool(said[_SYNCS]), bool(said[_SYNCS_REPLICAS])
        active = said[_NUM_FLAGS : _NUM_FLAGS + self.group.size()]
        ranks = dist.get_process_group_ranks(self.group)
        self._left = [rank for rank, is_in in zip(ranks, active, strict=True) if not is_in]
        if said[_WAITS] and not (said[_BACKWARD] or said[_FORWARD]):
            raise StateError(waits_for_sync([*self._places][said[_WAITS] - 1].fqn))
        return "backward" if said[_BACKWARD] else "forward" if said[_FORWARD] else None

    # ---- a pass ----

    def enter(self, kind: PassKind) -> None:
        """Take up the schedule of a pass that all ranks begin."""
        self._kind, plan = kind, self._exec_order.plan
        links = self._comm_ctx.pass_tracker.open_links() if self._exec_order.gathers else []
        if self._planned[0] != (plan, links):
            self._planned = (plan, links), {}
            for unit in self._units:
                is_read = all(group.is_read_by_peers(links) for group in unit.groups)  # without help of this rank
                unit.schedule = None if is_read else self.schedule
        calls = self._planned[1].get((kind, self._syncs))
        if calls is None:
            calls = self._planned[1][kind, self._syncs] = self._calls_of(kind)
        schedule = self.schedule
        schedule.gathers, schedule.reductions, schedule.cursor = [*calls[0], -1], [*calls[1], -1], 0
        schedule.whole.clear()
        self._used.clear()
        self._late.clear()
        self._is_short, self.is_open = plan is None, True

    def _calls_of(self, kind: PassKind) -> tuple[list[int], list[int]]:
        plan = self._exec_order.plan
        if plan is None:
            return [], []
        numbers = {unit.name: number for number, unit in enumerate(self._units)}
        begin = plan.starts[len(plan.order.forward)]
        calls = plan.calls[:begin] if kind == "forward" else plan.calls[begin:]
        taken = [
            (call.op, number)
            for call in calls
            if (number := numbers[call.unit]) >= 0
            and (
                (call.op is Op.REDUCE and self._syncs)
                or (call.op is Op.UNSHARD and self._units[number].schedule is not None)
            )
        ]
        return (
            [number if op is Op.UNSHARD else -1 for op, number in taken],
            [number if op is Op.REDUCE else -1 for op, number in taken],
        )

    def _reach_gather(self, number: int) -> None:
        """Launch for the others what comes before the gather of unit ``number``, which the caller launches next."""
        schedule = self.schedule
        at = schedule.find(schedule.gathers, number)
        if at is None:
            self._serve_until(len(schedule.gathers) - 1)
            self._is_short = True
            self._round([number])
            at = schedule.find(schedule.gathers, number)
            assert at is not None
        self._serve_until(at)
        schedule.cursor += 1

    def launch(self, unit: Unit, gradients: Gradients) -> None:
        """Launch the reduction of ``unit``, and before it for the others what comes first, with zeros added to ``gradients``.

        If the schedule has no such reduction any more, the gradients are kept until the end of the pass.
        """
        schedule, reductions = self.schedule, self._reductions
        is_whole = bool(gradients) and len(gradients) == unit.backward.counted[0]
        if is_whole and schedule.reductions[schedule.cursor] == unit.number:
            schedule.cursor += 1
            schedule.whole.append(unit.number)
            reductions.launch(unit, gradients)
            return
        if unit in self._late:
            gradients.update(add_gradients(self._late.pop(unit), gradients))
        at = schedule.find(schedule.reductions, unit.number)
        if at is None:
            self._late[unit] = gradients
            self._is_short = self._is_short or unit.number not in schedule.reductions
            return
        self._serve_until(at)
        schedule.cursor += 1
        early = frozenset[ShardedParam]() if reductions.early is None else reductions.early.params
        self._used.update(gradients, unit.earlier.held, unit.earlier.partial, early)
        for group in unit.groups:
            unit.add_zeros(group, gradients, early)
        reductions.launch(unit, gradients)

    def end(self, ran_here: bool = True) -> None:
        """Serve the other ranks until none needs anything more in this pass; ``ran_here``: this rank runs the pass, too."""
        schedule = self.schedule
        said, num_calls = list[int](), 0
        try:
            if self._kind == "backward" and self._syncs and not ran_here:
                for unit in reversed(self._units):
                    if unit.earlier.held:  # a rank that has left a Join runs no later backward
                        self.launch(unit, {})
            while len(schedule.gathers) != num_calls:
                num_calls = len(schedule.gathers)
                self._serve_until(num_calls - 1)
                said = self._round([])
        except BaseException:
            self._reset()
            raise
        self._drop_given(0)
        self.is_open = False
        if self._kind == "backward":
            size = self.group.size()
            factor = 1.0 if self.divides_by_all else size / max(size - len(self._left), 1)
            self._reductions.note_end(self._unused(said), factor)
        if said[_IS_SHORT]:
            self._plan_next(ran_here)

    def abort(self) -> None:
        """Leave a pass after a failure."""
        self.is_open = False
        self._drop_given(0)

    def _round(self, gathers: Sequence[int]) -> list[int]:
        """Tell the other ranks what this one needs, and append to the schedule what any rank needs."""
        num = len(self._units)
        first, second, third, last = (_NUM_FLAGS + each * num for each in range(4))
        places = [first + number for number in gathers]
        places += [second + unit.number for unit in self._late]
        places += [third + number for number in self.schedule.whole]
        places += [last + self._places[param] for param in self._used]
        said = self._exchange(_WITHIN, [_IS_SHORT] if self._is_short else [], places)
        self.schedule.append(
            [number for number in range(num) if said[first + number]],
            [number for number in range(num) if said[second + number]],
        )
        return said

    def _serve_until(self, end: int) -> None:
        while self.schedule.cursor < end:
            self._serve_next()

    def _serve_next(self) -> None:
        schedule = self.schedule
        number = schedule.gathers[schedule.cursor]
        if number >= 0:
            schedule.cursor += 1
            self._give(self._units[number])
        else:
            self.launch(self._units[schedule.reductions[schedule.cursor]], {})

    def _give(self, unit: Unit) -> None:
        streams = self._comm_ctx.streams
        if streams.are_concurrent:
            streams.gather.wait_current()
        for group in unit.groups:
            given = group.give_shards()
            if given is not None:
                self._given.append(given)
        unit.note(Op.SERVE, lambda: (unit.gather_staging[0], False))
        self._drop_given(_MOST_GIVEN)

    def _drop_given(self, most: int) -> None:
        while len(self._given) > most:
            handle, buffers = self._given.popleft()
            handle.cancel()
            for buffer in buffers:
                buffer.drop()

    # ---- after a pass ----

    def _unused(self, said: list[int]) -> set[ShardedParam]:
        """Return the parameters that have a gradient on no rank: they keep the ``.grad`` that they have."""
        num = len(self._units)
        whole, used = _NUM_FLAGS + 2 * num, _NUM_FLAGS + 3 * num
        partly = [unit for unit in self._units if not said[whole + unit.number]]
        return {param for unit in partly for param in unit.params if not said[used + self._places[param]]}

    def _plan_next(self, ran_here: bool) -> None:
        mine = [(each.unit, each.event.value) for each in (self._exec_order.own_order if ran_here else ())]
        every = gather_objects(mine, self.group)
        found = [[OrderEntry(unit, StepEvent(event)) for unit, event in each] for each in every]
        plan = self._exec_order.plan
        forward = list(plan.order.forward) if plan is not None else []
        backward = list(plan.order.backward) if plan is not None else []
        forward = union_of(forward, [[each for each in order if each.event in FORWARD] for order in found])
        if self._kind == "backward":
            backward = union_of(backward, [[each for each in order if each.event not in FORWARD] for order in found])
        self._exec_order.plan_from(ExecutionOrder((*forward, *backward)))


class ServeHook(JoinHook):
    """Serves other ranks after this one has left the body of a ``Join``.

    Args:
        module: the root.  divergence: that of its engine; None on a single rank.  divides_by_all: as of :class:`Divergence`.
    """

    def __init__(self, module: nn.Module, divergence: Divergence | None, divides_by_all: bool) -> None:
        self._module, self._divergence = module, divergence
        if divergence is None:
            return
        divergence.divides_by_all = divides_by_all
        this = weakref.ref(module)
        divergence.notify = lambda: Join.notify_join_context(cast(Any, this()))

    def main_hook(self) -> None:
        """Serve one pass."""
        if self._divergence is not None:
            self._divergence.serve_one()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave the join, as all ranks have."""
        cast(Any, self._module)._join_config = torch_private.no_join()
        if self._divergence is not None:
            self._divergence.leave_join()


def refuse_manual(is_manual: bool) -> None:
    """Raise StateError if ``is_manual``: ranks could not tell when the backward that user code finalizes has ended."""
    if is_manual:
        raise StateError(
            "set_manual_backward_finalization and set_allow_rank_divergence are both on: other ranks could not know when a "
            "backward is over that finalize_backward() ends. Use one of them"
        )
