"""The order of samples: computed from the seed, the epoch and the position, and never stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from shardwise.errors import ConfigError, StateError
from shardwise.one_host import set_seed

Numbers = NDArray[np.int64]
_NUMBER = int | float | Fraction | np.integer | np.floating
_MOST_ROUNDS = 8  # each one adds to a half of the number what a hash makes of the other half
_FEW_ROUNDS, _LARGE = 4, 1 << 16  # of lengths beyond: halves of few values need more
_CHUNK = 8192  # samples at most whose numbers are computed at once: numpy takes 0.4 ms for them, and 0.1 ms for one
_MOST_EXACT = 1 << 62  # larger products are computed as Python's integers


def own_microbatches(num_microbatches: int, rank: int, num_ranks: int) -> range:
    """Return the consecutive microbatches of a step that ``rank`` computes.  Raises: ConfigError if ranks cannot share
    equally, and for a rank that is none of them.

    Example:
        >>> own_microbatches(12, 1, 3)
        range(4, 8)
    """
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"rank is {rank}, expected one of range({num_ranks}): num_ranks is {num_ranks}")
    if num_microbatches < 1 or num_microbatches % num_ranks:
        fit = [ranks for ranks in range(1, num_microbatches + 1) if num_microbatches % ranks == 0]
        raise ConfigError(
            f"num_microbatches is {num_microbatches}, which {num_ranks} data-parallel ranks cannot share "
            f"equally; {num_microbatches} microbatches fit {fit} ranks"
        )
    per_rank = num_microbatches // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


def permuted(positions: Numbers, length: int, name: str) -> Numbers:
    """Return the values of a permutation of ``range(length)`` at ``positions``; each ``name`` has another permutation.

    A Feistel network permutes pairs of numbers below ``rows`` and ``columns``, which are barely more than ``length`` pairs.
    A value beyond ``length`` is permuted again until it is below (cycle walking).
    Sources: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; the hash is that of splitmix64.
    """
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    halves = np.array([rows, columns], np.uint64)  # sizes of the half that a round changes
    sizes = np.resize(halves, _FEW_ROUNDS if length > _LARGE else _MOST_ROUNDS)
    keys = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8 * _MOST_ROUNDS).digest(), "<u8", len(sizes))

    def hashed(half: Any, key: Any, size: Any) -> Any:
        mixed = (half ^ key) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
        return ((mixed ^ (mixed >> 31)) >> 32) * size >> 32  # a number below size

    is_short = rows < len(positions)  # then it is faster to hash each value that a half may have once
    tables = hashed(np.arange(rows, dtype=np.uint64), keys[:, None], sizes[:, None]) if is_short else keys

    def network(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = values // columns
        right = values - left * columns  # numpy's remainder takes twenty times as long
        for key, size, table in zip(keys, sizes, tables, strict=True):
            left = left + (table.take(right.view(np.int64)) if is_short else hashed(right, key, size))
            left, right = right, np.minimum(left, left - size)  # less the size if there is one: below it, that wraps
        return left * columns + right

    found = network(positions.astype(np.uint64))
    while len(beyond := np.flatnonzero(found >= length)):
        found[beyond] = network(found[beyond])
    return found.astype(np.int64)


def shares(weights: Sequence[int], total: Any) -> list[Any]:
    """Divide ``total`` samples by ``weights``; return the numbers of samples, whose sum is ``total``.

    Halves of the weights are rounded to the nearest number, and then halves of these.  So no number falls when ``total``
    grows, and each differs from its weight's exact part by at most half a sample per halving.

    Example:
        >>> [shares([7, 3], total) for total in (1, 2, 3, 10)]
        [[1, 0], [1, 1], [2, 1], [7, 3]]
    """
    if len(weights) == 1:
        return [total]
    middle = len(weights) // 2
    part, whole = sum(weights[:middle]), sum(weights) or 1
    left = (2 * part * total + whole) // (2 * whole)
    return [*shares(weights[:middle], left), *shares(weights[middle:], total - left)]


def whole_weights(weights: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Return the smallest whole numbers in the proportion of ``weights``, in the order of ``names``.

    Raises: ConfigError unless they are numbers from 0 on, one for each name, and not all 0.
    """
    is_right = set(weights) == set(names) and all(
        isinstance(each, _NUMBER) and type(each) is not bool and 0 <= each < math.inf for each in weights.values()
    )
    if not is_right or not any(weights.values()):
        raise ConfigError(
            f"Mixture: weights are {dict(weights)}, expected a number from 0 on for each of {', '.join(names)}, not all 0"
        )
    exact = [Fraction(str(weights[name])) for name in names]  # 0.7 as written, not as its binary fraction
    common = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * common) for each in exact]
    return [each // math.gcd(*whole) for each in whole]


@dataclass(slots=True)
class SampleOrder:
    """The numbers of the samples of every microbatch.

    Attributes:
        sources, lengths: by name: samples are numbered over all sources, in this order.
        num_microbatches, microbatch_size: of a step, and in samples.  drop_last: as of torch's BatchSampler, per epoch.
        weights: of sources, whole numbers, by the step from which on they are in force.
    """

    num_microbatches: int
    microbatch_size: int
    seed: int
    drop_last: bool = False
    sources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    weights: dict[int, list[int]] = field(default_factory=lambda: {0: [1]})

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.num_microbatches * self.microbatch_size

    def check(self) -> None:
        """Raise StateError if a source has another length than it had."""
        had, found = [*self.lengths.values()], [*map(len, self.sources.values())]
        if had != found:
            raise StateError(
                f"Microbatches: the dataset has {sum(found)} samples, and had {sum(had)} when it was given; keep them"
            )

    def seed_worker(self, number: int) -> None:
        """Seed the random generators of a worker of a DataLoader for a microbatch, by its number over all steps."""
        if get_worker_info() is not None:
            digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).digest()
            set_seed(int.from_bytes(digest, "big") >> 1)

    def microbatches(self, begin: int, own: range) -> Iterator[list[int]]:
        """Yield the samples of the microbatches ``own`` of each step from ``begin`` on, for ever."""
        size = self.microbatch_size
        at_once = max(1, min(_CHUNK, sum(self.lengths.values())) // (len(own) * size))
        offsets = np.arange(at_once)[:, None] * self.batch + np.arange(own.start * size, own.stop * size)

        def of_steps(first: int) -> Iterator[list[int]]:
            samples = iter(self._samples((first * self.batch + offsets).ravel()).tolist())
            # One list at a time, as BatchSampler has them: hundreds of lists at once make Python collect garbage.
            return map(list, zip(*[samples] * size, strict=True))

        return chain.from_iterable(map(of_steps, count(begin, at_once)))

    def _samples(self, positions: Numbers) -> Numbers:
        """Return the samples at ``positions``, which ascend and are counted over all steps."""
        self.check()
        found = np.empty_like(positions)
        before = [0] * len(self.lengths)  # samples of each source up to a change of weights
        steps = sorted(self.weights)
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            begin, weights = step * self.batch, self.weights[step]
            stop = None if after is None else after * self.batch
            inside = slice(*np.searchsorted(positions, [begin, stop or positions[-1] + 1]))
            self._mix(found[inside], positions[inside] - begin, weights, before)
            if stop is not None:
                before = [a + b for a, b in zip(before, shares(weights, stop - begin), strict=True)]
        return found

    def _mix(self, found: Numbers, positions: Numbers, weights: Sequence[int], before: Sequence[int]) -> None:
        """Write the samples at ``positions``, counted since a change of weights, into ``found``."""
        is_large = (int(positions.max(initial=0)) + 1) * 2 * sum(weights) > _MOST_EXACT
        exact: Any = positions.astype(object) if is_large else positions
        counts, offset = zip(shares(weights, exact), shares(weights, exact + 1), strict=True), 0
        for (name, length), first, (here, there) in zip(self.lengths.items(), before, counts, strict=True):
            chosen = np.flatnonzero(there > here)
            found[chosen] = offset + self._of_source(name, length, here[chosen].astype(np.int64) + first)
            offset += length

    def _of_source(self, name: str, length: int, positions: Numbers) -> Numbers:
        size, found = length // self.batch * self.batch if self.drop_last else length, np.empty_like(positions)
        first, last = (int(each) // size for each in positions[[0, -1]]) if len(positions) else (0, -1)
        for epoch in range(first, last + 1):
            inside = slice(*np.searchsorted(positions, [epoch * size, (epoch + 1) * size]))
            found[inside] = permuted(positions[inside] - epoch * size, length, f"{self.seed}/{name}/{epoch}")
        return found
