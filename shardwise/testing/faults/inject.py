"""Set a fault in this process, and count the occasions until it strikes.

Places are reached without touching torch or shardwise: the library says where it comes to (``black_box``), and torch lets
anybody hook all modules and optimizers.  Outside of :func:`inject` none of these hooks is there.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import black_box
from shardwise.errors import ConfigError
from shardwise.testing.faults.fault import Fault, Kind
from shardwise.testing.faults.strike import is_left_out, strike


class Injected:
    """A fault that is set.

    Attributes:
        fault: which.  num_struck: how often it has struck this process.
        tell: called right before it strikes.
        step: the number of the running step.
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
        self._struck_in: int | None = None

    def come(self, place: str, subject: object = None) -> bool:
        """Take note that this process comes to ``place``; return True if what begins there is to be left out."""
        fault = self.fault
        if place != fault.at or self.is_over or not self._is_mine():
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
        return is_left_out(fault)

    def _is_mine(self) -> bool:
        return self.fault.rank is None or self.fault.rank == this_rank()

    # ---- what the hooks call ----

    def hear(self, place: str, _what: str, subject: object) -> bool:
        """Hear of an event of the library."""
        return self.come(place, subject)

    def before_module(self, module: nn.Module, _args: object) -> None:
        """Hear that a module is about to run."""
        if self._is_between and torch.is_grad_enabled():
            self._is_between = False
            self.come("between steps")
        if not any(True for _ in module.children()):
            self.come("forward" if torch.is_grad_enabled() else "evaluation")

    def after_module(self, module: nn.Module, _args: object, output: object) -> None:
        """Hear that a module has run."""
        if isinstance(output, torch.Tensor) and output.requires_grad and not any(True for _ in module.children()):
            output.register_hook(partial(self._gradient, weakref.ref(self)))

    @staticmethod
    def _gradient(ref: weakref.ref[Injected], gradient: torch.Tensor) -> torch.Tensor | None:
        self = ref()
        if self is None:
            return None
        changed = gradient.clone() if self.fault.kind == "corrupt" else gradient
        self.come("backward", [changed])
        return changed if self.fault.kind == "corrupt" else None

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hear that an optimizer is about to step."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.come("optimizer step", [param.grad for param in params if param.grad is not None])

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hear that it has: of optimizers that step inside others, or beside them, each counts the same steps."""
        self._steps[optimizer] = count = self._steps.get(optimizer, 0) + 1
        if count + 1 > self.step:
            self.step = count + 1
            self._is_between = True


@contextmanager
def inject(fault: Fault | Kind, at: str = "", **options: Any) -> Generator[Injected, None, None]:
    """Let ``fault`` strike this process inside the block, if it is the rank that is meant; once, unless it says otherwise.

    Args:
        fault: a :class:`Fault`, or its kind; then ``at`` and ``options`` are its other fields.

    Every rank may enter with the same fault.  Faults may be nested.
    Raises: ConfigError for a fault that there cannot be.

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
        stack.enter_context(black_box.hearing(injected.hear))
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
    """Say in your own program that it comes to ``place``, so that faults may strike there.  Costs nothing without any."""
    black_box.note(place)


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
