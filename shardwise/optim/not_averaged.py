"""Plain parameters whose gradients nothing averages: the model was sharded by no API, and each rank trains one of its own."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.consistency.agreement import StoreExchange, open_exchange
from shardwise.consistency.store import Sketch, sample_of
from shardwise.errors import TransportError

logger = logging.getLogger(__name__)

_SAMPLE_NUMEL = 4096  # of each gradient
_MOST_STEPS = 1024  # after which ranks have begun at other times, and are not compared


class GradientComparison:
    """Compare the gradients of a rank's first step with those of the next rank, without waiting for it.

    Ranks may have parameters of their own (stages, experts, local steps), even with the same names and shapes, so
    gradients that differ are no error.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._mine: tuple[str, Sketch] | None = None
        self._exchange: StoreExchange | None = None

    @classmethod
    def of(cls, params: Iterable[torch.Tensor]) -> GradientComparison | None:
        """Return a comparison; None if parameters may be parts of a sharded one, or if there is no other rank."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        is_plain = all(type(param) in (torch.Tensor, nn.Parameter) for param in params)
        is_job = dist.get_backend() != "fake" and not torch_private.are_threads()
        return cls() if is_plain and is_job else None

    def after_step(self, params: Mapping[str, torch.Tensor]) -> bool:
        """Post this rank's gradients, or compare them; return True until that is done.  Later steps look seldom."""
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):
            return True
        with suppress(TransportError):  # the process that keeps the store may have ended
            return self._compare(params) and self._num_steps < _MOST_STEPS
        return False

    def _compare(self, params: Mapping[str, torch.Tensor]) -> bool:
        if self._mine is None or self._exchange is None:
            self._mine = _sketch_of(params)
            if self._mine is None:
                return True
            assert dist.group.WORLD is not None
            self._exchange = open_exchange(dist.group.WORLD, "gradients of plain parameters")
            self._exchange.post("gradients", json.dumps([self._mine[0], self._mine[1].told]))
        other = (self._exchange.rank + 1) % self._exchange.size
        text = self._exchange.collect("gradients", [other], 0.0).get(other)
        if text is None:
            return True
        names, sketch = json.loads(text)
        theirs, mine = Sketch(*sketch), self._mine[1]
        if names == self._mine[0] and not mine.distance(theirs) <= mine.tolerance:
            logger.warning(
                "ShardedOptimizer: the gradients of plain parameters differ between ranks (at the first step: of norm %.6g on "
                "rank %d and %.6g on rank %d), and nothing averages them, so that each rank trains a model of its own. Call "
                "fully_shard or replicate on the model before the optimizer is made, or wrap it in DistributedDataParallel. "
                "Ranks that are to have parameters of their own (stages, experts, local steps) need nothing",
                *(mine.norm, self._exchange.rank, theirs.norm, other),
            )
        return False


def _sketch_of(params: Mapping[str, torch.Tensor]) -> tuple[str, Sketch] | None:
    """Return a digest of names and shapes, and a sketch of the gradients; None if there is no dense one."""
    samples: list[torch.Tensor] = []
    facts: list[str] = []
    for name, param in params.items():
        gradient = param.grad
        if gradient is not None and gradient.layout is torch.strided:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            samples.append(sample_of(real.detach(), _SAMPLE_NUMEL).to("cpu", torch.float32))
            facts.append(f"{name} {tuple(param.shape)}")
    if not samples:
        return None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16], Sketch.of(torch.cat(samples))
