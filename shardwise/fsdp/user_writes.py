"""Writes of user code to registered full parameters: detect them, copy them to the shards, or refuse them.

Writes that torch counts are detected by version counters and addresses.  Writes that it does not count (``.data``) are detected
by comparing this rank's rows of a full parameter with its shard.  On an accelerator the host waits for that comparison, so only
the first forwards make it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.compressed import Compression
from shardwise.collectives.routes import have_same_bits
from shardwise.consistency.store import digest_of
from shardwise.errors import StateError
from shardwise.fsdp.flat_buffer import FlatBucket
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.parameter_classes import mark_full, mark_kept, may_be_written
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


_MAX_LOOKS = 2
_ORDINARY, _VERSION = {nn.Parameter}, operator.attrgetter("_version")

Written = list[tuple[ParamGroup, ShardedParam]]


class UserWrites:
    """Detection of writes to the full parameters of one unit; callers pass its groups and name.

    Attributes:
        num_compared: how often ranks have compared the writes of their forwards.
        is_looking: the end of a forward looks for uncounted writes: in the first forwards, and always if one was found.
    """

    def __init__(self) -> None:
        self.num_compared = 0
        self.is_looking = True
        self._num_looks = 0

    def look(self, groups: Sequence[ParamGroup]) -> None:
        """Look for writes through ``.data`` after a forward, and set ``is_touched`` of the parameters that have any."""
        for group in groups:
            _look_for_touched(group, self._num_looks < _MAX_LOOKS)
        self._num_looks += 1
        has_touchy = any(param.is_touchy for group in groups for param in group.params)
        self.is_looking = self._num_looks < _MAX_LOOKS or has_touchy

    @staticmethod
    def find(groups: Sequence[ParamGroup]) -> Written:
        """Return the parameters whose full form was written to since it was registered; the same on every rank."""
        found: Written = []
        for group in groups:
            packing = group.packing
            for bucket, buffer in () if packing is None else zip(packing.buckets, packing.fulls, strict=True):
                if not (buffer.is_shared or buffer.is_held):
                    continue
                if not (buffer.is_shared or bucket.has_touched):
                    fulls, versions, addresses = bucket.registered
                    if (
                        {*map(type, fulls)} <= _ORDINARY
                        and [*map(_VERSION, fulls)] == versions
                        and [*map(torch.Tensor.data_ptr, fulls)] == addresses
                    ):
                        continue  # no write is possible; this check of all parameters at C speed is the usual case
                _add_written(group, bucket, buffer.is_shared, found)
        return found

    @staticmethod
    def take(written: Written) -> None:
        """Copy this rank's rows of the written parameters to the shards."""
        for group, param in written:
            _bring_back(group, param)

    @staticmethod
    def keep(groups: Sequence[ParamGroup]) -> None:
        """Watch full parameters that stay registered between passes, where user code can write to them."""
        for group in groups:
            take = _taker(group)
            for bucket in () if group.packing is None else group.packing.buckets:
                bucket.note_registered()
                for param in bucket.params:
                    mark_kept(param, take)

    @staticmethod
    def values(written: Written) -> list[str]:
        """Return digests of written parameters, for a comparison between ranks."""
        return [
            f"{param.fqn} with digest {digest_of(torch_private.data_of(param.full)):x}"
            for _, param in written
            if param.full is not None and param.inner_spec is None and not param.is_touched
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
        """Raise StateError if the sub-sharded parameters of unit ``name`` were written to."""
        for param in params:
            if param.subsharded is not None and param.subsharded._version:
                raise StateError(
                    f"{param.fqn} ({unit_in_words(name)}) was written to between forward and backward, when its form on the "
                    "smaller mesh of reshard_after_forward was registered, and optimizers do not train that form. Write to it "
                    "after backward, or call reshard() on the module first"
                )


def _own_rows(group: ParamGroup) -> OwnRows:
    return OwnRows(group.axes.shard_rank, group.compression if group.gather_coding is not None else None)


def _is_written_unseen(group: ParamGroup, param: ShardedParam, full: nn.Parameter) -> bool:
    return may_be_written(full) and not (param.local.numel() and _own_rows(group).are_as_gathered(param, full))


def _add_written(group: ParamGroup, bucket: FlatBucket, is_shared: bool, found: Written) -> None:
    bucket.note_registered()
    for param in bucket.params:
        full = param.full
        if full is None or full is param.sharded:
            continue
        if is_shared:  # writes go to the shard's own memory, unless ``.data`` was assigned to
            if full.data_ptr() != param.full_address:
                found.append((group, param))
        elif (
            param.is_touched
            or full._version != param.full_version
            or full.data_ptr() != param.full_address
            or (type(full) is not nn.Parameter and _is_written_unseen(group, param, full))
        ):
            found.append((group, param))


def _look_for_touched(group: ParamGroup, looks_at_all: bool) -> None:
    packing = group.packing
    if packing is None or not group.is_collective or not group.place.on.has_values:
        return
    for bucket in packing.buckets:
        bucket.note_registered()
    for param in (param for bucket in packing.buckets for param in bucket.params):
        full = param.full
        if not (looks_at_all or param.is_touchy) or full is None or param.inner_spec is not None:
            continue
        is_counted = full._version != param.full_version or full.data_ptr() != param.full_address
        if not is_counted and param.local.numel() and not _own_rows(group).are_as_gathered(param, full):
            param.is_touched = param.is_touchy = True
            for bucket in packing.buckets:
                bucket.has_touched = bucket.has_touched or param in bucket.params


def _bring_back(group: ParamGroup, param: ShardedParam) -> None:
    full = param.full
    assert full is not None
    _own_rows(group).bring_back(param, full)
    group.is_written = True
    param.is_touched = False
    torch.autograd.graph.increment_version(param.sharded)
    mark_full([param])
    param.full_version, param.count.gathered = full._version, param.version
    if full.data_ptr() != param.full_address and group.packing is not None:
        # User code has assigned to ``.data``: point the parameter back to the memory that gathers fill.
        torch_private.set_data(full, group.packing.make_full(param, group.pool).detach())
        param.full_address = full.data_ptr()
    for bucket in group.main_buckets:
        if param in bucket.params:
            bucket.note_brought_back(param)


def _taker(group: ParamGroup) -> Callable[[ShardedParam], None]:
    """Return the callback of a kept parameter for writes to it; its reference to the group is weak."""
    ref = weakref.ref(group)

    def take(param: ShardedParam) -> None:
        mine = ref()
        if mine is not None and not param.is_its_full_form:
            _bring_back(mine, param)
            mark_kept(param, take)

    return take


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
