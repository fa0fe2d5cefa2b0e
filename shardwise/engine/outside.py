"""What user code has done to a model beside its engine: found at forwards and backwards, before it trains something else.

None of it shows in the units.  A parameter that was added to the module tree would be trained on each rank by itself; one of
before it was sharded, which a list or a closure has kept, takes gradients that no optimizer sees; what is assigned to
``.data`` of a DTensor goes nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.engine.attachment import Attachment, attachment_of, is_managed_by_torch
from shardwise.engine.take_over import managed_by_slot
from shardwise.errors import StateError
from shardwise.units.param import UnitParam

_VALUES = dict.values
_SHOWN = 4  # names that an error lists


class ModificationChecks:
    """Watches the module tree of one root, the storages of its shards, and the parameters that these were made from.

    Attributes:
        originals: those of the last that somebody keeps: names and weak references.

    Args:
        root: the module.  attachments: of the units in its tree.
    """

    def __init__(self, root: nn.Module, attachments: Iterable[Attachment]) -> None:
        self._root = weakref.ref(root)
        self._params = [param for each in attachments for param in each.unit.params]
        self.originals = [(param.fqn, param.original) for param in self._params if _is_kept_without_gradient(param)]
        self._note_tree(root)
        _check_tree(root)
        self._note_shards()
        self._check_since_made()

    # ---- before a forward ----

    def check(self) -> None:
        """Look at the tree and at the shards: microseconds where nothing has changed.

        Raises: StateError that names parameters no unit has, or shards whose ``.data`` was assigned to.
        """
        if self._size() != self._num_params or [*chain.from_iterable(map(_VALUES, self._children))] != self._modules:
            root = self._root()
            assert root is not None  # it runs a forward
            _check_tree(root)
            self._note_tree(root)
        sharded = [param.sharded for param in self._wrapped]
        storages = [*map(torch_private.storage_id, sharded)]
        if storages != self._storages:
            self._check_data(storages)
            self._note_shards()

    def _size(self) -> int:
        return sum(map(len, self._tables))

    def _note_tree(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._children = [children for module in modules if (children := torch_private.children_of(module))]
        self._modules = [*chain.from_iterable(map(_VALUES, self._children))]
        self._tables = [torch_private.parameters_of(module) for module in modules]
        self._tables += self._children  # a first child of a module that had none adds a table, not an entry
        self._num_params = self._size()

    def _note_shards(self) -> None:
        self._wrapped = [param for param in self._params if isinstance(param.sharded, DTensor)]
        self._seen = [(param.sharded, param.local) for param in self._wrapped]
        self._storages = [torch_private.storage_id(sharded) for sharded, _ in self._seen]

    def _check_data(self, storages: list[int]) -> None:
        rows = zip(self._wrapped, self._seen, self._storages, storages, strict=True)
        _refuse_assigned(
            [
                param.fqn
                for param, (sharded, local), before, now in rows
                if now != before and param.sharded is sharded and param.local is local
            ]
        )

    def _check_since_made(self) -> None:
        rows = zip(self._wrapped, self._storages, strict=True)
        _refuse_assigned(
            [param.fqn for param, now in rows if now != param.made_of[0] and param.made_of[1]() is param.local]
        )

    # ---- after a backward ----

    def check_originals(self) -> None:
        """Raise StateError if a gradient has come to a parameter of before it was sharded."""
        if self.originals:
            self.originals = [(fqn, original) for fqn, original in self.originals if original() is not None]
            used = [
                fqn for fqn, original in self.originals if (kept := original()) is not None and kept.grad is not None
            ]
            if used:
                raise StateError(
                    f"forward has used {_shown(used)} as it was before it was sharded: the gradient went there, where no step "
                    "of an optimizer on the sharded model comes. Something has kept the parameter (a list, a closure, "
                    "functools.partial): read it from its module in forward"
                )


def _refuse_assigned(names: list[str]) -> None:
    if names:
        raise StateError(
            f".data of {_shown(names)} was assigned to, which changes nothing: torch's DTensors compute with the local tensor "
            "they were made of. Write p.copy_(values) under torch.no_grad() in place of p.data = values "
            "(torch.nn.utils.vector_to_parameters assigns to .data, too)"
        )


def _is_kept_without_gradient(param: UnitParam) -> bool:
    original = param.original()
    return original is not None and original is not param.sharded and original.grad is None


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _refuse_shared(root: nn.Module, known: Container[int]) -> None:
    """Raise StateError if a parameter in the tree of ``root`` belongs to a unit that is not below ``root``."""
    owned = {id(form): owner for owner in managed_by_slot().values() for form in (owner.sharded, owner.full)}
    for path, param in root.named_parameters():
        owner = owned.get(id(param)) if id(param) not in known else None
        if owner is not None:
            raise StateError(
                f"{path} of this {type(root).__name__} is shared with {type(owner.module()).__name__}, which was sharded by "
                "itself and is not below it: both would train the parameter separately. Call fully_shard (or replicate) on a "
                "module that contains both, and run the forward of that module"
            )


def _check_tree(root: nn.Module) -> None:
    """Raise StateError if a parameter that is trained belongs to no unit, or one of a unit has left its module."""
    attachments = {id(each): each for module in root.modules() if (each := attachment_of(module)) is not None}
    params = [param for each in attachments.values() for param in each.unit.params]
    known = {id(form) for param in params for form in (param.sharded, param.full, param.subsharded)}
    ignored = {(id(table), name) for each in attachments.values() for table, name in each.ignored}
    tables: dict[int, str] = {}
    strangers: list[str] = []
    of_torch = {each for module in root.modules() if is_managed_by_torch(module) for each in module.modules()}
    for path, module in root.named_modules():
        table = torch_private.parameters_of(module)
        tables[id(table)] = path
        for name, param in table.items():
            if (
                param is not None
                and param.requires_grad
                and id(param) not in known
                and (id(table), name) not in ignored
                and module not in of_torch
            ):
                strangers.append(f"{path}.{name}" if path else name)
    for param in params:
        param.check_places(lambda table: id(table) in tables)
    if strangers:
        _refuse_shared(root, known)
        raise StateError(
            f"{_shown(strangers)} was added to the module tree after its units were made and belongs to none of them: every "
            "rank would train its own, on its own part of the batch. Add parameters before fully_shard (or replicate), shard "
            "the new module before the next forward, or freeze it (requires_grad_(False)); ignored_params leaves parameters to "
            "you"
        )
