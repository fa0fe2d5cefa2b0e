"""Which form of each parameter is registered on its modules: compared and switched for a whole unit, at C speed.

``param.sharded`` and ``param.full`` take turns in the ``_parameters`` of modules.  Between passes user code may put anything
there, change dtypes, devices and ``requires_grad``, or give a shard other memory.  A Python loop that looks for all of that,
for every parameter in every pass, costs several times what a small unit computes.  So :class:`Tables` are made when parameters
are packed, and ``map`` compares and switches whole columns of them.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam, refuse_gradients
from shardwise.fsdp.unit_memory import UnitMemory

_ADDRESS, _OFFSET, _STORAGE = torch.Tensor.data_ptr, torch.Tensor.storage_offset, torch_private.storage_id
_FACTS_OF_LOCAL, _GRAD_DTYPE = operator.attrgetter("dtype", "device"), operator.attrgetter("grad_dtype")
_IS, _REQUIRES_GRAD, _VERSION = operator.is_, operator.attrgetter("requires_grad"), torch_private.version_of
_TARGET: Callable[[weakref.ref[torch.Tensor]], torch.Tensor | None] = weakref.ref.__call__
Written = list[ShardedParam]  # whose full parameters a forward has written to
# Returns the hook of the gradient of a parameter, by ordinal.
OnGradient = Callable[[int], Callable[[torch.Tensor], None]]


class Snapshot:
    """The shards of a unit at a time when all of them were registered and packed.

    Args:
        params: the parameters.
        extended: those of them with an all-gather extension; the addresses of others are compared.
    """

    def __init__(self, params: Sequence[ShardedParam], extended: Container[ShardedParam]) -> None:
        self.counted: list[int] = []  # the version counters, as of the last check
        self._shards = shards = [param.sharded for param in params]
        rows = [(at.parameters, at.name, param.sharded) for param in params for at in param.registrations]
        *self.places, self.forms = zip(*rows, strict=True) if rows else ((), (), ())
        locals_ = torch_private.locals_of(shards)
        # Weak, so that memory is freed when user code replaces it.
        self._locals = [*map(weakref.ref, _apart(locals_, shards))]
        # A subclass with an all-gather extension (float8) decides itself what its address is, if it has one.
        self._is_addressed = [param not in extended for param in params]
        pairs = zip(self._is_addressed, locals_, strict=True)
        self._is_bare = [not (is_addressed and local.data_ptr()) for is_addressed, local in pairs]
        self._facts: list[object] = []
        self.versions(in_step=False)  # notes the facts

    def versions(self, in_step: bool) -> list[int] | None:
        """Return the version counters of the shards; None if user code has changed something else than values.

        ``in_step``: the backward begins whose forward has made the full check.  Then ``grad_dtype`` and storages are not
        checked again.
        """
        shards = self._shards
        locals_ = torch_private.locals_of(shards)
        apart = locals_ if len(self._locals) == len(locals_) else _apart(locals_, shards)
        if not all(map(_IS, apart, map(_TARGET, self._locals))):
            return None  # what has come in their place may have no address
        facts: list[object] = [*map(_ADDRESS, compress(locals_, self._is_addressed)), *map(_REQUIRES_GRAD, shards)]
        if not in_step:
            # The storage of a DTensor changes if ``.data`` is assigned to; dtype and device change with the address, if any.
            bare = map(_FACTS_OF_LOCAL, compress(locals_, self._is_bare))
            facts += [*bare, *map(_GRAD_DTYPE, shards), *map(torch_private.storage_id, shards)]
        known = self._facts = self._facts or facts
        if facts != known[: len(facts)]:
            return None
        return [*map(operator.add, map(_VERSION, shards), map(_VERSION, locals_))]


def _apart(locals_: list[torch.Tensor], shards: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Return those of ``locals_`` that are not the shards themselves: torch swaps no tensors with weak references."""
    return compress(locals_, map(operator.is_not, locals_, shards))


class Swap:
    """The columns by which full parameters, and the sharded ones again, are registered without a Python loop.

    They are made when parameters are registered for the first time, and again after user code has changed something.  A tied
    parameter has a row for each of its places.  A module with its own ``__setattr__`` (LSTM) is told afterwards.

    Attributes:
        fulls: the full parameters.
        wants: of each row, whether its parameter is trainable.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.fulls = fulls = [full for param in params if (full := param.full) is not None]
        pairs = zip(params, fulls, strict=True)
        self._rows = rows = [(at, full, param) for param, full in pairs for at in param.registrations]
        self.places = [at.parameters for at, _, _ in rows], [at.name for at, _, _ in rows]
        self.forms = [full for _, full, _ in rows], [param.sharded for _, _, param in rows]
        self.wants = [*map(_REQUIRES_GRAD, self.forms[1])]
        # Modules with their own ``__setattr__``, which is called after the registration.
        self.with_setattr = [row for row in rows if row[0].setattr_module is not None]

    def follow_freezing(self) -> None:
        """Give shards the ``requires_grad`` that user code has set on full parameters since they were registered.

        Raises: StateError if it has registered a hook on the gradient of one, which is not reduced.
        """
        ours = {param.hook_id for _, _, param in self._rows}
        hooked = [full for full, _ in torch_private.post_accumulate_hooks(self.fulls, ours)]
        hooked += [self.fulls[number] for number, _ in torch_private.gradient_hooks(self.fulls)]
        if hooked:
            fqn = next(param.fqn for _, full, param in self._rows if full is hooked[0])
            raise StateError(
                f"a hook was registered on the full form of {fqn}, whose gradient is that of this rank alone. Remove it, and "
                "register it on the shard, outside of forward and backward: it then gets the reduced gradient"
            )
        for (_, full, param), wanted in zip(self._rows, self.wants, strict=True):
            if full.requires_grad is not wanted:
                param.sharded.requires_grad_(full.requires_grad)


class Tables:
    """What one unit has registered, and the version counters by which writes of user code are seen.

    Attributes:
        seen: what user code could change, as the last full check has found it; None: the next check looks at everything.
        swap: the columns by which forms are switched; None: the next :meth:`register_full` makes them.
        registered: the parameters in buckets, their full parameters that were registered last, and version counters, storages
            and offsets of these, if user code has not written to them.
        last_version: the sum of the version counters of the shards, as of the last check; shards do not change in a pass.
        is_kept: full parameters stay registered between passes, where user code can reach them.
        on_gradient: makes the hooks of the full parameters' gradients; None: they have none.
    """

    def __init__(self, params: list[ShardedParam], memory: UnitMemory) -> None:
        self._params, self._memory = params, memory
        self.seen: Snapshot | None = None
        self.swap: Swap | None = None
        self.registered: tuple[list[ShardedParam], list[nn.Parameter], list[int], list[object]] = [], [], [], []
        self.last_version = 0
        self._has_new_versions = True  # the version counters of full parameters do not reflect the shards' yet
        self.is_kept = False
        self.on_gradient: OnGradient | None = None

    # ---- what user code has changed ----

    def check(self, in_step: bool = False) -> bool:
        """Return True, with versions noted, if user code has changed nothing but values; ``in_step``: see :class:`Snapshot`."""
        # A swap knows nothing of parameters in place, so it would not speak for the whole unit.
        seen, swap = self.seen, None if self._memory.in_place else self.swap
        are_shards = seen is not None and all(map(_IS, seen.forms, map(dict.get, *seen.places)))
        are_full = not are_shards and swap is not None and all(map(_IS, swap.forms[0], map(dict.get, *swap.places)))
        if seen is None or not (are_shards or are_full):
            return False
        counted = seen.versions(in_step)
        if counted is not None and counted != seen.counted:
            seen.counted = counted
            self._note_versions(counted)
        return counted is not None

    def _note_versions(self, counted: Sequence[int]) -> None:
        """Take the version counters of the shards."""
        self.last_version, self._has_new_versions = 0, True
        for param, version in zip(self._params, counted, strict=True):
            param.last_version = version + param.version_base
            self.last_version += param.last_version

    def count_versions(self) -> int:
        """Return a number that changes with every write to a shard that torch counts."""
        self._note_versions(torch_private.versions_of([param.sharded for param in self._params]))
        return self.last_version

    # ---- full parameters on the modules ----

    def register_full(self) -> None:
        """Register the full parameters on the modules."""
        self.is_kept = False
        # Gathering into memory that autograd has saved must look like the write to the shard that it repeats, and like none
        # where nothing was written: so versions of full parameters follow those of shards, and not the copies.
        if self._has_new_versions:
            self._follow_writes()
        memory, swap = self._memory, self.swap
        registered = () if swap is None else [*map(dict.get, *swap.places)]
        if (
            swap is None
            or not (all(map(_IS, swap.forms[1], registered)) or all(map(_IS, swap.forms[0], registered)))
            or [*map(_REQUIRES_GRAD, swap.forms[0])] != swap.wants
        ):
            swap = self._make_swap()
        # Not ``setattr``, which would look through every place where a module keeps things, for each parameter.
        deque(map(dict.__setitem__, *swap.places, swap.forms[0]), maxlen=0)
        for at, full, _ in swap.with_setattr:
            at.call_setattr(full)
        if memory.in_place:
            self._check_not_replaced(memory.in_place)
            self._own_forms_in_place()

    def _make_swap(self) -> Swap:
        """Make full parameters, or adapt those there are, at the first unshard, and when user code has changed something."""
        self._check_not_replaced(self._params)
        memory = self._memory
        params = [param for bucket in memory.buckets for param in bucket.params]
        for param in params:
            if param.full is None:
                param.full, param.is_hooked = memory.make_full(param), False
            elif memory.aliases_shard(param):
                # Keep the parameter object, which a graph may reference, and point it to the memory of the shard, which user
                # code may have moved.
                param.full.data = memory.make_full(param).detach()
        for param in (*params, *memory.extended.params):
            full = param.registered_form = param.full
            assert full is not None
            param.manage(full)
            self._sync_requires_grad(param, full)
        swap = self.swap = Swap([*params, *memory.extended.params])
        fulls = swap.fulls[: len(params)]
        # What writes of user code to full parameters are recognized by (:meth:`find_writes`).  Gathers keep their storages.
        places: list[object] = [*zip(map(_STORAGE, fulls), map(_OFFSET, fulls), strict=True)]
        self.registered = params, fulls, [*map(_VERSION, fulls)], places
        return swap

    def _own_forms_in_place(self) -> None:
        """Let parameters that stay registered be their own full form."""
        for param in self._memory.in_place:
            if param.full is not param.sharded:
                param.full, param.is_hooked = param.sharded, False
            self._sync_requires_grad(param, param.sharded)

    def _follow_writes(self) -> None:
        """Bump the version counters of full parameters whose shards were written to.

        A stale backward then raises, as it does on one process.
        """
        self._has_new_versions = False
        written = [param for param in self._params if param.last_version != param.gathered_version]
        for param in written:
            param.gathered_version = param.last_version
        fulls = [param.full for param in written if param.full is not None and param.full is not param.sharded]
        if fulls:
            torch.autograd.graph.increment_version(fulls)
            params, fulls, _, places = self.registered
            self.registered = params, fulls, [*map(_VERSION, fulls)], places

    @staticmethod
    def _check_not_replaced(params: Iterable[ShardedParam]) -> None:
        """Raise StateError if user code has replaced a parameter since the gather was launched or planned."""
        for param in params:
            for registration in param.registrations:
                current = registration.parameters.get(registration.name)
                if current is not param.sharded and not param.is_own(current):
                    param.check_places()
                    raise StateError(
                        f"{param.fqn} was replaced while a forward or backward ran. Replace it before or after"
                    )

    def find_writes(self) -> Written:
        """Return the parameters of a full unit that the running or last forward has written to; the same on every rank.

        Raises: StateError if ``.data`` was assigned to, or user code wrote between passes; such a write is dropped.
        """
        found: Written = []
        params, fulls, versions, places = self.registered
        # Between passes user code can freeze what is registered, or hook it; the shard is what it means.
        if self.is_kept and self.swap is not None:
            self.swap.follow_freezing()
        now: list[object] = [*zip(map(_STORAGE, fulls), map(_OFFSET, fulls), strict=True)]
        if [*map(_VERSION, fulls)] == versions and now == places:
            return found
        for index, (param, full) in enumerate(zip(params, fulls, strict=True)):
            if now[index] != places[index]:  # point it to the memory that gathers fill again
                full.data = self._memory.make_full(param).detach()
                versions[index] = torch_private.version_of(full)
                raise param.uncounted()
            if torch_private.version_of(full) != versions[index] and not self._memory.aliases_shard(param):
                if self.is_kept:
                    versions[index] = torch_private.version_of(full)
                    torch.autograd.graph.increment_version(param.sharded)  # it is gathered again
                    raise StateError(
                        f"{param.fqn} was written to while it was unsharded after a forward or by unshard(): the write is "
                        "dropped. To write, call reshard() on the module, then write to the shards under torch.no_grad()"
                    )
                found.append(param)
        return found

    # ---- hooks on gradients ----

    def listen(self, on_gradient: OnGradient) -> None:
        """Hook the gradients of all full parameters, from now on; ``on_gradient(ordinal)`` returns the hook of one."""
        if self.on_gradient is None:
            self.on_gradient = on_gradient
            self._own_forms_in_place()
            for param in self._params:
                if param.full is not None:
                    self._sync_requires_grad(param, param.full)

    def _sync_requires_grad(self, param: ShardedParam, full: nn.Parameter) -> None:
        """Set ``requires_grad`` of ``full`` to the shard's; if trainable, hook its gradient if :meth:`listen` was called."""
        wanted = param.sharded.requires_grad
        if full.requires_grad is not wanted:
            full.requires_grad_(wanted)
        if wanted and not param.is_hooked and self.on_gradient is not None:
            param.hook_id = full.register_post_accumulate_grad_hook(self.on_gradient(param.ordinal)).id
            param.is_hooked = True
        if wanted:
            refuse_gradients([param])  # it may have been frozen

    # ---- shards on the modules ----

    def register_sharded(self) -> None:
        """Register the sharded parameters on the modules.

        A parameter that user code has put in the place of a full one stays registered, as on one process.
        """
        swap = self.swap
        if swap is not None and all(map(_IS, swap.forms[0], map(dict.get, *swap.places))):
            deque(map(dict.__setitem__, *swap.places, swap.forms[1]), maxlen=0)
            for at, _, param in swap.with_setattr:
                at.call_setattr(param.sharded)
            return
        for param in self._params:
            for registration in param.registrations:
                if param.is_own(registration.parameters.get(registration.name)):
                    registration.put(param.sharded)
