"""Ranks that take different ways (``set_allow_rank_divergence``): all of them launch the collectives of one schedule.

A gather or a reduction takes all ranks of its group, also those whose own modules do not need it.  So the collectives of a
forward or backward (a pass) follow a schedule that all ranks share: each unit once, in the order of the modules.  A rank that
needs a later entry launches the entries before it first, for the others alone: it gives its shards and drops what it receives,
and its gradients are zeros.  At the end of the pass it launches the rest.  A collective that is not in the rest of the
schedule is a request: the rank launches the rest and waits until the others have done so, too, and all append the requests of
all ranks to the schedule, in the order of the units.  The pass is over when no rank requests anything.

Before a pass ranks tell each other which kind they begin.  Where they differ, a backward comes before a forward and a forward
before an optimizer step; ranks that begin something else serve it.

Ranks speak through one small all-reduce of a group of its own on the host, so that it waits for no stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from shardwise import torch_private
from shardwise.collectives.routes import PassKind
from shardwise.consistency.process_groups import largest_words
from shardwise.errors import StateError, TransportError
from shardwise.formatting import format_ranks
from shardwise.fsdp.local_gradients import Gradients, add_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.waiting_gradients import waits_for_sync
from shardwise.observe import Op, listeners
from shardwise.plan.schedule import forward_of

# ---- Serving other ranks.

Ids = Container[int] | None
_END = -(1 << 40)  # after the last collective of a schedule
_BEGIN, _WITHIN = 1, 2  # what ranks speak about
# The places of words in the vector that ranks exchange; the largest word of all ranks counts.
_COUNT, _LESS_COUNT, _ABOUT, _LESS_ABOUT, _FORWARD, _BACKWARD, _SYNCS, _SYNCS_REPLICAS, _WAITS = range(9)
_NUM_FLAGS = 9


class Divergence:
    """The part of an engine that lets ranks take different ways.

    Args:
        engine: it owns this object; its file imports this one.
        group: a gloo group of all ranks of the engine.

    Attributes:
        is_open: a pass runs.
        joined: the root inside a ``Join``, which counts what ranks begin; None outside of any.
        divides_by_all: gradients are averaged over all ranks, not only over those that are still in a ``Join``.
    """

    def __init__(self, engine: Any, group: dist.ProcessGroup) -> None:
        self._engine = engine = weakref.proxy(engine)
        self.group = group
        self._units: Sequence[Unit] = engine.exec_order.units
        params = [param for unit in self._units for param in unit.params]
        self._places = {param: place for place, param in enumerate(params)}
        self.is_open = self._syncs = False
        self.joined: weakref.ref[nn.Module] | None = None
        self.divides_by_all = True
        self._count = 0
        self._kind: PassKind = "forward"
        # The schedule of the running pass, and how many of its collectives this rank has launched.  Not the plan of a step
        # (``plan/schedule.py``), which a rank follows alone: all ranks launch these, in this order.
        # A number is the gather of that unit, its complement (negative) is the reduction.
        self.gathers, self.cursor = [_END], 0
        self._late: dict[Unit, Gradients] = {}
        self._used: set[ShardedParam] = set()
        self._planned: tuple[object, object] | None = None  # the plan and links for which units have their schedule
        self._left: list[int] = []  # ranks that have left a Join
        self._length = _NUM_FLAGS + 2 * len(self._units) + max(len(params), group.size())

    # ---- what ranks tell each other ----

    def _exchange(self, about: int, places: Sequence[int], waiting: int = 0) -> list[int]:
        """Return the largest word of all ranks at each place; this rank says 1 at ``places``."""
        mine = torch.zeros(self._length, dtype=torch.int32, device="cpu")
        mine[_COUNT], mine[_LESS_COUNT], mine[_ABOUT], mine[_LESS_ABOUT] = self._count, -self._count, about, -about
        mine[places] = 1
        mine[_WAITS] = waiting
        try:
            largest_words(mine, self.group)
            said: list[int] = mine.tolist()
            if said[_COUNT] != -said[_LESS_COUNT] or said[_ABOUT] != -said[_LESS_ABOUT]:
                raise TransportError(f"a rank has left a {self._kind} that others still run; see its error")
        except RuntimeError as error:
            self._engine.exec_order.explain(error, f"the other ranks in a {self._kind}")
            raise
        return said

    def begin(self, wanted: PassKind | None, changed: Ids = None) -> None:
        """Return when no rank begins anything that comes before ``wanted``; serve what does.

        Args:
            wanted: what this rank begins; None: a step or clip of the parameters with the ids ``changed``.

        Raises: StateError inside of a pass, and for a step or clip in a ``Join`` that a rank has left.
        """
        if self.is_open:
            raise StateError(f"a {wanted or 'step of an optimizer'} began inside of a {self._kind}: run it before that")
        while True:
            if self.joined is not None:
                Join.notify_join_context(cast(Any, self.joined()))
            kind = self._begin_next(wanted, True, changed)
            if kind is None or kind == wanted:
                return
            self._engine.serve_pass(kind)

    def leave_join(self) -> None:
        """End a ``Join``: all ranks have left its body."""
        self.joined, self.divides_by_all = None, True
        for unit in self._units:
            unit.reshard()  # ranks may differ in what they have left unsharded

    def serve_one(self) -> None:
        """Serve the next pass of the other ranks; this rank begins none (``Join``)."""
        if (kind := self._begin_next(None, False)) is not None:
            self._engine.serve_pass(kind)

    def _begin_next(self, wanted: PassKind | None, is_active: bool, changed: Ids = None) -> PassKind | None:
        places = [_NUM_FLAGS + self.group.rank()] if is_active else []
        places += [_FORWARD] if wanted == "forward" else []
        if wanted == "backward":
            syncing = [unit.policy for unit in self._units if unit.policy.sync]
            places += [_BACKWARD] + [_SYNCS] * bool(syncing)
            places += [_SYNCS_REPLICAS] * any(policy.syncs_replicas for policy in syncing)
        # 1 + the place of a parameter, one of ``changed``, whose gradients wait on this rank; else 0.
        shown = [(param, mark) for unit in self._units for param, mark in unit.earlier.waiting.items()]
        waiting = [param for param, mark in shown if param.sharded.grad is mark]
        named = [1 + self._places[each] for each in waiting if changed is None or id(each.sharded) in changed]
        said = self._exchange(_BEGIN, places, max(named, default=0))
        # Each exchange says its number and its kind: a rank that has left a pass by an error would else be taken for one in it.
        self._count += 1
        self._syncs, self._engine.reductions.syncs_replicas = bool(said[_SYNCS]), bool(said[_SYNCS_REPLICAS])
        active = said[_NUM_FLAGS : _NUM_FLAGS + self.group.size()]
        ranks = dist.get_process_group_ranks(self.group)
        self._left = [rank for rank, is_in in zip(ranks, active, strict=True) if not is_in]
        kind: PassKind | None = "backward" if said[_BACKWARD] else "forward" if said[_FORWARD] else None
        if kind is None and said[_WAITS]:
            raise StateError(waits_for_sync([*self._places][said[_WAITS] - 1].fqn))
        if kind is None and self._left:
            raise StateError(
                f"gradients are clipped or an optimizer steps inside of a Join that {format_ranks(self._left)} has left. "
                "Put Join around the forwards and backwards of one step, and clip and step after it"
            )
        return kind

    # ---- a pass ----

    def enter(self, kind: PassKind) -> None:
        """Take up the schedule of a pass that all ranks begin."""
        self._kind, plan = kind, self._engine.exec_order.plan_in_order()
        links = self._engine.comm_ctx.pass_tracker.open_links() if self._engine.exec_order.gathers else []
        if self._planned != (plan, links):
            self._planned = plan, links
            for unit in self._units:
                is_read = unit.memory.is_read_by_peers(links)  # without help of this rank
                unit.engine_side.schedule = None if is_read else weakref.proxy(self)
        units, begin = {unit.name: unit for unit in self._units}, plan.starts[len(forward_of(plan.order))]
        self.gathers, self.cursor = [], 0
        for call in plan.calls[:begin] if kind == "forward" else plan.calls[begin:]:
            unit = units[call.unit]
            if call.op is Op.UNSHARD and unit.engine_side.schedule is not None:
                self.gathers.append(unit.number)
            elif call.op is Op.REDUCE and self._syncs:
                self.gathers.append(~unit.number)
        self.gathers.append(_END)
        self._used.clear()
        self._late.clear()
        self.is_open = True

    def reach_gather(self, unit: Unit) -> None:
        """Launch for the others what comes before the gather of ``unit``; the caller launches that, and moves the cursor."""
        if unit.number not in self.gathers[self.cursor :]:
            self._serve_until(len(self.gathers) - 1)
            self._round([unit.number])
        self._serve_until(self.gathers.index(unit.number, self.cursor))

    def launch(self, unit: Unit, gradients: Gradients) -> None:
        """Launch the reduction of ``unit``, and before it for the others what comes first, with zeros added to ``gradients``.

        If the schedule has no such reduction any more, the gradients are kept until the end of the pass.
        """
        reductions = self._engine.reductions
        if unit in self._late:
            gradients.update(add_gradients(self._late.pop(unit), gradients))
        if self.gathers[self.cursor] != ~unit.number:  # ranks that take the same way pay for one comparison
            if ~unit.number not in self.gathers[self.cursor :]:
                self._late[unit] = gradients
                return
            self._serve_until(self.gathers.index(~unit.number, self.cursor))
        self.cursor += 1
        launched = frozenset[ShardedParam]() if reductions.open_launch is None else reductions.open_launch.params
        # What this rank has a gradient for; at the end of the pass ranks exchange it, since zeros are sent for the rest.
        self._used.update(gradients, unit.earlier.held, unit.earlier.partial, launched)
        unit.add_zeros(gradients, launched)
        reductions.launch(unit, gradients)

    def end(self, ran_here: bool = True) -> None:
        """Serve the other ranks until none needs anything more in this pass; ``ran_here``: this rank runs the pass, too."""
        said, num_calls = list[int](), 0
        try:
            if self._kind == "backward" and self._syncs and not ran_here:
                for unit in reversed(self._units):
                    if unit.earlier.held:  # a rank that has left a Join runs no later backward
                        self.launch(unit, {})
            while len(self.gathers) != num_calls:
                num_calls = len(self.gathers)
                self._serve_until(num_calls - 1)
                said = self._round([])
        except BaseException:
            self._engine.reset()  # an exception here leaves no pass that the next exchange could go on with
            raise
        self.is_open = False
        if self._kind == "backward":
            # Parameters that have a gradient on no rank keep the ``.grad`` that they have: what was reduced of them are zeros.
            used = said[_NUM_FLAGS + 2 * len(self._units) :]
            unused = {param for param, place in self._places.items() if not used[place]}
            size = self.group.size()
            factor = 1.0 if self.divides_by_all else size / max(size - len(self._left), 1)
            for launch in self._engine.reductions.launched:
                launch.unused, launch.factor = unused, factor

    def _round(self, gathers: Sequence[int]) -> list[int]:
        """Tell the other ranks what this one needs, and append to the schedule what any rank needs."""
        num = len(self._units)
        first, second, last = (_NUM_FLAGS + each * num for each in range(3))
        places = [first + number for number in gathers]
        places += [second + unit.number for unit in self._late]
        places += [last + self._places[param] for param in self._used]
        said = self._exchange(_WITHIN, places)
        gathers, sums = ([number for number in range(num) if said[begin + number]] for begin in (first, second))
        self.gathers[-1:] = [*gathers, *[~number for number in sums], _END]
        return said

    def _serve_until(self, end: int) -> None:
        while self.cursor < end:
            self.serve_next()

    def serve_next(self) -> None:
        """Launch for the others what comes next in the schedule."""
        number = self.gathers[self.cursor]
        if number >= 0:
            self.cursor += 1
            self._give(self._units[number])
        else:
            self.launch(self._units[~number], {})

    def _give(self, unit: Unit) -> None:
        streams = self._engine.comm_ctx.streams
        if streams.are_concurrent:
            streams.gather.wait_current()
        handle = unit.memory.gather() if unit.memory.comm.shards is not None else None
        if listeners:
            unit.emit(Op.SERVE, unit.gather_staging[0])
        if handle is not None:
            # Wait for it here, so that what this rank receives is freed at once: ranks launch in one order, so whatever keeps
            # the others from this gather would keep them from the next one, too.
            handle.cancel()


class ServeHook(JoinHook):
    """Serves other ranks after this one has left the body of a ``Join``.

    Args:
        module: the root.  divergence: that of its engine.  divides_by_all: as of :class:`Divergence`.
    """

    def __init__(self, module: nn.Module, divergence: Divergence, divides_by_all: bool) -> None:
        self._module, self._divergence = module, divergence
        divergence.divides_by_all, divergence.joined = divides_by_all, weakref.ref(module)

    def main_hook(self) -> None:
        """Serve one pass."""
        self._divergence.serve_one()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave the join, as all ranks have."""
        torch_private.leave_join(self._module)
        self._divergence.leave_join()


def refuse_manual(is_manual: bool) -> None:
    """Raise StateError if ``is_manual``: ranks could not tell when the backward that user code finalizes has ended."""
    if is_manual:
        raise StateError("set_manual_backward_finalization and set_allow_rank_divergence are both on: use one of them")
