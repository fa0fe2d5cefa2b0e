"""Say which units a model has."""

from __future__ import annotations

from torch import nn

from shardwise.engine.attachment import attachment_of
from shardwise.engine.engine import engine_of
from shardwise.errors import ConfigError
from shardwise.plan.naming import compress_paths
from shardwise.plan.table import UnitRow, UnitTable
from shardwise.units.unit import Unit


def describe_units(model: nn.Module) -> UnitTable:
    """Return the units of ``model``, however they were made, with their sizes; ``str()`` of it is a table.

    Needs no forward and no communication; every rank gets the same table.  Tied parameters count in the unit that owns
    them; beside tensor parallelism bytes and elements are those of the local part, which is what data parallelism gathers.

    Raises: ConfigError if ``model`` contains no unit.

    Example:
        >>> from shardwise import describe_units
        >>> print(describe_units(model))  # doctest: +SKIP
        unit        modules  parameters      bytes  padding          route
        (root)            1      36,992  144.5 KiB     1.00  shared memory
        blocks.0-7        8     399,872  1.525 MiB     1.00  shared memory
        2 units, 436,864 parameters, 1.667 MiB
    """
    paths: dict[Unit, list[str]] = {}
    for path, module in model.named_modules():
        attachment = attachment_of(module)
        if attachment is not None:
            paths.setdefault(attachment.unit, []).append(path)
    if not paths:
        raise ConfigError(
            f"{type(model).__name__} contains no unit; call shard_model, fully_shard or replicate on it first"
        )
    rows = tuple(_row(unit, compress_paths(names)) for unit, names in paths.items())
    engine = engine_of(next(iter(paths)))
    plan = None if engine is None else engine.journal.plan
    return UnitTable(rows, None if plan is None else plan.ahead_bytes)


def _row(unit: Unit, name: str) -> UnitRow:
    numel = num_bytes = moved = 0
    for group in unit.groups:
        for param in group.params:
            numel += param.shard.numel
            num_bytes += param.shard.numel * param.dtype.itemsize
            is_cut = group.is_collective and not param.shard.is_whole
            moved += param.shard.section_numel * param.shard.num_shards if is_cut else param.shard.numel
    route = unit.route if engine_of(unit) is not None else ""
    return UnitRow(name, len(unit.modules), numel, num_bytes, moved / numel if numel else 1.0, route)
