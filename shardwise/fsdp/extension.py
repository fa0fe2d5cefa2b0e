"""All-gather extensions: tensor subclasses that define their own inputs and outputs of the all-gather.

A shard (the local tensor) with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` returns the tensors to gather and
builds the full parameter from the results; quantised weights do so.  Flat memory cannot have them: their bytes are several
tensors of other dtypes, and only the class knows how to put them together.  Source: the all-gather extensions of torch's FSDP2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

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

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]
_ALIGNMENT = 16  # bytes, of every input in the packed section
_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(slots=True, eq=False)
class _Extended:
    param: ShardedParam
    # Memory, and the gathered tensor in it.
    outputs: list[tuple[FullBuffer, torch.Tensor]] = field(default_factory=list)
    inner: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)


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
        self._axes, self.num_shards, self._precision, self._device = axes, axes.num_shards, precision, device
        self.entries: list[_Extended] = []
        self.params: list[ShardedParam] = []

    @staticmethod
    def wants(param: ShardedParam) -> bool:
        """Return True if ``param`` cannot be in flat memory: the bytes of tensor subclasses are not those of the tensor.

        A plain tensor that has one of the methods is gathered by them, too.
        """
        return type(param.local) not in (torch.Tensor, nn.Parameter) or any(hasattr(param.local, e) for e in _METHODS)

    def adopt(self, params: list[ShardedParam]) -> None:
        """Manage ``params`` from now on."""
        self.entries = [_Extended(param) for param in params]
        self.params = params
        for param in params:
            param.full = None  # made again by the class, which may have other inputs now
            param.is_hooked = False

    def gather(self, plain: GatherEnds | None, comm: GroupCommunicator | None, pool: BufferPool) -> Handle | None:
        """Launch one all-gather of the plain shards and the extensions' inputs; if ``comm`` is None, copy them."""
        ends = _MixedEnds(self, plain, pool)
        if comm is None:
            ends.deliver(ends.shard())
            return None
        return comm.all_gather(ends)

    def inputs_of(self, param: ShardedParam) -> tuple[list[torch.Tensor], Any]:
        """Return the tensors of ``param`` to gather, on the device, and the metadata for ``fsdp_post_all_gather``.

        Raises: LayoutError on every rank if its class lacks one of the methods.
        """
        if missing := [each for each in _METHODS if not hasattr(param.local, each)]:
            raise LayoutError(
                f"{param.fqn}: its tensor type {type(param.local).__name__} has no {' and no '.join(missing)}, so its bytes "
                "cannot be gathered: define both on the type"
            )
        function: Callable[..., Any] = cast(Any, param.local).fsdp_pre_all_gather
        shape, given = param.shard.shape, list[Any]([_shard_mesh(self._axes)])
        if len(inspect.signature(function).parameters) > 1:
            given += torch.Size(shape), row_major(shape), param.module(), self._precision
        with torch.no_grad():
            tensors, extra = function(*given)
        on = device_of(self._device)
        return [_filled_up(on.fetch(tensor, tensor.dtype), param) for tensor in tensors], extra

    def complete(self, entry: _Extended, gathered: list[torch.Tensor], metadata: Any) -> None:
        """Build (first time) or refill the full parameter of ``entry`` from the gathered tensors."""
        param = entry.param
        function: Callable[..., Any] = cast(Any, param.local).fsdp_post_all_gather
        outputs, dtype = tuple(gathered), param.dtype_of_full(self._precision)
        with torch.no_grad():
            if param.full is not None:
                for storage, num_bytes in entry.inner:
                    storage.resize_(num_bytes)
                with torch_private.same_version(out := torch_private.local_of(param.full)):
                    function(outputs, metadata, dtype, out=out)
                return
            full, inner = function(outputs, metadata, dtype)
            shape = param.shard.shape
            if tuple(full.shape) != shape:  # uneven shards that fsdp_pre_all_gather has padded
                full = full.as_strided(shape, row_major(shape), 0)
            own = {tensor.untyped_storage().data_ptr() for _, tensor in entry.outputs}
            storages = [tensor.untyped_storage() for tensor in inner]
            entry.inner = [(each, each.nbytes()) for each in storages if each.data_ptr() not in own]
            if param.inner_spec is not None:
                full = torch_private.dtensor_from_local(full, param.inner_spec)
            param.full = nn.Parameter(full, requires_grad=param.sharded.requires_grad)
            torch_private.give_attributes(param.attributes, param.full)

    def hold_outputs(self, entry: _Extended, shapes: list[ShapeAndDtype], pool: BufferPool) -> list[torch.Tensor]:
        """Return contiguous tensors for the gathered inputs, the same tensor objects in every step."""
        if [(tuple(tensor.shape), tensor.dtype) for _, tensor in entry.outputs] != shapes:
            buffers = [(FullBuffer(math.prod(shape), dtype, self._device), shape) for shape, dtype in shapes]
            entry.outputs = [(buffer, buffer.hold(pool).view(shape)) for buffer, shape in buffers]
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
    """Plain shards and extension inputs in one section of bytes: one all-gather takes all parameters of a unit."""

    take_over = None

    def __init__(self, owner: ExtensionParams, plain: GatherEnds | None, pool: BufferPool) -> None:
        self._owner, self._plain, self._pool = owner, plain, pool
        self._inputs: list[tuple[list[torch.Tensor], Any]] = []  # of each entry, with metadata
        self._plain_shard = torch.empty(0, dtype=torch.uint8, device="cpu")

    def buckets(self) -> Sequence[BucketEnds]:
        """Return no buckets: extensions need one packed buffer."""
        return ()

    def shard(self) -> torch.Tensor:
        # Make the inputs here and not earlier, so that their kernels run on the stream of the all-gather.
        self._inputs = [self._owner.inputs_of(entry.param) for entry in self._owner.entries]
        parts = [tensor.contiguous() for tensors, _ in self._inputs for tensor in tensors]
        if self._plain is not None:
            self._plain_shard = self._plain.shard()
            parts.insert(0, self._plain_shard)
        raw = [part.view(-1).view(torch.uint8) for part in parts]
        return torch.cat([nn.functional.pad(each, (0, -each.numel() % _ALIGNMENT)) for each in raw])

    def deliver(self, packed: torch.Tensor) -> None:
        sections, start = packed.view(self._owner.num_shards, -1), 0
        if self._plain is not None:
            num_bytes = self._plain_shard.nbytes
            self._plain.deliver(sections[:, :num_bytes].contiguous().view(-1).view(self._plain_shard.dtype))
            start = align(num_bytes, _ALIGNMENT)
        for entry, (tensors, metadata) in zip(self._owner.entries, self._inputs, strict=True):
            shapes = [((sections.shape[0] * t.shape[0], *t.shape[1:]), t.dtype) for t in tensors]
            outputs = self._owner.hold_outputs(entry, shapes, self._pool)
            for tensor, output in zip(tensors, outputs, strict=True):
                num_bytes = tensor.nbytes
                # Where the shard itself is sent, shards come together along its dim; they follow each other otherwise.
                is_shard = tuple(tensor.shape) == entry.param.shard_shape
                outer = max(entry.param.shard.outer, 1) if is_shard else 1
                raw = output.view(-1).view(torch.uint8).view(outer, sections.shape[0], num_bytes // outer)
                sent = sections[:, start : start + num_bytes].unflatten(1, (outer, num_bytes // outer))
                with torch_private.same_version(output):  # autograd must not count a refill as a write
                    raw.transpose(0, 1).copy_(sent)
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
