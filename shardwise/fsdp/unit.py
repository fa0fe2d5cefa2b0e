"""One set of parameters that unshard and reshard together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.protocol import Handle
from shardwise.collectives.routes import Transport
from shardwise.consistency.failure_report import concerns_others
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.gradients import EarlyBuckets, planned_scatter_bytes, sharing_of
from shardwise.fsdp.local_gradients import EarlierGradients, Gradients, take_at_once, take_gradients
from shardwise.fsdp.param import ShardedParam, mark_full
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.precision import MixedPrecisionPolicy
from shardwise.fsdp.user_writes import UserWrites, Written
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
from shardwise.plan.schedule import Sharing, UnitPolicy

# ---- How far the backward of a unit has come: its stage, the gradients that are there, the passes that are open.


class Stage(Enum):
    """What a unit knows of a backward."""

    IDLE = "idle"  # none runs, or it has not come to the unit, or it has left it
    ARRIVING = (
        "arriving"  # gradients come before its outputs' have: of tied weights that it owns, or of used parameters alone
    )
    RUNNING = "running"  # the gradient of an output has come: parameters are read

    __hash__ = object.__hash__  # Enum's own is Python, and stages are looked up at every step


LEGAL_STEPS: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.IDLE, Stage.ARRIVING),
        (Stage.IDLE, Stage.RUNNING),
        (Stage.ARRIVING, Stage.RUNNING),
        (Stage.ARRIVING, Stage.IDLE),
        (Stage.RUNNING, Stage.IDLE),
    }
)


def _nobody() -> None:
    return None


def _nothing() -> tuple[int, bool]:
    return 0, False


class UnitBackward:
    """The backward of one unit.  Whoever reads may read the attributes; the methods alone write them.

    Attributes:
        on_gradients: what is called when one has come from which something may follow.
        stage: one arrow of the table above is one method.
        task: the autograd task in which it began; with nested backwards, the last one.
        arrived: ordinals of the parameters whose gradient has come.
        counted: how many parameters want one, and how many there are.  has_frozen: some want none.
        open_passes: passes through the unit's modules that it has come to and not left.
        is_nested: gradients have come from a backward within it: they tell nothing of what is still to come.
        comes_again: this backward used the unit again after its end in a nested one, or produced a gradient twice.
        came_again: ``comes_again`` of the last backward that produced gradients.
        ended_in: the outermost autograd task of the backward in which the unit ended with a nested one.
        counts: the last gradient ends it.  Where checkpoints run backwards of their own, which may use the parameters
            again, that is so once a first backward has shown that they do not.
        ended_late: the last one ended without some gradient, at the end of the whole backward.
        early: what may be sent before it ends; None: nothing.
        owes_weights: one came without any: those of the weights may be computed apart, as stages of pipelines do.
        keeps_for_graph: one ran with ``create_graph=True``: the graph of that backward reads the parameters, so they stay full
            until a backward without it has ended.
        is_unseen: the last forward has returned no tensor whose gradient would tell that backward comes to the unit, so that
            its parameters stay full.
        first: the parameter whose gradient came before anybody knew that backward has begun.
        has_lost_weights: one of these began before the parameters were full, so that nobody can know which they are.
    """

    def __init__(self) -> None:
        self.on_gradients: Callable[[], None] = _nobody
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
        self.early: EarlyBuckets | None = None
        self._began_full = True

    @property
    def expects_any(self) -> bool:
        """True if parameters want gradients."""
        return self.counted[0] > 0

    def _step(self, new: Stage) -> None:
        if (self.stage, new) not in LEGAL_STEPS:
            raise StateError(f"the backward of a unit is {self.stage.value} and cannot become {new.value}")
        self.stage = new

    def expect(self, num_trainable: int, num_params: int) -> None:
        """Wait for the gradients of ``num_trainable`` of ``num_params`` parameters."""
        self.counted = (num_trainable, num_params)
        self.has_frozen = num_trainable < num_params

    def enter(self, task: int, is_full: bool = True, whole: int = -1) -> None:
        """The gradient of an output has come, in autograd's ``task``; ``is_full``: its parameters are there.

        ``whole``: the outermost task, which may have used the unit before, in another nested backward.
        """
        if self.stage is not Stage.RUNNING:  # a second time where somebody has resharded the unit by hand
            self.stage = Stage.RUNNING  # legal from both others
            self._began_full = is_full
            self.comes_again = self.comes_again or self.ended_in == whole != -1
        self.task = task

    def hook(self, param: ShardedParam) -> Callable[[torch.Tensor], None]:
        """Return what the full form of ``param`` runs when its gradient has been accumulated."""
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
                    backward.is_nested = True  # a checkpoint within the unit runs its own: others may follow
                is_bucket = early is not None and early.come(ordinal)
                if backward.is_nested or (len(arrived) < backward.counted[0] and not is_bucket):
                    return  # the engine knows of this backward, and nothing is complete
            elif backward.stage is Stage.IDLE:
                backward.first = ordinal
                backward._step(Stage.ARRIVING)
            backward.on_gradients()

        return on_accumulated

    def send_early(self, early: EarlyBuckets | None) -> None:
        """Let ``early`` be sent before it ends, as far as they have come; None: nothing."""
        self.early = early
        if early is not None:
            early.begin()

    def note_nested(self) -> None:
        """What has come is of a tied weight that the unit owns, from a checkpoint's own backward: there may be more."""
        self.is_nested = True

    @property
    def is_complete(self) -> bool:
        """True when every parameter has its gradient: then backward reads none of them any more.

        A frozen parameter may still be read after the last gradient has come; its unit ends at its inputs.
        """
        is_there = len(self.arrived) >= self.counted[0] > 0
        return is_there and self.counts and not self.has_frozen and not self.is_nested

    def ends_with(self, task: int, is_one_module: bool) -> bool:
        """Return True if it ends with the nested backward ``task``; if it has several modules, some may be recomputed later."""
        if self.stage is not Stage.RUNNING or self.task != task or self.comes_again or self.came_again:
            return False
        return is_one_module or len(self.arrived) >= self.counted[0] > 0

    def leave(self, ended_late: bool = False, is_kept: bool = False) -> None:
        """The unit's part of the backward is over, and its gradients are taken; ``is_kept``: its parameters stay full."""
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
        """Be without a backward, as after one that has failed."""
        self.arrived.clear()
        self.open_passes.clear()
        self.is_nested = self.comes_again = False
        self.early = self.first = None
        self.stage = Stage.IDLE  # legal from both others

    def distrust_counts(self) -> None:
        """Do not let the last gradient end it until one has shown which gradients are the last."""
        self.counts = False


# ---- The states of a unit and the moves between them that are legal.


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank holds its shards alone; the sharded parameters are registered."""


SHARDED = Sharded()


@dataclass(slots=True)  # frozen ones take three times as long to make, and a step makes them
class Gathering:
    """All-gather launched; the full parameters may not be read yet.

    Attributes:
        version: a number that changes when the shards that are gathered from are written to.
        pass_number: the forward or backward in which they were seen to have it; None: outside of any.
    """

    version: int
    pass_number: int | None
    handles: tuple[Handle | None, ...]


@dataclass(slots=True)
class Unsharded:
    """The full parameters are registered; attributes as of :class:`Gathering`."""

    version: int
    pass_number: int | None


@dataclass(frozen=True, slots=True)
class Subsharded:
    """Resharded to a smaller mesh after forward; the parameters on that mesh are registered."""

    version: int


UnitState = Sharded | Gathering | Unsharded | Subsharded

LEGAL_MOVES: frozenset[tuple[type, type]] = frozenset(
    {
        (Sharded, Gathering),
        (Subsharded, Gathering),
        (Gathering, Unsharded),
        (Gathering, Sharded),
        (Unsharded, Gathering),
        (Unsharded, Sharded),
        (Unsharded, Subsharded),
        (Subsharded, Sharded),
    }
)


def check_move(unit: str, old: UnitState, new: UnitState) -> None:
    """Raise StateError if a unit may not go from ``old`` to ``new``."""
    if (type(old), type(new)) not in LEGAL_MOVES:
        raise StateError(
            f"{unit_in_words(unit)} is {type(old).__name__} and cannot become {type(new).__name__}; "
            f"legal next states: {sorted(to.__name__ for start, to in LEGAL_MOVES if start is type(old))}"
        )


class StepCallbacks(Protocol):
    """Whoever carries out the steps of a unit."""

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Return ``error``, of a collective at ``where``, with what the other ranks were doing."""
        ...

    def before_gather(self) -> None:
        """Order the all-gather that follows after what has been done to shards."""
        ...


class Unit:
    """The parameters of one ``fully_shard`` or ``replicate`` call.

    What they are now is its ``state``: one arrow of that machine is one method; :meth:`note` checks the arrow.  How far
    its backward has come is ``backward``, what earlier ones have left is ``earlier``.

    Attributes:
        groups: its parameters, one group per mesh.
        policy: its behaviour; replaced whole.
        is_full: the full parameters are registered: its state is Unsharded.
        name: paths of its modules in the root, from the first forward on.
        log: hears what it does.
        num_commits: how often its gradients have been set: an optimizer is expected to change its shards then.
        tied_units: units whose parameters its modules use too.
        holders: forwards that are using its full parameters now.
        num_aliases: :meth:`count_aliases` when a forward began.
        awaited: ids of the modules that have not run yet in a forward that has begun; only units of several modules wait.
        uses_default_reshard: ``reshard_after_forward`` was not given, so a root keeps its parameters.
        max_reductions: reduce-scatter inputs that may live at once; the largest of an engine's units holds.
        transport: how its engine's ranks may exchange tensors, if the user has said so of this unit; a root's holds.
        writes: what users write to full parameters.
        ahead_bytes: within how many bytes its engine's units are gathered ahead, if the user has said so; a root's holds.
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
        self.backward = UnitBackward()
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
        self.writes = UserWrites()
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.host_ref: Callable[[], StepCallbacks | None] = _nobody

    def adopt_modules(self, modules: Sequence[nn.Module]) -> None:
        """Be the unit of ``modules``, which own it."""
        self._modules = tuple(weakref.ref(module) for module in modules)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules it was made for, as far as they are alive."""
        return tuple(module for ref in self._modules if (module := ref()) is not None)

    @property
    def params(self) -> Sequence[ShardedParam]:
        """All parameters of all groups."""
        if len(self.groups) == 1:
            return self.groups[0].params
        return [param for group in self.groups for param in group.params]

    def use_tied(self, owner: Unit) -> None:
        """Use parameters of ``owner`` too."""
        if owner not in self.tied_units:
            self.tied_units = (*self.tied_units, owner)

    def refuse_packing(self) -> None:
        """Raise StateError: parameters were put together anew since the forward whose backward runs."""
        raise StateError(
            f"parameters of {unit_in_words(self.name)} were replaced, moved or given another dtype after the forward whose "
            "backward runs now: their gradients would go to what they were before. Do such changes before forward, or "
            "after backward"
        )

    @property
    def reduce_bytes(self) -> int:
        """Staging bytes of the reduction of all trainable parameters."""
        return sum(planned_scatter_bytes(group, self.policy) for group in self.groups)

    @property
    def keeps_sums(self) -> bool:
        """True if sums over shards are left on this rank, for a later backward to sum over replicas."""
        return not self.policy.syncs_replicas and any(group.axes.num_replicas > 1 for group in self.groups)

    @property
    def sharing(self) -> Sharing | None:
        """By what its gradients share a bucket with those of other units; None: by nothing."""
        if len(self.groups) != 1 or self.all_reduce_hook is not None:
            return None
        return sharing_of(self.groups[0])

    @property
    def gather_staging(self) -> tuple[int, bool]:
        """Bytes that a launched unshard holds, and whether (all of) the full parameters are among them."""
        if len(self.groups) == 1 and not self.policy.keeps_full_memory:
            return self.groups[0].gather_staging
        stagings = [group.gather_staging for group in self.groups]
        if not self.policy.keeps_full_memory and all(is_in_place for _, is_in_place in stagings):
            return sum(num_bytes for num_bytes, _ in stagings), bool(stagings)
        # Of groups that do not agree, the full parameters count when they are waited for.
        held = sum(
            group.full_bytes for group, (_, is_in_place) in zip(self.groups, stagings, strict=True) if is_in_place
        )
        return sum(num_bytes for num_bytes, _ in stagings) - held, False

    @property
    def route(self) -> str:
        """How parameters travel: the names of links, as far as they are known."""
        return ", ".join(dict.fromkeys(route for group in self.groups if (route := group.route)))

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards; 0 if they stay, as what does not move in a step."""
        total = 0
        for group in self.groups:
            total += group.full_bytes
        return 0 if self.policy.keeps_full_memory else total

    def number_parameters(self) -> None:
        """Give every parameter its ordinal."""
        for ordinal, param in enumerate(self.params):
            param.ordinal = ordinal

    def release(self, params: Sequence[ShardedParam]) -> None:
        """Be without ``params``, which another unit is to manage."""
        self.reshard()
        for group in self.groups:
            group.release(params)
        self.groups = [group for group in self.groups if group.params]
        self.number_parameters()

    def note(
        self,
        op: Op | None,
        measure: Callable[[], tuple[int, bool]] = _nothing,
        new: UnitState | None = None,
    ) -> None:
        """Note what this unit has just done, for all listeners, and what it is ``new``; None: it stays what it is.

        ``op``: None says nothing to listeners.  ``measure``: the bytes, and the place, of the call.
        """
        if new is not None:
            kind = type(new)
            if (type(self.state), kind) not in LEGAL_MOVES:
                check_move(self.name, self.state, new)
            self.state = new
            self.is_full = kind is Unsharded
        if op is None:
            return
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
        """Launch the all-gather unless the parameters are full, or on their way, from the shards as they are now.

        ``pass_number``: number of the forward or backward that runs, in which nobody changes shards; None: outside of any.
        """
        state, groups = self.state, self.groups
        is_sharded = type(state) is Sharded
        if isinstance(state, (Gathering, Unsharded)):
            if self._is_from_now(state, pass_number):
                return
            if isinstance(state, Gathering):
                self.discard()
        if is_sharded and pass_number is not None and len(groups) == 1 and groups[0].is_as_seen:
            version = (self.num_commits << 40) + groups[0].last_version
        else:
            version = self._version(is_sharded and pass_number is not None)
        from_sub = isinstance(state, Subsharded) and state.version == version
        is_written = False
        for group in groups:
            if pass_number is None and not from_sub:
                group.ensure_packed()
            is_written |= group.is_written
            group.is_written = False
        if pass_number is None or is_written or not is_sharded:  # what is gathered may just have been changed
            host = self.host_ref()
            if host is not None:
                host.before_gather()
        if isinstance(state, Subsharded):
            self.writes.check_sub(self.name, self.params)
        if listeners:
            begin(self.log.track.name, "unshard", self.name)
        try:
            if len(groups) == 1:
                launched = (groups[0].gather(from_sub),)
            else:
                launched = tuple([group.gather(from_sub) for group in groups])
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._explained(error) from error
        self.note(Op.UNSHARD, lambda: self.gather_staging, Gathering(version, pass_number, launched))
        if listeners:
            end("unshard", self.name, self.gather_staging[0])

    def wait(self, pass_number: int | None = None) -> None:
        """Register the full parameters once the all-gather has delivered them; launches it if nobody has."""
        state = self.state
        if type(state) is not Gathering or pass_number is None or state.pass_number != pass_number:
            if isinstance(state, Unsharded) and self._is_from_now(state, pass_number):
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
        backward = self.backward
        if pass_number is not None and state.pass_number != pass_number:
            self.writes.check_copies(self.name, self.groups)
        num_trainable = num_params = 0
        for group in self.groups:
            num_trainable += group.register_full(backward.hook)
            num_params += len(group.params)
        if (num_trainable, num_params) != backward.counted:
            backward.expect(num_trainable, num_params)
        self.note(Op.WAIT, lambda: (self.full_bytes, False), Unsharded(state.version, pass_number))
        if listeners:
            end("wait", self.name, self.full_bytes)

    def reshard(self, in_pass: bool = False) -> bool:
        """Give the full parameters back and register the shards; what was written to the full ones goes there.

        Returns: False if somebody has written to them and, ``in_pass``, others may be reading the shards: nothing is done.
        """
        if isinstance(self.state, Sharded):
            return True
        if isinstance(self.state, Gathering):
            self.discard()
            return True
        was_full = self.is_full
        if was_full:
            written = self.writes.find(self.groups)
            if written and in_pass:
                return False
            if listeners:
                begin(self.log.track.name, "reshard", self.name)
            if written:
                self.writes.take(written)
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)
        self.note(Op.RESHARD if was_full else None, lambda: (self.full_bytes, False), SHARDED)
        if was_full and listeners:
            end("reshard", self.name, self.full_bytes)
        return True

    def discard(self) -> None:
        """Forget an all-gather that nobody has waited for."""
        assert isinstance(self.state, Gathering)
        self._cancel(self.state)
        self.note(None, new=SHARDED)

    def _cancel(self, state: Gathering | None) -> None:
        for handles in state.handles if state is not None else ():
            if handles is not None:
                handles.cancel()
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)

    def _drop(self) -> None:
        for group in self.groups:
            group.drop(self.policy.keeps_full_memory)

    def let_go(self) -> None:
        """Give memory back that is kept for no use any more."""
        if isinstance(self.state, (Sharded, Subsharded)):
            self._drop()

    def abandon(self) -> None:
        """Be sharded after a failure, in no forward and no backward: an all-gather that cannot end any more is forgotten."""
        self.holders = 0
        self.awaited = set()
        self.backward.forget()
        self._cancel(self.state if isinstance(self.state, Gathering) else None)
        if type(self.state) is not Sharded:
            self.note(None, new=SHARDED)

    @property
    def num_packs(self) -> int:
        """How often its parameters were put together, over all groups."""
        groups = self.groups
        return groups[0].num_packs if len(groups) == 1 else sum(group.num_packs for group in groups)

    # ---- use in a forward ----

    def wait_with_tied(self, pass_number: int | None) -> None:
        """Make the full parameters readable that its modules use."""
        self.wait(pass_number)
        for member in self.tied_units:
            member.wait(pass_number)

    def begin_forward(self, pass_number: int | None) -> None:
        """One of its modules begins to run: nobody reshards what it uses."""
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
        """Return how many tensors use the memory of the full parameters; needed only while hooks on saved tensors are on.

        A hook may keep such a tensor to recognize others by address (activation offloading does), so no other parameter may
        get this address before backward.
        """
        packings = [group.packing for group in self.groups if group.packing is not None]
        return sum(buffer.num_holders for packing in packings for buffer in packing.fulls)

    def end_forward(self, module: nn.Module) -> bool:
        """``module`` has run; return True if all of its modules have."""
        self.awaited.discard(id(module))
        for member in (self, *self.tied_units):
            member.holders -= 1
        return not self.awaited

    def await_none(self) -> None:
        """Some of its modules will not run in this forward."""
        self.awaited = set()

    def abort_forward(self) -> None:
        """One of its modules has raised."""
        self.awaited = set()
        for member in (self, *self.tied_units):
            member.holders -= 1
            if not member.holders:
                member.reshard()

    def reshard_after_forward(self) -> bool:
        """Do what the policy says at the end of forward; return False as :meth:`reshard` in a pass does."""
        if self.is_full and self.writes.is_looking:
            self.writes.look(self.groups)
        wanted = self.policy.reshard_after_forward
        if wanted is False or not isinstance(self.state, Unsharded):
            return True
        if wanted is True or not self.groups:
            return self.reshard(in_pass=True)
        if any(group.sub_axes is None or group.extended.params for group in self.groups):
            return self.reshard(in_pass=True)
        if self.writes.find(self.groups):
            return False
        version = self.state.version
        for group in self.groups:
            group.cut_to_sub(self.policy.keeps_full_memory)
        self.note(Op.RESHARD, lambda: (self.full_bytes, False), Subsharded(version))
        return True

    # ---- changes made by others ----

    def _version(self, in_pass: bool = False) -> int:
        version = self.num_commits << 40
        for group in self.groups:
            version += group.last_version if in_pass and group.is_as_seen else group.version()
        return version

    def _is_from_now(self, state: Gathering | Unsharded, pass_number: int | None) -> bool:
        """Return True if what was gathered is still what the shards are.

        Raises: StateError if shards were written to in a way that torch does not count.
        """
        if pass_number is None:
            self.take_writes()
        elif state.pass_number == pass_number:
            return True
        if state.version != self._version(pass_number is not None):
            return False
        if isinstance(state, Unsharded) and pass_number is not None:
            self.writes.check_copies(self.name, self.groups)
            num_trainable = sum(group.mark_in_use(self.backward.hook) for group in self.groups)
            if num_trainable != self.backward.counted[0]:
                self.backward.expect(num_trainable, self.backward.counted[1])
            self.state = Unsharded(state.version, pass_number)
        return True

    def take_writes(self, see: Callable[[Unit, Written], None] | None = None) -> None:
        """Let what was written to full parameters go to the shards; not in a pass, in which others read them.

        Every rank takes its rows: all must have written the same.  ``see`` is called with what was written, before.
        """
        if self.is_full and (written := self.writes.find(self.groups)):
            if see is not None:
                see(self, written)
            self.writes.take(written)

    @property
    def has_shards_registered(self) -> bool:
        """True if shards are registered on the modules of a full unit, as ``torch.func.functional_call`` does at its end."""
        return any(
            param.registrations[0].parameters[param.registrations[0].name] is param.sharded
            and param.full is not param.sharded
            for param in self.params
        )

    def keep(self, see: Callable[[Unit, Written], None] | None = None) -> None:
        """Leave full parameters registered although no forward or backward runs; ``see`` as for :meth:`take_writes`."""
        self.take_writes(see)
        self.writes.keep(self.groups)

    # ---- gradients ----

    def take_gradients(self, is_late: bool = False) -> Gradients:
        """End its backward: return the gradients in their reduce dtypes, zeros for unused ones if the policy says so.

        ``is_late``: some have not come, and the whole backward has ended.
        """
        taken: Gradients = {}
        stage = self.backward.stage
        if (
            not self.is_full
            or stage is Stage.ARRIVING
            or (stage is Stage.RUNNING and not self.policy.unshard_in_backward)
        ):
            mark_full(self.params)  # nobody has waited for it, so ``.grad`` of what is registered would be the shard's
        for group in self.groups:
            gradients = take_at_once(group)
            if gradients is None:
                gradients = take_gradients(group)
            if self.policy.reduces_unused:
                self._add_zeros(group, gradients)
            taken.update(gradients)
        self.backward.leave(is_late, not self.policy.reshard_after_backward)
        return taken

    def _add_zeros(self, group: ParamGroup, gradients: Gradients) -> None:
        for param in group.params:
            if not param.sharded.requires_grad:
                continue
            if group.dtypes.takes_any_gradient(param):  # whether its gradient has come or not: so every rank finds it
                raise ConfigError(
                    f"{param.fqn} ({unit_in_words(self.name)}) has grad_dtype None, so a rank that does not use it cannot know "
                    "the dtype of the zeros that set_reduce_scatter_unused_params sends; give reduce_dtype in mp_policy, or a "
                    "dtype to grad_dtype"
                )
            if param not in gradients:
                dtype = group.dtypes.of_reduction(param)
                gradients[param] = torch.zeros(param.shard.shape, dtype=dtype, device=group.device)

    def stash_gradients(self) -> None:
        """Take the gradients of parameters that stay registered from where backward is about to accumulate new ones."""
        for group in self.groups:
            if group.in_place:
                self.earlier.stash(group.in_place, self.policy.divide_factor is not None, self.backward.first)

    def unstash_gradients(self) -> None:
        """Put them back, with what a backward has added."""
        for group in self.groups:
            if group.in_place:
                self.earlier.unstash(group.in_place)

    def drop_gradients(self) -> None:
        """Forget the gradients of an unfinished backward."""
        mark_full(self.params)  # else it would be the shards' gradients that are dropped
        for param in self.params:
            if param.full is not None:
                param.full.grad = None
        self.backward.forget()


def is_in_backward() -> bool:
    """True while autograd runs a backward on this thread."""
    return torch_private.graph_task_id() != -1
