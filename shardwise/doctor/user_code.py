"""Finds the lines of a stack that are user code, not this package, torch or the standard library.  Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = re.compile(r"/torch/|/lib/python3[.\d]*/(?!(site|dist)-packages/)|^<|/(threading|contextlib)\.py")
_OTHERS = re.compile(r"/(site|dist)-packages/")
_MOST_FRAMES = 40
_USER, _PROGRAM, _OTHER, _LIBRARY = range(4)  # kinds of lines, the most informative first


def own_line(frames: Sequence[str]) -> str:
    """Return the innermost of ``frames`` that is user code, and the function that runs; without user code, a library's line.

    Lines of a program of this package (``shardwise train``) are marked as such.

    Args:
        frames: "file:line function", the innermost last.
    """
    if not frames:
        return "nowhere"
    place = innermost(frames, _OTHER)
    called = f"in {frames[-1].rsplit(' ', 1)[-1]}()"
    if place is None:
        return f"outside your code, {called}"
    prefix = "shardwise's own program, " if whose(frames[place]) == _PROGRAM else ""
    return f"{prefix}{frames[place]}" + (f", {called}" if place < len(frames) - 1 else "")


def innermost(frames: Sequence[str], least: int = _USER) -> int | None:
    """Return the index of the innermost of ``frames`` that is user code, or else of the best kind up to ``least``."""
    kinds = [whose(frame) for frame in frames]
    best = min(kinds, default=_LIBRARY)
    return None if best > least else len(kinds) - 1 - kinds[::-1].index(best)


def whose(frame: str) -> int:
    """Return the kind of a frame: user code, a program of this package, another package, or a library."""
    path = frame.rsplit(":", 1)[0]
    return _USER if path.startswith("<") and frame.endswith(" <module>") else _whose_file(path)  # python -c


@functools.lru_cache(maxsize=4096)
def _whose_file(path: str) -> int:
    tail = path.rpartition("/shardwise/")[2] if "/shardwise/" in path else ""
    if tail.startswith("recipes/"):  # it calls the library as a user does
        return _PROGRAM
    if tail and (_PACKAGE / tail).is_file():  # a folder of the user may also be called shardwise
        return _LIBRARY
    if _LIBRARIES.search(path):
        return _LIBRARY
    return _OTHER if _OTHERS.search(path) else _USER


def lines_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the stack that ends in ``frame``: its innermost lines, and only user code of the outer ones."""
    found: list[str] = []
    while frame is not None and len(found) < 2 * _MOST_FRAMES:
        line = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        if len(found) < _MOST_FRAMES or whose(line) == _USER:
            found.append(line)
        frame = frame.f_back
    return tuple(reversed(found))


def lines_of_trace(trace: TracebackType | None) -> tuple[str, ...]:
    """Return the lines of a traceback, the innermost last, with the limits of :func:`lines_of`."""
    found: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    outer = [line for line in found[:-_MOST_FRAMES] if whose(line) == _USER]
    return (*outer[-_MOST_FRAMES:], *found[-_MOST_FRAMES:])
