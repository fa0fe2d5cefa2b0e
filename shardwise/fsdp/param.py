"""A sharded parameter: its forms (sharded, full, sharded on a smaller mesh), and the places where modules register it.

Modules read parameters from a dict, autograd and optimizers hold the objects, and user code may put others there between any
two lines of it.  So each form is one object for as long as the parameter lives, and what is registered is compared with what
shardwise has put there.  Source: FSDP2's ``FSDPParam``; the places are those of ``torch.nn.utils.stateless``.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.arguments import Extent
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.precision import MixedPrecisionPolicy, dtype_of_full
from shardwise.layout import ChunkShard
from shardwise.torch_private import DTensorSpec


def nothing() -> None:
    """Return None, as a weak reference to what is gone."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A place where a parameter is registered: a module's dict of parameters and a name.

    Attributes:
        parameters: ``_parameters`` of the module; the dict does not keep the module alive.
        name: the parameter's name in the module.
        setattr_module: weak reference to the module if its class overrides ``__setattr__`` (as LSTM does, which stores its
            flat weights there); else None.
    """

    parameters: dict[str, nn.Parameter | None]
    name: str
    setattr_module: Callable[[], nn.Module | None] | None = None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Registration:
        """Return the registration of parameter ``name`` of ``module``."""
        follows = type(module).__setattr__ is not nn.Module.__setattr__
        return cls(torch_private.parameters_of(module), name, weakref.ref(module) if follows else None)

    @property
    def current(self) -> nn.Parameter | None:
        """What is registered here now."""
        return self.parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here.  The hot path inlines this and calls :meth:`call_setattr` only where needed."""
        self.parameters[self.name] = parameter
        self.call_setattr(parameter)

    def call_setattr(self, parameter: nn.Parameter) -> None:
        """Call the module's own ``__setattr__`` with ``parameter``, which is registered here now."""
        if self.setattr_module is not None and (module := self.setattr_module()) is not None:
            setattr(module, self.name, parameter)


_logger = logging.getLogger("shardwise")

# Only the identity of a parameter shows that user code has tied it.  So this maps the ids of the forms of managed parameters,
# and of those that they were made from, to them; by now an id may be another parameter's.
_managed: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def manager_of(param: nn.Parameter | None) -> ShardedParam | None:
    """Return the managed parameter of which ``param`` is a form, or from which it was made; None if no unit has it."""
    if (found := _managed.get(id(param))) is None or found.unit() is None:
        return None
    return found if any(param is form for form in (found.sharded, found.full, found.original())) else None


class _Probe(torch.autograd.Function):
    """A function whose node leads to the accumulator of a leaf, also of a DTensor that has no ``view_as`` (uneven shards)."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty((), device="cpu")


def refuse_grad_dtype(param: nn.Parameter, fqn: str) -> None:
    """Raise ConfigError if user code has assigned another ``grad_dtype`` than its dtype to ``param``."""
    if param.grad_dtype is not param.dtype:
        raise ConfigError(
            f"{fqn} has grad_dtype {param.grad_dtype}; gradients of sharded parameters have the parameter's dtype "
            f"({param.dtype}). Leave it out, and pass MixedPrecisionPolicy(reduce_dtype=...) for the dtype of their sums"
        )


@dataclass(eq=False)
class ShardedParam:
    """A parameter that a unit manages, in its three forms: sharded, full, and sharded on a smaller mesh.

    Attributes:
        fqn: its path; until the first forward from the module that was sharded, then from the root.
        registrations: the places that use it; a tied parameter has several.
        shard: the layout of the local tensor over the shard axis.
        spec: the DTensorSpec of the sharded parameter and its gradients.
        inner_spec: the DTensorSpec of the full parameter if that is a DTensor (tensor parallelism), else None.
        sharded: the parameter that is registered while sharded, and that optimizers have.
        full: the parameter that is registered while unsharded.  It is made at the first unshard and stays the same object,
            since autograd's saved tensors and accumulators refer to it.
        subsharded: the parameter that is registered while resharded to a smaller mesh.  sub_seen: its version, and
            ``requires_grad``, when it was made.
        registered_form: the form that shardwise has registered; None: the sharded one.  Any other registered parameter comes
            from user code.
        shard_shape: the shape of this rank's shard.
        version_base: what :attr:`version` has more than torch's counters, which restart with every local tensor that user code
            puts in place.
        counted: weak reference to the local tensor whose counter is read, if the shard is a DTensor.
        last_version, gathered_version: those of the last check, and from which the full parameter was last gathered.
        ordinal: its index among the parameters of its unit.
        is_hooked: the full parameter has the hook that reports its gradient; ``hook_id`` identifies the hook.
        keeps_dtype: it is used in its own dtype, whatever the mixed precision of its unit.
        module: weak reference to the module of the first registration.
        original: weak reference to the parameter that it was made from, which user code may still reference.
        attributes: the attributes that users have set on it, one dict for all forms; a parameter that conversions or loading
            register lacks them.
        memory: where the parameter was before it was sharded: a later call may shard another one over the same memory.
        beginning: samples of its values when it was sharded, until ranks have compared them.
        accumulator: the node by which a backward would accumulate into the shard; see :func:`refuse_gradients`.
        storage: the identity of the storage of ``sharded`` when it was packed.
        unit: returns the unit, None if that was deleted.
    """

    fqn: str
    registrations: list[Registration]
    shard: ChunkShard
    spec: DTensorSpec
    inner_spec: DTensorSpec | None
    sharded: nn.Parameter
    shard_shape: tuple[int, ...]
    # All that follows is written on the thread that runs user code, outside of a pass or by the forward or backward that runs:
    # autograd's threads run one backward at a time, and no forward then.
    full: nn.Parameter | None = None
    subsharded: nn.Parameter | None = None
    sub_seen: tuple[int, bool] = (0, True)
    registered_form: nn.Parameter | None = None
    version_base: int = 0
    counted: Callable[[], torch.Tensor | None] = field(default=nothing)
    last_version: int = 0
    gathered_version: int = -1
    ordinal: int = 0
    is_hooked: bool = False
    hook_id: int = -1
    keeps_dtype: bool = False
    module: Callable[[], nn.Module | None] = field(default=nothing)
    original: Callable[[], nn.Parameter | None] = field(default=nothing)
    # Two samples, not the values: the first forward compares them between ranks, and they are dropped.
    beginning: tuple[torch.Tensor, torch.Tensor] | None = None
    memory: Extent | None = None
    storage: int = 0
    unit: Callable[[], Any] = field(default=nothing)
    accumulator: Any = None
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = torch_private.attributes_of(self.sharded)
        self.manage(self.sharded)

    def manage(self, form: nn.Parameter) -> None:
        """Let :func:`manager_of` find this parameter by ``form``."""
        _managed[id(form)] = self

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's own dtype."""
        return self.local.dtype

    def dtype_of_full(self, precision: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype in which the parameter is all-gathered and used."""
        return self.dtype if self.keeps_dtype else dtype_of_full(precision, self.dtype)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return torch_private.local_of(self.sharded)

    @property
    def version(self) -> int:
        """A number that changes with every write to the shard that torch counts."""
        return torch_private.version_of(self.sharded) + torch_private.version_of(self.local) + self.version_base

    def replace_local(self, local: torch.Tensor) -> None:
        """Make ``local``, of the same values, the local tensor of the shard; the version stays."""
        before = self.version
        torch_private.set_local(self.sharded, local)
        self._count_from(before)

    def _count_from(self, version: int) -> None:
        self.version_base += version - self.version
        if self.local is not self.sharded:
            self.counted = weakref.ref(self.local)

    def follow_local(self) -> None:
        """Count on if user code has put another local tensor in place; a plain parameter keeps its own counter.

        The version increases, so that a backward that needs the old values raises: they are gone.
        """
        if self.local is not self.sharded and self.local is not self.counted():
            self._count_from(self.last_version + 1)

    def register(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``, one of the forms, at every place."""
        self.registered_form = parameter
        for registration in self.registrations:
            registration.put(parameter)

    def is_own(self, current: nn.Parameter | None) -> bool:
        """Return True if ``current`` is one of this parameter's forms, not a parameter from user code."""
        forms = self.sharded, self.full, self.subsharded, self.registered_form
        return current is not None and any(current is form for form in forms)

    def check_places(self, is_in_tree: Callable[[dict[str, nn.Parameter | None]], bool] = lambda _: True) -> None:
        """Raise StateError if a module has no parameter of this name any more; of modules for whose dict ``is_in_tree``."""
        for registration in self.registrations:
            if registration.current is None and is_in_tree(registration.parameters):
                raise StateError(
                    f"{self.fqn} was removed from its module or set to None, as torch.nn.utils.parametrize, weight_norm and "
                    "prune do. Call them, and remove parameters, before fully_shard (or replicate)"
                )

    def uncounted(self) -> StateError:
        """Return the error for a write to the full parameter that torch has not counted."""
        return StateError(
            f"a write to {self.fqn} in forward, or while it was unsharded, through .data, has not reached the shards, since "
            f"torch does not count it. Write under torch.no_grad(): {self.fqn.rpartition('.')[2]}.copy_(values)"
        )

    def check_data(self) -> None:
        """Raise StateError if the DTensor has another storage than before, but the same local tensor."""
        if self.counted() is self.local and self.storage != torch_private.storage_id(self.sharded):
            raise StateError(
                f".data of {self.fqn} was assigned to, which changes nothing in a DTensor "
                "(torch.nn.utils.vector_to_parameters does it). Write p.copy_(values) under torch.no_grad()"
            )

    def check_ties(self) -> None:
        """Tie a shared parameter again after user code has replaced it at all its places; the first one is registered.

        ``load_state_dict(assign=True)`` and ``to_empty`` from meta put one parameter into each module, usually of the same
        values.

        Raises: StateError if only some of the places have another parameter.
        """
        self.check_places()
        first, *others = found = [each for at in self.registrations if (each := at.current) is not None]
        is_old = [*map(self.is_own, found)]
        if all(is_old) or all(other is first for other in others):
            return
        if any(is_old):
            raise StateError(
                f"{self.fqn} is shared by {len(self.registrations)} places, and only some of them were given another "
                "parameter. Register the same one in all (module.weight = other.weight), or build two before sharding"
            )
        mine, *rest = [torch_private.local_of(each).detach() for each in found]
        have_values = not any(each.is_meta for each in (mine, *rest))
        if have_values and not all(mine.dtype is each.dtype and torch.equal(mine, each) for each in rest):
            _logger.warning(
                "%s is shared by %d places, which were given parameters of different values: it stays shared, with those "
                "of the first. Tie them yourself (module.weight = other.weight) after to_empty() or assign=True",
                *(self.fqn, len(found)),
            )
        for registration in self.registrations[1:]:
            registration.put(first)

    def adopt_registered(self) -> None:
        """Make the parameter that is registered at the first place the sharded one; user code may have replaced it.

        Raises: ConfigError if it is a tensor but no parameter (``torch.func.functional_call`` registers those), or has a
        ``grad_dtype``; StateError if there is none any more.
        """
        current = self.registrations[0].current
        if current is None:
            self.check_places()
        elif current is not self.full and current is not self.subsharded:
            if current is not self.sharded:
                if not isinstance(current, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise ConfigError(
                        f"{self.fqn}: a {type(current).__name__} that is no Parameter is registered in its place, as "
                        "torch.func.functional_call does. Call the plain module with it, or copy_ the values into the shards"
                    )
                _managed.pop(id(self.sharded), None)  # its id may become another parameter's
                self.manage(current)
            self.sharded = self.registered_form = current
            self.hand_on_attributes()
            refuse_gradients([self])
        refuse_grad_dtype(self.sharded, self.fqn)

    def hand_on_attributes(self) -> None:
        """Give the registered parameters the attributes that users have set on this one."""
        for current in [at.current for at in self.registrations]:
            if current is not None and vars(current) is not self.attributes:
                torch_private.give_attributes(self.attributes, current)


def refuse_gradients(params: Iterable[ShardedParam]) -> None:
    """Make backward raise StateError where a loss has read one of the shards: no unit would average that gradient."""
    # A hook of the tensor would also run for ``torch.autograd.grad``, and stand among those of users.
    for param in [each for each in params if isinstance(each.sharded, DTensor) and each.sharded.requires_grad]:
        if param.accumulator is None or param.accumulator.variable is not param.sharded:
            with torch.enable_grad():
                probed: Any = _Probe.apply(param.sharded)
            param.accumulator = probed.grad_fn.next_functions[0][0]
            param.accumulator.register_prehook(functools.partial(_refuse, weakref.ref(param)))


def _refuse(ref: weakref.ref[ShardedParam], _: object) -> None:
    name = "a parameter" if (param := ref()) is None else param.fqn
    raise StateError(
        f"a loss has read {name} outside of the forward of its unit, where it is a shard: nothing would average this gradient "
        "over the ranks. Read it from its module in forward, or call unshard() on the module before"
    )
