"""All-gather extensions: tensor subclasses that define their own inputs and outputs of the all-gather.

A shard (the local tensor) with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` returns the tensors to gather and
builds the full parameter from the results; quantised weights do so.  Source: the all-gather extensions of torch's FSDP2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from shardwise import torch_private
from shardwise.collectives.c10d import GroupCommunicator
from shardwise.collectives.routes import BucketEnds, GatherEnds, Handle
from shardwise.collectives.streams import BufferPool, device_of
from shardwise.consistency.process_groups import mesh_of_one
from shardwise.errors import LayoutError
from shardwise.fsdp.full_buffer import FullBuffer
from shardwise.fsdp.mesh import MeshAxes
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.precision import MixedPrecisionPolicy
from shardwise.layout import align, row_major

_ALIGNMENT = 16  # bytes, of every input in the packed section


@dataclass(slots=True, eq=False)
class _Extended:
    param: ShardedParam
    # Memory, and the gathered tensor in it.
    outputs: list[tuple[FullBuffer, torch.Tensor]] = field(default_factory=list)
    inner: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)


def has_extension(param: ShardedParam) -> bool:
    """Return True if the shard has both extension methods.  Raises: LayoutError if it has only one."""
    local = torch_private.local_of(param.sharded)
    before, after = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if before != after:
        raise LayoutError(
            f"{param.fqn}: its tensor type {type(local).__name__} has "
            f"{'fsdp_pre_all_gather' if before else 'fsdp_post_all_gather'} alone; define both or neither"
        )
    return before


def _shard_mesh(axes: MeshAxes) -> DeviceMesh:
    """Return the mesh over which parameters are sharded; a mesh of this rank only if they are not."""
    if axes.shard_mesh_dim is None:
        return mesh_of_one(axes.mesh.device_type)
    return axes.mesh if axes.mesh.ndim == 1 else axes.mesh[(axes.mesh.mesh_dim_names or ())[axes.shard_mesh_dim]]


class ExtensionParams:
    """The parameters of a group that have extensions.

    Attributes:
        params: the parameters, in the group's order.
        entries: one record for each.
    """

    def __init__(self, axes: MeshAxes, precision: MixedPrecisionPolicy, device: torch.device) -> None:
        self._axes, self.num_shards = axes, axes.num_shards
        self._precision = precision
        self._device = device
        self._on = device_of(device)
        self.entries: list[_Extended] = []
        self.params: list[ShardedParam] = []

    @staticmethod
    def wants(param: ShardedParam) -> bool:
        """Return True if ``param`` cannot be in flat memory: the bytes of tensor subclasses are not those of the tensor."""
        return has_extension(param) or type(torch_private.local_of(param.sharded)) not in (torch.Tensor, nn.Parameter)

    def adopt(self, params: list[ShardedParam]) -> None:
        """Manage ``params`` from now on."""
        self.entries = [_Extended(param) for param in params]
        self.params = params
        for param in params:
            param.full = None
            param.is_hooked = False

    def gather(self, plain: GatherEnds | None, comm: GroupCommunicator | None, pool: BufferPool) -> Handle | None:
        """Launch one all-gather of the plain shards and the extensions' inputs; if ``comm`` is None, copy them."""
        ends = _MixedEnds(self, plain, pool)
        if comm is None:
            ends.deliver(ends.shard())
            return None
        return comm.all_gather(ends)

    def inputs_of(self, param: ShardedParam) -> tuple[list[torch.Tensor], Any]:
        """Return the tensors of ``param`` to gather, on the device, and the metadata for ``fsdp_post_all_gather``."""
        local = torch_private.local_of(param.sharded)
        if not hasattr(local, "fsdp_pre_all_gather"):
            return [local], None
        function: Callable[..., Any] = local.fsdp_pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
        shard_mesh = _shard_mesh(self._axes)
        with torch.no_grad():
            if len(inspect.signature(function).parameters) == 1:
                tensors, extra = function(shard_mesh)
            else:
                shape = torch.Size(param.shard.shape)
                stride = torch.empty(shape, device="meta").stride()
                tensors, extra = function(shard_mesh, shape, stride, param.module(), self._precision)
        return [_filled_up(self._on.fetch(tensor, tensor.dtype), param) for tensor in tensors], extra

    def complete(self, entry: _Extended, gathered: list[torch.Tensor], metadata: Any) -> None:
        """Build (first time) or refill the full parameter of ``entry`` from the gathered tensors."""
        local = torch_private.local_of(entry.param.sharded)
        if not hasattr(local, "fsdp_post_all_gather"):
            raise LayoutError(
                f"{entry.param.fqn}: tensor type {type(local).__name__} has no fsdp_pre_all_gather/fsdp_post_all_gather, "
                "so its bytes cannot be gathered; define both on the type"
            )
        function: Callable[..., Any] = local.fsdp_post_all_gather  # pyright: ignore[reportAttributeAccessIssue]
        dtype = entry.param.dtype_of_full(self._precision)
        outputs = tuple(gathered)
        with torch.no_grad():
            if entry.param.full is not None:
                for storage, num_bytes in entry.inner:
                    storage.resize_(num_bytes)
                target = entry.param.full
                out = torch_private.local_of(target) if entry.param.inner_spec else target
                with torch_private.same_version(out):
                    function(outputs, metadata, dtype, out=out)
                return
            full, inner = function(outputs, metadata, dtype)
            shape = entry.param.shard.shape
            if tuple(full.shape) != shape:  # uneven shards that fsdp_pre_all_gather has padded
                full = full.as_strided(shape, row_major(shape), 0)
            own = {tensor.untyped_storage().data_ptr() for _, tensor in entry.outputs}
            storages = [tensor.untyped_storage() for tensor in inner]
            entry.inner = [(each, each.nbytes()) for each in storages if each.data_ptr() not in own]
            if entry.param.inner_spec is not None:
                full = torch_private.dtensor_from_local(full, entry.param.inner_spec)
            entry.param.full = nn.Parameter(full, requires_grad=entry.param.sharded.requires_grad)
            torch_private.give_attributes(entry.param.attributes, entry.param.full)

    def hold_outputs(
        self, entry: _Extended, shapes: list[tuple[tuple[int, ...], torch.dtype]], pool: BufferPool
    ) -> list[torch.Tensor]:
        """Return contiguous tensors for the gathered inputs, the same tensor objects in every step."""
        if [(tuple(tensor.shape), tensor.dtype) for _, tensor in entry.outputs] != shapes:
            buffers = [FullBuffer(math.prod(shape), dtype, self._device) for shape, dtype in shapes]
            pairs = zip(buffers, shapes, strict=True)
            entry.outputs = [(buffer, buffer.hold(pool).view(shape)) for buffer, (shape, _) in pairs]
        for buffer, _ in entry.outputs:
            buffer.hold(pool)
        return [tensor for _, tensor in entry.outputs]

    def drop(self) -> None:
        """Free the memory of the gathered tensors."""
        for entry in self.entries:
            for buffer, _ in entry.outputs:
                buffer.drop()
            for storage, _ in entry.inner:
                storage.resize_(0)


class _MixedEnds:
    """Plain shards and extension inputs in one section of bytes."""

    take_over = None

    def __init__(self, owner: ExtensionParams, plain: GatherEnds | None, pool: BufferPool) -> None:
        self._owner = owner
        self._pool = pool
        self._plain = plain
        self._inputs: list[list[torch.Tensor]] = []
        self._metadata: list[Any] = []
        self._plain_dtype = torch.uint8
        self._plain_bytes = 0

    def buckets(self) -> Sequence[BucketEnds]:
        """Return no buckets: extensions need one packed buffer."""
        return ()

    def shard(self) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        # Make the inputs here and not earlier, so that their kernels run on the stream of the all-gather.
        found = [self._owner.inputs_of(entry.param) for entry in self._owner.entries]
        self._inputs, self._metadata = [tensors for tensors, _ in found], [extra for _, extra in found]
        if self._plain is not None:
            section = self._plain.shard()
            self._plain_dtype = section.dtype
            raw = section.view(torch.uint8)
            self._plain_bytes = raw.numel()
            parts.append(_padded(raw))
        for tensors in self._inputs:
            parts += [_padded(tensor.contiguous().view(-1).view(torch.uint8)) for tensor in tensors]
        return torch.cat(parts)

    def deliver(self, packed: torch.Tensor) -> None:
        sections = packed.view(self._owner.num_shards, -1)
        start = 0
        if self._plain is not None:
            plain = sections[:, : self._plain_bytes].contiguous().view(-1)
            self._plain.deliver(plain.view(self._plain_dtype))
            start = align(self._plain_bytes, _ALIGNMENT)
        for entry, tensors, metadata in zip(self._owner.entries, self._inputs, self._metadata, strict=True):
            shapes = [((sections.shape[0] * t.shape[0], *t.shape[1:]), t.dtype) for t in tensors]
            outputs = self._owner.hold_outputs(entry, shapes, self._pool)
            for tensor, output in zip(tensors, outputs, strict=True):
                num_bytes = tensor.numel() * tensor.element_size()
                # Where the shard itself is sent, shards come together along its dim; they follow each other otherwise.
                is_shard = tuple(tensor.shape) == entry.param.shard_shape
                outer = max(entry.param.shard.outer, 1) if is_shard else 1
                raw = output.view(-1).view(torch.uint8).view(outer, sections.shape[0], num_bytes // outer)
                with torch_private.same_version(output):  # autograd must not count a refill as a write
                    raw.transpose(0, 1).copy_(
                        sections[:, start : start + num_bytes].unflatten(1, (outer, num_bytes // outer))
                    )
                start += align(num_bytes, _ALIGNMENT)
            self._owner.complete(entry, outputs, metadata)


def _filled_up(tensor: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """Return ``tensor`` padded to the rows of the largest shard, so that all ranks send the same size.

    A tensor whose rows are not those of the shard is returned as it is.  A class whose ``fsdp_pre_all_gather`` receives only
    the mesh cannot pad by itself; :meth:`ExtensionParams.complete` cuts the result to the shape of the parameter.
    """
    shard, shape = param.shard, tensor.shape
    if not shard.has_padding or shard.dim != 0 or shape[:1] != param.shard_shape[:1] or shape[0] == shard.chunk:
        return tensor
    whole = tensor.new_zeros((shard.chunk, *shape[1:]))
    whole[: shape[0]].copy_(tensor)
    return whole


def _padded(raw: torch.Tensor) -> torch.Tensor:
    extra = align(raw.numel(), _ALIGNMENT) - raw.numel()
    return nn.functional.pad(raw, (0, extra)) if extra else raw
