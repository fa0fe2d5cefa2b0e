"""Gradients of several units in one all-reduce, where nothing is sharded: what may share, and where it lies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.comm.carve import is_own
from shardwise.comm.communicator import Scale
from shardwise.plan.buckets import LEAST_BYTES, Sharing, bucket_bytes, split_unit
from shardwise.units.early_buckets import EarlyBuckets
from shardwise.units.gradient_memory import KEPT_BYTES
from shardwise.units.gradients import (
    Reduction,
    ReductionTerms,
    by_reduce_dtype,
    layout_of,
    num_spare_of,
    scale_of,
    widened,
)
from shardwise.units.group import ShardGroup
from shardwise.units.local_gradients import Gradients
from shardwise.units.param import UnitParam
from shardwise.units.reduce_layout import ReduceLayout

# Of the device, not measured: sums over more than two ranks depend on where an element lies, so that buckets must be the
# same in every run.  Between processes of a host, and of accelerators of one host or more.
FULL_BYTES_ON_HOST = bucket_bytes(latency_s=150e-6, bytes_per_s=1.5e9)
FULL_BYTES_ON_LANES = bucket_bytes(latency_s=25e-6, bytes_per_s=1e11)
LARGE_BYTES = LEAST_BYTES  # of a gradient on the host: it is a bucket of its own, in its own memory
_MOST_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class Brought:
    """What a unit brings to a bucket.

    Attributes:
        gradients: in their reduce dtypes.  partial: sums that earlier backwards have left of some of them.
        terms: of the unit.
    """

    group: ShardGroup
    gradients: Gradients
    partial: Gradients
    terms: ReductionTerms


def shares(group: ShardGroup) -> bool:
    """Return True if gradients of ``group`` take nothing but an all-reduce of what they are."""
    comm = group.bound_comm
    return comm is not None and comm.reduce is None and comm.replicas is not None and group.compression is None


def sharing_of(group: ShardGroup) -> Sharing | None:
    """Return by what the gradients of ``group`` share a bucket with those of others; None: by nothing."""
    comm = group.bound_comm
    if comm is None or comm.replicas is None or not shares(group):
        return None
    num_bytes = 0
    for param in group.params:
        dtype = group.dtypes.of_reduction(param)
        if param.sharded.requires_grad and not _is_large(group, param, dtype):
            num_bytes += param.shard.numel * dtype.itemsize
    if not num_bytes:
        return None
    place = group.place
    key = (comm.replicas.packed.group.group_name, str(place.device), place.is_offloaded, place.pins)
    return Sharing(key, num_bytes, FULL_BYTES_ON_LANES if place.on.has_lanes else FULL_BYTES_ON_HOST)


def split(group: ShardGroup) -> EarlyBuckets:
    """Return the buckets of a group whose gradients share none with others."""
    params = [param for param in group.params if param.sharded.requires_grad]
    num_bytes = [param.shard.numel * group.dtypes.of_reduction(param).itemsize for param in params]
    limit = FULL_BYTES_ON_LANES if group.place.on.has_lanes else FULL_BYTES_ON_HOST
    return EarlyBuckets([[params[index] for index in bucket] for bucket in split_unit(num_bytes, limit)])


def _is_large(group: ShardGroup, param: UnitParam, dtype: torch.dtype) -> bool:
    """True for what is reduced where it is: within a host copying it costs as much as sending it."""
    return not group.place.on.has_lanes and param.shard.numel * dtype.itemsize >= LARGE_BYTES


def launch_large(brought: Brought, kept: Collection[UnitParam]) -> list[Reduction]:
    """Start the reduction of the large gradients, and take them out of ``brought``; in memory of their own if ``kept``."""
    group, launched = brought.group, list[Reduction]()
    for param in group.by_size:
        gradient = brought.gradients.get(param)
        if gradient is None or not _is_large(group, param, gradient.dtype):
            continue
        gradient = widened(brought.gradients.pop(param), brought.partial.get(param))
        layout = layout_of(group, [param], gradient.dtype)
        launched.append(Reduction(group, layout, [gradient], gradient.dtype, brought.terms, brought.partial))
        launched[-1].is_marked = False
        launched[-1].reduce_here(in_place=param not in kept and is_own(gradient))
    return launched


@dataclass(slots=True)
class _Lot:
    """What travels in one all-reduce."""

    first: Brought
    params: list[UnitParam] = field(default_factory=list[UnitParam])
    gradients: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    partial: Gradients = field(default_factory=Gradients)


class BucketLayouts:
    """Where gradients of several units lie in a bucket, remembered from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ReduceLayout] = {}

    def launch(self, brought: Sequence[Brought]) -> list[Reduction]:
        """Start the reduction of what units have brought: one for each reduce dtype and scale, alike on every rank."""
        lots: dict[tuple[torch.dtype, Scale], _Lot] = {}
        for each in brought:
            gradients = each.gradients
            if each.partial:
                gradients = {param: widened(own, each.partial.get(param)) for param, own in gradients.items()}
            dtypes = {param: gradient.dtype for param, gradient in gradients.items()}
            for dtype, params in by_reduce_dtype(each.group, dtypes):
                lot = lots.setdefault((dtype, scale_of(each.group, dtype, each.terms.policy)), _Lot(each))
                lot.params += params
                lot.gradients += [gradients[param] for param in params]
                lot.partial.update(each.partial)
            each.gradients.clear()
        launched: list[Reduction] = []
        for (dtype, _), lot in lots.items():
            first, layout = lot.first, self._layout_of(lot, dtype)
            launched.append(Reduction(first.group, layout, lot.gradients, dtype, first.terms, lot.partial))
            launched[-1].reduce_here(in_place=False)
        return launched

    def _layout_of(self, lot: _Lot, dtype: torch.dtype) -> ReduceLayout:
        key = (dtype, *lot.params)
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= _MOST_LAYOUTS:  # of units that come together in ever new ways
                self._known.clear()
            group = lot.first.group
            # On the host what is small is kept, as it was unit by unit: there are more gradients to make in a bucket.
            kept_bytes = KEPT_BYTES if group.place.on.has_lanes else 2 * FULL_BYTES_ON_HOST
            alignment, num_spare = group.place.alignment(dtype), num_spare_of(group, dtype)
            layout = ReduceLayout(lot.params, alignment, group.axes.shard_rank, num_spare, kept_bytes)
            self._known[key] = layout
        return layout
