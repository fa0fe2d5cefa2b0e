"""The forwards of one engine that have begun and not ended."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FrameType

from shardwise.units.unit import Unit

# torch's words where a tensor is read whose storage has no memory.
_NO_MEMORY = (
    "Cannot access data pointer of Storage that is invalid",
    "out of bounds for storage of size 0",
    "its data is not allocated yet",
)
_GIVEN_BACK = (
    "a tensor that shared memory with a full parameter was read after that was given back. "
    "Keep clone() of it, or read the parameter from its module inside its forward"
)


@dataclass(slots=True)
class Forward:
    """A forward that has begun: of which unit, while which exception was handled."""

    unit: Unit
    exception: BaseException | None


def explain_no_memory(error: BaseException | None) -> None:
    """Say in ``error``, which a forward has raised, what has no memory, if it is torch's complaint of that."""
    if type(error) is RuntimeError and len(error.args) == 1:
        text = str(error)
        if _GIVEN_BACK not in text and any(words in text for words in _NO_MEMORY):
            error.args = (f"{text}\n{_GIVEN_BACK}",)


def is_left(frame_id: int) -> bool:
    """Return True if the frame with that id is not on this thread's stack any more.

    An interrupt (BaseException) skips torch's always-called hooks and leaves forwards behind that have ended unseen.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if id(frame) == frame_id:
            return False
        frame = frame.f_back
    return True


def module_frame_id() -> int:
    """Return the id of the frame that runs the module which is about to start its forward."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_name not in ("_call_impl", "forward_method"):
        frame = frame.f_back
    return id(frame)
