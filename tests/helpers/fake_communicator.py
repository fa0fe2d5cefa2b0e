"""The smallest communicator there can be: what the contract of communicators means, said in as few lines as possible."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.collectives.routes import GatherEnds, Scale, ScatterEnds, SectionContents


class Launched:
    """A collective that is over: its result waits to be delivered, once, or to be forgotten."""

    holds_input = False

    def __init__(self, deliver: Callable[[], object]) -> None:
        self._deliver: Callable[[], object] | None = deliver

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()

    def cancel(self) -> None:
        self._deliver = None


class FakeCommunicator:
    """Every rank tells every other all it has, as pickled tensors; each adds up what is for it, in the order of ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def _from_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [mine] * self.size
        dist.all_gather_object(found, mine.clone(), self.group)
        return found

    def _sum(self, parts: list[torch.Tensor], scale: Scale) -> torch.Tensor:
        return torch.stack(parts).sum(0) / (scale.divisor or self.size)

    def all_gather(self, ends: GatherEnds) -> Launched:
        packed = torch.cat(self._from_all(ends.shard()))
        return Launched(lambda: ends.deliver(packed))

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Launched:
        packed = torch.zeros(self.size * ends.section_numel, dtype=ends.dtype)
        ends.fill(packed)
        ends.drop()
        section = self._sum([each.chunk(self.size)[self.rank] for each in self._from_all(packed)], scale)
        return Launched(lambda: ends.deliver(section))

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SectionContents | None = None) -> Launched:
        total = self._sum(self._from_all(tensor), scale)
        return Launched(lambda: tensor.copy_(total))
