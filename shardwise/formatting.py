"""Text for people: byte counts, ranks, and output that any terminal or pipe can print."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence

# ---- Text without terminal control characters, and streams that print any text: names in files are untrusted, and
# pipes may be closed.

_CONTROL = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    r"""Return ``text`` with control characters escaped.

    Example:
        >>> plain("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    return text.translate(_CONTROL)


def drop_output() -> None:
    """Discard further output: no process reads standard output any more."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


_MOST_LISTED = 8  # ranks


def format_bytes(count: float) -> str:
    """Return a byte count in powers of 1024 with four digits, as sizes are given to the command.

    Example:
        >>> format_bytes(1.25 * 2**20), format_bytes(1536)
        ('1.25 MiB', '1.5 KiB')
    """
    units, power = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while abs(count) >= 1023.5 and power < len(units) - 1:  # else it would be rounded up to 1024
        count, power = count / 1024, power + 1
    return f"{count:.4g} {units[power]}"


def parse_size(text: str) -> int | None:
    """Return the bytes of ``0``, ``4096``, ``512k``, ``1.5M`` or ``2 GiB``, None for another text; units are powers of 1024.

    Example:
        >>> parse_size("2 GiB"), parse_size("two")
        (2147483648, None)
    """
    match = re.fullmatch(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKmMgG]?)(?:i?[bB])?", text.strip())
    return match and int(float(match["number"]) * 1024 ** " kmg".index(match["unit"].lower() or " "))


def format_ranks(ranks: Sequence[int], one: str = "rank", many: str = "ranks") -> str:
    """Return ``ranks`` as errors name them; ``one``, ``many``: what they are.

    Example:
        >>> format_ranks([3]), format_ranks(range(10))
        ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    more = ", ..." if len(ranks) > _MOST_LISTED else ""
    return f"{many if len(ranks) > 1 else one} {', '.join(map(str, ranks[:_MOST_LISTED]))}{more}"


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
