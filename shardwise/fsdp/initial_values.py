"""Initial values: check that all ranks have the same, and ``sync_module_states``, which broadcasts those of the first rank."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.consistency.agreement import MismatchCheck, open_agreement
from shardwise.consistency.process_groups import broadcast_from_first
from shardwise.consistency.store import digest_of, sample_of
from shardwise.errors import ConfigError, DesyncError, ShardwiseError
from shardwise.formatting import format_ranks
from shardwise.fsdp.mesh import MeshAxes
from shardwise.fsdp.unit import Unit

# ---- Checks that all ranks start with the same values.
# Replicas add the same averaged gradients to their values, so values that differ at the start (a seed per rank, a checkpoint
# that only one rank has loaded) differ forever.  Ranks that shard different values train a mixture of them.  The loss shows
# neither.  So ranks compare digests through the store once: of sharded values in the first forward, of replicas in the first
# backward that averages over them.

Key = tuple[str, str]  # which ranks have a part of the parameter, and its name
_SAMPLE_NUMEL, _SOME_NUMEL = 1 << 14, 64


def beginning_of(whole: torch.Tensor, shard: torch.Tensor) -> tuple[int, int] | None:
    """Return digests of samples of ``whole`` and ``shard``; None for values on meta or of a tensor subclass."""
    if type(whole) not in (torch.Tensor, nn.Parameter) or whole.is_meta:
        return None
    return digest_of(sample_of(whole.detach(), _SAMPLE_NUMEL)), _digest_of_some(shard)


def _digest_of_some(shard: torch.Tensor) -> int:
    some = sample_of(shard.detach(), _SOME_NUMEL)
    some = torch.view_as_real(some) if some.is_complex() else some
    return digest_of(some.to("cpu", torch.bfloat16))  # conversions of a model to another dtype are no writes


def compare_replicas(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare the values of replicas of ``units`` between ranks; of a large parameter, a sample.  Collective.

    Raises: DesyncError on every rank, naming a parameter that is not the same on all of its replicas.
    """
    _compare(
        "values that replicas begin with",
        {key: digest_of(sample_of(local)) for key, local in _replicated(units).items()},
        mismatch_check,
        "replicas",
        "Each would add the same averaged gradients to its own, so that they never become equal: build the model with one seed "
        "on all ranks, load a checkpoint on every rank, or broadcast the parameters of one rank before the first step; put "
        "parameters that should differ between ranks into ignored_params",
    )


def compare_beginnings(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare between ranks the values from which the parameters of ``units`` were sharded.  Collective.

    Parameters that any rank has overwritten since (initialized, loaded) are skipped.

    Raises: DesyncError on every rank, naming a parameter that was not the same on all ranks.
    """
    digests: dict[Key, int | None] = {}
    groups = [group for unit in units for group in unit.groups if group.axes.num_shards > 1]
    if not groups:
        return
    for param, first in ((param, int(group.axes.mesh.mesh.min())) for group in groups for param in group.params):
        if param.local.numel():  # values of a rank whose shard is empty are not used
            begun = param.beginning
            is_same = begun is not None and not param.local.is_meta and _digest_of_some(param.local) == begun[1]
            # Ranks whose models differ in shapes get a better error at the first all-gather.
            key = f"{first}/{param.shard.num_holders}", f"{param.fqn} of shape {param.shard.shape}"
            digests[key] = begun[0] if begun and is_same else None
    _compare(
        "values that were sharded",
        digests,
        mismatch_check,
        "ranks",
        "Each rank has sharded its own values, so that the model is a mixture of them: build the model with one seed on all "
        "ranks, load weights on every rank or after sharding, or pass sync_module_states=True to fully_shard or shard_model, "
        "which broadcasts the values of the first rank",
    )
    for param in (param for group in groups for param in group.params):
        param.beginning = None


def _compare(
    topic: str, digests: Mapping[Key, int | None], mismatch_check: MismatchCheck, who: str, advice: str
) -> None:
    """Raise DesyncError if ``digests`` differ between ranks; a parameter that has None on some rank is not compared.

    Nothing is compared if ranks are threads: they share one random generator, so no two ranks start with the same values.
    """
    if torch_private.are_threads():
        return

    def exchange(topic: str, values: Mapping[Key, Any]) -> dict[Key, list[Any]]:
        local = [json.dumps([*key, value]) for key, value in values.items()]
        found: dict[Key, list[Any]] = defaultdict(list)
        for track, name, value in map(json.loads, sorted(mismatch_check.union(topic, local))):
            found[track, name].append(value)
        return found

    # Exchange one sum per set of ranks first: usually all agree, and no rank sends a digest per parameter.
    alike: dict[str, list[int | None]] = defaultdict(list)
    for (track, _), digest in digests.items():
        alike[track].append(digest)
    sums = {(track, ""): hashlib.sha256(repr(each).encode()).hexdigest() for track, each in alike.items()}
    if all(len(found) == 1 for found in exchange(topic, sums).values()):
        return
    mine = {key: [dist.get_rank(), digest] for key, digest in digests.items()}
    rows = {key: dict(found) for key, found in exchange(f"each of the {topic}", mine).items()}
    unlike = [(name, row) for (_, name), row in rows.items() if None not in row.values() and len({*row.values()}) > 1]
    if unlike:
        name, row = min(unlike, key=lambda each: each[0])
        first = min(row)
        others = sorted(rank for rank, digest in row.items() if digest != row[first])
        more = f", and {len(unlike) - 1} more parameters differ" if len(unlike) > 1 else ""
        raise DesyncError(
            f"{who} do not begin with the same values: {name} is not the same on {format_ranks(others)} as on rank "
            f"{first}{more}. {advice}"
        )


def _replicated(units: Iterable[Unit]) -> dict[Key, torch.Tensor]:
    """Return the local tensors that have replicas; without tensor subclasses, which may have no readable bits."""
    found: dict[Key, torch.Tensor] = {}
    for group in (group for unit in units for group in unit.groups if group.axes.num_replicas > 1):
        assert group.axes.replicate_mesh_dim is not None
        track = dist.get_process_group_ranks(group.axes.mesh.get_group(group.axes.replicate_mesh_dim))[0]
        for param in group.params:
            if type(param.local) in (torch.Tensor, nn.Parameter):
                found[str(track), param.fqn] = param.local.detach()
    return found


def values_of_first(
    named: Sequence[tuple[str, torch.Tensor]], axes: MeshAxes, error: ShardwiseError | None = None
) -> list[torch.Tensor]:
    """Broadcast tensors from the first rank of the mesh; return them, with new tensors for those on meta.  Collective.

    Raises: ``error`` of any rank, ConfigError if the first rank has meta tensors, DesyncError if ranks pass different tensors;
        on every rank.
    """
    dims = [dim for dim in (axes.replicate_mesh_dim, axes.shard_mesh_dim) if dim is not None]
    groups = [group for dim in dims if (group := axes.mesh.get_group(dim)).size() > 1]
    _agree(named, axes, groups, error)
    found = [
        torch.empty_like(tensor, device=axes.device, requires_grad=False) if tensor.is_meta else tensor.detach()
        for _, tensor in named
    ]
    for group in groups:  # first along the replicas, then along the shards
        broadcast_from_first(found, group)
    return found


def sync_buffers(modules: Iterable[tuple[str, nn.Module]], axes: MeshAxes, error: ShardwiseError | None = None) -> None:
    """Broadcast the buffers of ``modules``, pairs of path and module, from the first rank; raise ``error``.  Collective."""
    places = [(path, module, name) for path, module in modules for name, _ in module.named_buffers(recurse=False)]
    buffers = [(f"{path}.{name}", module.get_buffer(name)) for path, module, name in places]
    for (_, module, name), (_, buffer), value in zip(
        places, buffers, values_of_first(buffers, axes, error), strict=True
    ):
        if buffer.is_meta:
            torch_private.buffers_of(module)[name] = value


def _agree(
    named: Sequence[tuple[str, torch.Tensor]],
    axes: MeshAxes,
    groups: Sequence[dist.ProcessGroup],
    error: ShardwiseError | None,
) -> None:
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
