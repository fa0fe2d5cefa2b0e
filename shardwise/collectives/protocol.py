"""What units ask of a communicator.

A collective is asked for by an object that knows where bytes come from and go to; the transport decides how they travel:
through one packed buffer, with one equal section per rank in rank order, or in parts, straight between full tensors and
sections.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.formatting import format_ranks
from shardwise.layout import Bucket

# ---- A mark behind what is summed: ranks that sum different things hear of it from the sum, at no message more.
# A backend pairs all-reduces by their number in the group and knows nothing of what is in them: a rank that has left one out
# mixes its next one with the others' last, and goes on with numbers of nobody.

MOST_RANKS = 256  # so many marks are added up exactly, and one that differs shows in the mean
_LARGEST = 0xFFF


@dataclass(frozen=True, slots=True)
class ReductionChecksum:
    """What this rank says about a sum.

    Attributes:
        whole: 1-D, what is summed, with one element behind it for the mark.  label: what is in it.
        number: how many sums of these parameters came before, also those that were left out by choice.
    """

    whole: torch.Tensor
    label: str
    number: int

    @property
    def _value(self) -> int:
        return zlib.crc32(f"{self.label} {self.number}".encode()) & _LARGEST

    def put(self) -> torch.Tensor:
        """Write the mark; return what to sum in place of the section alone."""
        self.whole[-1] = self._value
        return self.whole

    def check(self, scale: float, ranks: Sequence[int], mine: int) -> None:
        """Raise unless what was summed over global ``ranks``, times ``scale``, is of the same thing on all of them.

        Raises: RuntimeError, as a backend does of a group whose ranks cannot be paired any more; it is explained like one.
        """
        mean = float(self.whole[-1]) / scale / len(ranks)
        if abs(mean - self._value) < 0.4 / len(ranks):
            return
        raise RuntimeError(sums_something_else(self.label, self.number, mine, [rank for rank in ranks if rank != mine]))


def sums_something_else(label: str, number: int, mine: int, others: Sequence[int]) -> str:
    """Say that one of ``others`` sums something else than what ``label`` names, which rank ``mine`` sums.  Ranks are global."""
    return (
        f"rank {mine} sums gradients of {label} with its replicas, {format_ranks(others)}, as number {number + 1}, and one "
        "of them sums something else: it has left a sum out, or has other gradients (set_requires_all_reduce and the "
        "microbatches must be the same on all replicas)"
    )


# ---- What users put in the place of a backend's collectives.


class AllGatherFunction(Protocol):
    """A user's all-gather, as torch's ``set_custom_all_gather`` takes it."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for a result."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""
        ...


class ReduceScatterFunction(Protocol):
    """A user's reduce-scatter, as torch's ``set_custom_reduce_scatter`` takes it."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer."""
        ...

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over ranks and leave this rank's section in ``output_tensor``."""
        ...


@dataclass(slots=True)
class CustomCollectives:
    """What a user wants of the collectives of some parameters.

    Attributes:
        all_gather, reduce_scatter: what to call in place of the backend's.
        allocates_from_group: staging buffers come from the process group's own allocator, where its backend has one.
        reduce_group: where reduce-scatters run, beside all-gathers.
    """

    all_gather: AllGatherFunction | None = None
    reduce_scatter: ReduceScatterFunction | None = None
    allocates_from_group: bool = False
    reduce_group: dist.ProcessGroup | None = None


class Handle(Protocol):
    """A launched collective.

    Attributes:
        holds_input: what it sends stays allocated until :meth:`wait`.
    """

    holds_input: bool

    def is_done(self) -> bool:
        """True if :meth:`wait` would not block, as far as that is known."""
        ...

    def wait(self) -> None:
        """Order the current stream after it (on CPU: block), deliver its result, give its buffers back; once."""
        ...

    def cancel(self) -> None:
        """Forget the result and give the buffers back; waits only if the backend may still write to them.

        Buffers of a collective that does not end are never given back.
        """
        ...


class NamedTensor(Protocol):
    """A tensor that travels, by identity.  ``fqn``: its name in its unit."""

    fqn: str


class SectionContents(Protocol):
    """What lies in a section."""

    @property
    def layout(self) -> Bucket:
        """Where the part of every tensor lies."""
        ...

    @property
    def params(self) -> Sequence[NamedTensor]:
        """Whose parts these are, in the order of the layout."""
        ...


class SumContents(SectionContents, Protocol):
    """What lies in a section that is summed.

    Attributes:
        number: how many sums of these parameters came before, also those that were left out by choice.
        mark: by which ranks that sum different things hear of it where the backend sums; None: they do not.
    """

    number: int
    mark: ReductionChecksum | None

    @property
    def label(self) -> str:
        """What is summed, the same on every rank."""
        ...


class BucketEnds(Protocol):
    """One bucket of an all-gather, for transports that move parts.

    Attributes:
        layout: where parts lie in a section.
        dtype: of the section as it is stored.  full_dtype: of the full parameters, which is sent.
    """

    layout: Bucket
    dtype: torch.dtype
    full_dtype: torch.dtype

    @property
    def params(self) -> Sequence[NamedTensor]:
        """Whose parts these are, in the order of the layout."""
        ...

    @property
    def number(self) -> int | None:
        """Which of the sections that the ranks of a host read from each other this is; None: none of them."""
        ...

    def section(self) -> torch.Tensor:
        """Return this rank's section in ``full_dtype``: 1-D, ``layout.section_numel`` elements."""
        ...

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the full parameter that ``rank``'s part goes to."""
        ...

    def lose_full(self) -> object:
        """Take the memory of :meth:`full_parts` out of use, because somebody may still write to it; return what keeps it."""
        ...


class GatherEnds(Protocol):
    """The two ends of an all-gather."""

    def buckets(self) -> Sequence[BucketEnds]:
        """Return the buckets if they can travel in parts; nothing if the packed way is the only one."""
        ...

    def shard(self) -> torch.Tensor:
        """Return this rank's section: 1-D, contiguous; every rank's has the same dtype and length."""
        ...

    def deliver(self, packed: torch.Tensor) -> None:
        """Take the result: 1-D, ``size * len(shard)`` elements, valid only during the call."""
        ...


class ScatterEnds(Protocol):
    """The two ends of a reduce-scatter."""

    @property
    def layout(self) -> Bucket:
        """Where the parts of every gradient lie in a section."""
        ...

    @property
    def params(self) -> Sequence[NamedTensor]:
        """Whose gradients these are, in the order of the layout."""
        ...

    @property
    def label(self) -> str:
        """What is reduced, the same on every rank: transports that can, compare it."""
        ...

    @property
    def section_numel(self) -> int:
        """Elements of one section."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        ...

    def fill(self, packed: torch.Tensor) -> None:
        """Write every section of the 1-D buffer ``packed`` (``size * section_numel`` elements)."""
        ...

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the gradient that belongs to ``rank``."""
        ...

    def drop(self) -> None:
        """Forget the gradients: their parts are all copied."""
        ...

    def target(self) -> torch.Tensor:
        """Return where this rank's reduced section is wanted: 1-D, ``section_numel`` elements; the same tensor every time."""
        ...

    def deliver(self, section: torch.Tensor) -> None:
        """Take this rank's reduced section: ``target()``, or another tensor, which is copied."""
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """How a sum over ranks becomes the wanted mean.

    Attributes:
        divisor: what the sum is divided by; None asks for the mean over the group that carries it out.
        sum_only: the transport may use nothing but sums; scaling is done beside the collective.
        split: divide by a power of two near sqrt(divisor) before the sum and by the rest after, so that neither fp16's
            range nor its small numbers are lost.
    """

    divisor: float | None = None
    sum_only: bool = False
    split: bool = False


class Communicator(Protocol):
    """One group of ranks along a mesh axis."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        ...

    def all_gather(self, ends: GatherEnds) -> Handle:
        """Launch; the result is delivered by ``wait``."""
        ...

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Launch; the result is delivered by ``wait``."""
        ...

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Handle:
        """Launch, in place.  ``contents``: of the 1-D ``tensor``."""
        ...
