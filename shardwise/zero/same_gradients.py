"""Are the gradients that ranks are about to step on the same?  Asked once, where nothing has averaged them before our eyes.

Each owner steps on its own copy of the gradients.  If nobody averaged them, every owner trains on another batch, without
a sign of it.  So ranks compare digests of the bits through the store, at the first step; nothing in the steps after.

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
from shardwise.comm.digest import Sketch, digest_of
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
    digests = [None if gradient is None else digest_of(gradient) for gradient in gradients]
    summary = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if has_inputs else ""
    texts = board.gather(f"comparing the gradients of {what}", json.dumps([summary, any(digests)]))
    summaries, are_there = zip(*(json.loads(text) for text in texts), strict=True)
    if len({found for found in summaries if found}) <= 1:
        return any(are_there) and sum(map(bool, summaries)) > 1
    every = [json.loads(text) for text in board.gather(f"comparing each gradient of {what}", json.dumps(digests))]
    unlike = [index for index, column in enumerate(zip(*every, strict=True)) if len(set(column)) > 1]
    sketches = {index: Sketch.of(gradient).told for index in unlike if (gradient := gradients[index]) is not None}
    texts = board.gather(f"comparing some gradients of {what}", json.dumps(sketches))
    rows = [{rank: _sketch_in(text, index) for rank, text in enumerate(texts) if summaries[rank]} for index in unlike]
    _judge(share, what, dict(zip(unlike, rows, strict=True)), only_warn)
    return True


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


def _judge(share: Share, what: str, rows: Mapping[int, dict[int, Sketch | None]], only_warn: bool) -> None:
    largest = 0.0
    for index, row in rows.items():
        present = [sketch for sketch in row.values() if sketch is not None]
        lacking = [piece.owner for piece in share.by_param[index] if row.get(piece.owner, present[0]) is None]
        apart = [present[0].distance(sketch) for sketch in present]
        if lacking or not all(distance <= present[0].tolerance for distance in apart):  # nan is far, too
            _complain(f"parameter {index} of shape {tuple(share.params[index].shape)}", what, row, lacking, only_warn)
            return
        largest = max(largest, *apart)
    if largest:
        text = "%s: gradients are not the same to the bit on all ranks; they differ by %.1e of their norm at most"
        logger.warning(text, what, largest)


def _complain(name: str, what: str, row: Mapping[int, Sketch | None], lacking: Sequence[int], only_warn: bool) -> None:
    listing = ", ".join(
        f"none on rank {rank}" if sketch is None else f"of norm {sketch.norm:.6g} on rank {rank}"
        for rank, sketch in list(row.items())[:8]
    )
    owners = f" (rank {', '.join(map(str, lacking))} owns it)" if lacking else ""
    text = (
        f"{what}: gradients differ between ranks: that of {name} is {listing}{owners}. Each owner would train on its own: "
        "wrap the model in DistributedDataParallel, or call reduce_gradients() before step()"
    )
    if not only_warn:
        raise DesyncError(text)
    logger.warning("%s. A closure's gradients are taken as they are", text)
