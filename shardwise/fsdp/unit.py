"""A unit: parameters of one ``fully_shard`` or ``replicate`` call on one mesh, which unshard and reshard together."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.compressed import Coding, takes
from shardwise.collectives.routes import Handle
from shardwise.errors import StateError
from shardwise.fsdp.backward import NOWHERE, Place, UnitBackward
from shardwise.fsdp.comm_context import UnitComm
from shardwise.fsdp.flat_buffer import FlatBucket, ReduceLayout
from shardwise.fsdp.local_gradients import EarlierGradients, Gradients, are_usual, local_form
from shardwise.fsdp.param import Registration, ShardedParam, manager_of, nothing
from shardwise.fsdp.settings import UnitSettings
from shardwise.fsdp.tables import Snapshot, Tables, Written
from shardwise.fsdp.unit_memory import UnitMemory
from shardwise.layout import by_size
from shardwise.observe import Call, Op, Track, begin, emit, listeners, unit_in_words
from shardwise.plan.schedule import UnitPolicy

_GRAD, _IS_NOT = operator.attrgetter("grad"), operator.is_not

# ---- The state of a unit: what its modules have, and whether full parameters have memory.


class Registered(Enum):
    """Which form of the parameters the modules have."""

    SHARDS = "shards"
    SUB = "shards on a smaller mesh"  # after forward, until backward
    FULL = "full"


class Memory(Enum):
    """Whether full parameters have memory."""

    NONE = "none"
    COMING = "coming"  # the all-gather is launched; they may not be read yet
    HELD = "held"


# Two enums, since they change apart: a prefetched unit has shards registered while full parameters are coming, and one that
# user code has kept unsharded shows the shards between passes while the full ones are held.
SHARDS, SUB, FULL = Registered
NONE, COMING, HELD = Memory


class StepChecks:
    """The events that checks of user programs listen to; this one checks nothing.  The checks are in ``shardwise.checks``.

    Attributes:
        is_on: checks that cost more than a comparison of lists are made in the running pass.
    """

    is_on = False

    def begin_forward(self) -> None:
        """A forward of the root begins."""

    def see_change(self) -> None:
        """User code has changed parameters, as the comparison of ``Snapshot`` shows; called in a pass, or before the next."""

    def end_unit(self, unit: Unit) -> None:
        """The forward of ``unit`` has ended, whose full parameters are still registered; called while ``is_on``."""

    def use_again(self, unit: Unit) -> None:
        """``unit`` begins another pass with the full parameters that it has; called while ``is_on``."""

    def see_writes(self, unit: Unit, written: Sequence[ShardedParam]) -> None:
        """The forward of ``unit`` has written to its parameters ``written``."""

    def end_backward(self) -> None:
        """Gradients have been set: all ranks have finished their forwards."""


@dataclass(slots=True)
class EngineSide:
    """What the engine of a unit has told it.

    Attributes:
        engine_ref: returns the engine (``engine.py``, which imports this file); None before there is one.
        engine_for_gradient: returns the engine for a gradient; for plain parameters it makes one before the first forward.
        checks: those of the engine.
        diverges: ranks may take different ways.
        schedule: the engine's ``Divergence`` (``divergence.py``, which imports this file) if ranks may take different ways and
            a gather of this unit needs all of them; else None.
    """

    engine_ref: Callable[[], Any] = nothing
    engine_for_gradient: Callable[[], Any] = nothing
    checks: StepChecks = field(default_factory=StepChecks)
    diverges: bool = False
    schedule: Any = None


@dataclass(slots=True)
class UnitForward:
    """The use of a unit in forwards.

    Attributes:
        holders: the number of forwards that are using the full parameters now.
        awaited: ids of the modules that have not run yet in the current forward; with several modules the last one ends it.
        begun_by, begun_at: the id of the module that began the last forward, and where in the graph it began.
        num_aliases: :meth:`Unit.count_aliases` when a forward began.
    """

    holders: int = 0
    awaited: set[int] = field(default_factory=set[int])
    begun_by: int = -1
    begun_at: Place = NOWHERE
    num_aliases: int = 0


@dataclass(slots=True)
class UnitReduction:
    """What reductions of a unit's gradients look up, and what they have counted.

    Attributes:
        by_size: the parameters in their order in memory, large ones first.
        dtypes: gradient dtype -> reduce dtype, for parameters without a dtype of their own.  A gradient dtype with more than
            one reduce dtype is missing.
        gradient_dtypes: the dtypes of ``.grad`` of all parameters.
        layouts: of reductions, by dtype and parameters.
        split: the buckets of a unit that is alone, and what they depend on.
        num_commits: how often gradients of the unit have been set; an optimizer is expected to change the shards after each.
        num_replica_sums: how many all-reduces over replicas are due so far, those that a later backward makes included.
    """

    by_size: list[ShardedParam]
    dtypes: dict[torch.dtype, torch.dtype] = field(default_factory=dict[torch.dtype, torch.dtype])
    gradient_dtypes: set[torch.dtype] = field(default_factory=set[torch.dtype])
    layouts: dict[tuple[object, ...], ReduceLayout] = field(default_factory=dict[tuple[object, ...], ReduceLayout])
    split: tuple[object, tuple[tuple[int, ...], ...]] = None, ()
    num_commits: int = 0
    num_replica_sums: int = 0


class Unit:
    """Parameters of one ``fully_shard`` or ``replicate`` call that share a mesh, which FSDP2 calls a param group.

    One collective gathers them, and one per dtype reduces their gradients.  Parameters of the call on another mesh
    (``shard_placement_fn``) make another unit, :attr:`beside` this one.

    ``registered`` and ``held`` say what there is; each transition is one method: :meth:`unshard` only launches the all-gather,
    so that it overlaps the computation of other units (not within a host, where waiting copies); :meth:`wait` ends it and
    registers the full parameters; :meth:`reshard` frees them.

    Attributes:
        settings: what the user has asked for.  policy: the part that planning compares, replaced as a whole by setters.
        params: the parameters in the order of the modules.
        name: paths of the unit's modules in the root, from the first forward on.  number: index among the units of its engine.
        track: the events of its engine.
        tables: what is registered on the modules.  memory: where parameters are.  reduction: how gradients are reduced.
        forward: its use in forwards.  backward: the progress of the running backward.
        earlier: the gradients that earlier backwards left.
        registered: which form the modules have.  held: whether full parameters have memory.
        fresh_as_of: of the shards that full parameters were gathered from: their version, which changes when one is written to,
            and the number of the forward or backward in which it was read (None outside of any).
        handle: of the all-gather in flight; None if there is nothing to wait for.
        reshards_late: modules have written to full parameters, so it is resharded when the pass is over.
        tied_units: units that own tied parameters that this unit's modules use.
        beside: the units of other meshes of the same modules; they are used and ended with this one.
        others: the other units whose parameters the modules use: those beside it, and owners of tied parameters.
        engine_side: what its engine has told it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        settings: UnitSettings,
        policy: UnitPolicy,
        params: Sequence[ShardedParam] = (),
    ) -> None:
        self.adopt_modules(modules)
        self.settings, self.policy = settings, policy
        self.name, self.number, self.track = "", -1, Track("no engine")
        # On an accelerator autograd calls hooks on a thread of its own for each device, while the thread of the user waits in
        # ``backward()``.  So what forward writes (``forward``, ``registered``, ``held``) backward may write, too, without a
        # lock.
        self.forward, self.backward, self.earlier = UnitForward(), UnitBackward(), EarlierGradients()
        self.registered, self.held = SHARDS, NONE
        self.fresh_as_of: tuple[int, int | None] = 0, None
        self.handle: Handle | None = None
        self.reshards_late = False
        self.tied_units = self.beside = self.others = tuple[Unit, ...]()
        self.engine_side = EngineSide()
        self.own(params)

    def own(self, params: Sequence[ShardedParam]) -> None:
        """Manage ``params``."""
        self.params = [*params]
        self.reduction = UnitReduction([self.params[index] for index in by_size([param.shard for param in params])])
        axes = self.settings.axes
        # A shard axis of one rank takes no collectives, except with tensor parallelism: torch's tests count them there.
        has_tensor_parallelism = any(param.inner_spec is not None for param in params)
        is_cut = axes.shard_mesh_dim is not None and (axes.num_shards > 1 or has_tensor_parallelism)
        self.memory = UnitMemory(self.settings, bool(params) and is_cut)
        self.tables = Tables(self.params, self.memory)

    def adopt_modules(self, modules: Sequence[nn.Module]) -> None:
        """Become the unit of ``modules``.  References are weak, since the modules own the unit."""
        self.module_refs = tuple(weakref.ref(module) for module in modules)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those of the unit's modules that are alive."""
        return tuple(module for ref in self.module_refs if (module := ref()) is not None)

    def use_tied(self, owner: Unit) -> None:
        """Record that this unit's modules use tied parameters of ``owner``."""
        if owner is not self and owner not in self.tied_units:
            self.tied_units = (*self.tied_units, owner)
            self.others = (*self.beside, *self.tied_units)

    def take_beside(self, units: Sequence[Unit]) -> None:
        """Let ``units``, of other meshes of the same modules, be used and end with this one."""
        self.beside = tuple(units)
        self.others = (*self.beside, *self.tied_units)
        for unit in units:
            unit.memory.packs = self.memory.packs

    def tie(self, param: ShardedParam, places: Sequence[Registration]) -> None:
        """Use ``param``, which another unit may own, at ``places`` of this unit's modules."""
        owner: Unit = param.unit()
        param.registrations += places
        # The owner switches its forms at the new places, too, so this unit needs no copy of the parameter.
        owner.tables.seen = None  # the tables are made again
        self.use_tied(owner)

    # ---- facts for planning, reports and links ----

    @property
    def main_buckets(self) -> Sequence[FlatBucket]:
        """The present buckets; empty before the first packing."""
        return self.memory.buckets

    def largest_reductions(self) -> list[tuple[int, int]]:
        """Return (elements of a section, bytes of an element) of the reduction of all parameters, per reduce dtype."""
        by_dtype = Counter[torch.dtype]()
        for param in self.params:
            by_dtype[self.memory.reduce_dtype(param)] += param.shard.section_numel
        num_parts = 1 if self.settings.sums is None else self.settings.sums.most_parts
        return [(num_parts * numel, dtype.itemsize) for dtype, numel in by_dtype.items()]

    @property
    def gather_staging(self) -> tuple[int, bool]:
        """Bytes that a launched all-gather allocates, and whether they include the full parameters."""
        shards, comm = self.memory.shards, None if self.memory.bound_comm is None else self.memory.bound_comm.shards
        if shards is None or not self.memory.is_collective or self.memory.link is not None:
            return 0, False
        # The buffer of a collective becomes the full parameter: one tensor, as it is, in a pooled buffer.
        is_pooled = comm is not None and comm.gathers_to_pool and not self.policy.keeps_full_memory
        is_plain = self.coding("gather") is None and not self.memory.extended.params
        return shards.packed_bytes, is_pooled and is_plain and shards.are_full(self.memory.fulls)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards; 0 if the policy keeps them, since a step does not allocate them."""
        return 0 if self.policy.keeps_full_memory else sum(full.num_bytes for full in self.memory.fulls)

    @property
    def route(self) -> str:
        """The transport for messages: the name of a link or "collectives", with codings; "" if nothing is sent."""
        ways = {"gather": self.coding("gather"), "reduce": self.coding("reduce")}
        coded = [f"{way} {coding}" for way, coding in ways.items() if coding]
        link = self.memory.link
        via = ["collectives" if link is None else link.name] if self.memory.is_collective else []
        return ", ".join([*via, *coded])

    def coding(self, way: Literal["gather", "reduce"]) -> Coding | None:
        """Return the coding in which parameters are gathered, or gradients reduced (between replicas if there are any).

        None: uncompressed.
        """
        compression = self.settings.compression
        num_ranks = self.settings.axes.num_shards if way == "gather" else self.settings.num_ranks
        if compression is None or num_ranks == 1 or not any(map(self.is_coded, self.params)):
            return None
        return getattr(compression.policy, way)

    def is_coded(self, param: ShardedParam) -> bool:
        """Return True if ``param`` is compressed when its unit is."""
        coded = self.settings.compression
        return coded is not None and takes(coded.policy, param.fqn, param.shard.shape, param.dtype.itemsize)

    @property
    def compares_reductions(self) -> bool:
        """True if the transport itself detects that ranks reduce different gradients."""
        comm = self.memory.comm
        link = comm.reduce.planned_link if comm.reduce is not None else None
        return comm.replicas is None and (comm.reduce is None or (link is not None and link.compares_contents))

    @property
    def has_copies(self) -> bool:
        """True if full parameters, or those of a smaller mesh, are registered: an optimizer step makes them stale."""
        return self.held is HELD or (self.held is NONE and self.registered is SUB)

    def emit(self, op: Op, num_bytes: int = 0, in_place: bool = False) -> None:
        """Tell listeners that the unit has done ``op``; call it only if there are any."""
        emit(self.track.name, Call(op, self.name, num_bytes, in_place))

    def _explain(self, error: RuntimeError) -> NoReturn:
        """Raise from ``error`` one that says where the ranks are, unless it is of this rank alone."""
        if (engine := self.engine_side.engine_ref()) is not None:
            engine.exec_order.explain(error, f"all-gather of {unit_in_words(self.name)}")
        raise error

    # ---- what user code has changed between passes ----

    def bind(self, comm: UnitComm) -> None:
        """Use ``comm`` for collectives and memory from now on."""
        self.tables.seen = None  # until here user code may have patched extensions on shards
        self.memory.bind(comm)

    def ensure_packed(self, has_changed: bool = False) -> None:
        """Detect whether user code has replaced parameters or their memory, or changed their dtype; repack if it has.

        ``has_changed``: a check has found so already.
        """
        if not has_changed and self.tables.check():
            return
        # Only here does anything loop over parameters in Python; a warm step ends above.
        is_first = self.memory.kinds is None
        self.tables.seen = self.tables.swap = None
        if not is_first:  # else they have just been sharded
            self.adopt_registered()
            for param in self.params:
                param.check_data()
                param.follow_local()
        for param in self.params:
            param.storage = torch_private.storage_id(param.sharded)
        if self.memory.settle(self.params, self.reduction.by_size):
            self.tables.registered = [], [], [], []
            usual, precision = [param for param in self.params if not param.keeps_dtype], self.settings.precision
            pairs = {(param.dtype_of_full(precision), self.memory.reduce_dtype(param)) for param in usual}
            counts = Counter([full for full, _ in pairs])
            self.reduction.dtypes = {full: wanted for full, wanted in pairs if counts[full] == 1}
        self.reduction.gradient_dtypes = {param.dtype for param in self.params}
        self.tables.seen = Snapshot(self.params, self.memory.extended.params)
        self.tables.count_versions()
        self.engine_side.checks.see_change()

    def adopt_registered(self) -> None:
        """Adopt what is registered on the modules as the shards; parameters that user code put there count as a packing."""
        for param in [*self.params]:
            if self._keep_tied(param):
                param.check_ties()
                self.memory.packs.count += not param.is_own(param.registrations[0].current)
                param.adopt_registered()

    def _keep_tied(self, param: ShardedParam) -> bool:
        """Hand places of ``param`` that user code has tied to another parameter over to that; return False if none is left."""
        user: Unit = param.unit()
        for at in [*param.registrations]:
            owner = manager_of(at.parameters.get(at.name))
            if owner is None or owner is param or owner.unit() is None:
                continue
            if self.engine_side.engine_ref() is not None:
                raise StateError(
                    f"{param.fqn} was tied to {owner.fqn} after the first forward, or after unshard(): tie parameters before"
                )
            param.registrations = [each for each in param.registrations if each is not at]
            user.tie(owner, [at])
        if not param.registrations:
            self.params.remove(param)
            self.reduction.by_size.remove(param)
            self.tables.seen = None
        return bool(param.registrations)

    # ---- unshard and reshard ----

    def unshard(self, pass_number: int | None = None) -> None:
        """Launch the all-gather, unless the full parameters are up to date or their all-gather is in flight.

        ``pass_number``: the number of the running forward or backward, in which shards do not change; None outside of any.
        """
        was_idle = self.held is NONE and self.registered is SHARDS
        if self.held is not NONE:
            if self._is_from_now(pass_number):
                self._serve_others(pass_number)
                return
            if self.held is COMING:
                self.discard()
        memory, tables, is_sub = self.memory, self.tables, self.registered is SUB
        is_known = pass_number is not None and tables.seen is not None  # as in ``_current_version``, without a call
        counted = tables.last_version if is_known else tables.count_versions()
        version = (self.reduction.num_commits << 40) + counted
        from_sub = is_sub and self.fresh_as_of[0] == version
        if pass_number is None and not from_sub:
            self.ensure_packed()
        if pass_number is None or memory.is_written or not was_idle:
            # The current stream may have just written to the shards, or to those on the smaller mesh.
            memory.comm.streams.gather.wait_current()
            memory.is_written = False
        if is_sub:
            self._check_sub()
        schedule = self.engine_side.schedule
        if schedule is not None and pass_number is not None:
            # Ranks that take different ways still have to launch the same collectives: the gathers before this one, which only
            # other ranks need, are launched first.  A rank on the usual way makes no call for it.
            if schedule.gathers[schedule.cursor] != self.number:
                schedule.reach_gather(self)
            schedule.cursor += 1
        if listeners:
            begin(self.track.name, "unshard", self.name)
        try:
            self.handle = memory.gather_from_sub() if from_sub else memory.gather()
        except RuntimeError as error:
            self._explain(error)
        self.held, self.fresh_as_of = COMING, (version, pass_number)
        if listeners:
            self.emit(Op.UNSHARD, *self.gather_staging)

    def _serve_others(self, pass_number: int | None) -> None:
        """Launch the all-gather for other ranks alone if it is next: this rank has the full parameters."""
        schedule = self.engine_side.schedule
        if schedule is not None and pass_number is not None and schedule.gathers[schedule.cursor] == self.number:
            schedule.serve_next()

    def wait(self, pass_number: int | None = None) -> None:
        """Wait for the all-gather, launching it if it is not in flight, and register the full parameters."""
        needs_gather = not (self.held is HELD and self._is_from_now(pass_number))
        if not needs_gather:
            self._serve_others(pass_number)
            if self.registered is FULL and (pass_number is None or pass_number == self.fresh_as_of[1]):
                return
            checks = self.engine_side.checks
            if checks.is_on and not is_in_backward():  # weights are exchanged outside of one
                checks.use_again(self)
            self.fresh_as_of = self.fresh_as_of[0], pass_number
        else:
            if self.held is not COMING or pass_number is None or pass_number != self.fresh_as_of[1]:
                self.unshard(pass_number)
            if listeners:
                begin(self.track.name, "wait", self.name)
            if self.handle is not None:
                try:
                    self.handle.wait()
                except RuntimeError as error:
                    self._explain(error)
                self.handle = None
        # After the wait, so that user code that runs while the gather is in flight never finds a parameter without values.
        self.tables.register_full()
        if self.memory.sub is not None:
            self.memory.drop_sub()
        self.registered, self.held = FULL, HELD
        if pass_number is None:
            self.listen()
        if needs_gather and listeners:
            self.emit(Op.WAIT, self.full_bytes)

    def wait_with_tied(self, pass_number: int | None) -> None:
        """Wait for the full parameters that the unit's modules use: those beside it and tied ones included."""
        for member in (self, *self.others):
            member.wait(pass_number)

    def reshard(self, in_pass: bool = False) -> None:
        """Copy writes to full parameters into the shards, free the full parameters and register the sharded ones.

        If there are writes and other ranks may be reading the shards (``in_pass``), the unit stays full to the end of the pass.
        """
        if self.held is COMING:
            self.discard()
            return
        if self.registered is SUB and not in_pass:
            self._check_sub()
        was_full = self.held is HELD
        if was_full:
            # A forward may write to its parameters (``Embedding(max_norm=)``).  Peers on this host read the shards until the
            # pass has ended, so in a pass the write waits in the full parameter.
            written = self.tables.find_writes()
            if written and in_pass:
                self.reshards_late = True
                return
            if listeners:
                begin(self.track.name, "reshard", self.name)
            if written:
                self.take_written(written)
        elif self.registered is SHARDS:
            return
        self._register_sharded()
        if was_full and listeners:
            self.emit(Op.RESHARD, self.full_bytes)

    def _register_sharded(self) -> None:
        self.tables.register_sharded()
        memory = self.memory
        for buffer in memory.fulls if not self.policy.keeps_full_memory else ():  # ``memory.drop()``, without a call
            buffer.drop()
        if memory.extended.params and not self.policy.keeps_full_memory:
            memory.extended.drop()
        if memory.sub is not None:
            memory.drop_sub()
        self.registered, self.held = SHARDS, NONE

    def discard(self) -> None:
        """Cancel an all-gather that was not waited for."""
        # A backend cannot take a collective back: cancelling waits for it, and drops what it has brought.
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None
        self._register_sharded()

    # ---- the end of a forward ----

    def count_aliases(self) -> int:
        """Return how many tensors use the memory of the full parameters; needed only while saved-tensor hooks are active.

        A hook may store such a tensor to recognize others by address (activation offloading does), so no other parameter
        may get this address before backward.
        """
        return sum(torch_private.storage_use_count(e.storage) for e in self.memory.fulls if not e.aliases_shards)

    def reshard_after_forward(self) -> None:
        """Apply ``policy.reshard_after_forward``, unless something reads the full parameters before backward does."""
        backward, checks, wanted = self.backward, self.engine_side.checks, self.policy.reshard_after_forward
        if backward.keeps_for_graph or (backward.is_unseen and torch.is_grad_enabled()):
            return  # a double backward, or a backward that no hook announces, reads them
        # Saved-tensor hooks (activation offloading) may have stored an alias of a full parameter; its memory must stay then.
        has_hooks = torch_private.saved_tensor_hooks(True) is not None and torch.is_grad_enabled()
        if has_hooks and self.count_aliases() > self.forward.num_aliases:
            return
        if self.held is not HELD:
            return
        if checks.is_on:
            checks.end_unit(self)
        if wanted is False:
            return
        sub = self.settings.sub_axes
        # A rank that skips the unit, where ranks may take different ways, has no part on the smaller mesh.
        is_freed = wanted is True or self.engine_side.diverges or self.memory.extended.params or not self.params
        if sub is None or is_freed or self.tables.find_writes():
            self.reshard(in_pass=True)
            return
        self.memory.cut_to_sub(sub)
        if not self.policy.keeps_full_memory:
            self.memory.drop()
        self.registered, self.held = SUB, NONE
        if listeners:
            self.emit(Op.RESHARD, self.full_bytes)

    # ---- writes of user code to parameters ----

    def _current_version(self, pass_number: int | None) -> int:
        # Commits count, since a rank whose shards are empty sees no write of the optimizer, yet has to gather when the others
        # do.  In a pass the version is what the check at its begin has read.
        # Commits stand above all versions of shards, which stay far below 2**40.
        tables = self.tables
        is_known = pass_number is not None and tables.seen is not None
        return (self.reduction.num_commits << 40) + (tables.last_version if is_known else tables.count_versions())

    def _is_from_now(self, pass_number: int | None) -> bool:
        """Return True if the shards have not changed since they were gathered."""
        if pass_number is None:
            self.take_writes()
        elif self.fresh_as_of[1] == pass_number:
            return True
        return self.fresh_as_of[0] == self._current_version(pass_number)

    def take_writes(self) -> None:
        """Copy writes to full parameters into the shards; not in a pass, where other ranks may read the shards.

        Every rank copies its own rows, so all ranks must have written the same values.  Raises: StateError where ranks may take
        different ways.
        """
        if self.held is HELD and (written := self.tables.find_writes()):
            if self.engine_side.diverges:
                raise StateError(
                    f"a forward has written to parameters of {unit_in_words(self.name)}, where ranks may take different ways: "
                    "others would keep their old rows. Write between steps, on every rank, or remove "
                    "set_allow_rank_divergence"
                )
            self.engine_side.checks.see_writes(self, written)
            self.take_written(written)

    def take_written(self, written: Written) -> None:
        """Copy this rank's rows of the ``written`` parameters to the shards.

        If a gather casts or compresses, only elements that differ from its result are copied: others would lose precision.
        """
        for param in written:
            full, local = param.full, param.local.detach()
            assert full is not None
            with torch.no_grad():
                rows, gathered = self.own_rows(param, full)
                if rows.dtype is not local.dtype or self.coding("gather") is not None:
                    rows = torch.where(rows != gathered, rows.to(local.dtype), local.to(rows.device))
                local.copy_(rows)
            self.memory.is_written = True
            torch.autograd.graph.increment_version(param.sharded)
            # Else the next unshard would take this write for one of user code, and bump the versions that autograd has saved.
            param.gathered_version = param.version
            params, _, versions, _ = self.tables.registered
            versions[params.index(param)] = torch_private.version_of(full)

    def own_rows(self, param: ShardedParam, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of ``full``, and the shard after a gather: cast, or compressed and decompressed."""
        cut, whole = param.shard, torch_private.local_of(full).data
        rows = cut.rows(self.settings.axes.shard_rank)
        mine = whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))
        local, compression = param.local.detach().to(whole.device), self.settings.compression
        if compression is None or self.coding("gather") is None:
            return mine, local.to(whole.dtype)
        return mine, compression.round_trip(local, param.fqn, cut.shape, whole.dtype)

    def _check_sub(self) -> None:
        """Raise StateError if the parameters on the smaller mesh were written to, or have gradients."""
        for param in self.params:
            sub = param.subsharded
            if sub is None:
                continue
            version, (seen, was_trainable) = torch_private.versions_of([sub])[0], param.sub_seen
            is_changed = version != seen or sub.grad is not None or torch_private.gradient_hooks([sub])
            param.sub_seen, sub.grad = (version, sub.requires_grad), None
            if sub.requires_grad is not was_trainable:  # user code has frozen or thawed what was registered
                param.sharded.requires_grad_(sub.requires_grad)
            if is_changed:
                raise StateError(
                    f"{param.fqn} ({unit_in_words(self.name)}) was written to, used in a loss or given a hook between forward "
                    "and backward, when its form on the smaller mesh of reshard_after_forward was registered, which is not "
                    "trained. Do so in forward or after backward, or call reshard() or unshard() on the module first"
                )

    def keep(self) -> None:
        """Keep full parameters registered between passes."""
        self.take_writes()
        self.tables.is_kept = True
        self.listen()

    # ---- gradients ----

    def listen(self) -> None:
        """Hook the gradients of the full parameters, where a backward may begin without an output of the unit, or with buckets.

        So it is with parameters that stay full or plain.  Others are freed after forward: a backward reaches an output first.
        """
        self.tables.listen(partial(_gradient_hook, weakref.ref(self)))

    @property
    def has_gradients(self) -> bool:
        """True if a full parameter that is not registered for ever has a gradient that was not taken."""
        swap = self.tables.swap
        return swap is not None and any(map(_IS_NOT, map(_GRAD, swap.fulls), repeat(None)))

    def take_gradients(self, some: Iterable[ShardedParam] | None = None) -> Gradients:
        """Return the local gradients of full parameters in their reduce dtypes, and clear ``.grad`` of those.

        ``some``: parameters of the unit; None: all.
        """
        taken: Gradients = {}
        for param in self.params if some is None else some:
            full = param.full
            if full is not None and (gradient := full.grad) is not None:
                full.grad = None  # sums over backwards are made of gradients in reduce dtypes
                taken[param] = gradient
        # ``.grad`` is cleared for frozen parameters as well: they may have been frozen since autograd made their gradient.
        swap, wanted = self.tables.swap, self.reduction.dtypes
        # User code may have frozen some after forward.
        if swap is None or self.memory.in_place or not all(swap.wants):
            taken = {param: gradient for param, gradient in taken.items() if param.sharded.requires_grad}
        if are_usual(taken, wanted):
            return taken
        for param, gradient in taken.items():
            local = local_form(gradient, param, self.settings.axes.dp_mesh_dims)
            dtype = None if param.keeps_dtype else wanted.get(local.dtype)
            taken[param] = local.to(dtype or self.memory.reduce_dtype(param))
        return taken

    def end_backward(self) -> Gradients:
        """End the unit's backward; return its gradients, with zeros for unused ones if the policy says so."""
        taken = self.take_gradients()
        if self.policy.reduces_unused:
            self.add_zeros(taken)
        # Ranks pair all-reduces over replicas by their parameters, so one that has a sum of earlier backwards and no gradient
        # in this one takes part with zeros.
        if self.earlier.partial and self.policy.sync and self.policy.syncs_replicas:
            sums = self.earlier.partial.items()
            taken |= {param: each.new_zeros(param.shard.shape) for param, each in sums if param not in taken}
        backward = self.backward
        backward.is_running, backward.buckets = False, None
        backward.arrived.clear()
        return taken

    def add_zeros(self, gradients: Gradients, sent: Container[ShardedParam] = ()) -> None:
        """Add zeros for trainable parameters without a gradient, except for those that were ``sent`` already."""
        for param in self.params:
            if param.sharded.requires_grad and param not in sent and param not in gradients:
                dtype, device = self.memory.reduce_dtype(param), self.settings.storage.device
                gradients[param] = torch.zeros(param.shard.shape, dtype=dtype, device=device)


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
            engine = unit.engine_side.engine_for_gradient()
            if engine is not None:
                engine.gradient_arrived(unit, ordinal)

    return on_accumulated


def is_in_backward() -> bool:
    """True while autograd runs a backward on this thread."""
    return torch_private.graph_task_id() != -1
