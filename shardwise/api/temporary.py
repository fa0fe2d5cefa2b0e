"""Change the behaviour of sharded modules for the length of a block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace

from torch import nn

from shardwise.engine.attachment import attachment_of
from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.policy import UnitPolicy
from shardwise.units.unit import Unit


@contextmanager
def policy(
    module: nn.Module, *, recurse: bool = True, **changes: bool | int | float | None
) -> Generator[None, None, None]:
    """Replace parts of the policy of ``module``'s units; put the old ones back at the end, also after an exception.

    Args:
        module: a module that contains units, itself one or not.
        recurse: change all units below ``module`` too.
        changes: fields of :class:`shardwise.plan.policy.UnitPolicy` and their new values, e.g. ``sync=False``.  ``sync=False``
            alone holds gradients back whole, over replicas too.

    Raises: ConfigError for a field that a policy does not have, or a module without units.

    Example:
        >>> import shardwise
        >>> with shardwise.policy(model, sync=False):  # doctest: +SKIP
        ...     loss.backward()
    """
    known = [each.name for each in fields(UnitPolicy)]
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise ConfigError(f"a unit policy has no field {unknown}.{did_you_mean(unknown[0], known)} It has {known}")
    units = _units_in(module, recurse)
    if not units:
        raise ConfigError(
            f"{type(module).__name__} contains no sharded module; call fully_shard or replicate on it first"
        )
    before = [unit.policy for unit in units]
    for unit in units:
        unit.policy = replace(unit.policy, **changes)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for unit, old in zip(units, before, strict=True):
            unit.policy = replace(unit.policy, **{name: getattr(old, name) for name in changes})


def _units_in(module: nn.Module, recurse: bool) -> list[Unit]:
    found: dict[int, Unit] = {}
    for each in module.modules() if recurse else [module]:
        attachment = attachment_of(each)
        if attachment is not None:
            found[id(attachment.unit)] = attachment.unit
    return list(found.values())
