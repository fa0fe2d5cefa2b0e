"""Text that a terminal takes for text alone, and streams that take any: names in files are anybody's, and pipes get closed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_CONTROL = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    r"""Return ``text`` with control characters written out.

    Example:
        >>> plain("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    return text.translate(_CONTROL)


def prepare_output() -> None:
    """Let every text be printed: also where a stream is closed, is ASCII, or a name is no UTF-8."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  for the rest of the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]


def drop_output() -> None:
    """Let what is still printed go nowhere: nobody reads standard output."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
