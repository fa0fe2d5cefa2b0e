"""Have replicas the same values?  Asked once, in the first backward whose gradients are averaged over them.

They apply the same sums to whatever each has begun with: seeds of each rank's own, or a checkpoint that one rank alone has
loaded, keep them apart for ever, and no loss shows it.  Ranks compare digests through the store, where all of them come by.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.comm.bulletin import Bulletin, Position
from shardwise.comm.digest import Sketch, digest_of
from shardwise.errors import DesyncError
from shardwise.units.unit import Unit

logger = logging.getLogger(__name__)

SAMPLE_NUMEL = 1 << 16
_TOPIC = "values that replicas begin with"

Key = tuple[int, str]  # the first of the ranks that hold the same, and the name of a parameter, "" for all of them


def have_replicas(units: Iterable[Unit]) -> bool:
    """Return True if other ranks hold the same of some parameters."""
    return any(group.axes.num_replicas > 1 for unit in units for group in unit.groups)


def compare_replicas(units: Iterable[Unit], bulletin: Bulletin, position: Position) -> None:
    """Let all ranks compare what they hold of ``units``; of a large parameter, a sample.  Collective.

    Not where ranks are threads, whom one generator of random numbers serves: no two begin alike.  What differs by rounding
    (processors of two kinds make other last bits of one seed) is let pass with a warning.

    Raises: DesyncError on every rank, naming a parameter that is not the same on all of its replicas.
    """
    if torch_private.are_threads():
        return
    mine = _replicated(units)
    digests = {key: digest_of(sample_of(local)) for key, local in mine.items()}
    by_track: dict[int, list[int]] = defaultdict(list)
    for (track, _), digest in digests.items():
        by_track[track].append(digest)
    sums = {(track, ""): hashlib.sha256(repr(each).encode()).hexdigest() for track, each in by_track.items()}

    def unlike(topic: str, values: Mapping[Key, Any]) -> dict[Key, list[Any]]:
        said = [json.dumps([*key, value]) for key, value in values.items()]
        found: dict[Key, list[Any]] = defaultdict(list)
        for track, name, value in map(json.loads, sorted(bulletin.union(topic, said, position))):
            found[track, name].append(value)
        return {key: others for key, others in found.items() if len(others) > 1}

    if not unlike(_TOPIC, sums):
        return
    names = unlike(f"each of the {_TOPIC}", digests)
    sketches = {key: [dist.get_rank(), *Sketch.of(mine[key]).told] for key in names if key in mine}
    _judge(unlike(f"some of the {_TOPIC}", sketches))


def sample_of(local: torch.Tensor) -> torch.Tensor:
    """Return what is compared of ``local``, in one dimension: all, or, of much, some from everywhere and the end."""
    flat = local.reshape(-1)
    if flat.numel() <= SAMPLE_NUMEL:
        return flat
    half = SAMPLE_NUMEL // 2
    return torch.cat([flat[:: -(-flat.numel() // half)], flat[-half:]])


def _replicated(units: Iterable[Unit]) -> dict[Key, torch.Tensor]:
    """Return the local tensors of which other ranks hold the same, but for those of users' classes, which need have no bits."""
    found: dict[Key, torch.Tensor] = {}
    for group in (group for unit in units for group in unit.groups if group.axes.num_replicas > 1):
        assert group.axes.replicate_mesh_dim is not None
        track = dist.get_process_group_ranks(group.axes.mesh.get_group(group.axes.replicate_mesh_dim))[0]
        for param in group.params:
            if type(param.local) in (torch.Tensor, nn.Parameter):
                found[track, param.fqn] = param.local.detach()
    return found


def _judge(unlike: Mapping[Key, Sequence[Any]]) -> None:
    apart: list[tuple[str, dict[int, Sketch]]] = []
    largest = 0.0
    for (_, name), told in unlike.items():
        sketches = {rank: Sketch(*rest) for rank, *rest in told}
        first = sketches[min(sketches)]
        distances = [first.distance(other) for other in sketches.values()]
        if all(distance <= first.tolerance for distance in distances):  # nan is far, too
            largest = max(largest, *distances)
        else:
            apart.append((name, sketches))
    if not apart:
        logger.warning(
            "replicas do not begin with the same bits; they differ by %.1e of a parameter's norm at most", largest
        )
        return
    name, sketches = apart[0]
    norms = ", ".join(f"of norm {sketches[rank].norm:.6g} on rank {rank}" for rank in sorted(sketches)[:8])
    more = f", and {len(apart) - 1} more parameters differ" if len(apart) > 1 else ""
    raise DesyncError(
        f"replicas do not begin with the same values: {name} is {norms}{more}. Each would add the same averaged gradients to "
        "its own, so that they stay apart: build the model with one seed on all ranks, load a checkpoint on every rank, or "
        "broadcast the parameters of one before the first step; what is to differ between ranks belongs into ignored_params"
    )
