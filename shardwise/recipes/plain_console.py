"""A console of rich that prints no command of a terminal that is in a text, and goes on where nobody reads any more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardwise.recipes.plain_text import drop_output, plain


class PlainConsole(Console):
    """Prints control characters of texts as text, and goes on without output where nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Say once that nobody reads, on standard error."""
        self.quiet = True
        drop_output()
        with contextlib.suppress(OSError):
            print("shardwise: standard output was closed; the work goes on without it", file=sys.stderr)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return what is printed, with control characters of texts written out."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
