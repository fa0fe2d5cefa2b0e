"""Writes that torch does not count (``.data``), and writes that differ between ranks.

This rank's rows of a full parameter are compared with its shard.  On an accelerator the host waits for that comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.consistency.store import digest_of
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.user_writes import Written, own_rows, uncounted
from shardwise.observe import unit_in_words


def check_forward(groups: Sequence[ParamGroup]) -> None:
    """Raise StateError if the forward that ends has written to a full parameter through ``.data``."""
    for group in groups:
        if (param := _differing(group)) is not None:
            raise uncounted(param)


def check_copies(name: str, groups: Sequence[ParamGroup]) -> None:
    """Raise StateError if this rank's rows of the full parameters of unit ``name`` differ from its shards."""
    for group in groups:
        if not group.place.on.has_streams and (param := _differing(group)) is not None:
            raise StateError(
                f"{param.fqn} ({unit_in_words(name)}) was unsharded when its shard was written to through .data or another "
                "alias that torch does not count as a write, so the full parameter differs from the shard. Call "
                "reshard() on the module before such writes, or write to the parameter itself under torch.no_grad()"
            )


def digests_of(written: Written) -> list[str]:
    """Return digests of written parameters, for a comparison between ranks."""
    return [
        f"{param.fqn} with digest {digest_of(param.full.data):x}"
        for _, param in written
        if param.full is not None and param.inner_spec is None
    ]


def _differing(group: ParamGroup) -> ShardedParam | None:
    """Return a parameter whose full form differs from its shard, though torch has counted no write to it; NaN equals NaN."""
    if not group.is_collective or not group.place.on.has_values:
        return None
    for param, full, version, address in zip(*group.registered, strict=True):
        is_seen = full._version != version or full.data_ptr() != address  # ``find_writes`` sees this write itself
        if is_seen or param.inner_spec is not None or not param.local.numel():
            continue
        rows, gathered = own_rows(group, param, full)
        if not torch.equal(rows, gathered) and not torch.allclose(rows, gathered, rtol=0, atol=0, equal_nan=True):
            return param
    return None
