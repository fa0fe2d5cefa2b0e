"""A unit: the parameters of one ``fully_shard`` or ``replicate`` call, which unshard and reshard together."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Sequence
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Protocol

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.protocol import Handle
from shardwise.collectives.routes import Transport
from shardwise.consistency.failure_report import concerns_others
from shardwise.fsdp.backward import NOWHERE, UnitBackward
from shardwise.fsdp.local_gradients import EarlierGradients, Gradients, take_gradients
from shardwise.fsdp.param import Registration, ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.precision import MixedPrecisionPolicy
from shardwise.fsdp.user_writes import StepChecks, Written, check_sub, find_writes, take_written
from shardwise.observe import Call, Op, Track, begin, emit, listeners, unit_in_words
from shardwise.plan.schedule import UnitPolicy

# ---- The states of a unit.


_GRAD, _IS_NOT = operator.attrgetter("grad"), operator.is_not


class UnitState(Enum):
    """Which parameters of a unit are registered, and have memory."""

    SHARDED = "sharded"  # the shards are registered, and this rank has nothing else
    GATHERING = "gathering"  # the all-gather is launched; the full parameters may not be read yet
    FULL = "full"  # the full parameters have memory
    SUB = "sub"  # after forward it was resharded to a smaller mesh, and the parameters on that mesh are registered


SHARDED, GATHERING, FULL, SUB = UnitState


class StepCallbacks(Protocol):
    """The callbacks of a unit to the engine that runs its steps."""

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Return ``error``, of a collective at ``where``, with what the other ranks were doing."""
        ...

    def gradient_arrived(self, unit: Unit, ordinal: int) -> None:
        """Act on the gradient of parameter ``ordinal``: it completes a bucket, or no hook of an output has run yet."""
        ...


def _no_engine() -> None:
    return None


class SharedSchedule(Protocol):
    """The collectives of a pass whose ranks may take different ways: :class:`shardwise.fsdp.divergence.Divergence`.

    Not the plan of a step (``plan/schedule.py``), which a rank follows alone: all ranks launch these, in this order.

    Attributes:
        gathers: for each collective the number of the unit whose parameters are gathered; -1 if it is no gather.
        cursor: how many collectives this rank has launched.  The last entry of ``gathers`` is -1, so it is always an index.
    """

    gathers: list[int]
    cursor: int

    def reach_gather(self, unit: Unit) -> None:
        """Launch for other ranks what comes before the gather of ``unit``, which the caller launches next."""
        ...

    def serve_next(self) -> None:
        """Launch for other ranks what comes next."""
        ...


class Unit:
    """The parameters of one ``fully_shard`` or ``replicate`` call, which FSDP2 calls a param group.

    ``state`` says which parameters are registered.  Each transition is one method: :meth:`unshard` only launches the
    all-gather, so that it overlaps the computation of other units; :meth:`wait` ends it and registers the full parameters.
    ``backward`` is the progress of the running backward; ``earlier`` holds what earlier backwards left.

    Attributes:
        groups: the unit's parameters, one group per mesh.
        policy: the unit's settings; setters replace it by another immutable value.
        version: of the shards that full parameters were gathered from; it changes when a shard is written to.
        gathered_in: number of the forward or backward in which this version was read; None outside of any.
        handles: of the all-gather in flight, one per group; None for a group that has nothing to wait for.
        shows_shards: the unit stays unsharded between passes, and the shards are registered.
        reshards_late: modules have written to full parameters, so it is resharded when the pass is over.
        num_packs: how often the parameters of all groups were packed, as of the begin of the pass.
        number: index among the units of its engine.
        may_diverge: the user lets ranks take different ways; the root's counts.  diverges: its engine does.
        schedule: set if ranks may take different ways and a gather of this unit needs all of them; else None.
        name: paths of the unit's modules in the root, from the first forward on.
        track: the events of its engine.
        num_commits: how often gradients of the unit have been set; an optimizer is expected to change the shards after each.
        tied_units: units that own tied parameters that this unit's modules use.
        holders: the number of forwards that are using the full parameters now.
        num_aliases: :meth:`count_aliases` when a forward began.
        awaited: ids of the modules that have not run yet in the current forward; with several modules the last one ends it.
        begun_by, begun_at: the id of the module that began the last forward, and where in the graph it began.
        keeps_for_backward: the user did not pass ``reshard_after_forward``, so a root stays full after a forward, but only
            for its backward: not after a forward without a graph.
        max_reductions: how many reduce-scatter inputs may be allocated at once; the largest of an engine's units counts.
        transport: the transport that the user chose for this unit; the root's counts.
        checks: those of its engine.
        ahead_bytes: the prefetch limit in bytes that the user chose for this unit; the root's counts.
        forward_prefetch, backward_prefetch: units that the user wants unsharded when this one starts; None: the plan's.
        all_reduce_hook: the user's function that gets the section after the reduce-scatter, or after the all-reduce.
        callbacks_ref: returns the engine, which a unit may not import; None before there is one.
        heard_by: returns the engine for a gradient; for plain parameters it makes one before the first forward.
    """

    def __init__(self, modules: Sequence[nn.Module], precision: MixedPrecisionPolicy, policy: UnitPolicy) -> None:
        self.adopt_modules(modules)
        self.groups: list[ParamGroup] = []
        self.precision = precision
        self.policy = policy
        self.name = ""
        self.track = Track("no engine")
        self.state = SHARDED
        self.version = self.num_packs = 0
        self.gathered_in: int | None = None
        self.handles: Sequence[Handle | None] = ()
        self.shows_shards = self.reshards_late = False
        self.number = -1
        self.may_diverge = self.diverges = False
        self.schedule: SharedSchedule | None = None
        self.backward = UnitBackward()
        self.earlier = EarlierGradients()
        self.num_commits = 0
        self.tied_units: tuple[Unit, ...] = ()
        self.holders = self.num_aliases = 0
        self.awaited: set[int] = set()
        self.begun_by, self.begun_at = -1, NOWHERE
        self.keeps_for_backward = False
        self.max_reductions = 1
        self.transport: Transport | None = None
        self.ahead_bytes: int | None = None
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.checks = StepChecks()
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.callbacks_ref: Callable[[], StepCallbacks | None] = _no_engine
        self.heard_by: Callable[[], StepCallbacks | None] = _no_engine

    def adopt_modules(self, modules: Sequence[nn.Module]) -> None:
        """Become the unit of ``modules``.  References are weak, since the modules own the unit."""
        self._modules = tuple(weakref.ref(module) for module in modules)
        self.has_one_module = len(modules) == 1

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
        if owner is not self and owner not in self.tied_units:
            self.tied_units = (*self.tied_units, owner)

    def tie(self, param: ShardedParam, places: Sequence[Registration]) -> None:
        """Use ``param``, which another unit may own, at ``places`` of this unit's modules."""
        owner: Unit = param.unit()
        param.registrations += places
        for group in owner.groups:
            group.seen = None  # the tables are made again
        self.use_tied(owner)

    @property
    def gather_staging(self) -> tuple[int, bool]:
        """Bytes that a launched all-gather allocates, and whether they include all full parameters."""
        stagings = [group.gather_staging(self.policy.keeps_full_memory) for group in self.groups]
        if not self.policy.keeps_full_memory and all(is_in_place for _, is_in_place in stagings):
            return sum(num_bytes for num_bytes, _ in stagings), bool(stagings)
        # If only some groups gather in place, the full parameters are counted at the wait.
        held = sum(group.full_bytes for group, (_, each) in zip(self.groups, stagings, strict=True) if each)
        return sum(num_bytes for num_bytes, _ in stagings) - held, False

    @property
    def route(self) -> str:
        """The names of the links that gather the parameters; before the first forward ``collectives``."""
        return ", ".join(dict.fromkeys(route for group in self.groups if (route := group.route)))

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards; 0 if the policy keeps them, since a step does not allocate them."""
        return 0 if self.policy.keeps_full_memory else sum(group.full_bytes for group in self.groups)

    @property
    def has_copies(self) -> bool:
        """True if full parameters, or those of a smaller mesh, are registered: an optimizer step makes them stale."""
        return self.state is FULL or self.state is SUB

    def emit(self, op: Op, num_bytes: int = 0, in_place: bool = False) -> None:
        """Tell listeners that the unit has done ``op``; call it only if there are any."""
        emit(self.track.name, Call(op, self.name, num_bytes, in_place))

    def _explained(self, error: RuntimeError) -> RuntimeError:
        callbacks = self.callbacks_ref()
        return error if callbacks is None else callbacks.explain(error, f"all-gather of {unit_in_words(self.name)}")

    # ---- parameters ----

    def unshard(self, pass_number: int | None = None) -> None:
        """Launch the all-gather, unless the full parameters are up to date or their all-gather is in flight.

        ``pass_number``: the number of the running forward or backward, in which shards do not change; None outside of any.
        """
        groups, before = self.groups, self.state
        if before is GATHERING or before is FULL:
            if self._is_from_now(pass_number):
                self._serve_others(pass_number)
                return
            if before is GATHERING:
                self.discard()
        version, in_pass = self.num_commits << 40, before is SHARDED and pass_number is not None
        for group in groups:
            version += group.last_version if in_pass and group.seen is not None else group.version()
        from_sub = before is SUB and self.version == version
        is_written = False
        for group in groups:
            if pass_number is None and not from_sub:
                group.ensure_packed()
            is_written |= group.is_written
            group.is_written = False
        if pass_number is None or is_written or before is not SHARDED:
            for group in groups[:1]:  # the current stream may have just written to the shards
                group.comm.streams.gather.wait_current()
        if before is SUB:
            check_sub(self.name, self.params)
        schedule = self.schedule
        if schedule is not None and pass_number is not None:
            # Ranks that take different ways still have to launch the same collectives: this gather is either the next one of
            # the schedule, or the gathers before it, which only other ranks need, are launched first.
            if schedule.gathers[schedule.cursor] == self.number:
                schedule.cursor += 1
            else:
                schedule.reach_gather(self)
        if listeners:
            begin(self.track.name, "unshard", self.name)
        try:
            handles: list[Handle | None] = []
            for group in groups:  # a comprehension would be one more call
                handles.append(group.gather_from_sub() if from_sub else group.gather())
        except RuntimeError as error:
            if not concerns_others(error):
                raise
            raise self._explained(error) from error
        self.handles, self.state, self.version, self.gathered_in = handles, GATHERING, version, pass_number
        if listeners:
            self.emit(Op.UNSHARD, *self.gather_staging)

    def _serve_others(self, pass_number: int | None) -> None:
        """Launch the all-gather for other ranks alone if it is next: this rank has the full parameters."""
        schedule = self.schedule
        if schedule is not None and pass_number is not None and schedule.gathers[schedule.cursor] == self.number:
            schedule.serve_next()

    def wait(self, pass_number: int | None = None) -> None:
        """Wait for the all-gather, launching it if it is not in flight, and register the full parameters."""
        is_gathered = False
        if self.state is FULL and self._is_from_now(pass_number):
            self._serve_others(pass_number)
            if not self.shows_shards and (pass_number is None or pass_number == self.gathered_in):
                return
            if self.checks.is_on and not is_in_backward():  # weights are exchanged outside of one
                self.checks.use_again(self.name, self.groups)
        else:
            if self.state is not GATHERING or pass_number is None or pass_number != self.gathered_in:
                self.unshard(pass_number)
            is_gathered = True
            if listeners:
                begin(self.track.name, "wait", self.name)
            try:
                for handle in self.handles:
                    if handle is not None:
                        handle.wait()
            except RuntimeError as error:
                raise self._explained(error) from error
        num_packs = 0  # of the packing to which gradients of this pass belong
        for group in self.groups:
            group.register_full()
            num_packs += group.num_packs
        self.num_packs = num_packs
        if is_gathered:
            self.state, self.handles = FULL, ()
        else:
            self.gathered_in = pass_number
        self.shows_shards = False
        if pass_number is None:
            self.listen()
        if is_gathered and listeners:
            self.emit(Op.WAIT, self.full_bytes)

    def reshard(self, in_pass: bool = False) -> None:
        """Copy writes to full parameters into the shards, free the full parameters and register the sharded ones.

        If there are writes and other ranks may be reading the shards (``in_pass``), the unit stays full to the end of the pass.
        """
        if self.state is SHARDED:
            return
        if self.state is GATHERING:
            self.discard()
            return
        if self.state is SUB and not in_pass:
            check_sub(self.name, self.params)
        was_full = self.state is FULL
        if was_full:
            written = find_writes(self.groups)
            if written and in_pass:
                self.reshards_late = True
                return
            if listeners:
                begin(self.track.name, "reshard", self.name)
            if written:
                take_written(written)
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)
        self.state = SHARDED
        if was_full and listeners:
            self.emit(Op.RESHARD, self.full_bytes)

    def discard(self) -> None:
        """Cancel an all-gather that was not waited for."""
        for handle in self.handles:
            if handle is not None:
                handle.cancel()
        for group in self.groups:
            group.register_sharded(self.policy.keeps_full_memory)
        self.state, self.handles = SHARDED, ()

    def free_kept_memory(self) -> None:
        """Free the memory of full parameters that a sharded unit keeps, after the policy that kept it has changed."""
        if self.state is SHARDED or self.state is SUB:
            for group in () if self.policy.keeps_full_memory else self.groups:
                group.drop()

    def abandon(self) -> None:
        """Reset the unit after a failure: sharded, in no forward and no backward; an all-gather in flight is cancelled."""
        self.holders = 0
        self.awaited = set()
        self.backward.leave()
        self.reshards_late = False
        self.discard()

    # ---- use in a forward ----

    def wait_with_tied(self, pass_number: int | None) -> None:
        """Wait for the full parameters that the unit's modules use, tied ones included."""
        self.wait(pass_number)
        for member in self.tied_units:
            member.wait(pass_number)

    def count_aliases(self) -> int:
        """Return how many tensors use the memory of the full parameters; needed only while saved-tensor hooks are active.

        A hook may store such a tensor to recognize others by address (activation offloading does), so no other parameter
        may get this address before backward.
        """
        packings = [group.packing for group in self.groups if group.packing is not None]
        return sum(buffer.num_holders for packing in packings for buffer in packing.fulls)

    def abort_forward(self) -> None:
        """Reshard what no other forward uses, after one of the unit's modules raised."""
        self.awaited = set()
        for member in (self, *self.tied_units):
            member.holders -= 1
            if not member.holders:
                member.reshard()

    def reshard_after_forward(self) -> None:
        """Apply ``policy.reshard_after_forward``, unless something reads the full parameters before backward does."""
        backward, policy = self.backward, self.policy
        if backward.keeps_for_graph or (backward.is_unseen and torch.is_grad_enabled()):
            return  # a double backward, or a backward that no hook announces, reads them
        # Saved-tensor hooks (activation offloading) may have stored an alias of a full parameter; its memory must stay then.
        has_hooks = torch_private.saved_tensor_hooks(True) is not None and torch.is_grad_enabled()
        if has_hooks and self.count_aliases() > self.num_aliases:
            return
        if self.checks.is_on and self.state is FULL:
            self.checks.end_unit(self.groups)
        wanted = policy.reshard_after_forward
        if wanted is False or self.state is not FULL:
            return
        if (
            wanted is True
            or not self.groups
            or self.diverges  # a rank that skips the unit has no part on the smaller mesh
            or any(group.sub_axes is None or group.extended.params for group in self.groups)
        ):
            self.reshard(in_pass=True)
            return
        if find_writes(self.groups):
            self.reshards_late = True
            return
        for group in self.groups:
            group.cut_to_sub(policy.keeps_full_memory)
        self.state = SUB
        if listeners:
            self.emit(Op.RESHARD, self.full_bytes)

    # ---- changes by user code ----

    def _is_from_now(self, pass_number: int | None) -> bool:
        """Return True if the shards have not changed since they were gathered."""
        if pass_number is None:
            self.take_writes()
        elif self.gathered_in == pass_number:
            return True
        # Commits count, since a rank whose shards are empty sees no write of the optimizer, yet has to gather when the others
        # do.  In a pass the version is what the check at its begin has read.
        version, in_pass = self.num_commits << 40, pass_number is not None
        for group in self.groups:
            version += group.last_version if in_pass and group.seen is not None else group.version()
        return self.version == version

    def take_writes(self, on_written: Callable[[Unit, Written], None] | None = None) -> None:
        """Copy writes to full parameters into the shards; not in a pass, where other ranks may read the shards.

        Every rank copies its own rows, so all ranks must have written the same values.  ``on_written`` is called first,
        with the written parameters.
        """
        if self.state is FULL and (written := find_writes(self.groups)):
            if on_written is not None:
                on_written(self, written)
            take_written(written)

    def keep(self, on_written: Callable[[Unit, Written], None] | None = None) -> None:
        """Keep full parameters registered between passes; for ``on_written`` see :meth:`take_writes`."""
        self.take_writes(on_written)
        for group in self.groups:
            group.is_kept = True
        self.listen()

    def register_shards(self) -> None:
        """Register the shards while the unit stays unsharded, so that user code finds what optimizers have."""
        for group in self.groups:
            group.register_sharded(keeps_memory=True)
        self.shows_shards = True

    # ---- gradients ----

    def listen(self) -> None:
        """Hook the gradients of the full parameters, for whose sake alone a backward may begin, or a bucket be complete.

        Those of other units need no hook: they are freed after forward, so a backward reaches an output of the unit first.
        """
        for group in self.groups:
            group.listen(partial(_gradient_hook, weakref.ref(self)))

    @property
    def has_gradients(self) -> bool:
        """True if a full parameter that is not registered for ever has a gradient that was not taken."""
        swaps = [group.swap for group in self.groups if group.swap is not None]
        return any([any(map(_IS_NOT, map(_GRAD, swap.fulls), repeat(None))) for swap in swaps])  # noqa: C419 (fewer calls)

    def take_gradients(self) -> Gradients:
        """End the unit's backward; return the gradients in their reduce dtypes, zeros for unused ones if the policy says so."""
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
        self.backward.leave()
        return taken

    @property
    def sums_are_due(self) -> bool:
        """True if a backward reduces the sums over shards of earlier ones over the replicas."""
        return bool(self.earlier.partial) and self.policy.sync and self.policy.syncs_replicas

    def add_zeros(self, group: ParamGroup, gradients: Gradients, sent: Container[ShardedParam] = ()) -> None:
        """Add zeros for trainable parameters without a gradient, except for those that were ``sent`` already."""
        for param in group.params:
            if param.sharded.requires_grad and param not in sent and param not in gradients:
                dtype = group.reduce_dtype(param)
                gradients[param] = torch.zeros(param.shard.shape, dtype=dtype, device=group.device)


def _gradient_hook(this: weakref.ref[Unit], ordinal: int) -> Callable[[torch.Tensor], None]:
    """Return the post-accumulate-grad hook of parameter ``ordinal`` of a unit, which owns the parameter and so the hook."""

    def on_accumulated(_: torch.Tensor) -> None:
        unit = this()
        if unit is None:
            return
        backward = unit.backward
        backward.arrived.add(ordinal)
        # Most gradients end here: the engine knows of this backward, and no bucket is complete.
        if not backward.is_running or (backward.buckets is not None and backward.buckets.is_ready()):
            callbacks = unit.heard_by()
            if callbacks is not None:
                callbacks.gradient_arrived(unit, ordinal)

    return on_accumulated


def is_in_backward() -> bool:
    """True while autograd runs a backward on this thread."""
    return torch_private.graph_task_id() != -1
