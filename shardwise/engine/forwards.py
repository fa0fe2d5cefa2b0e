"""The forwards of one engine that have begun and not ended."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import FrameType

from shardwise.units.unit import Unit


@dataclass(slots=True)
class Forward:
    """A forward that has begun: of which unit, under which handled exception, in which Python frame."""

    unit: Unit
    exception: BaseException | None
    frame_id: int

    @property
    def has_raised(self) -> bool:
        """True, where a forward ends, if it ends by an exception."""
        return sys.exc_info()[1] is not self.exception


def begun(unit: Unit) -> Forward:
    """Return the forward of ``unit`` that begins now."""
    return Forward(unit, sys.exc_info()[1], _module_frame_id())


def were_left(stack: list[Forward], unit: Unit) -> bool:
    """Return True if the forwards in ``stack`` have ended unseen and ``unit`` begins a new one.

    An interrupt (BaseException) skips torch's always-called hooks and leaves forwards behind: they are not on the Python
    stack any more when the same root starts again.
    """
    if unit is not stack[0].unit:
        return False
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if id(frame) == stack[0].frame_id:
            return False
        frame = frame.f_back
    return True


def _module_frame_id() -> int:
    """Return the id of the frame that runs the module which is about to start its forward."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_name not in ("_call_impl", "forward_method"):
        frame = frame.f_back
    return id(frame)
