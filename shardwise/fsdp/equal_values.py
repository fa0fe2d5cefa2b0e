"""Values that ranks have alike: samples of initial ones, ``sync_module_states``, and buffers that differ (BatchNorm).

``fully_shard`` itself sends nothing, so values that differ between ranks (a seed per rank) are not seen when they are cut: each
rank keeps its rows of another model.  So samples stay until the first forward compares them, and ``sync_module_states`` is
there for those who want one rank's values.  Source: ``DistributedDataParallel``, which broadcasts module states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.collectives.owned import broadcast_from_first
from shardwise.consistency.agreement import open_agreement
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.fsdp.mesh import MeshAxes

_SAMPLE_NUMEL, _SOME_NUMEL = 1 << 12, 64
_ROUGH = torch.bfloat16  # a conversion of a model to another dtype is no write, so shards are compared as this
SHARES_BUFFERS = "_shardwise_shares_buffers"  # marks a module whose forward broadcasts the first rank's buffers
_MOST_LISTED = 8  # names in an error


def few(names: Iterable[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MOST_LISTED} more" if len(every) > _MOST_LISTED else ""
    return ", ".join(every[:_MOST_LISTED]) + more


def beginning_of(whole: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return samples of ``whole``, which is sharded, and of ``shard``; None for values on meta or of a tensor subclass."""
    if type(whole) is not torch.Tensor or whole.is_meta:
        return None
    # a copy of one element would keep its stride, and then is not to be read as bytes
    kept, some = _spaced(whole, _SAMPLE_NUMEL), _spaced(shard, _SOME_NUMEL)
    return kept.clone(memory_format=torch.contiguous_format), some.clone(memory_format=torch.contiguous_format)


def unwritten(begun: tuple[torch.Tensor, torch.Tensor] | None, shard: torch.Tensor) -> bytes | None:
    """Return the sample of a parameter before it was sharded; None if it has none, or its shard was written to since."""
    if begun is None or shard.is_meta:
        return None
    before, now = (each.to("cpu", _ROUGH) for each in (begun[1], _spaced(shard, _SOME_NUMEL)))
    # A write on this rank shows in the sample of the shard: initialization and loading replace all of it.
    return begun[0].cpu().view(torch.uint8).numpy().tobytes() if torch.equal(before, now) else None


def _spaced(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most ``most`` evenly spaced elements of ``values``, 1-D: all of them if there are no more."""
    flat = values.detach().view(-1) if values.is_contiguous() else values.detach().reshape(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat if flat.numel() <= most else flat[:: -(-flat.numel() // most)]


Named = Sequence[tuple[str, torch.Tensor]]


def values_of_first(named: Named, axes: MeshAxes, error: ShardwiseError | None = None) -> list[torch.Tensor]:
    """Broadcast tensors from the first rank of the mesh; return them, with new tensors for those on meta.  Collective.

    Raises: ``error`` of any rank, ConfigError if the first rank has meta tensors, DesyncError if ranks pass different tensors;
        on every rank.
    """
    dims = [dim for dim in (axes.replicate_mesh_dim, axes.shard_mesh_dim) if dim is not None]
    groups = [group for dim in dims if (group := axes.mesh.get_group(dim)).size() > 1]
    _agree(named, axes, groups, error)
    tensors = [tensor.detach() for _, tensor in named]
    # A rank on meta gets memory here; the others send and receive where their values are.
    found = [torch.empty_like(each, device=axes.device) if each.is_meta else each for each in tensors]
    for group in groups:  # first along the replicas, then along the shards
        broadcast_from_first(found, group)
    return found


def sync_buffers(modules: Iterable[tuple[str, nn.Module]], axes: MeshAxes, error: ShardwiseError | None = None) -> None:
    """Broadcast the buffers of ``modules``, pairs of path and module, from the first rank; raise ``error``.  Collective."""
    places = [(path, module, name) for path, module in modules for name, _ in module.named_buffers(recurse=False)]
    buffers = [(f"{path}.{name}", module.get_buffer(name)) for path, module, name in places]
    values = values_of_first(buffers, axes, error)
    for (_, module, name), (_, buffer), value in zip(places, buffers, values, strict=True):
        if buffer.is_meta:
            torch_private.buffers_of(module)[name] = value


def _agree(named: Named, axes: MeshAxes, groups: Sequence[dist.ProcessGroup], error: ShardwiseError | None) -> None:
    facts = [f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in named]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty and dist.get_rank() == int(axes.mesh.mesh.min()):
        error = ConfigError(
            f"sync_module_states=True: the first rank has {empty[0]} on meta, expected values to broadcast. Load the "
            "weights on that rank before sharding, or leave sync_module_states out and call init_parameters after sharding"
        )
    try:
        for group in groups:  # an error in one group is agreed on in the next, so that it reaches every rank
            try:
                open_agreement(group, "sync_module_states").agree("sync_module_states", facts, error)
            except ShardwiseError as found:
                error = found
        if error is not None:
            raise error
    finally:
        del error  # the error refers to this frame


def unlike_buffers(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the buffers that differ, each with two ranks whose values are different."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, list[int]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                found.setdefault(name, [other, rank])
    return found


def unlike_in_words(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return what is wrong with buffers that differ, and what to do."""
    return (
        f"buffers differ between ranks: {few(names)}; rank {ranks[0]} and rank {ranks[1]} have different values, and a "
        "checkpoint holds one. Call save(..., buffers='rank0') to save those of the lowest rank, or 'per_rank' for those of "
        "every rank, which load at the same number of ranks; or keep buffers equal during training (SyncBatchNorm)"
    )
