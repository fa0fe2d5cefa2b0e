"""What a rank says of the exception that ended its step, and which of several was the first cause."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from shardwise.errors import DesyncError, StepError, TransportError

Choice = Literal["retry", "skip", "raise", "end"]
_PACKAGE = str(Path(__file__).parent.parent)
_INSIDE = (_PACKAGE, str(Path(torch.__file__).parent))
_LIMIT = 400  # characters of a text that is quoted


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's exception.

    Attributes:
        rank: global.  order: how many ranks had reported before, and this one.
        follows: it may be what another rank's exception has led to.
        kind, text, place: name of the class, first line, and where in user code it was raised.
        choice: what this rank's user wants done about it; "end": it cannot be undone.
    """

    rank: int
    order: int
    follows: bool
    kind: str
    text: str
    place: str
    choice: Choice

    def to_text(self) -> str:
        """Return it as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        """Return what :meth:`to_text` wrote."""
        return cls(**json.loads(text))


def make_report(error: BaseException, rank: int, order: int, choice: Choice) -> Report:
    """Return the report of ``error`` on ``rank``."""
    text = (str(error).splitlines() or [""])[0][:_LIMIT]
    return Report(rank, order, _follows(error, order), type(error).__name__, text, place_of(error), choice)


def first_cause(reports: Iterable[Report]) -> Report:
    """Return the one that no other rank's exception has led to, as far as can be seen; of several the first that came."""
    return min(reports, key=lambda report: (report.follows, report.order))


def place_of(error: BaseException) -> str:
    """Return where ``error`` was raised: the innermost line outside of torch and this package, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_INSIDE)]
    if not frames:
        return "no line of Python"
    frame = (outside or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _follows(error: BaseException, order: int) -> bool:
    if isinstance(error, (StepError, TransportError, DesyncError)):
        return True
    # Of connections that were closed because of the first report, backends raise errors of no class of their own.
    words = ("gloo", "Connection", "connection")
    return order > 1 and isinstance(error, RuntimeError) and any(word in str(error) for word in words)
