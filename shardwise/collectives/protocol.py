"""What units need from a communicator.

A collective is launched with its *ends*: an object that knows where bytes come from and where they go.  The transport
decides how they travel: through one packed buffer with one equal section per rank in rank order, or in parts, straight
between full tensors and sections.  ``fsdp/flat_buffer.py::Delivery`` has the ends of an all-gather,
``fsdp/gradients.py::Reduction`` those of a reduce-scatter and an all-reduce.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwise.collectives.buffer_pool import PooledBuffer
from shardwise.formatting import format_ranks
from shardwise.layout import Bucket

# ---- A checksum after the summed elements: the sum itself shows when ranks sum different things, without an extra
# message.
# A backend pairs all-reduces by their sequence number in the group and does not know their contents: after a rank has
# skipped one, its next sum mixes with the others' last one, and training would continue with meaningless numbers.

MOST_RANKS = 256  # the sum of that many checksums is exact, so that a single one that differs shows in the mean
_LARGEST = 0xFFF


@dataclass(frozen=True, slots=True)
class ReductionChecksum:
    """This rank's description of a sum, as a number that is summed too.

    Attributes:
        whole: 1-D: the summed elements, then one element for the checksum.  label: what they are.
        number: how many sums of these parameters came before, including those that were skipped on purpose.
    """

    whole: torch.Tensor
    label: str
    number: int

    @property
    def _value(self) -> int:
        return zlib.crc32(f"{self.label} {self.number}".encode()) & _LARGEST

    def put(self) -> torch.Tensor:
        """Write the checksum; return the tensor to sum instead of the section alone."""
        self.whole[-1] = self._value
        return self.whole

    def check(self, scale: float, ranks: Sequence[int], mine: int) -> None:
        """Raise unless all global ``ranks`` have summed the same thing.  ``scale``: the factor that the sum was multiplied by.

        Raises: RuntimeError, as a backend raises it when the ranks of a group cannot be paired any more; the same code
        explains it.
        """
        mean = float(self.whole[-1]) / scale / len(ranks)
        if abs(mean - self._value) < 0.4 / len(ranks):
            return
        raise RuntimeError(sums_something_else(self.label, self.number, mine, [rank for rank in ranks if rank != mine]))


def sums_something_else(label: str, number: int, mine: int, others: Sequence[int]) -> str:
    """Return the error text: one of ``others`` does not sum ``label``, which rank ``mine`` sums.  Ranks are global."""
    return (
        f"rank {mine} sums gradients of {label} with its replicas, {format_ranks(others)}, as number {number + 1}, and one "
        "of them sums something else: it has left a sum out, or has other gradients (set_requires_all_reduce and the "
        "microbatches must be the same on all replicas)"
    )


# ---- Collectives of the user, in place of a backend's.


class CustomCollective(Protocol):
    """A user's all-gather or reduce-scatter, as torch's ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` take it.

    Attributes:
        __call__: ``(output_tensor, input_tensor, group, async_op=)``, which gathers the input of all ranks into the output,
            or ``(output_tensor, input_tensor, group, op, async_op=)``, which leaves this rank's section of the reduced input
            in it; returns the work, or None.
    """

    __call__: Callable[..., dist.Work | None]

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer."""
        ...


@dataclass(slots=True)
class CustomCollectives:
    """The user's choices for the collectives of some parameters.

    Attributes:
        all_gather, reduce_scatter: functions to call instead of the backend's.
        allocates_from_group: allocate staging buffers from the process group's own allocator if its backend has one.
        reduce_group: the group that runs reduce-scatters, so that they overlap all-gathers.
    """

    all_gather: CustomCollective | None = None
    reduce_scatter: CustomCollective | None = None
    allocates_from_group: bool = False
    reduce_group: dist.ProcessGroup | None = None


class Handle(Protocol):
    """A launched collective, like torch's ``Work``.

    Attributes:
        holds_input: its input stays allocated until :meth:`wait`.
    """

    holds_input: bool

    def is_done(self) -> bool:
        """True if :meth:`wait` is known not to block."""
        ...

    def wait(self) -> None:
        """Order the current stream after it (on CPU: block), deliver its result, release its buffers.  Call once."""

    def cancel(self) -> None:
        """Drop the result and release the buffers; wait only if the backend may still write to them.

        Buffers of a collective that does not end are never released.
        """


_Ends = TypeVar("_Ends")


class OnceHandle(Generic[_Ends]):
    """A handle that ends once: by :meth:`finish` when it is waited for, by :meth:`drop` when it is cancelled.

    Either gets the ends that the handle was launched with, and before that the handle lets them go: they keep gradients.
    """

    __slots__ = ("_ends",)
    holds_input = True

    def __init__(self, ends: _Ends) -> None:
        self._ends: _Ends | None = ends

    def is_done(self) -> bool:
        return self._ends is None

    def wait(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            self.finish(ends)

    def cancel(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            self.drop(ends)

    def finish(self, ends: _Ends) -> None:
        """Wait, deliver to ``ends``, release the buffers."""
        raise NotImplementedError

    def drop(self, ends: _Ends) -> None:
        """Release the buffers, as :meth:`Handle.cancel` says."""
        raise NotImplementedError


class NamedTensor(Protocol):
    """A tensor in a collective, compared by identity.  ``fqn``: its name in its unit."""

    fqn: str


class SectionContents(Protocol):
    """The contents of a section."""

    @property
    def layout(self) -> Bucket:
        """Where the part of every tensor lies."""
        ...

    @property
    def params(self) -> Sequence[NamedTensor]:
        """The tensors of these parts, in the order of the layout."""
        ...


class SumContents(SectionContents, Protocol):
    """The contents of a section that is summed.

    Attributes:
        number: how many sums of these parameters came before, including those that were skipped on purpose.
        checksum: by which ranks notice that they sum different things if the backend sums; None for no check.
    """

    number: int
    checksum: ReductionChecksum | None

    @property
    def label(self) -> str:
        """What is summed; the same on every rank."""
        ...


class BucketEnds(SectionContents, Protocol):
    """One bucket of an all-gather, for transports that move parts.

    Attributes:
        dtype: of the stored section.  full_dtype: of the full parameters; it is sent in this dtype.
    """

    dtype: torch.dtype
    full_dtype: torch.dtype

    @property
    def number(self) -> int | None:
        """Index among the sections that the ranks of a host read from each other; None if it is not one of them."""
        ...

    def section(self) -> torch.Tensor:
        """Return this rank's section in ``full_dtype``: 1-D, ``layout.section_numel`` elements."""
        ...

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the full parameter that receives ``rank``'s part."""
        ...


class GatherEnds(Protocol):
    """The two ends of an all-gather."""

    @property
    def take_over(self) -> Callable[[PooledBuffer], bool] | None:
        """Makes a pooled buffer with the result the memory of the full parameter; None: :meth:`deliver` must copy it.

        It returns False, with nothing done, if the parameter has memory already.
        """
        ...

    def buckets(self) -> Sequence[BucketEnds]:
        """Return the buckets if they can travel in parts; nothing if they must be packed."""
        ...

    def shard(self) -> torch.Tensor:
        """Return this rank's section: 1-D, contiguous, of the same dtype and length on every rank."""
        ...

    def deliver(self, packed: torch.Tensor) -> None:
        """Use the result: 1-D, ``size * len(shard)`` elements, valid only during the call."""


class ScatterEnds(SectionContents, Protocol):
    """The two ends of a reduce-scatter."""

    @property
    def label(self) -> str:
        """What is reduced; the same on every rank.  Transports that can compare contents compare it."""
        ...

    @property
    def section_numel(self) -> int:
        """Number of elements of one section."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        ...

    def fill(self, packed: torch.Tensor) -> None:
        """Write every section of the 1-D buffer ``packed`` (``size * section_numel`` elements)."""

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the gradient that belongs to ``rank``."""
        ...

    def drop(self) -> None:
        """Release the gradients: all their parts are copied."""

    def target(self) -> torch.Tensor:
        """Return the destination of this rank's reduced section: 1-D, ``section_numel`` elements; always the same tensor."""
        ...

    def deliver(self, section: torch.Tensor) -> None:
        """Use this rank's reduced section: ``target()``, or another tensor, which is copied."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a sum over ranks becomes a mean.

    Attributes:
        divisor: the divisor of the sum; None for the mean over the group that computes it.
        sum_only: the transport may use plain sums only; scaling is separate from the collective.
        split: divide by a power of two near sqrt(divisor) before the sum and by the rest after it, so that fp16 neither
            overflows nor underflows.
        add: ``add(sections, out)`` adds the sections of all ranks in an order of its own; None: they are added in rank order.
    """

    divisor: float | None = None
    sum_only: bool = False
    split: bool = False
    add: Callable[[Sequence[torch.Tensor], torch.Tensor], None] | None = None


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The steps of a scaled reduction: divide by ``before`` (None: do not), reduce by ``op``, divide by ``after``."""

    before: float | None
    op: Any
    after: float | None


def resolve_scale(scale: Scale, size: int) -> Arithmetic:
    """Return the arithmetic of ``scale`` for a group of ``size`` ranks."""
    divisor = float(size) if scale.divisor is None else scale.divisor
    if scale.split:
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Arithmetic(before if before != 1 else None, dist.ReduceOp.SUM, divisor / before)
    if divisor == 1:
        return Arithmetic(None, dist.ReduceOp.SUM, None)
    if divisor == size and not scale.sum_only:
        return Arithmetic(None, dist.ReduceOp.AVG, None)
    return Arithmetic(None, dist.ReduceOp.SUM, divisor)
