"""Checks and registration of all parameters of a bucket at once, at C speed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.parameter_classes import FreedParameter, mark_freed

# ---- Checks and registration for all parameters of a bucket at once.  ``map`` queries the tensors, since a Python loop takes
# several times as long, and every forward and backward does this for every unit.

_ADDRESS = torch.Tensor.data_ptr
_FACTS_OF_LOCAL, _GRAD_DTYPE = operator.attrgetter("dtype", "device"), operator.attrgetter("grad_dtype")
_DICT, _VERSION = operator.attrgetter("__dict__"), operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass(slots=True)
class Snapshot:
    """The shards of a bucket at a time when all of them were registered and packed; lists have one entry per shard.

    Attributes:
        shards: the sharded parameters.
        registries: the ``_parameters`` dicts in which they were registered.
        names: their names in these dicts.
        locals: weak references to the local tensors, so that memory is freed when user code replaces it.
        facts: dtype and device of the local tensors.
        addresses: addresses of the local tensors; None if they may move, since the full parameters are the shards.
        grad_dtypes: ``grad_dtype`` of the sharded parameters.
        counted: the version counters when :meth:`is_current` last returned True.
    """

    shards: list[nn.Parameter]
    registries: list[dict[str, nn.Parameter | None]]
    names: list[str]
    locals: list[weakref.ref[torch.Tensor]]
    facts: list[object]
    addresses: list[int] | None
    grad_dtypes: list[torch.dtype | None]
    counted: list[int]

    @classmethod
    def of(cls, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor], has_place: bool) -> Snapshot | None:
        """Return a snapshot of ``params``, whose local tensors are ``locals_``; None if not all are DTensors."""
        refs = [ref for param in params if isinstance(ref := param.count.local, weakref.ref)]
        if len(refs) < len(params):
            return None
        return cls(
            [param.sharded for param in params],
            [param.registrations[0].parameters for param in params],
            [param.registrations[0].name for param in params],
            refs,
            [*map(_FACTS_OF_LOCAL, locals_)],
            [*map(_ADDRESS, locals_)] if has_place else None,
            [param.sharded.grad_dtype for param in params],
            [],
        )

    def is_current(self, in_step: bool) -> bool:
        """Return True if nothing has changed.

        ``in_step``: the backward begins whose forward has made the full check.  Then dtype, device, ``grad_dtype`` and
        attributes are not checked again.
        """
        locals_ = [*map(torch_private.LOCAL, self.shards)]
        if not (
            all(map(operator.is_, self.shards, map(dict.get, self.registries, self.names)))
            and all(map(operator.is_, locals_, map(weakref.ref.__call__, self.locals)))
            and (self.addresses is None or [*map(_ADDRESS, locals_)] == self.addresses)
        ):
            return False
        if not (
            in_step
            or (
                [*map(_FACTS_OF_LOCAL, locals_)] == self.facts
                and [*map(_GRAD_DTYPE, self.shards)] == self.grad_dtypes
                and not any(map(_DICT, locals_))
            )
        ):
            return False
        self.counted = [*map(operator.add, map(_VERSION, self.shards), map(_VERSION, locals_))]
        return True


Registry = dict[str, nn.Parameter | None]


class Swap:
    """Registers the full parameters of a bucket, and the sharded ones again, by ``dict.update`` without a Python loop.

    It is made when parameters are registered for the first time, and again after user code has changed something.  A tied
    parameter has a row for each of its places.  A module with its own ``__setattr__`` (LSTM) is told afterwards.

    Attributes:
        fulls: the full parameters, in the bucket's order.
        num_trainable: how many of them are trainable.
    """

    def __init__(self, params: Sequence[ShardedParam], fulls: list[nn.Parameter]) -> None:
        self.fulls, self._classes = fulls, [type(full) for full in fulls]  # Parameter or DTensor
        self.num_trainable = sum(param.sharded.requires_grad for param in params)
        self._rows = rows = [
            (registration, full, param)
            for param, full in zip(params, fulls, strict=True)
            for registration in param.registrations
        ]
        self._places = [at.parameters for at, _, _ in rows], [at.name for at, _, _ in rows]
        self._forms = [full for _, full, _ in rows], [param.sharded for _, _, param in rows]
        self._wants = [*map(_REQUIRES_GRAD, self._forms[1])]
        self._told = [row for row in rows if row[0].setattr_module is not None]
        by_registry: dict[int, tuple[Registry, dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for at, full, param in rows:
            _, fulls_of, shards_of = by_registry.setdefault(id(at.parameters), (at.parameters, {}, {}))
            fulls_of[at.name], shards_of[at.name] = full, param.sharded
        self._by_registry = [*by_registry.values()]
        self._has_memory: bool | None = None  # ``shardwise_has_memory`` of the freed parameters; None: not marked yet

    def register_full(self, is_new: bool = False) -> bool:
        """Register the full parameters; return False, with nothing registered, if user code has changed something.

        ``is_new``: this swap has just been made, and anything may be registered.
        """
        (fulls, shards), registered = self._forms, [*map(dict.get, *self._places)]
        if not (is_new or all(map(operator.is_, shards, registered)) or all(map(operator.is_, fulls, registered))):
            return False  # full ones stay registered after a forward
        if [*map(_REQUIRES_GRAD, shards)] != self._wants:
            return False
        for full, used in zip(self.fulls, self._classes, strict=True):
            full.__class__ = used
        if [*map(_REQUIRES_GRAD, fulls)] != self._wants:
            return False
        for registry, fulls_of, _ in self._by_registry:
            registry.update(fulls_of)
        for registration, full, _ in self._told:
            registration.call_setattr(full)
        return True

    def follow_freezing(self) -> None:
        """Give shards the ``requires_grad`` that user code has set on full parameters since they were registered.

        Raises: StateError if it has registered a hook on the gradient of one, which is not reduced.
        """
        if torch_private.have_gradient_hooks(self.fulls)[0]:
            fqn = next(param.fqn for _, full, param in self._rows if torch_private.gradient_hooks([full]))
            raise StateError(
                f"a hook was registered on the full form of {fqn}, whose gradient is that of this rank alone. Remove it, and "
                "register it on the shard, outside of forward and backward: it then gets the reduced gradient"
            )
        if [*map(_REQUIRES_GRAD, self._forms[0])] != self._wants:
            for (_, full, param), wanted in zip(self._rows, self._wants, strict=True):
                if full.requires_grad is not wanted:
                    param.sharded.requires_grad_(full.requires_grad)

    def register_sharded(self) -> None:
        """Register the sharded parameters; one that user code has put in the place of a full one stays, as on one process."""
        if all(map(operator.is_, self._forms[0], map(dict.get, *self._places))):
            for registry, _, shards in self._by_registry:
                registry.update(shards)
        else:
            for at, _, param in self._rows:
                if param.is_own(at.parameters.get(at.name)):
                    at.parameters[at.name] = param.sharded
        for at, _, param in self._told:
            if at.parameters.get(at.name) is param.sharded:
                at.call_setattr(param.sharded)

    def mark_freed(self, params: Iterable[ShardedParam], has_memory: bool) -> None:
        """Refuse uses of the full parameters, as ``mark_freed`` does, with less work if ``has_memory`` is as before."""
        if self._has_memory is not has_memory:
            mark_freed(params, has_memory)
            self._has_memory = has_memory
            return
        for full, used in zip(self.fulls, self._classes, strict=True):
            if used is nn.Parameter:
                full.__class__ = FreedParameter
