"""The attachment of a sharded module, and the registry of all units."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from shardwise import torch_private
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.unit import Unit
from shardwise.plan.grouping import compress_paths

# ---- The registry of all units: a new unit is refused parameters that the unit of an outer module has.

# It is global, since an inner module has no reference to the units of outer modules.  The order is that of creation, which is
# the same on all ranks.
all_units: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()


def remember(unit: Unit) -> None:
    """Add ``unit`` to the registry, so that later units know its parameters; give these their ordinals."""
    all_units[unit] = None
    for ordinal, param in enumerate(unit.params):
        param.ordinal, param.unit = ordinal, weakref.ref(unit)


# ---- The attachment of a sharded module.

ATTACHMENT = "_shardwise_attachment"
PENDING = "shardwise: attachments to complete"  # key in the memo of a deep copy: pairs of an attachment and its copy


class Attachment:
    """The unit of a module, and its engine if it is a root.

    Ownership runs module -> attachment -> (engine ->) unit; every reference back is weak.

    Attributes:
        unit: the unit; those beside it belong to the module, too.
        engine: the engine of a root, from its first forward on; before that, of a module that user code unshards or evaluates
            by itself.  Else None.
        is_root: None until the first forward of the root, which sets it for all units below.
        forward_methods: names of methods that are treated like ``forward``, each once.
        ignored: the registrations of ignored parameters: a module's dict of parameters, and a name.
        is_materialized: tensors of its modules were moved from meta to a device, and no forward has run since.
        asked_sync: whether backwards reduce gradients from the next forward on (``no_sync`` of replicas); None: as they do.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine: Engine | None = None
        self.is_root: bool | None = None
        self.forward_methods: dict[str, None] = {}
        self.ignored: tuple[tuple[dict[str, nn.Parameter | None], str], ...] = ()
        self.is_materialized = False
        self.asked_sync: bool | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The unit and those beside it."""
        return (self.unit, *self.unit.beside)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attachment:
        """Return an attachment with an empty unit, which is filled in when the outermost copy is done."""
        result = Attachment(Unit([], self.unit.settings, self.unit.policy))
        result.is_materialized, result.asked_sync = self.is_materialized, self.asked_sync
        memo[id(self)] = result
        memo.setdefault(PENDING, []).append((self, result))
        return result


# Where ranks may take different ways, in an order that is the same on all ranks: roots that have not run a forward on this
# rank, and engines.
roots_to_come: weakref.WeakKeyDictionary[Attachment, None] = weakref.WeakKeyDictionary()
diverging: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()


def is_managed_by_torch(module: nn.Module) -> bool:
    """Return True if torch's own composable APIs (``fully_shard``, ``replicate``) manage the parameters of ``module``."""
    names = torch_private.composable_apis_of(module)
    return attachment_of(module) is None and not {"fully_shard", "replicate"}.isdisjoint(names)


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return the attachment of ``module``, None if it is not sharded."""
    return module.__dict__.get(ATTACHMENT)


def units_in(model: nn.Module) -> dict[Unit, list[str]]:
    """Return the units of the modules of ``model``, in their order, with the paths of these modules."""
    found: dict[Unit, list[str]] = {}
    for path, module in model.named_modules():
        if (attachment := attachment_of(module)) is not None:
            for unit in attachment.units:
                found.setdefault(unit, []).append(path)
    return found


def names_of_units(model: nn.Module) -> dict[Unit, str]:
    """Return the names of the units of ``model``: paths of their modules; those of further meshes are numbered."""
    paths, named = units_in(model), dict[Unit, str]()
    for unit in paths:
        for number, beside in enumerate(unit.beside, 2):
            named[beside] = f"{compress_paths(paths[unit])} (mesh {number})".lstrip()
        named.setdefault(unit, compress_paths(paths[unit]))
    return {unit: named[unit] for unit in paths}
