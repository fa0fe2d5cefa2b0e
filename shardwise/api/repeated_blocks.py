"""Find the repeated blocks of a model, as descriptions that the pure planning of units reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.api.module import FSDPModule
from shardwise.engine.attachment import attachment_of
from shardwise.plan.grouping import Child, repeated_blocks

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def families_of(model: nn.Module, ignored: frozenset[int]) -> Iterator[tuple[Child, ...]]:
    """Yield, for every module of ``model`` that has repeated blocks, its children with parameters.

    Goes from the outside in and does not enter a block, nor a module that is a unit already.  Parameters whose id is in
    ``ignored`` do not count; tied ones count in the first block.
    """
    seen: set[int] = set()
    counted = set(ignored)
    todo = [("", model)]
    while todo:
        path, parent = todo.pop()
        pairs: list[tuple[Child, nn.Module]] = []
        for name, module in parent.named_children():
            if id(module) in seen or not _has_parameters(module, ignored):
                continue
            seen.add(id(module))
            pairs.append((_describe(f"{path}.{name}" if path else name, module, parent), module))
        blocks = {child.path for child in repeated_blocks([child for child, _ in pairs])}
        if blocks:
            yield tuple(_weighed(child, module, counted) if child.path in blocks else child for child, module in pairs)
        inner = [(child.path, m) for child, m in pairs if child.path not in blocks and not child.is_explicit]
        todo += reversed(inner)


def _describe(path: str, module: nn.Module, parent: nn.Module) -> Child:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
    # The norms of a layer, or its projections, are alike too: in a plain module only what has parts can be a block.
    is_listed = isinstance(parent, _CONTAINERS)
    inner = _unwrapped(module)
    kind = _original_class(inner)
    return Child(
        path,
        (kind, _structure(inner)),
        is_explicit=attachment_of(module) is not None,
        can_be_unit=not is_list and (is_listed or any(True for _ in module.children())),
        kind=kind if is_listed else None,  # the first of many layers often has a parameter more than the others
    )


def _weighed(child: Child, module: nn.Module, counted: set[int]) -> Child:
    if child.is_explicit:
        return child
    num_bytes = 0
    for param in _own_parameters(module):
        if id(param) not in counted:
            counted.add(id(param))
            num_bytes += _num_bytes(param)
    return replace(child, num_bytes=num_bytes)


def _has_parameters(module: nn.Module, ignored: frozenset[int]) -> bool:
    if attachment_of(module) is not None:
        return True
    return any(id(param) not in ignored for param in _own_parameters(module))


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters below ``module`` that no inner unit has."""
    for param in torch_private.parameters_of(module).values():
        if param is not None:
            yield param
    for child in module.children():
        if attachment_of(child) is None:
            yield from _own_parameters(child)


def _num_bytes(param: nn.Parameter) -> int:
    """Return the bytes that data parallelism gathers: with tensor parallelism, those of the largest local part."""
    numel = param.numel()
    if isinstance(param, DTensor):
        sizes = (param.device_mesh.size(axis) for axis, each in enumerate(param.placements) if each.is_shard())
        numel = -(-numel // math.prod(sizes))
    return numel * param.element_size()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what ``module`` wraps: compiled and checkpointed blocks are like the ones beside them."""
    while len(children := list(module.children())) == 1 and not any(True for _ in module.parameters(recurse=False)):
        module = children[0]
    return module


def _original_class(module: nn.Module) -> type:
    cls = type(module)
    return cls.__dict__.get("_original_class", cls) if isinstance(module, FSDPModule) else cls


def _structure(module: nn.Module) -> Hashable:
    named = module.named_parameters(remove_duplicate=False)
    return tuple((name, tuple(param.shape), param.dtype) for name, param in named)
