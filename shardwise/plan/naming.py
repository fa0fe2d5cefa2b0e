"""Write many module paths in few words, and read them back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(?P<stem>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)", re.DOTALL)
_RANGE = re.compile(r"(?P<stem>(?:.*[^0-9])?)(?P<first>0|[1-9][0-9]*)-(?P<last>0|[1-9][0-9]*)", re.DOTALL)


def compress_paths(paths: Sequence[str]) -> str:
    """Return ``paths`` as a list in which neighbours that count up by one are a range: ``blocks.0-7, head``.

    A path that could be mistaken for a range or a list is quoted as in JSON, so different lists get different texts.
    The empty path (the root) alone is the empty text.
    """
    if list(paths) == [""]:
        return ""
    parts: list[str] = []
    position = 0
    while position < len(paths):
        length = _count_up(paths, position)
        numbered = _split_number(paths[position])
        if length == 1 or numbered is None:
            parts.append(_quoted(paths[position]))
        else:
            stem, first = numbered
            parts.append(f"{stem}{first}-{first + length - 1}")
        position += length
    return ", ".join(parts)


def _count_up(paths: Sequence[str], start: int) -> int:
    """Return how many paths from ``start`` on differ by one in the number at their end alone."""
    numbered = _split_number(paths[start])
    if numbered is None:
        return 1
    stem, first = numbered
    length = 1
    while start + length < len(paths) and _split_number(paths[start + length]) == (stem, first + length):
        length += 1
    return length


def _split_number(path: str) -> tuple[str, int] | None:
    match = _NUMBERED.fullmatch(path)
    if match is None or match["stem"].endswith("-") or _needs_quotes(match["stem"]):
        return None
    return match["stem"], int(match["number"])


def _quoted(path: str) -> str:
    return json.dumps(path) if not path or _RANGE.fullmatch(path) or _needs_quotes(path) else path


def _needs_quotes(path: str) -> bool:
    return path.strip() != path or "," in path or '"' in path
