"""Checks and registration of all parameters of a group at once, at C speed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam

# ``map`` queries the tensors, since a Python loop takes several times as long, and every forward and backward does this for
# every unit.

_ADDRESS = torch.Tensor.data_ptr
_FACTS_OF_LOCAL, _GRAD_DTYPE = operator.attrgetter("dtype", "device"), operator.attrgetter("grad_dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


_TARGET: Callable[[weakref.ref[torch.Tensor]], torch.Tensor | None] = weakref.ref.__call__
Registry = dict[str, nn.Parameter | None]


class Snapshot:
    """The shards of one group, or of several, at a time when all of them were registered and packed.

    Args:
        params: the parameters.
        extended: those of them with an all-gather extension; the addresses of others are compared.
    """

    def __init__(self, params: Sequence[ShardedParam], extended: Container[ShardedParam]) -> None:
        self._shards = shards = [param.sharded for param in params]
        rows = [(at.parameters, at.name, param.sharded) for param in params for at in param.registrations]
        *self._places, self._forms = zip(*rows, strict=True)
        locals_ = torch_private.locals_of(shards)
        # Weak, so that memory is freed when user code replaces it.
        self._locals = [*map(weakref.ref, _apart(locals_, shards))]
        self._is_addressed = [param not in extended for param in params]
        self._addresses = [*map(_ADDRESS, compress(locals_, self._is_addressed))]
        rows = zip(self._is_addressed, locals_, strict=True)
        self._is_bare = [not (is_addressed and local.data_ptr()) for is_addressed, local in rows]
        self._facts, self._wants = self._facts_of(locals_), [*map(_REQUIRES_GRAD, shards)]

    def _facts_of(self, locals_: Sequence[torch.Tensor]) -> list[object]:
        # The storage of a DTensor changes if ``.data`` is assigned to; dtype and device change with the address, if any.
        bare = map(_FACTS_OF_LOCAL, compress(locals_, self._is_bare))
        return [*bare, *map(_GRAD_DTYPE, self._shards), *map(torch_private.storage_id, self._shards)]

    @property
    def are_registered(self) -> bool:
        """True if the shards are registered."""
        return all(map(operator.is_, self._forms, map(dict.get, *self._places)))

    def versions(self, in_step: bool) -> list[int] | None:
        """Return the version counters of the shards; None if user code has changed something else than values.

        ``in_step``: the backward begins whose forward has made the full check.  Then ``grad_dtype`` and storages are not
        checked again.
        """
        shards = self._shards
        locals_ = torch_private.locals_of(shards)
        apart = locals_ if len(self._locals) == len(locals_) else _apart(locals_, shards)
        if (
            not all(map(operator.is_, apart, map(_TARGET, self._locals)))
            or [*map(_ADDRESS, compress(locals_, self._is_addressed))] != self._addresses
            or [*map(_REQUIRES_GRAD, shards)] != self._wants
            or not (in_step or self._facts_of(locals_) == self._facts)
        ):
            return None
        return [*map(operator.add, map(torch_private.version_of, shards), map(torch_private.version_of, locals_))]


def _apart(locals_: list[torch.Tensor], shards: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Return those of ``locals_`` that are not the shards themselves: torch swaps no tensors with weak references."""
    return compress(locals_, map(operator.is_not, locals_, shards))


class Swap:
    """The tables by which a group registers its full parameters, and the sharded ones again, without a Python loop.

    They are made when parameters are registered for the first time, and again after user code has changed something.  A tied
    parameter has a row for each of its places.  A module with its own ``__setattr__`` (LSTM) is told afterwards.

    Attributes:
        fulls: the full parameters.
        num_trainable: how many of them are trainable.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.fulls = fulls = [full for param in params if (full := param.full) is not None]
        self.num_trainable = sum(param.sharded.requires_grad for param in params)
        pairs = zip(params, fulls, strict=True)
        self._rows = rows = [(at, full, param) for param, full in pairs for at in param.registrations]
        self.places = [at.parameters for at, _, _ in rows], [at.name for at, _, _ in rows]
        self.forms = [full for _, full, _ in rows], [param.sharded for _, _, param in rows]
        self.wants = [*map(_REQUIRES_GRAD, self.forms[1])]
        # Modules with their own ``__setattr__``, which is called after the registration.
        self.with_setattr = [row for row in rows if row[0].setattr_module is not None]
        by_registry: dict[int, tuple[Registry, dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for at, full, param in rows:
            _, fulls_of, shards_of = by_registry.setdefault(id(at.parameters), (at.parameters, {}, {}))
            fulls_of[at.name], shards_of[at.name] = full, param.sharded
        self.by_registry = [*by_registry.values()]

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

    @property
    def has_full(self) -> bool:
        """True if the full parameters are registered."""
        return all(map(operator.is_, self.forms[0], map(dict.get, *self.places)))
