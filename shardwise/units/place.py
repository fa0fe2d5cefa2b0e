"""Where the parameters of a group live, and how buckets are made there."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from shardwise.comm.lanes import Device, device_of
from shardwise.layout.bucket import build_bucket
from shardwise.units.flat_bucket import Allocator, FlatBucket
from shardwise.units.param import UnitParam
from shardwise.units.precision import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True)
class ParamStorage:
    """Where the parameters of a group live.

    Attributes:
        device: of the full parameters.
        offload: whether shards live on the host instead.
        is_shared: shards are made where other ranks of this host could read them.
    """

    device: torch.device
    offload: OffloadPolicy
    is_shared: bool = False

    @functools.cached_property
    def on(self) -> Device:
        """What the engine asks ``device`` through."""
        return device_of(self.device)

    @functools.cached_property
    def is_offloaded(self) -> bool:
        """True if shards and gradients live on the host, and full parameters elsewhere."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.on.has_lanes

    @functools.cached_property
    def storage_device(self) -> torch.device:
        """The device of the shards."""
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device

    @property
    def pins(self) -> bool:
        """True if shards lie in page-locked memory."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory and self.on.can_pin

    def alignment(self, dtype: torch.dtype) -> int:
        """Return to how many elements tensors of ``dtype`` are aligned in a section."""
        # 16 bytes keep vector loads of an accelerator's kernels possible; on CPU gaps would only cost.
        return max(16 // dtype.itemsize, 1) if self.on.has_lanes else 1

    def bucket(self, params: list[UnitParam], full_dtype: torch.dtype, is_collective: bool) -> FlatBucket:
        """Return a bucket that ``params``, all of one dtype, have moved into.

        It travels unless it has no elements, or, without collectives, is its own full form.
        """
        dtype, device = params[0].dtype, params[0].local.device
        layout = build_bucket([param.shard for param in params], self.alignment(dtype), self.alignment(full_dtype))
        travels = (
            is_collective or dtype != full_dtype or self.is_offloaded or device != self.device
        ) and layout.full_numel > 0
        allocate = Allocator(device, self.pins, self.is_shared, self.on if self.is_offloaded else None)
        bucket = FlatBucket(params, layout, full_dtype, allocate, travels)
        bucket.move_in()
        return bucket
