"""What the user has asked of a unit: the checked arguments of its call, and what setters have changed since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.collectives.c10d import OrderedSums
from shardwise.collectives.compressed import Compression
from shardwise.collectives.routes import CustomCollectives, Transport
from shardwise.fsdp.flat_buffer import ParamStorage
from shardwise.fsdp.mesh import MeshAxes
from shardwise.fsdp.precision import MixedPrecisionPolicy


@dataclass(slots=True, eq=False)
class UnitSettings:
    """The settings of one unit that are not part of its policy, which planning compares.

    Attributes:
        axes: the data-parallel mesh.  sub_axes: the smaller mesh of ``reshard_after_forward``; None if there is none.
        precision: the dtypes in which parameters are gathered and gradients reduced.
        storage: the devices of shards and full parameters.
        keeps_plain: parameters stay plain tensors, and registered (``replicate``).
        keeps_for_backward: the user did not pass ``reshard_after_forward``, so a root stays full after a forward, but only
            for its backward: not after a forward without a graph.
        custom: replacements of the backend's collectives.
        compression: the compression of parameters and gradients; None: they are sent uncompressed.
        sums: sums gradients over microbatches and ranks in a fixed order; None: ranks add in rank order.
        transport, ahead_bytes, may_diverge: the transport, the prefetch limit in bytes, and whether ranks may take different
            ways; those of the root count.
        max_reductions: how many reduce-scatter inputs may be allocated at once; the largest of an engine's units counts.
        forward_prefetch, backward_prefetch: units that are unsharded when this one starts; None: the plan's.
        all_reduce_hook: gets the section after the reduce-scatter, or after the all-reduce.
    """

    axes: MeshAxes
    precision: MixedPrecisionPolicy
    storage: ParamStorage
    keeps_plain: bool = False
    sub_axes: MeshAxes | None = None
    keeps_for_backward: bool = False
    custom: CustomCollectives = field(default_factory=CustomCollectives)
    compression: Compression | None = None
    sums: OrderedSums | None = None
    transport: Transport | None = None
    ahead_bytes: int | None = None
    may_diverge: bool = False
    max_reductions: int = 1
    forward_prefetch: list[weakref.ref[Any]] | None = None
    backward_prefetch: list[weakref.ref[Any]] | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks gradients are averaged over."""
        return self.axes.num_shards * self.axes.num_replicas
