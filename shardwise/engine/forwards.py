"""The forwards of one engine that have begun and not ended."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from types import FrameType

from shardwise.comm.last_words import in_short, leave
from shardwise.errors import ShardwiseError
from shardwise.units.unit import Unit

# torch's words where a tensor is read whose storage has no memory.
_NO_MEMORY = (
    "Cannot access data pointer of Storage that is invalid",
    "out of bounds for storage of size 0",
    "its data is not allocated yet",
)
_MIXED = "got mixed torch.Tensor and DTensor"
_READ_ELSEWHERE = (
    "a sharded parameter was read outside of its unit's forward, and it is unsharded only there. Put the module that reads it "
    "and the one that has it into one unit, fully_shard([outer, inner]), or call fully_shard only on the outer one"
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


def explain_torchs(error: BaseException | None) -> None:
    """Add advice to ``error`` of a forward if it is torch's about freed memory, or about mixed plain tensors and DTensors."""
    if type(error) is RuntimeError and len(error.args) == 1:
        text = str(error)
        if _GIVEN_BACK not in text and any(words in text for words in _NO_MEMORY):
            error.args = (f"{text}\n{_GIVEN_BACK}",)
        elif _MIXED in text and _READ_ELSEWHERE not in text:
            error.args = (f"{text}\n{_READ_ELSEWHERE}",)


class Forwards(list[Forward]):
    """The forwards that have begun and not ended, the outermost first.

    An interrupt (BaseException) skips torch's always-called hooks and leaves forwards behind that have ended unseen: the frame
    of the outermost call tells.

    Attributes:
        frame: that; held, since another could have its address, until the forward has ended.
        has_told: the other ranks may read why one has ended by an exception.
    """

    frame: FrameType | None = None
    has_told = False
    _thread = 0

    def remember_call(self) -> None:
        """Remember the call of the module that is about to start its forward."""
        self._thread = threading.get_ident()
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name not in ("_call_impl", "forward_method"):
            frame = frame.f_back
        self.frame = frame

    @property
    def were_left(self) -> bool:
        """True if there are any, of this thread, and the outermost is not on its stack any more."""
        if not self or self.frame is None or self._thread != threading.get_ident():
            return False
        frame = inspect.currentframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None

    def tell(self, error: BaseException | None) -> None:
        """Leave for the other ranks why forward has ended here; an error of ours has told them itself."""
        if isinstance(error, Exception) and not isinstance(error, ShardwiseError):
            leave(f"{type(error).__name__}: {in_short(error)}")
            self.has_told = True

    def take_back(self) -> None:
        """Take back what was told: a later forward has come to its end, where all ranks meet."""
        leave("")
        self.has_told = False

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.frame = None
