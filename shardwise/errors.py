"""The exceptions that shardwise raises.

Every class also derives from the built-in type that torch raises in the same place, so that code written for torch's
``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from shardwise import observe

# Names of other libraries, and of torch's FSDP1, for what has another name here.
_ELSEWHERE = {
    "auto_wrap_policy": "min_unit_bytes",
    "batch_size": "batch",
    "cpu_offload": "offload_policy",
    "device_mesh": "mesh",
    "learning_rate": "lr",
    "mixed_precision": "mp_policy",
    "nproc_per_node": "nproc",
    "num_layers": "layers",
    "sharding_strategy": "reshard_after_forward",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the name in ``known`` that means or resembles ``name``; an empty text if none does.

    Example:
        >>> did_you_mean("modle", ["model", "optimizer"])
        " Did you mean 'model'?"
    """
    names = {each.strip("-").replace("-", "_"): each for each in known}
    bare = name.strip("-").replace("-", "_")
    close = [_ELSEWHERE[bare]] if _ELSEWHERE.get(bare) in names else difflib.get_close_matches(bare, names, 1, 0.7)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        observe.note_error(f"{type(self).__name__}: {args[0] if args else ''}")


class ConfigError(ShardwiseError, ValueError):
    """An argument is wrong; the text shows what was found, what was expected, and what to change."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has the wrong type or an unknown name, where torch or Python raise a TypeError."""


class UsageError(ConfigError, AssertionError):
    """A call that cannot work, in place of torch's AssertionError."""


class LayoutError(ShardwiseError, ValueError):
    """A tensor does not have the shape, dtype or placement that the layout expects."""


class StateError(ShardwiseError, RuntimeError):
    """A call in a state that does not allow it."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks disagree about a fact that must be equal on all of them; the text names the ranks and the fact."""


class TransportError(ShardwiseError, RuntimeError):
    """An exchange with another rank failed: that rank is gone, or did not take part in time."""


class RankError(ShardwiseError, RuntimeError):
    """A rank of ``notebook_launch`` was killed or raised; the text has its traceback."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint was not written, or cannot be loaded; nothing has changed.  The text names file, tensor and block."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was saved: a file is missing, belongs to another save, or has other bytes."""


class UnsafeFileError(ShardwiseError, OSError):
    """A file that this package would not have written: a link, a FIFO, too long, or malformed."""


class RejectedStep(ShardwiseError, RuntimeError):
    """A step that user code has rejected (``step.reject``) in a transaction."""


class StepError(ShardwiseError, RuntimeError):
    """Another rank raised in a transaction, and all ranks have restored the state before it.

    Attributes:
        rank: global rank that raised.  kind: name of the exception's class.  text: its first line.  place: the line of
            code.
    """

    def __init__(self, message: str, rank: int = -1, kind: str = "", text: str = "", place: str = "") -> None:
        super().__init__(message)
        self.rank, self.kind, self.text, self.place = rank, kind, text, place
