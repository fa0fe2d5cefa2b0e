"""Checks, once before the first step, that all ranks have the same gradients and the same parameters.

Each owner steps on its own copy of the gradients. Without averaging, every owner would silently train on another
batch. Each owner then sends its values to all, so parameters that differ at the start would make the model a mixture.
Ranks therefore compare digests of the bits through the store, at the first step only.

All-reduces return equal bits (every rank gets sums that one rank computed), but programs may change them: ranks on
different processors clip with other last bits. So gradients with different bits are compared by random projections,
and such small differences only cause a warning: owners' values are sent to all anyway.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence

import torch

from shardwise.consistency.agreement import GroupAgreement
from shardwise.consistency.store import Sketch, digest_of, sample_of
from shardwise.errors import DesyncError
from shardwise.zero.partition import RankPartition, flat_like

logger = logging.getLogger(__name__)


def are_same(
    rank_partition: RankPartition,
    agreement: GroupAgreement,
    what: str,
    *,
    has_inputs: bool = True,
    only_warn: bool = False,
) -> bool:
    """Return True if all ranks have the same gradients, False if no rank has any (so that nothing is known).  Collective.

    ``has_inputs`` False: a rank in ``Join`` without gradients of its own; it is not compared.  ``only_warn``: for
    gradients of a closure, which torch's class does not check.

    Raises: DesyncError on every rank, with the first parameter that differs.
    """
    gradients = [_gradient(param) if has_inputs else None for param in rank_partition.params]
    is_known, rows = _compare(gradients, f"the gradients of {what}", agreement, has_inputs)
    complaint = _judge(rank_partition, f"{what}: gradients", rows)
    if complaint:
        text = (
            f"{what}: gradients differ between ranks: that of {complaint}. Each owner would train on its own: "
            "wrap the model in DistributedDataParallel, or average the gradients before step()"
        )
        if not only_warn:
            raise DesyncError(text)
        logger.warning("%s. A closure's gradients are taken as they are", text)
    return is_known


def check_same_params(
    rank_partition: RankPartition, moving: Sequence[bool], agreement: GroupAgreement, what: str
) -> None:
    """Compare the parameters of all ranks (samples of large ones) before the first step, which sends those ``moving``.

    Those become equal, to a mixture of the ranks' values: a warning, since torch's class does the same.  Collective.
    Raises: DesyncError on every rank, with the first parameter that differs and that no step makes equal.
    """
    params = [sample_of(flat_like(param.detach(), param)) for param in rank_partition.params]
    rows = _compare(params, f"the parameters before {what}", agreement)[1]
    text = (
        f"{what}: parameters differ between ranks before it: %s. %s: build the model with one seed on all ranks, load "
        "weights on every rank, or wrap the model in DistributedDataParallel, which broadcasts those of the first rank"
    )
    stay = _judge(rank_partition, f"{what}: parameters", {i: row for i, row in rows.items() if not moving[i]})
    if stay:
        raise DesyncError(text % (stay, "No step sends frozen parameters, so that ranks would keep different models"))
    complaint = _judge(rank_partition, f"{what}: parameters", {i: row for i, row in rows.items() if moving[i]})
    if complaint:
        logger.warning(text, complaint, "Each owner sends its own to all, so that the model becomes a mixture of them")


def _compare(
    tensors: Sequence[torch.Tensor | None], what: str, agreement: GroupAgreement, takes_part: bool = True
) -> tuple[bool, dict[int, dict[int, Sketch | None]]]:
    """Return whether ranks had tensors to compare, and the sketches of those that differ, by index and rank."""
    digests = [None if tensor is None else digest_of(tensor) for tensor in tensors]
    summary = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if takes_part else ""
    texts = agreement.gather(f"comparing {what}", json.dumps([summary, any(digests)]))
    summaries, are_there = zip(*(json.loads(text) for text in texts), strict=True)
    is_known = any(are_there) and sum(map(bool, summaries)) > 1
    if len({found for found in summaries if found}) <= 1:
        return is_known, {}
    every = [json.loads(text) for text in agreement.gather(f"comparing each of {what}", json.dumps(digests))]
    unlike = [index for index, column in enumerate(zip(*every, strict=True)) if len(set(column)) > 1]
    sketches = {index: Sketch.of(tensor).told for index in unlike if (tensor := tensors[index]) is not None}
    told = [json.loads(text) for text in agreement.gather(f"comparing some of {what}", json.dumps(sketches))]
    those = [rank for rank, summary in enumerate(summaries) if summary]
    rows = [{rank: Sketch(*found) if (found := told[rank].get(str(i))) else None for rank in those} for i in unlike]
    return is_known, dict(zip(unlike, rows, strict=True))


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    gradient = param.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce()
        return torch.cat([gradient.values().reshape(-1).double(), gradient.indices().reshape(-1).double()])
    return flat_like(gradient.detach(), param)


def _judge(rank_partition: RankPartition, what: str, rows: Mapping[int, dict[int, Sketch | None]]) -> str:
    """Return a text about the first tensor that differs, else ""; warn if only rounding differs."""
    largest = 0.0
    for index, row in rows.items():
        present = [sketch for sketch in row.values() if sketch is not None]
        lacking = [
            owned_slice.owner
            for owned_slice in rank_partition.by_param[index]
            if row.get(owned_slice.owner, present[0]) is None
        ]
        apart = [present[0].distance(sketch) for sketch in present]
        if lacking or not all(distance <= present[0].tolerance for distance in apart):  # nan counts as different
            listing = ", ".join(
                f"none on rank {rank}" if sketch is None else f"of norm {sketch.norm:.6g} on rank {rank}"
                for rank, sketch in list(row.items())[:8]
            )
            owners = f" (rank {', '.join(map(str, lacking))} owns it)" if lacking else ""
            return f"parameter {index} of shape {tuple(rank_partition.params[index].shape)} is {listing}{owners}"
        largest = max(largest, *apart)
    if largest:
        logger.warning(
            "%s are not the same to the bit on all ranks; they differ by %.1e of their norm at most", what, largest
        )
    return ""
