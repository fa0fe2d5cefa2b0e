"""Deep copies: a copied module gets units of its own, over copies of the shards."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise import torch_private
from shardwise.comm.coding_state import Compression
from shardwise.engine.attachment import PENDING, Attachment
from shardwise.engine.hooks import Hooks, wrap_forward_method
from shardwise.engine.roots import copy_settings
from shardwise.engine.take_over import remember
from shardwise.units.group import ShardGroup
from shardwise.units.param import Slot, UnitParam
from shardwise.units.unit import Unit


def copy_module(module: nn.Module, attachment: Attachment, memo: dict[Any, Any]) -> nn.Module:
    """Return a deep copy of a sharded module, for ``copy.deepcopy``.

    Full parameters are given back first.  Gradients are not copied, as ``nn.Parameter`` does not copy its own: neither those
    that are set nor those that earlier backwards hold back.  What the user has set (sync, prefetching, ends of steps) is.
    """
    for member in (attachment.unit, *attachment.unit.borrows):
        member.reshard()
    is_outermost = PENDING not in memo
    pending: list[tuple[Attachment, Attachment]] = memo.setdefault(PENDING, [])
    result = object.__new__(type(module))
    memo[id(module)] = result
    # torch copies gradients of DTensors with them, unlike those of other parameters.
    owners = (attachment.unit, *attachment.unit.borrows)
    apart = [(each.sharded, each.sharded.grad) for owner in owners for each in owner.params]
    for sharded, _ in apart:
        sharded.grad = None
    try:
        for key, value in module.__dict__.items():
            result.__dict__[key] = copy.deepcopy(value, memo)
    finally:
        for sharded, gradient in apart:
            sharded.grad = gradient
    if is_outermost:
        # Only now every module that may share a parameter has been copied.
        del memo[PENDING]
        for old, new in pending:
            _complete(old, new, memo)
    return result


def _complete(old: Attachment, new: Attachment, memo: dict[Any, Any]) -> None:
    source, unit = old.unit, new.unit
    unit.adopt_modules([memo[id(module)] for module in source.modules if id(module) in memo])
    unit.uses_default_reshard = source.uses_default_reshard
    if old.is_root and source.uses_default_reshard:
        unit.policy = source.policy  # a root that has run keeps its parameters after forward; so does its copy
    unit.max_reductions = source.max_reductions
    unit.transport = source.transport
    unit.ahead_bytes = source.ahead_bytes
    unit.all_reduce_hook = source.all_reduce_hook
    unit.groups = [_copy_group(group, memo) for group in source.groups]
    unit.number_parameters()
    remember(unit)
    Hooks(new).listen()
    copy_settings(old, new)
    unit.forward_prefetch = _copied(source.forward_prefetch, memo)
    unit.backward_prefetch = _copied(source.backward_prefetch, memo)
    new.ignored = tuple((memo[id(table)], name) for table, name in old.ignored if id(table) in memo)
    for lender in source.borrows:
        copied = _copy_of(lender, memo)
        if copied is not None:
            unit.borrow(copied)
    for name in old.forward_methods:
        for module in unit.modules:
            module.__dict__.pop(name, None)
            wrap_forward_method(module, new, name)


def _copy_group(group: ShardGroup, memo: dict[Any, Any]) -> ShardGroup:
    params: list[UnitParam] = []
    for param in group.params:
        slots = [_copy_slot(slot, memo) for slot in param.slots if id(slot.parameters) in memo]
        sharded = slots[0].parameters[slots[0].name]
        assert sharded is not None
        attributes = copy.deepcopy(param.attributes, memo)
        if attributes is not vars(sharded):  # copies of plain parameters lack them
            torch_private.give_attributes(attributes, sharded)
        copied = UnitParam(param.fqn, slots, param.shard, param.spec, param.inner_spec, sharded, param.shard_shape)
        copied.keeps_dtype, copied.grad_dtype = param.keeps_dtype, param.grad_dtype
        copied.follow_grad_dtype()
        copied.beginning = param.beginning
        module = param.module()
        if module is not None and id(module) in memo:
            copied.module = weakref.ref(memo[id(module)])
        params.append(copied)
    result = ShardGroup(params, group.axes, group.dtypes.precision, group.place, group.keeps_plain)
    result.sub_axes = group.sub_axes
    result.custom = replace(group.custom)
    if group.compression is not None:
        known = group.compression.residuals
        pairs = [(new, known[old]) for old, new in zip(group.params, params, strict=True) if old in known]
        result.compression = Compression(group.compression.policy, {new: each.clone() for new, each in pairs})
    result.ensure_packed()
    return result


def _copy_slot(slot: Slot, memo: dict[Any, Any]) -> Slot:
    module = slot.follower() if slot.follower is not None else None
    follower = weakref.ref(memo[id(module)]) if module is not None and id(module) in memo else None
    return Slot(memo[id(slot.parameters)], slot.name, follower)


def _copied(named: list[weakref.ref[Unit]] | None, memo: dict[Any, Any]) -> list[weakref.ref[Unit]] | None:
    if named is None:
        return None
    copies = [_copy_of(unit, memo) for ref in named if (unit := ref()) is not None]
    return [weakref.ref(copied) for copied in copies if copied is not None]


def _copy_of(unit: Unit, memo: dict[Any, Any]) -> Unit | None:
    for module in unit.modules:
        copied = memo.get(id(module))
        if copied is not None:
            for value in copied.__dict__.values():
                if isinstance(value, Attachment):
                    return value.unit
    return None
