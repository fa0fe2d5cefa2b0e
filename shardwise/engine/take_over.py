"""Parameters that a unit takes from the unit of an outer module, which was sharded first."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.units.axes import MeshAxes
from shardwise.units.param import Slot, UnitParam
from shardwise.units.unit import Unit

# Nothing leads from an inner module to the units of those around it.
# In the order in which they were made, which is the same on all ranks.
_units: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()
_unit_of: weakref.WeakKeyDictionary[UnitParam, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


def remember(unit: Unit) -> None:
    """Let units that are made later find the parameters of ``unit``."""
    _units[unit] = None
    for param in unit.params:
        _unit_of[param] = weakref.ref(unit)


def all_units() -> list[Unit]:
    """Return the units of all models that are alive."""
    return list(_units)


def unit_of(param: UnitParam) -> Unit | None:
    """Return the unit that manages ``param``, None if it is gone."""
    ref = _unit_of.get(param)
    return None if ref is None else ref()


def managed_by_slot() -> dict[tuple[int, str], UnitParam]:
    """Return what units manage, by place: the id of a module's dict of parameters, and a name."""
    params = (param for unit in all_units() for param in unit.params)
    return {_place(slot): param for param in params for slot in param.slots}


def owner_in(places: dict[tuple[int, str], UnitParam], slots: Sequence[Slot]) -> UnitParam | None:
    """Return what hangs in the first of ``slots``, None if no unit manages it."""
    return places.get(_place(slots[0]))


def is_used_elsewhere(param: UnitParam, slots: Iterable[Slot]) -> bool:
    """True if ``param`` hangs in other places than ``slots``: then it stays with its unit."""
    return not {_place(slot) for slot in param.slots} <= {_place(slot) for slot in slots}


def axes_of_plan(param: UnitParam) -> MeshAxes | None:
    """Return the mesh that ``param`` is sharded on; None: it stayed a plain tensor, or its unit is gone."""
    owner = unit_of(param)
    group = next((each for each in owner.groups if param in each.members), None) if owner is not None else None
    return None if group is None or group.keeps_plain else group.axes


def fits(param: UnitParam, old: MeshAxes | None, axes: MeshAxes, dim: int, device: torch.device) -> bool:
    """True if ``param``, sharded on ``old``, is what a unit on ``axes`` would make, cut over ``dim``, on ``device``."""
    if old is None or param.local.device != device or param.shard.dim != dim % max(len(param.shard.shape), 1):
        return False
    return (old.mesh, old.shard_mesh_dim, old.replicate_mesh_dim, old.dims) == (
        axes.mesh,
        axes.shard_mesh_dim,
        axes.replicate_mesh_dim,
        axes.dims,
    )


def leave(params: Sequence[UnitParam]) -> None:
    """Take ``params`` out of their units."""
    owners = {id(owner): owner for param in params if (owner := unit_of(param)) is not None}
    for owner in owners.values():
        owner.release([param for param in params if unit_of(param) is owner])


def whole(param: UnitParam) -> nn.Parameter:
    """Return the parameter that ``param`` was made from, as far as it can be told; a collective unless it is plain."""
    sharded = param.sharded
    if not isinstance(sharded, DTensor):
        return sharded
    if param.inner_spec is not None:
        raise ConfigError(
            f"{param.fqn} is parallel over tensors and was sharded with an outer module, on another mesh or dim than is asked "
            "for now. Shard inner modules before the outer one"
        )
    if sharded.device.type == "meta":
        tensor = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    else:
        with torch.no_grad():
            tensor = sharded.full_tensor().clone()
    return nn.Parameter(tensor, requires_grad=sharded.requires_grad)


def _place(slot: Slot) -> tuple[int, str]:
    return id(slot.parameters), slot.name
