"""A unit: the parameters of one ``fully_shard`` or ``replicate`` call, which unshard and reshard together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Protocol

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.protocol import Handle
from shardwise.collectives.routes import Transport
from shardwise.consistency.failure_report import concerns_others
from shardwise.errors import ConfigError
from shardwise.fsdp.local_gradients import EarlierGradients, Gradients, take_gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.precision import MixedPrecisionPolicy
from shardwise.fsdp.step_checks import StepChecks
from shardwise.fsdp.user_writes import Written, check_sub, find_writes, take_written
from shardwise.observe import (
    Call,
    EventLog,
    Op,
    begin,
    end,
    hearers,
    listeners,
    now,
    remember,
    tell,
    thread,
    unit_in_words,
)
from shardwise.plan.schedule import AgreedSchedule, Buckets, UnitPolicy

# ---- The progress of a unit's backward: its stage, the gradients that have arrived, the passes that are open.


class Stage(Enum):
    """The progress of backward through a unit."""

    IDLE = "idle"  # no backward runs, or it has not reached the unit, or it is past it
    # Parameters have gradients, but no output has: of tied weights that the unit owns, or of parameters used directly.
    ARRIVING = "arriving"
    RUNNING = "running"  # the gradient of an output has arrived: backward reads the parameters

    __hash__ = object.__hash__  # Enum hashes in Python, and every step looks stages up


def _no_op() -> None:
    return None


def _nothing() -> tuple[int, bool]:
    return 0, False


class UnitBackward:
    """The progress of one unit's backward.  Other classes may read the attributes; only the methods write them.

    Attributes:
        host: returns the engine, which acts on gradients, or None.  unit: weak reference to the unit.
        stage: how far it is; only the methods here change it.
        task: the autograd task in which it began; with nested backwards, the last one.
        arrived: ordinals of the parameters whose gradients have arrived.
        counted: the number of trainable parameters, and of all parameters.
        has_frozen: some parameters are frozen.
        open_passes: passes through the unit's modules that backward has entered and not left.
        is_nested: some gradients came from a nested backward (reentrant checkpoint), so more may follow for any parameter.
        comes_again: this backward used the unit again after its end in a nested one, or produced a gradient twice.
        came_again: ``comes_again`` of the last backward that produced gradients.
        ended_in: the outermost autograd task of the backward in which the unit ended with a nested one.
        counts: the last gradient ends the unit's backward.  Where checkpoints run nested backwards, which may use the
            parameters again, this is False until a first backward has shown that they do not.
        ended_late: a backward ended the unit only at its own end, since some gradient did not arrive.
        early: the buckets that may be reduced before the unit's backward ends; None if there are none.
        owes_weights: a backward produced no gradient of a parameter: pipeline schedules may compute those separately.
        keeps_for_graph: a backward ran with ``create_graph=True``.  Its graph reads the parameters, so they stay full until a
            backward without it has ended.
        is_unseen: the last forward returned no tensor whose gradient hook would announce the unit's backward, so its
            parameters stay full.
        first: the ordinal of the parameter whose gradient arrived before any hook announced the backward.
        looked_at: of a root: number of graph nodes of the last forward that was searched for reentrant checkpoints, and
            whether one of its inputs needed a gradient; None: no forward was searched.
        has_lost_weights: a backward of inputs alone began while the parameters were sharded, so the gradients of weights
            that are computed later have no parameters to go to.
    """

    def __init__(self, unit: Callable[[], Unit | None]) -> None:
        self.unit = unit
        self.host: Callable[[], StepCallbacks | None] = _no_op
        self.stage = Stage.IDLE
        self.task = -1
        self.arrived: set[int] = set()
        self.counted = (0, 0)
        self.has_frozen = False
        self.open_passes: set[object] = set()
        self.is_nested = self.comes_again = self.came_again = False
        self.ended_in = -1
        self.counts = True
        self.ended_late = False
        self.owes_weights = self.has_lost_weights = False
        self.keeps_for_graph = False
        self.is_unseen = False
        self.first: int | None = None
        self.early: Buckets | None = None
        self.looked_at: tuple[int, bool] | None = None
        self._began_full = True

    def expect(self, num_trainable: int, num_params: int) -> None:
        """Expect gradients of ``num_trainable`` of ``num_params`` parameters."""
        self.counted = (num_trainable, num_params)
        self.has_frozen = num_trainable < num_params

    def enter(self, task: int, is_full: bool = True, whole: int = -1) -> None:
        """Record that the gradient of an output has arrived.

        Args:
            task: the autograd task that runs.
            is_full: the unit's parameters are unsharded.
            whole: the outermost task, which may have used the unit before, in another nested backward.
        """
        if self.stage is not Stage.RUNNING:  # RUNNING already if user code has resharded the unit meanwhile
            self.stage = Stage.RUNNING
            self._began_full = is_full
            self.comes_again = self.comes_again or self.ended_in == whole != -1
        self.task = task

    def hook(self, param: ShardedParam) -> Callable[[torch.Tensor], None]:
        """Return the post-accumulate-grad hook of the full parameter of ``param``."""
        # Through a weak reference: the full parameter owns the hook, and the unit owns the full parameter.
        this, ordinal, running, task_id = weakref.ref(self), param.ordinal, Stage.RUNNING, torch_private.graph_task_id

        def on_accumulated(_: torch.Tensor) -> None:
            backward = this()
            if backward is None:
                return
            arrived, early = backward.arrived, backward.early
            if ordinal in arrived:
                backward.comes_again = True
            arrived.add(ordinal)
            if backward.stage is running:
                if backward.task != task_id():
                    backward.is_nested = True  # a reentrant checkpoint inside the unit runs it: others may follow
                is_bucket = early is not None and early.is_ready()
                if backward.is_nested or (len(arrived) < backward.counted[0] and not is_bucket):
                    return  # the engine has seen this backward begin, and neither a bucket nor the unit is complete
            elif backward.stage is Stage.IDLE:
                backward.first = ordinal
                backward.stage = Stage.ARRIVING
            host, unit = backward.host(), backward.unit()
            if host is not None and unit is not None:
                host.gradient_arrived(unit)

        return on_accumulated

    @property
    def is_complete(self) -> bool:
        """True when every parameter has its gradient, so that backward reads none of them any more.

        It is never True with a frozen parameter: backward may read that after the last gradient, so its unit ends when
        autograd leaves its inputs.
        """
        is_there = len(self.arrived) >= self.counted[0] > 0
        return is_there and self.counts and not self.has_frozen and not self.is_nested

    def ends_with(self, task: int, is_one_module: bool) -> bool:
        """Return True if the unit's backward ends with the nested backward ``task``.

        A unit of several modules ends only when all gradients have arrived: other modules may be recomputed later.
        """
        if self.stage is not Stage.RUNNING or self.task != task or self.comes_again or self.came_again:
            return False
        return is_one_module or len(self.arrived) >= self.counted[0] > 0

    def leave(self, ended_late: bool = False, is_kept: bool = False) -> None:
        """End the unit's part of the backward, whose gradients were taken; ``is_kept``: its parameters stay full."""
        if self.arrived:
            self.came_again = self.comes_again
            self.counts = not (self.is_nested or self.comes_again)
        self.ended_late = self.ended_late or ended_late
        if self.stage is Stage.RUNNING:
            brought_none = self.counted[0] > 0 and not self.arrived
            self.owes_weights = self.owes_weights or brought_none
            if brought_none and is_kept and not self._began_full:
                self.has_lost_weights = True
        self.forget()

    def forget(self) -> None:
        """Return to IDLE and drop the progress of this backward."""
        self.arrived.clear()
        self.open_passes.clear()
        self.is_nested = self.comes_again = False
        self.early = self.first = None
        self.stage = Stage.IDLE

    def unlearn(self) -> None:
        """Forget how earlier backwards ended: ranks that took different ways have seen different ones."""
        self.counts, self.ended_late, self.came_again, self.is_unseen, self.looked_at = True, False, False, False, None


# ---- The states of a unit: sharded, gathering, unsharded, and maybe sharded on a smaller mesh, then sharded again.


@dataclass(frozen=True, slots=True)
class Sharded:
    """The sharded parameters are registered, and this rank has nothing but its shards."""


SHARDED = Sharded()


@dataclass(slots=True)  # not frozen: a step makes several, and frozen dataclasses take three times as long to make
class Gathering:
    """The all-gather is launched; the full parameters may not be read yet.

    Attributes:
        version: the version of the shards that are gathered; it changes when a shard is written to.
        pass_number: the forward or backward in which this version was read; None outside of any.
        handles: one per group; None for a group that has nothing to wait for.
    """

    version: int
    pass_number: int | None
    handles: tuple[Handle | None, ...]


@dataclass(slots=True)
class Unsharded:
    """The full parameters have memory; for attributes see :class:`Gathering`.

    ``is_registered``: they are registered; between passes the shards may be, of units that stay unsharded.
    """

    version: int
    pass_number: int | None
    is_registered: bool = True


@dataclass(frozen=True, slots=True)
class Subsharded:
    """The unit was resharded to a smaller mesh after forward, and the parameters on that mesh are registered."""

    version: int


UnitState = Sharded | Gathering | Unsharded | Subsharded


class StepCallbacks(Protocol):
    """The callbacks of a unit to the engine that runs its steps."""

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Return ``error``, of a collective at ``where``, with what the other ranks were doing."""
        ...

    def before_gather(self) -> None:
        """Order the next all-gather after the writes to shards that the current stream runs."""
        ...

    def gradient_arrived(self, unit: Unit) -> None:
        """Act on a gradient of ``unit``: the last one of it, or of a bucket, or the first before any hook."""
        ...


class Unit:
    """The parameters of one ``fully_shard`` or ``replicate`` call.

    ``state`` says which parameters are registered.  Each transition is one method.
    ``backward`` is the progress of the running backward; ``earlier`` holds what earlier backwards left.

    Attributes:
        groups: the unit's parameters, one group per mesh.
        policy: the unit's settings; setters replace it by another immutable value.
        is_full: the full parameters are registered: the state is Unsharded.
        number: index among the units of its engine.
        may_diverge: the user lets ranks take different ways; the root's counts.  diverges: its engine does.
        schedule: the schedule of its gathers if ranks may take different ways and a gather needs all of them; else None.
        name: paths of the unit's modules in the root, from the first forward on.
        log: the event log.
        num_commits: how often gradients of the unit have been set; an optimizer is expected to change the shards after each.
        tied_units: units that own tied parameters that this unit's modules use.
        holders: the number of forwards that are using the full parameters now.
        num_aliases: :meth:`count_aliases` when a forward began.
        awaited: ids of the modules that have not run yet in the current forward; with several modules the last one ends it.
        uses_default_reshard: the user did not pass ``reshard_after_forward``, so a root keeps its parameters unsharded, and
            whatever is kept is freed after a forward that no backward follows.
        max_reductions: how many reduce-scatter inputs may be allocated at once; the largest of an engine's units counts.
        transport: the transport that the user chose for this unit; the root's counts.
        checks: those of its engine.
        ahead_bytes: the prefetch limit in bytes that the user chose for this unit; the root's counts.
        forward_prefetch, backward_prefetch: units that the user wants unsharded when this one starts; None: the plan's.
    """

    def __init__(self, modules: Sequence[nn.Module], precision: MixedPrecisionPolicy, policy: UnitPolicy) -> None:
        self.adopt_modules(modules)
        self.groups: list[ParamGroup] = []
        self.precision = precision
        self.policy = policy
        self.name = ""
        self.log = EventLog()
        self.state: UnitState = Sharded()
        self.is_full = False
        self.number = -1
        self.may_diverge = self.diverges = False
        self.schedule: AgreedSchedule | None = None
        self.backward = UnitBackward(weakref.ref(self))
        self.earlier = EarlierGradients()
        self.num_commits = 0
        self.tied_units: tuple[Unit, ...] = ()
        self.holders = 0
        self.num_aliases = 0
        self.awaited: set[int] = set()
        self.uses_default_reshard = False
        self.max_reductions = 1
        self.transport: Transport | None = None
        self.ahead_bytes: int | None = None
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.checks = StepChecks()
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.host_ref: Callable[[], StepCallbacks | None] = _no_op

    def adopt_modules(self, modules: Sequence[nn.Module]) -> None:
        """Become the unit of ``modules``.  References are weak, since the modules own the unit."""
        self._modules = tuple(weakref.ref(module) for module in modules)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those of the unit's modules that are alive."""
        return tuple(module for ref in self._modules if (module := ref()) is not None)

    @property
    def params(self) -> Sequence[ShardedParam]:
        """All parameters of all groups."""
        if len(self.groups) == 1:
            return self.groups[0].params
        return [param for group in self.groups for param in group.params]

    def use_tied(self, owner: Unit) -> None:
        """Record that this unit's modules use tied parameters of ``owner``."""
        if owner not in self.tied_units:
            self.tied_units = (*self.tied_units, owner)

    @property
    def keeps_sums(self) -> bool:
        """True if gradients are reduced over the shard axis only, and a later backward reduces them over replicas."""
        return not self.policy.syncs_replicas and any(group.axes.num_replicas > 1 for group in self.groups)

    @property
    def gather_staging(self) -> tuple[int, bool]:
        """Bytes that a launched all-gather allocates, and whether they include all full parameters."""
        if len(self.groups) == 1 and not self.policy.keeps_full_memory:
            return self.groups[0].gather_staging()
        stagings = [group.gather_staging(self.policy.keeps_full_memory) for group in self.groups]
        if not self.policy.keeps_full_memory and all(is_in_place for _, is_in_place in stagings):
            return sum(num_bytes for num_bytes, _ in stagings), bool(stagings)
        # If only some groups gather in place, the full parameters are counted at the wait.
        held = sum(
            group.full_bytes for group, (_, is_in_place) in zip(self.groups, stagings, strict=True) if is_in_place
        )
        return sum(num_bytes for num_bytes, _ in stagings) - held, False

    @property
    def route(self) -> str:
        """The names of the links that gather the parameters; of unbound groups nothing is known."""
        return ", ".join(dict.fromkeys(route for group in self.groups if (route := group.route)))

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards; 0 if the policy keeps them, since a step does not allocate them."""
        total = 0
        for group in self.groups:
            total += group.full_bytes
        return 0 if self.policy.keeps_full_memory else total

    def note(self, op: Op, measure: Callable[[], tuple[int, bool]] = _nothing, state: UnitState | None = None) -> None:
        """Tell observers that the unit has just done ``op``, after which it is in ``state``; None: that stays.

        ``measure`` returns the bytes of the operation, and whether they include the full parameters.
        """
        if state is not None:
            self.state, self.is_full = state, type(state) is Unsharded
        log = self.log
        log.num_calls += 1
        log.recent.append((op, self.name))
        track = log.track
        track.count = count = track.count + 1
        remember((now(), thread(), track.name, count, op, self.name))
        if hearers:
            tell(op, self.name)
        if log.instruments:
            call = Call(op, self.name, *measure())
            for instrument in log.instruments:
                instrument.on_event(call)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        host = self.host_ref()
        return error if host is None else host.explain(error, f"all-gather of {unit_in_words(self.name)}")

    # ---- parameters ----

    def unshard(self, pass_number: int | None = None) -> None:
        """Launch the all-gather, unless the full parameters are up to date or their all-gather is in flight.

        ``pass_number``: the number of the running forward or backward, in which shards do not change; None outside of any.
        """
        state, groups = self.state, self.groups
        is_sharded = type(state) is Sharded
        if isinstance(state, (Gathering, Unsharded)):
            if self._is_from_now(state, pass_number):
                self._serve_others(pass_number)
                return
            if isinstance(state, Gathering):
                self.discard()
        version, in_pass = self.num_commits << 40, is_sharded and pass_number is not None
        for group in groups:
            version += group.last_version if in_pass and group.seen is not None else group.version()
        from_sub = isinstance(state, Subsharded) and state.version == version
        is_written = False
        for group in groups:
            if pass_number is None and not from_sub:
                group.ensure_packed()
            is_written |= group.is_written
            group.is_written = False
        if pass_number is None or is_written or not is_sharded:
            # The current stream may have just written to the shards.
            host = self.host_ref()
            if host is not None:
                host.before_gather()
        if isinstance(state, Subsharded):
            check_sub(self.name, self.params)
        schedule = self.schedule
        if schedule is not None and pass_number is not None:
            if schedule.gathers[schedule.cursor] == self.number:
                schedule.cursor += 1
            else:
                schedule.reach_gather(self.number)
        if listeners:
            begin(self.log.track.name, "unshard", self.name)
        try:
            launched = (*map(ParamGroup.gather, groups, repeat(from_sub)),)
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._explained(error) from error
        self.note(Op.UNSHARD, lambda: self.gather_staging, Gathering(version, pass_number, launched))
        if listeners:
            end("unshard", self.name, self.gather_staging[0])

    def _serve_others(self, pass_number: int | None) -> None:
        """Launch the all-gather for other ranks if it is next in the schedule: this rank has the full parameters."""
        schedule = self.schedule
        if schedule is not None and pass_number is not None and schedule.gathers[schedule.cursor] == self.number:
            schedule.serve_next()

    def wait(self, pass_number: int | None = None) -> None:
        """Wait for the all-gather, launching it if it is not in flight, and register the full parameters."""
        state = self.state
        if type(state) is not Gathering or pass_number is None or state.pass_number != pass_number:
            if isinstance(state, Unsharded) and self._is_from_now(state, pass_number):
                self._serve_others(pass_number)
                return
            self.unshard(pass_number)
            state = self.state
        assert isinstance(state, Gathering)
        if listeners:
            begin(self.log.track.name, "wait", self.name)
        try:
            for handle in state.handles:
                if handle is not None:
                    handle.wait()
        except RuntimeError as error:
            raise self._explained(error) from error
        self._register_full()
        self.note(Op.WAIT, lambda: (self.full_bytes, False), Unsharded(state.version, pass_number))
        if listeners:
            end("wait", self.name, self.full_bytes)

    def _register_full(self) -> None:
        backward = self.backward
        num_trainable = num_params = 0
        for group in self.groups:
            num_trainable += group.register_full(backward.hook)
            num_params += len(group.params)
        if (num_trainable, num_params) != backward.counted:
            backward.expect(num_trainable, num_params)

    def reshard(self, in_pass: bool = False) -> bool:
        """Copy writes to full parameters into the shards, free the full parameters and register the sharded ones.

        Returns: False, with nothing done, if there are writes and other ranks may be reading the shards (``in_pass``).
        """
        if isinstance(self.state, Sharded):
            return True
        if isinstance(self.state, Gathering):
            self.discard()
            return True
        if isinstance(self.state, Subsharded) and not in_pass:
            check_sub(self.name, self.params)
        was_full = self.is_full
        if was_full:
            written = find_writes(self.groups)
            if written and in_pass:
                return False
            if listeners:
                begin(self.log.track.name, "reshard", self.name)
            if written:
                take_written(written)
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)
        self.state, self.is_full = SHARDED, False
        if was_full:
            self.note(Op.RESHARD, lambda: (self.full_bytes, False))
            if listeners:
                end("reshard", self.name, self.full_bytes)
        return True

    def discard(self) -> None:
        """Cancel an all-gather that was not waited for."""
        assert isinstance(self.state, Gathering)
        self._cancel(self.state)
        self.state = SHARDED

    def _cancel(self, state: Gathering | None) -> None:
        for handles in state.handles if state is not None else ():
            if handles is not None:
                handles.cancel()
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)

    def free_kept_memory(self) -> None:
        """Free the memory of full parameters that a sharded unit keeps, after the policy that kept it has changed."""
        if isinstance(self.state, (Sharded, Subsharded)):
            for group in self.groups:
                group.drop(self.policy.keeps_full_memory)

    def abandon(self) -> None:
        """Reset the unit after a failure: sharded, in no forward and no backward; an all-gather in flight is cancelled."""
        self.holders = 0
        self.awaited = set()
        self.backward.forget()
        self._cancel(self.state if isinstance(self.state, Gathering) else None)
        self.state, self.is_full = SHARDED, False

    @property
    def num_packs(self) -> int:
        """How often the parameters of all groups were packed."""
        groups = self.groups
        return groups[0].num_packs if len(groups) == 1 else sum(group.num_packs for group in groups)

    # ---- use in a forward ----

    def wait_with_tied(self, pass_number: int | None) -> None:
        """Wait for the full parameters that the unit's modules use, tied ones included."""
        self.wait(pass_number)
        for member in self.tied_units:
            member.wait(pass_number)

    def begin_forward(self, pass_number: int | None) -> None:
        """Begin the forward of one of the unit's modules; until its end no other forward reshards what it uses."""
        if not self.awaited and not self.holders:
            refs = self._modules
            if len(refs) == 1:
                self.awaited = {id(refs[0]())}
            else:
                self.awaited = {id(module) for ref in refs if (module := ref()) is not None}
        for member in (self, *self.tied_units):
            member.holders += 1
            member.wait(pass_number)
            if torch_private.saved_tensor_hooks(True) is not None:
                member.num_aliases = member.count_aliases()

    def count_aliases(self) -> int:
        """Return how many tensors use the memory of the full parameters; needed only while saved-tensor hooks are active.

        A hook may store such a tensor to recognize others by address (activation offloading does), so no other parameter
        may get this address before backward.
        """
        packings = [group.packing for group in self.groups if group.packing is not None]
        return sum(buffer.num_holders for packing in packings for buffer in packing.fulls)

    def end_forward(self, module: nn.Module) -> bool:
        """End the forward of ``module``; return True if all modules of the unit have run."""
        self.awaited.discard(id(module))
        for member in (self, *self.tied_units):
            member.holders -= 1
        return not self.awaited

    def abort_forward(self) -> None:
        """Reshard what no other forward uses, after one of the unit's modules raised."""
        self.awaited = set()
        for member in (self, *self.tied_units):
            member.holders -= 1
            if not member.holders:
                member.reshard()

    def reshard_after_forward(self) -> bool:
        """Apply ``policy.reshard_after_forward``; return False where :meth:`reshard` with ``in_pass`` does."""
        if self.checks.is_on and self.is_full:
            self.checks.end_unit(self.groups)
        wanted = self.policy.reshard_after_forward
        if wanted is False or not isinstance(self.state, Unsharded):
            return True
        if (
            wanted is True or not self.groups or self.diverges
        ):  # a rank that skips the unit has no part on the smaller mesh
            return self.reshard(in_pass=True)
        if any(group.sub_axes is None or group.extended.params for group in self.groups):
            return self.reshard(in_pass=True)
        if find_writes(self.groups):
            return False
        version = self.state.version
        for group in self.groups:
            group.cut_to_sub(self.policy.keeps_full_memory)
        self.note(Op.RESHARD, lambda: (self.full_bytes, False), Subsharded(version))
        return True

    # ---- changes by user code ----

    def _version(self, in_pass: bool) -> int:
        """Return the version of the shards; ``in_pass``: as the check at the begin of the pass has read it."""
        version = self.num_commits << 40
        for group in self.groups:
            version += group.last_version if in_pass and group.seen is not None else group.version()
        return version

    def _is_from_now(self, state: Gathering | Unsharded, pass_number: int | None) -> bool:
        """Return True if the shards have not changed since they were gathered.

        Raises: StateError if shards were written to in a way that torch does not count.
        """
        if pass_number is None:
            self.take_writes()
        elif state.pass_number == pass_number:
            return True
        if state.version != self._version(pass_number is not None):
            return False
        if isinstance(state, Unsharded) and (pass_number is not None or not state.is_registered):
            if self.checks.is_on and not is_in_backward():  # weights are exchanged outside of one
                self.checks.use_again(self.name, self.groups)
            self._register_full()
            self.state = Unsharded(state.version, pass_number)
        return True

    def take_writes(self, see: Callable[[Unit, Written], None] | None = None) -> None:
        """Copy writes to full parameters into the shards; not in a pass, where other ranks may read the shards.

        Every rank copies its own rows, so all ranks must have written the same values.  ``see`` is called with the written
        parameters first.
        """
        if self.is_full and (written := find_writes(self.groups)):
            if see is not None:
                see(self, written)
            take_written(written)

    @property
    def has_copies(self) -> bool:
        """True if full parameters, or those of a smaller mesh, are registered: an optimizer step makes them stale."""
        return self.is_full or type(self.state) is Subsharded

    def keep(self, see: Callable[[Unit, Written], None] | None = None) -> None:
        """Keep full parameters registered between passes; for ``see`` see :meth:`take_writes`."""
        self.take_writes(see)
        for group in self.groups:
            group.is_kept = True

    def register_shards(self) -> None:
        """Register the shards while the unit stays unsharded, so that user code finds what optimizers have."""
        state = self.state
        assert isinstance(state, Unsharded)
        for group in self.groups:
            group.register_sharded(keeps_memory=True)
        self.state = Unsharded(state.version, state.pass_number, is_registered=False)

    # ---- gradients ----

    def take_gradients(self, is_late: bool = False) -> Gradients:
        """End the unit's backward; return the gradients in their reduce dtypes, zeros for unused ones if the policy says so.

        ``is_late``: some gradients did not arrive before the whole backward ended.
        """
        taken: Gradients = {}
        for group in self.groups:
            gradients = take_gradients(group)
            if self.policy.reduces_unused:
                self.add_zeros(group, gradients)
            taken.update(gradients)
        if self.earlier.partial and self.sums_are_due:
            for param, sum_over_shards in self.earlier.partial.items():
                if param not in taken:
                    taken[param] = sum_over_shards.new_zeros(param.shard.shape)
        self.backward.leave(is_late, not self.policy.reshard_after_backward)
        return taken

    @property
    def sums_are_due(self) -> bool:
        """True if a backward reduces the sums over shards of earlier ones over the replicas."""
        return bool(self.earlier.partial) and self.policy.sync and self.policy.syncs_replicas

    def check_zeros(self, group: ParamGroup, param: ShardedParam, sender: str) -> None:
        """Raise ConfigError, on every rank, if the dtype of the zeros that ``sender`` sends for ``param`` is unknown."""
        if group.dtypes.takes_any_gradient(param):
            raise ConfigError(
                f"{param.fqn} ({unit_in_words(self.name)}) has grad_dtype None, so on a rank that does not use it the dtype of "
                f"the zeros that {sender} sends is unknown; set reduce_dtype in mp_policy, or set grad_dtype to a dtype"
            )

    def add_zeros(self, group: ParamGroup, gradients: Gradients, sent: Container[ShardedParam] = ()) -> None:
        """Add zeros for trainable parameters without a gradient, except for those that were ``sent`` already."""
        for param in group.params:
            if not param.sharded.requires_grad or param in sent:
                continue
            self.check_zeros(group, param, "set_reduce_scatter_unused_params")  # also if its gradient has arrived
            if param not in gradients:
                dtype = group.dtypes.of_reduction(param)
                gradients[param] = torch.zeros(param.shard.shape, dtype=dtype, device=group.device)

    def stash_gradients(self) -> None:
        """Stash ``.grad`` of parameters that stay registered, so that backward accumulates from zero."""
        for group in self.groups:
            if group.in_place:
                self.earlier.stash(group.in_place, self.policy.divide_factor is not None, self.backward.first)

    def unstash_gradients(self) -> None:
        """Restore stashed gradients, with those of this backward added."""
        for group in self.groups:
            if group.in_place:
                self.earlier.unstash(group.in_place)

    def drop_gradients(self) -> None:
        """Drop the gradients of an unfinished backward."""
        for param in self.params:
            if param.full is not None:
                param.full.grad = None
        self.backward.forget()


def is_in_backward() -> bool:
    """True while autograd runs a backward on this thread."""
    return torch_private.graph_task_id() != -1
