"""Checks and registration of all parameters of a bucket at once, at C speed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise import torch_private
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


class Swap:
    """Registers the full parameters of a bucket, and the sharded ones again, by ``dict.update`` without a Python loop.

    It is made after the parameters were registered one by one, if registration is all that remains to be done in later
    steps: each parameter has one place, a full parameter whose gradient is hooked, and no dtype of its own.

    Attributes:
        fulls, shards: the full and the sharded parameters, in the bucket's order.
        num_trainable: how many of them are trainable.
    """

    def __init__(self, params: Sequence[ShardedParam], fulls: list[nn.Parameter], wants: list[bool]) -> None:
        self.fulls, self._wants, self.num_trainable = fulls, wants, sum(wants)
        self.shards = [param.sharded for param in params]
        self._registries = [param.registrations[0].parameters for param in params]
        self._names = [param.registrations[0].name for param in params]
        self._fulls_of: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter]]] = []
        self._shards_of: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter]]] = []
        self._has_memory: bool | None = None  # ``shardwise_has_memory`` of the freed parameters; None: not marked yet
        by_registry: dict[int, tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for registry, name, full, sharded in zip(self._registries, self._names, fulls, self.shards, strict=True):
            if id(registry) not in by_registry:
                by_registry[id(registry)] = {}, {}
                self._fulls_of.append((registry, by_registry[id(registry)][0]))
                self._shards_of.append((registry, by_registry[id(registry)][1]))
            by_registry[id(registry)][0][name], by_registry[id(registry)][1][name] = full, sharded

    @staticmethod
    def suits(params: Sequence[ShardedParam], fulls: Sequence[nn.Parameter]) -> bool:
        """Return True if a swap can register ``params`` and their full parameters ``fulls``."""
        return all(
            len(param.registrations) == 1
            and param.registrations[0].setattr_module is None
            and param.grad_dtype is None
            and not param.keeps_dtype
            and type(full) is nn.Parameter
            and (param.is_hooked or not param.sharded.requires_grad)
            for param, full in zip(params, fulls, strict=True)
        )

    def register_full(self) -> bool:
        """Register the full parameters; return False, with nothing registered, if user code has changed something."""
        shards, wants, fulls = self.shards, self._wants, self.fulls
        if not all(map(operator.is_, shards, map(dict.get, self._registries, self._names))):
            return False
        if [*map(_REQUIRES_GRAD, shards)] != wants:
            return False
        for full in fulls:
            full.__class__ = nn.Parameter
        if [*map(_REQUIRES_GRAD, fulls)] != wants:
            return False
        for registry, forms in self._fulls_of:
            registry.update(forms)
        return True

    def register_sharded(self) -> bool:
        """Register the sharded parameters; return False, with nothing done, if the full ones are not what is registered."""
        if not all(map(operator.is_, self.fulls, map(dict.get, self._registries, self._names))):
            return False
        for registry, forms in self._shards_of:
            registry.update(forms)
        return True

    def mark_freed(self, params: Iterable[ShardedParam], has_memory: bool) -> None:
        """Refuse uses of the full parameters, as ``mark_freed`` does, with less work if ``has_memory`` is as before."""
        if self._has_memory is not has_memory:
            mark_freed(params, has_memory)
            self._has_memory = has_memory
            return
        for full in self.fulls:
            full.__class__ = FreedParameter
