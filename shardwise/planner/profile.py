"""What one forward and backward of a model does on one rank: values, made by a dry run, read by everything that plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.plan.grouping import Child
from shardwise.plan.visits import Edge

ROOT = 0  # the number of the block that holds what is in no repeated block


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """One parameter.

    Attributes:
        name: its path in the model.
        shape: of the whole parameter, in elements.
        dtype: name of the dtype that it is kept in; ``itemsize``: bytes of an element in it.
        is_floating: mixed precision casts it.
        is_trainable: it gets a gradient.
        block: number of the block that it belongs to; ``ROOT``: of none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_floating: bool
    is_trainable: bool
    block: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter as it is kept."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed in a stretch of a step.

    Attributes:
        flops: floating-point operations of matrix products and attention.
        traffic_bytes: read and written by the operations that are bound by memory.
        num_ops: operations that the host launches.
        ops: (number of the operation in ``Profile.op_names``, how often it runs).
        ring_bytes, num_rings: of collectives among ranks that split a block: an all-reduce is two rings over its bytes.
    """

    flops: float = 0.0
    traffic_bytes: float = 0.0
    num_ops: int = 0
    ops: tuple[tuple[int, int], ...] = ()
    ring_bytes: float = 0.0
    num_rings: int = 0


@dataclass(frozen=True, slots=True)
class StepMark:
    """A moment of the step: an edge of a block, or (``edge`` None) the arrival of the gradient of parameter ``param``."""

    edge: Edge | None
    block: int = ROOT
    param: int = -1


@dataclass(frozen=True, slots=True)
class Stretch:
    """What follows a mark, up to the next one.

    Attributes:
        mark: where it begins.
        peak_bytes: most bytes of activations and temporaries at one time; parameters, inputs and gradients that have
            arrived do not count.
        left_bytes: of them at its end.
    """

    mark: StepMark
    peak_bytes: int
    left_bytes: int
    work: Work


@dataclass(frozen=True, slots=True)
class Profile:
    """A model and one forward and backward of it on one rank, as a dry run has seen them.

    Attributes:
        model: name of its class.
        params: its distinct parameters.
        buffer_bytes: its distinct buffers.  input_bytes: of a microbatch.
        blocks: paths of the root ("", number ``ROOT``) and of the repeated blocks, in module order.
        families: for each module that has repeated blocks, its children: what grouping reads.
        stretches: the step in order.
        saved_bytes: for each block, what autograd keeps of its forward for its backward.
        op_names: operations by number.
        precision: "fp32", "bf16" (parameters are cast) or "autocast".  recomputes: blocks are computed again in backward.
        batch: sequences, or rows, of a microbatch.
        tensor: ranks that split every block: parameters and work are those of the first of them.
    """

    model: str
    params: tuple[ParamFacts, ...]
    buffer_bytes: int
    input_bytes: int
    blocks: tuple[str, ...]
    families: tuple[tuple[Child, ...], ...]
    stretches: tuple[Stretch, ...]
    saved_bytes: tuple[int, ...]
    op_names: tuple[str, ...]
    precision: str
    recomputes: bool
    batch: int
    tensor: int = 1

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for param in self.params)

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward and backward on one rank, recomputation included."""
        return sum(stretch.work.flops for stretch in self.stretches)

    def for_batch(self, batch: int) -> Profile:
        """Return the profile of another microbatch: activations and work grow with the batch, parameters do not."""
        factor = batch / self.batch
        stretches = tuple(_scaled(stretch, factor) for stretch in self.stretches)
        saved = tuple(int(num_bytes * factor) for num_bytes in self.saved_bytes)
        inputs = int(self.input_bytes * factor)
        return replace(self, stretches=stretches, saved_bytes=saved, input_bytes=inputs, batch=batch)


def _scaled(stretch: Stretch, factor: float) -> Stretch:
    # Operations that were timed one by one are not of this size any more: the roofline speaks for them.
    done = stretch.work
    work = Work(
        done.flops * factor, done.traffic_bytes * factor, done.num_ops, (), done.ring_bytes * factor, done.num_rings
    )
    return Stretch(stretch.mark, int(stretch.peak_bytes * factor), int(stretch.left_bytes * factor), work)


def params_by_block(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Return, for each block, the numbers of its parameters, in the order of the model."""
    found: list[list[int]] = [[] for _ in profile.blocks]
    for number, param in enumerate(profile.params):
        found[param.block].append(number)
    return tuple(tuple(numbers) for numbers in found)
