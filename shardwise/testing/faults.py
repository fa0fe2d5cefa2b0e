"""Fault injection: one rank is killed, stopped, delayed, or made to send wrong data at a named place.

Example:
    >>> from shardwise.testing import faults
    >>> with faults.raise_at("reduction", rank=1, step=3, error=MemoryError):  # doctest: +SKIP
    ...     train()
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import observe, torch_private
from shardwise.errors import ConfigError

# ---- Faults as values, so that they can be drawn at random, printed, and sent to ranks.

Kind = Literal["kill", "stop", "terminate", "interrupt", "raise", "delay", "drop", "corrupt"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The places where faults strike. Other names are places that a program has named itself, with reach().
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
    "elastic commit": "the state after a step is written to memory, and not yet marked as complete",
    "elastic recovery": "ranks of an elastic run have joined, and are about to call build()",
}
_TENSORS_AT = ("backward", "optimizer step", "all-gather", "reduction", "exchange")
_LEFT_OUT_AT = ("all-gather", "reduction")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: kill (SIGKILL), stop (SIGSTOP), terminate (SIGTERM), interrupt (SIGINT), raise, delay, drop (this rank
            skips a collective), corrupt (one number that this rank sends is changed).
        at: one of ``PLACES``, or a name that the program passes to ``reach``.
        rank: global rank that is struck; None: every rank.
        step: in which step, counted from 1 from the time the fault was set; a step ends with the optimizer's.  None:
            any.
        call: at which occasion in that step, counted from 1 (with ``step`` None: in all).
        times: how often, with ``step`` once in each of that many steps; after that nothing more happens.
        error: what ``raise`` raises: an exception, or a class of exceptions.
        seconds: of ``delay``.

    Raises: ConfigError for an unknown kind, or one that cannot strike at this place.

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
        """The fault in a few words."""
        more = ""
        if self.kind == "delay":
            more = f" ({self.seconds:g} s)"
        elif self.kind == "raise":
            more = f" {self.error.__name__ if isinstance(self.error, type) else type(self.error).__name__}"
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        when = "" if self.step is None else f" in step {self.step}"
        return f"{self.kind}{more} of {who} at {self.at}{when}"


# ---- The effect of each kind of fault on the process, or on the data that it is about to send.

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}


def strike(fault: Fault, subject: object) -> None:
    """Carry out ``fault``.  ``subject``: the object of the place, for faults that change it.

    Raises: ConfigError if this process ignores the signal of the fault.
    """
    number = _SIGNALS.get(fault.kind)
    if number is not None:
        if signal.getsignal(number) is signal.SIG_IGN:
            raise ConfigError(
                f"{fault.text}: this process ignores {number.name}, so the fault would do nothing; give it a handler first "
                "(shells start background jobs so: signal.signal(signal.SIGINT, signal.default_int_handler))"
            )
        os.kill(os.getpid(), number)
    elif fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "corrupt":
        corrupt(subject)
    elif fault.kind == "raise":
        raise (fault.error(f"injected: {fault.text}") if isinstance(fault.error, type) else fault.error)


def corrupt(subject: object) -> None:
    """Change the first element of the first non-empty tensor in ``subject``: its sign and its size."""
    with torch.no_grad():
        for tensor in _tensors(subject):
            local = torch_private.local_of(tensor).detach()
            if local.numel():
                place = (0,) * local.dim()
                local[place] = -2 * local[place] - 1
                return


def _tensors(subject: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in the object of a place: a tensor, any nesting of sequences, or an end of a collective."""
    if isinstance(subject, torch.Tensor):
        yield subject
    elif isinstance(subject, Sequence):
        for each in cast(Sequence[object], subject):
            yield from _tensors(each)
    elif hasattr(subject, "full_parts"):
        yield from cast(Any, subject).full_parts(0)
    elif hasattr(subject, "shard"):
        yield cast(Any, subject).shard()


# ---- Set a fault in this process, and count the occasions until it strikes.
# Places are reached without changes to torch or shardwise: the library announces its actions (``observe``), and torch
# has hooks for all modules and optimizers. Outside :func:`inject` none of these hooks is set.


class Injected(observe.Listener):
    """A fault that is set.

    Attributes:
        fault: the fault.  num_struck: how often it has struck this process.
        tell: called right before it strikes.
        step: the number of the current step.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_struck = 0
        self.tell: Callable[[], None] = lambda: None
        self.step = 1
        self.is_over = False
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_between = True
        self._occasions: Counter[int | None] = Counter()

    def reach(self, place: str, what: str = "", subject: object = None) -> bool:
        """Record that this process reaches ``place``; return True to skip what begins there."""
        fault = self.fault
        if place != fault.at or self.is_over or fault.rank not in (None, this_rank()):
            return False
        if fault.step is not None and self.step != fault.step + self.num_struck:
            return False
        key = self.step if fault.step is not None else None
        self._occasions[key] += 1
        if self._occasions[key] < fault.call:
            return False
        self.num_struck += 1
        self.is_over = self.num_struck >= fault.times
        self.tell()
        strike(fault, subject)
        return fault.kind == "drop"

    # ---- hooks ----

    def before_module(self, module: nn.Module, _args: object) -> None:
        """Handle the begin of a module's forward."""
        if self._is_between and torch.is_grad_enabled():
            self._is_between = False
            self.reach("between steps")
        if not any(True for _ in module.children()):
            self.reach("forward" if torch.is_grad_enabled() else "evaluation")

    def after_module(self, module: nn.Module, _args: object, output: object) -> None:
        """Handle the end of a module's forward."""
        if isinstance(output, torch.Tensor) and output.requires_grad and not any(True for _ in module.children()):
            output.register_hook(partial(self._gradient, weakref.ref(self)))

    @staticmethod
    def _gradient(ref: weakref.ref[Injected], gradient: torch.Tensor) -> torch.Tensor | None:
        self = ref()
        if self is None:
            return None
        changed = gradient.clone() if self.fault.kind == "corrupt" else gradient
        self.reach("backward", subject=[changed])
        return changed if self.fault.kind == "corrupt" else None

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Handle the begin of an optimizer's step."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.reach("optimizer step", subject=[param.grad for param in params if param.grad is not None])

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Handle its end: nested optimizers, and several side by side, count the same steps."""
        self._steps[optimizer] = count = self._steps.get(optimizer, 0) + 1
        if count + 1 > self.step:
            self.step = count + 1
            self._is_between = True


@contextmanager
def inject(fault: Fault | Kind, at: str = "", **options: Any) -> Generator[Injected, None, None]:
    """Let ``fault`` strike this process inside the context, if it is the chosen rank; once, unless the fault says otherwise.

    Args:
        fault: a :class:`Fault`, or its kind; then ``at`` and ``options`` are its other fields.

    Every rank may enter with the same fault.  Faults may be nested.
    Raises: ConfigError for an impossible fault.

    Example:
        >>> from shardwise.testing import faults
        >>> with faults.inject("raise", at="my loop", error=KeyError("a")):
        ...     faults.reach("my loop")
        Traceback (most recent call last):
        ...
        KeyError: 'a'
    """
    if isinstance(fault, Fault) and (at or options):
        raise ConfigError("give a Fault, or a kind and its fields; found both")
    injected = Injected(fault if isinstance(fault, Fault) else Fault(fault, at, **options))
    with ExitStack() as stack:
        stack.enter_context(observe.listening(injected))
        for handle in (
            register_module_forward_pre_hook(injected.before_module),
            register_module_forward_hook(injected.after_module),
            register_optimizer_step_pre_hook(injected.before_step),
            register_optimizer_step_post_hook(injected.after_step),
        ):
            stack.callback(handle.remove)
        try:
            yield injected
        finally:
            injected.is_over = True


def reach(place: str) -> None:
    """Mark a place in your own program at which faults may strike.  Costs nothing without faults."""
    observe.note(place)


def this_rank() -> int:
    """Return the global rank of this process; before there is a process group, that of the launcher, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


kill_at = partial(inject, "kill")
stop_at = partial(inject, "stop")
terminate_at = partial(inject, "terminate")
interrupt_at = partial(inject, "interrupt")
raise_at = partial(inject, "raise")
delay_at = partial(inject, "delay")
drop_at = partial(inject, "drop")
corrupt_at = partial(inject, "corrupt")
