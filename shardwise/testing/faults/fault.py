"""What a fault is: a value, so that it can be drawn at random, printed, and sent to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError

Kind = Literal["kill", "stop", "terminate", "interrupt", "raise", "delay", "drop", "corrupt"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "terminate", "interrupt", "raise", "delay", "drop", "corrupt")

# Where this process may be struck.  Other names are places that a program has named itself, with reach().
PLACES: dict[str, str] = {
    "init": "the start of fully_shard (each call), replicate, ZeroRedundancyOptimizer or ShardedOptimizer",
    "between steps": "before the first module of a step runs",
    "forward": "a module without children is about to run, with gradients",
    "evaluation": "a module without children is about to run, without gradients",
    "backward": "the gradient of the output of a module without children is there",
    "optimizer step": "an optimizer is about to step",
    "all-gather": "parameters are about to be gathered; with ZeRO, sent by their owners",
    "reduction": "gradients are about to be reduced (over shards, replicas, or to their owners)",
    "exchange": "whole matrices are about to go to their owners, or back",
    "consolidation": "ZeroRedundancyOptimizer.consolidate_state_dict",
    "checkpoint save": "a checkpoint is about to be written, after all ranks have agreed on it",
    "checkpoint load": "a checkpoint is about to be read",
}
_TENSORS_AT = ("backward", "optimizer step", "all-gather", "reduction", "exchange")
_LEFT_OUT_AT = ("all-gather", "reduction")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: kill (SIGKILL), stop (SIGSTOP), terminate (SIGTERM), interrupt (SIGINT), raise, delay, drop (this rank leaves a
            collective out), corrupt (one number of what this rank brings is another).
        at: one of ``PLACES``, or a name that the program gives to ``reach``.
        rank: global rank that is struck; None: every rank.
        step: in which step, counted from 1 from the time the fault was set; a step ends with the optimizer's.  None: any.
        call: at which occasion in that step, counted from 1 (with ``step`` None: in all).
        times: how often, with ``step`` once in each of as many steps; after that nothing more happens.
        error: what ``raise`` raises: an exception, or a class of exceptions.
        seconds: of ``delay``.

    Raises: ConfigError for a kind that there is not, or that cannot be at this place.

    Example:
        >>> Fault("delay", at="forward", rank=1, seconds=0.5).text
        'delay (0.5 s) of rank 1 at forward'
    """

    kind: Kind
    at: str
    rank: int | None = None
    step: int | None = None
    call: int = 1
    times: int = 1
    error: BaseException | type[BaseException] = RuntimeError
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"there is no fault {self.kind!r}; expected one of {', '.join(KINDS)}")
        allowed = {"drop": _LEFT_OUT_AT, "corrupt": _TENSORS_AT}.get(self.kind)
        if allowed is not None and self.at not in allowed:
            raise ConfigError(f"{self.kind} cannot be at {self.at!r}; expected one of {', '.join(allowed)}")
        if self.call < 1 or self.times < 1 or (self.step is not None and self.step < 1):
            raise ConfigError(f"step, call and times are counted from 1; found {self.step}, {self.call}, {self.times}")

    @property
    def text(self) -> str:
        """Say what the fault is, in a few words."""
        more = ""
        if self.kind == "delay":
            more = f" ({self.seconds:g} s)"
        elif self.kind == "raise":
            more = f" {self.error.__name__ if isinstance(self.error, type) else type(self.error).__name__}"
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        when = "" if self.step is None else f" in step {self.step}"
        return f"{self.kind}{more} of {who} at {self.at}{when}"
