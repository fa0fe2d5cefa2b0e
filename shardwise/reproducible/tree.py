"""The tree along which microbatches are summed: the same for every number of ranks.

Its nodes are the aligned intervals [k * 2**j, (k + 1) * 2**j) of microbatches; what is left at the top is added from left to
right.  A binary counter adds a stream of microbatches in this order: two neighbours of one size become one twice as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shardwise.data.order import own_microbatches

_Value = TypeVar("_Value")


class Node(NamedTuple):
    """The microbatches ``first`` to ``first + size - 1``; ``size`` is a power of two that divides ``first``."""

    first: int
    size: int


def nodes_of(first: int, count: int) -> tuple[Node, ...]:
    """Return the largest nodes that together are ``count`` microbatches from ``first`` on, from left to right."""
    found: list[Node] = []
    end = first + count
    while first < end:
        size = first & -first or 1 << (end - 1).bit_length()
        while first + size > end:
            size //= 2
        found.append(Node(first, size))
        first += size
    return tuple(found)


class Counter(Generic[_Value]):
    """Partial sums of consecutive microbatches, at most one per node of :func:`nodes_of`.

    Args:
        add: ``add(left, right)`` returns the sum of two neighbours.
        start: the first microbatch.

    Attributes:
        stop: the microbatch after the last one.
    """

    def __init__(self, add: Callable[[_Value, _Value], _Value], start: int = 0) -> None:
        self._add, self.stop = add, start
        self.parts: list[tuple[Node, _Value]] = []

    def push(self, node: Node, value: _Value) -> None:
        """Append the sum of ``node``, which starts where the last one ends."""
        self.stop = node.first + node.size
        while self.parts and self.parts[-1][0].size == node.size and not self.parts[-1][0].first % (2 * node.size):
            left, its = self.parts.pop()
            node, value = Node(left.first, 2 * node.size), self._add(its, value)
        self.parts.append((node, value))


@dataclass(slots=True)
class BatchPlace:
    """Which microbatches of a step this rank computes, and which of them it computes now.

    Ranks are counted replica by replica, as the data-parallel mesh lists them.

    Attributes:
        num_microbatches: of one step, of all ranks together.
        num_shards, num_replicas: sizes of the axes of the data-parallel mesh.  shard, replica: this rank's coordinates.
        number: the microbatch that runs; None outside of :meth:`Reproducible.microbatches`.
    """

    num_microbatches: int
    num_shards: int
    num_replicas: int
    shard: int
    replica: int
    number: int | None = None

    def __post_init__(self) -> None:
        own_microbatches(self.num_microbatches, 0, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.num_shards * self.num_replicas

    @property
    def per_rank(self) -> int:
        """Number of microbatches of one rank."""
        return self.num_microbatches // self.num_ranks

    @property
    def own(self) -> range:
        """The microbatches of this rank."""
        return own_microbatches(self.num_microbatches, self.replica * self.num_shards + self.shard, self.num_ranks)

    def of_shards(self) -> list[tuple[Node, ...]]:
        """Return the nodes of every rank of this replica."""
        first = self.replica * self.num_shards
        return [nodes_of((first + rank) * self.per_rank, self.per_rank) for rank in range(self.num_shards)]

    def of_replicas(self) -> list[tuple[Node, ...]]:
        """Return the nodes of every replica."""
        count = self.num_shards * self.per_rank
        return [nodes_of(replica * count, count) for replica in range(self.num_replicas)]

    def sent(self, num_bytes: int) -> int:
        """Return the bytes that a rank sends per step, if a shard's gradients have ``num_bytes``; as a ring all-reduces."""
        of_shards, of_replicas = most_parts(self.of_shards()), most_parts(self.of_replicas())
        slices = (of_replicas + 2) * (self.num_replicas - 1) / self.num_replicas
        return round(num_bytes * (of_shards * (self.num_shards - 1) + slices))

    def held(self, num_bytes: int) -> int:
        """Return the bytes of this rank's partial sums, one of which is being added."""
        most = 1 + max(len(nodes_of(self.own[0], count)) for count in range(self.per_rank))
        return num_bytes * self.num_shards * most


def most_parts(nodes: Sequence[tuple[Node, ...]]) -> int:
    """Return the largest number of nodes that one rank has."""
    return max(map(len, nodes))
