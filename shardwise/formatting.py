"""Bytes and ranks as messages and tables write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_LISTED = 8  # ranks


def format_bytes(count: float, base: int = 1000) -> str:
    """Return a byte count in powers of 1000 with three digits, or in powers of 1024 with four, as files are measured.

    Example:
        >>> format_bytes(1.25e6), format_bytes(1536, 1024)
        ('1.25 MB', '1.5 KiB')
    """
    units, digits = (("B", "kB", "MB", "GB", "TB"), 3) if base == 1000 else (("B", "KiB", "MiB", "GiB", "TiB"), 4)
    most = 999.5 if base == 1000 else base  # what would round up to the next unit belongs there
    power = 0
    while abs(count) >= most and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.{digits}g} {units[power]}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as errors name them.

    Example:
        >>> format_ranks([3]), format_ranks(range(10))
        ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    more = ", ..." if len(ranks) > _MOST_LISTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_LISTED]))}{more}"


def ranks_by_text(found: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks of each text, in the order of ``found``.

    Example:
        >>> ranks_by_text([(0, "same"), (1, "another"), (2, "same")])
        {'same': [0, 2], 'another': [1]}
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in found:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of
