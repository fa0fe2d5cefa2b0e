"""What ``Module.to`` and its kin meet on a sharded module: shards, which it converts one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.torch_private import shares_locals, without_weak_references
from shardwise.units.group import ShardGroup
from shardwise.units.param import UnitParam
from shardwise.units.unit import Unit


@contextmanager
def converting(
    groups: Sequence[ShardGroup], units: Iterable[Unit], fn: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield what to apply to the tensors of a module in place of ``fn``.

    Args:
        groups: of the unit that begins at the module.  units: those whose parameters its tree uses.
    """
    with _settings_kept(groups), without_weak_references(_followers(units), shares_locals(fn)) as convert:
        yield convert


def _followers(units: Iterable[Unit]) -> list[nn.Module]:
    """Return the modules that follow parameters of ``units`` (as LSTMs do), wherever they are."""
    slots = [slot for unit in units for param in unit.params for slot in param.slots]
    found = [slot.follower() for slot in slots if slot.follower is not None]
    return list({id(module): module for module in found if module is not None}.values())


@contextmanager
def _settings_kept(groups: Sequence[ShardGroup]) -> Generator[None, None, None]:
    """Restore users' attributes and ``grad_dtype`` after a conversion.

    torch registers new parameters, which have neither, and converts gradients together with them.
    """
    kept: list[tuple[UnitParam, torch.Tensor | None]] = []
    for group in groups:
        group.adopt_registered()
    for param in (param for group in groups for param in group.params):
        if param.grad_dtype is not None:
            kept.append((param, param.sharded.grad))
            param.sharded.grad = None
    try:
        yield
    finally:
        for param in (param for group in groups for param in group.params):
            param.hand_on_attributes()
        for param, gradient in kept:
            param.adopt_registered()
            param.follow_grad_dtype()
            if gradient is not None:
                param.sharded.grad = gradient.to(param.sharded.device)
