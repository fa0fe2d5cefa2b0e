"""Checks that all ranks begin with the same values."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.store import are_threads, digest_of, sample_of
from shardwise.errors import DesyncError
from shardwise.formatting import format_ranks
from shardwise.fsdp.equal_values import unwritten
from shardwise.fsdp.unit import Unit

# ---- Checks that all ranks start with the same values.
# Replicas add the same averaged gradients to their values, so values that differ at the start (a seed per rank, a checkpoint
# that only one rank has loaded) differ forever.  Ranks that shard different values train a mixture of them: as good a random
# start as another, but no checkpoint.  The loss shows neither.  So ranks compare digests through the store once: of sharded
# values in the first forward, of replicas in the first backward that averages over them.

Key = tuple[str, str]  # which ranks have a part of the parameter, and its name
_logger = logging.getLogger(__name__)
_REMEDY = (
    "build the model with one seed on all ranks, load weights on every rank or after sharding, or pass sync_module_states=True "
    "to fully_shard or shard_model, which broadcasts the values of the first rank"
)


def compare_replicas(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare the values of replicas of ``units`` between ranks; of a large parameter, a sample.  Collective.

    Raises: DesyncError on every rank, naming a parameter that is not the same on all of its replicas.
    """
    digests = {key: digest_of(sample_of(local)) for key, local in _replicated(units).items()}
    if unlike := _compare("values that replicas begin with", digests, mismatch_check):
        raise DesyncError(
            f"replicas do not begin with the same values: {_in_words(unlike)}. Each would add the same averaged gradients to "
            "its own, so that they never become equal: build the model with one seed on all ranks, load a checkpoint on every "
            "rank, or broadcast the parameters of one rank before the first step; put parameters that should differ between "
            "ranks into ignored_params"
        )


def compare_beginnings(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare between ranks the values from which the parameters of ``units`` were sharded.  Collective.

    Parameters that any rank has overwritten since (initialized, loaded) are skipped.  The first rank warns of others that were
    not the same on all ranks.

    Raises: DesyncError on every rank, naming such a parameter, if ranks would have different models: it has replicas, or is a
        scalar, which is not cut; or if the model must not depend on the number of ranks (``Reproducible``).
    """
    digests: dict[Key, int | str | None] = {}
    groups = [group for unit in units for group in unit.groups if group.axes.num_shards > 1]
    if not groups:
        return
    must_agree: set[str] = set()
    for group, param in ((each, param) for each in groups for param in each.params):
        if param.local.numel():  # values of a rank whose shard is empty are not used
            sample = unwritten(param.beginning, param.local)
            # Ranks whose models differ in shapes get a better error at the first all-gather.
            name = f"{param.fqn} of shape {param.shard.shape}"
            key = f"{int(group.axes.mesh.mesh.min())}/{param.shard.num_holders}", name
            digests[key] = None if sample is None else hashlib.sha256(sample).hexdigest()
            if group.axes.num_replicas > 1 or param.shard.is_whole or group.sums is not None:
                must_agree.add(name)
    unlike = _compare("values that were sharded", digests, mismatch_check)
    if refused := {name: row for name, row in unlike.items() if name in must_agree}:
        raise DesyncError(
            f"ranks do not begin with the same values: {_in_words(refused)}. Ranks would train different models, or one that "
            f"depends on their number: {_REMEDY}"
        )
    if unlike and mismatch_check.rank == mismatch_check.members[0]:
        _logger.warning(
            "ranks do not begin with the same values: %s. Each rank has sharded its own, so that the model is a mixture of "
            "them. One of random values is as good as another; to begin with one rank's weights %s",
            *(_in_words(unlike), _REMEDY),
        )
    for param in (param for group in groups for param in group.params):
        param.beginning = None


def _compare(
    topic: str, digests: Mapping[Key, int | str | None], mismatch_check: MismatchCheck
) -> dict[str, dict[int, int | str]]:
    """Return, by name, the digest on each rank of what differs; a parameter that has None on some rank is not compared.

    Nothing is compared if ranks are threads: they share one random generator, so no two ranks start with the same values.
    """
    if are_threads():
        return {}

    def exchange(topic: str, values: Mapping[Key, Any]) -> dict[Key, list[Any]]:
        local = [json.dumps([*key, value]) for key, value in values.items()]
        found: dict[Key, list[Any]] = defaultdict(list)
        for track, name, value in map(json.loads, sorted(mismatch_check.union(topic, local))):
            found[track, name].append(value)
        return found

    # Exchange one sum per set of ranks first: usually all agree, and no rank sends a digest per parameter.
    alike: dict[str, list[int | str | None]] = defaultdict(list)
    for (track, _), digest in digests.items():
        alike[track].append(digest)
    sums = {(track, ""): hashlib.sha256(repr(each).encode()).hexdigest() for track, each in alike.items()}
    if all(len(found) == 1 for found in exchange(topic, sums).values()):
        return {}
    mine = {key: [dist.get_rank(), digest] for key, digest in digests.items()}
    rows = {key: dict(found) for key, found in exchange(f"each of the {topic}", mine).items()}
    return {name: row for (_, name), row in rows.items() if None not in row.values() and len({*row.values()}) > 1}


def _in_words(unlike: Mapping[str, Mapping[int, int | str]]) -> str:
    name, row = min(unlike.items())
    first = min(row)
    others = sorted(rank for rank, digest in row.items() if digest != row[first])
    more = f", and {len(unlike) - 1} more parameters differ" if len(unlike) > 1 else ""
    return f"{name} is not the same on {format_ranks(others)} as on rank {first}{more}"


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
