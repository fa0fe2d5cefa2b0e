"""Checks once, before the first step, that all ranks have the same gradients and the same parameters.

Each owner steps on its own copy of the gradients.  If nobody averaged them, every owner trains on another batch, without
a sign of it.  Each owner then sends its values to all: if parameters differ at first, the model becomes a mixture.  So ranks
compare digests of the bits through the store, at the first step; nothing in the steps after.

Equal bits are what all-reduces give (every rank gets the sums that one rank has taken), but not what all programs do
with them: ranks on unlike processors clip with another last bit.  Gradients that are not equal are therefore compared by
random projections, and such small differences are let pass with a warning: owners' values are sent to all anyway.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence

import torch

from shardwise.comm.board import Board
from shardwise.comm.digest import Sketch, digest_of, sample_of
from shardwise.errors import DesyncError
from shardwise.optim.owned_gradient import OwnedGradient
from shardwise.zero.local_pieces import flat_like
from shardwise.zero.share import Share

logger = logging.getLogger(__name__)


def are_same(share: Share, board: Board, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> bool:
    """Return True if all ranks have the same gradients, False if nobody has any (so that nothing is known).  Collective.

    ``has_inputs`` False: a rank in ``Join`` that makes no gradients of its own; it is left out.  ``only_warn``: for
    gradients of a closure, which torch's class takes as they are.
    Raises: DesyncError on every rank, naming the first parameter that differs.
    """
    gradients = [_gradient(param) if has_inputs else None for param in share.params]
    is_known, rows = _compare(gradients, f"the gradients of {what}", board, has_inputs)
    complaint = _judge(share, f"{what}: gradients", rows)
    if complaint:
        text = (
            f"{what}: gradients differ between ranks: that of {complaint}. Each owner would train on its own: "
            "wrap the model in DistributedDataParallel, or call reduce_gradients() before step()"
        )
        if not only_warn:
            raise DesyncError(text)
        logger.warning("%s. A closure's gradients are taken as they are", text)
    return is_known


def check_same_params(share: Share, moving: Sequence[bool], board: Board, what: str) -> None:
    """Check that all ranks have the same parameters (of large ones, a sample); skip those not ``moving``.  Collective.

    Raises: DesyncError on every rank, naming the first parameter that differs.
    """
    params = [
        sample_of(flat_like(param.detach(), param)) if moves else None
        for param, moves in zip(share.params, moving, strict=True)
    ]
    complaint = _judge(share, f"{what}: parameters", _compare(params, f"the parameters before {what}", board)[1])
    if complaint:
        raise DesyncError(
            f"{what}: parameters differ between ranks before it: {complaint}. Each owner would send its own to all, so that "
            "the model becomes a mixture of them: build the model with one seed on all ranks, load weights on every rank, or "
            "wrap the model in DistributedDataParallel, which broadcasts those of the first rank"
        )


def _compare(
    tensors: Sequence[torch.Tensor | None], what: str, board: Board, takes_part: bool = True
) -> tuple[bool, dict[int, dict[int, Sketch | None]]]:
    """Return whether ranks had tensors to compare, and the sketches of those that differ, by index and rank."""
    digests = [None if tensor is None else digest_of(tensor) for tensor in tensors]
    summary = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if takes_part else ""
    texts = board.gather(f"comparing {what}", json.dumps([summary, any(digests)]))
    summaries, are_there = zip(*(json.loads(text) for text in texts), strict=True)
    is_known = any(are_there) and sum(map(bool, summaries)) > 1
    if len({found for found in summaries if found}) <= 1:
        return is_known, {}
    every = [json.loads(text) for text in board.gather(f"comparing each of {what}", json.dumps(digests))]
    unlike = [index for index, column in enumerate(zip(*every, strict=True)) if len(set(column)) > 1]
    sketches = {index: Sketch.of(tensor).told for index in unlike if (tensor := tensors[index]) is not None}
    texts = board.gather(f"comparing some of {what}", json.dumps(sketches))
    rows = [{rank: _sketch_in(text, index) for rank, text in enumerate(texts) if summaries[rank]} for index in unlike]
    return is_known, dict(zip(unlike, rows, strict=True))


def _sketch_in(text: str, index: int) -> Sketch | None:
    found = json.loads(text).get(str(index))
    return None if found is None else Sketch(*found)


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    gradient = param.grad
    if gradient is None or isinstance(gradient, OwnedGradient):
        return None
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce()
        return torch.cat([gradient.values().reshape(-1).double(), gradient.indices().reshape(-1).double()])
    return flat_like(gradient.detach(), param)


def _judge(share: Share, what: str, rows: Mapping[int, dict[int, Sketch | None]]) -> str:
    """Return a text about the first tensor that differs; "" if none does, with a warning if rounding differs."""
    largest = 0.0
    for index, row in rows.items():
        present = [sketch for sketch in row.values() if sketch is not None]
        lacking = [piece.owner for piece in share.by_param[index] if row.get(piece.owner, present[0]) is None]
        apart = [present[0].distance(sketch) for sketch in present]
        if lacking or not all(distance <= present[0].tolerance for distance in apart):  # nan is far, too
            listing = ", ".join(
                f"none on rank {rank}" if sketch is None else f"of norm {sketch.norm:.6g} on rank {rank}"
                for rank, sketch in list(row.items())[:8]
            )
            owners = f" (rank {', '.join(map(str, lacking))} owns it)" if lacking else ""
            return f"parameter {index} of shape {tuple(share.params[index].shape)} is {listing}{owners}"
        largest = max(largest, *apart)
    if largest:
        logger.warning(
            "%s are not the same to the bit on all ranks; they differ by %.1e of their norm at most", what, largest
        )
    return ""
