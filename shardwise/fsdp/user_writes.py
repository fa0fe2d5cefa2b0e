"""Writes of user code to full parameters: those of a forward that torch counts reach the shards, all others are refused.

Writes that torch does not count (``.data``) are detected by comparing this rank's rows of a full parameter with its shard.  On
an accelerator the host waits for that comparison, so only the first forwards make it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.collectives.compressed import Compression
from shardwise.collectives.routes import have_same_bits
from shardwise.consistency.store import digest_of
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.parameter_classes import TO_WRITE, is_kept, mark_kept
from shardwise.observe import unit_in_words

# ---- A rank's own rows of a full parameter, compared with the result of a gather of its shard.


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of one rank in full parameters.

    Attributes:
        rank: the rank's index along the shard axis.
        compression: the compression of gathers; None: uncompressed.
    """

    rank: int
    compression: Compression | None

    def of(self, param: ShardedParam, full: torch.Tensor) -> torch.Tensor:
        """Return the window of ``full`` that is this rank's shard."""
        cut, whole = param.shard, torch_private.data_of(torch_private.local_of(full))
        rows = cut.rows(self.rank)
        return whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))

    def are_as_gathered(self, param: ShardedParam, full: torch.Tensor) -> bool:
        """Return True if this rank's rows of ``full`` equal its shard after a gather; NaN equals NaN."""
        rows = self.of(param, full)
        gathered = self._as_gathered(param, rows)
        return torch.equal(rows, gathered) or bool(
            ((rows == gathered) | ((rows != rows) & (gathered != gathered))).all()
        )

    def bring_back(self, param: ShardedParam, full: torch.Tensor) -> None:
        """Copy this rank's rows of ``full`` to the shard.

        If a gather casts or compresses, only elements that differ from its result are copied: others would lose precision.
        """
        local = param.local.detach()
        with torch.no_grad():
            rows = self.of(param, full)
            if rows.dtype is not local.dtype or rows.device != local.device or self.compression is not None:
                old = local.to(rows.device)
                rows = torch.where(rows != self._as_gathered(param, rows), rows.to(local.dtype), old)
            local.copy_(rows)

    def _as_gathered(self, param: ShardedParam, rows: torch.Tensor) -> torch.Tensor:
        """Return the shard after a gather: cast to the dtype of ``rows``, or compressed and decompressed."""
        local = param.local.detach().to(rows.device)
        if self.compression is None:
            return local.to(rows.dtype)
        return self.compression.round_trip(local, param.fqn, param.shard.shape, rows.dtype)


MAX_LOOKS = 2  # of forwards
_VERSION, _ADDRESS = operator.attrgetter("_version"), torch.Tensor.data_ptr

Written = list[tuple[ParamGroup, ShardedParam]]


class UserWrites:
    """Detection of writes to the full parameters of one unit; callers pass its groups and name.

    Attributes:
        num_compared: how often ranks have compared the writes of their forwards.
        num_looks: how many forwards were searched for writes that torch does not count.
    """

    def __init__(self) -> None:
        self.num_compared = self.num_looks = 0

    def look(self, groups: Sequence[ParamGroup]) -> None:
        """Raise StateError if one of the first forwards has written to a full parameter through ``.data``."""
        self.num_looks += 1
        for group in groups:
            if not group.is_collective or not group.place.on.has_values:
                continue
            own = _own_rows(group)
            for bucket in group.main_buckets:
                for param, full, version, address in zip(bucket.params, *bucket.registered, strict=True):
                    is_seen = full._version != version or full.data_ptr() != address  # by ``find``
                    if is_seen or param.inner_spec is not None or not param.local.numel():
                        continue
                    if not own.are_as_gathered(param, full):
                        raise _uncounted(param)

    @staticmethod
    def find(groups: Sequence[ParamGroup]) -> Written:
        """Return the parameters that the running or last forward has written to; the same on every rank.

        Raises: StateError if ``.data`` was assigned to, or user code wrote between passes; such a write is dropped.
        """
        found: Written = []
        for group in groups:
            packing = group.packing
            if packing is None:
                continue
            for bucket, buffer in zip(packing.buckets, packing.fulls, strict=True):
                fulls, versions, addresses = bucket.registered
                if not (buffer.is_shared or buffer.is_held):
                    continue
                if [*map(_VERSION, fulls)] == versions and [*map(_ADDRESS, fulls)] == addresses:
                    continue
                for index, (param, full) in enumerate(zip(bucket.params, fulls, strict=True)):
                    if full.data_ptr() != addresses[index]:  # point it to the memory that gathers fill again
                        torch_private.set_data(full, packing.make_full(param, group.pool).detach())
                        versions[index] = full._version
                        raise _uncounted(param)
                    if full._version != versions[index] and not buffer.is_shared:
                        if is_kept(full):
                            versions[index] = full._version
                            torch.autograd.graph.increment_version(param.sharded)  # it is gathered again
                            raise StateError(
                                f"{param.fqn} was written to while it was unsharded after a forward or by unshard(): the write "
                                f"has not reached the shards, and is dropped. {TO_WRITE}"
                            )
                        found.append((group, param))
        return found

    @staticmethod
    def take(written: Written) -> None:
        """Copy this rank's rows of the written parameters to the shards."""
        for group, param in written:
            full = param.full
            assert full is not None
            _own_rows(group).bring_back(param, full)
            group.is_written = True
            torch.autograd.graph.increment_version(param.sharded)
            param.count.gathered = param.version
            for bucket in group.main_buckets:
                if param in bucket.params:
                    bucket.registered[1][bucket.params.index(param)] = full._version

    @staticmethod
    def keep(groups: Sequence[ParamGroup]) -> None:
        """Watch full parameters that stay registered between passes, where user code can reach them."""
        for group in groups:
            for bucket in group.main_buckets:
                for param in bucket.params:
                    mark_kept(param)

    @staticmethod
    def values(written: Written) -> list[str]:
        """Return digests of written parameters, for a comparison between ranks."""
        return [
            f"{param.fqn} with digest {digest_of(torch_private.data_of(param.full)):x}"
            for _, param in written
            if param.full is not None and param.inner_spec is None
        ]

    @staticmethod
    def check_copies(name: str, groups: Sequence[ParamGroup]) -> None:
        """Raise StateError if this rank's rows of the full parameters of unit ``name`` differ from its shards."""
        for group in groups:
            param = _differing(group)
            if param is not None:
                raise StateError(
                    f"{param.fqn} ({unit_in_words(name)}) was unsharded when its shard was written to through .data or another "
                    "alias that torch does not count as a write, so the full parameter differs from the shard. Call "
                    "reshard() on the module before such writes, or write to the parameter itself under torch.no_grad()"
                )

    @staticmethod
    def check_sub(name: str, params: Sequence[ShardedParam]) -> None:
        """Raise StateError if the sub-sharded parameters of unit ``name`` were written to, or have gradients."""
        for param in params:
            sub = param.subsharded
            if sub is not None and torch.Tensor.grad.__get__(sub) is not None:  # pyright: ignore  not the shard's
                torch.Tensor.grad.__set__(sub, None)  # pyright: ignore
                raise StateError(
                    f"{param.fqn} ({unit_in_words(name)}) was used in a loss after its forward, when its form on the smaller "
                    "mesh of reshard_after_forward was registered, whose gradient does not reach the shards. Compute with it "
                    "inside forward, or call unshard() on the module first"
                )
            if sub is not None and sub._version:
                raise StateError(
                    f"{param.fqn} ({unit_in_words(name)}) was written to between forward and backward, when its form on the "
                    "smaller mesh of reshard_after_forward was registered, and optimizers do not train that form. Write to it "
                    "after backward, or call reshard() on the module first"
                )


def _own_rows(group: ParamGroup) -> OwnRows:
    return OwnRows(group.axes.shard_rank, group.compression if group.gather_coding is not None else None)


def _uncounted(param: ShardedParam) -> StateError:
    return StateError(
        f"a write to {param.fqn} in forward, through .data, has not reached the shards: torch does not count such writes. "
        f"Write to the parameter itself under torch.no_grad(): {param.fqn.rpartition('.')[2]}.copy_(values)"
    )


def _differing(group: ParamGroup) -> ShardedParam | None:
    packing = group.packing
    if group.place.on.has_streams or packing is None or not group.is_collective:
        return None
    if group.compression is not None and group.gather_coding is not None:
        own = _own_rows(group)
        for param in (param for bucket in packing.buckets for param in bucket.params):
            if param.full is not None and param.local.numel() and not own.are_as_gathered(param, param.full):
                return param
        return None
    assert packing.pool is not None  # something has been gathered
    rank, shards = group.axes.shard_rank, packing.shards
    for index, (bucket, full_flat) in enumerate(zip(shards.buckets, packing.hold(packing.pool), strict=True)):
        full_parts = shards.full_parts(index, rank, full_flat)
        for param, mine, full in zip(bucket.params, shards.own_parts(index, rank), full_parts, strict=True):
            if not have_same_bits(mine, full):
                return param
    return None
