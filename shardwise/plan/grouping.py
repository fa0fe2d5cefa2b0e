"""Choose which neighbouring blocks become one unit.  Pure; no function takes a rank, so all ranks choose the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

DEFAULT_MIN_UNIT_BYTES = 3 * 2**19  # 1.5 MiB; why: see shardwise.shard_model


@dataclass(frozen=True, slots=True)
class Child:
    """A child with parameters of some module.

    Attributes:
        path: its path in the model.
        signature: equal for children of one class and parameter structure.
        num_bytes: its parameters unsharded, without those that another unit has.
        is_explicit: it is a unit already.
        can_be_unit: it may become one.
        kind: children of the kind of a repeated block are blocks too, alike or not; None: of no kind.
    """

    path: str
    signature: Hashable
    num_bytes: int = 0
    is_explicit: bool = False
    can_be_unit: bool = True
    kind: Hashable | None = None


def repeated_blocks(children: Sequence[Child]) -> tuple[Child, ...]:
    """Return the children of one module that are its repeated blocks: two or more of one signature, and their kind.

    Explicit units count as repetitions, so that one of two blocks may have been sharded by hand.
    """
    able = [child for child in children if child.can_be_unit]
    repetitions = Counter(child.signature for child in able)
    kinds = {child.kind for child in able if repetitions[child.signature] > 1} - {None}
    return tuple(child for child in able if repetitions[child.signature] > 1 or child.kind in kinds)


def group_blocks(children: Sequence[Child], min_unit_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the blocks among the children of one module, one tuple for each new unit, in their order.

    A block of at least ``min_unit_bytes`` stands alone.  Smaller neighbours are merged into units of at least that size:
    as many units as can be, of equally many blocks where that will do.  A run of neighbours that is smaller as a whole is
    one unit.  Explicit units, large blocks and children that are no blocks end a run.
    """
    blocks = {child.path for child in repeated_blocks(children)}
    groups: list[tuple[str, ...]] = []
    run: list[Child] = []
    for child in children:
        if child.path in blocks and not child.is_explicit and child.num_bytes < min_unit_bytes:
            run.append(child)
            continue
        groups += _cut(run, min_unit_bytes)
        run = []
        if child.path in blocks and not child.is_explicit:
            groups.append((child.path,))
    return (*groups, *_cut(run, min_unit_bytes))


def _cut(run: Sequence[Child], min_unit_bytes: int) -> Iterator[tuple[str, ...]]:
    if not run:
        return
    sizes = [child.num_bytes for child in run]
    lengths = _greedy_lengths(sizes, min_unit_bytes)
    equal = _equal_lengths(len(sizes), len(lengths))
    start = 0
    for length in equal if _is_enough(sizes, equal, min_unit_bytes) else lengths:
        yield tuple(child.path for child in run[start : start + length])
        start += length


def _greedy_lengths(sizes: Sequence[int], min_unit_bytes: int) -> list[int]:
    """Return the lengths of groups that end as soon as they are large enough; the rest joins the last one."""
    lengths: list[int] = []
    length = num_bytes = 0
    for size in sizes:
        length, num_bytes = length + 1, num_bytes + size
        if num_bytes >= min_unit_bytes:
            lengths.append(length)
            length = num_bytes = 0
    if not lengths:
        return [length]
    lengths[-1] += length
    return lengths


def _equal_lengths(count: int, num_groups: int) -> list[int]:
    each, rest = divmod(count, num_groups)
    return [each + 1] * rest + [each] * (num_groups - rest)


def _is_enough(sizes: Sequence[int], lengths: Sequence[int], min_unit_bytes: int) -> bool:
    start = 0
    for length in lengths:
        if sum(sizes[start : start + length]) < min_unit_bytes:
            return False
        start += length
    return True
