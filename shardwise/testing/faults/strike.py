"""What each kind of fault does to the process, or to what it is about to send."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from shardwise import torch_private
from shardwise.errors import ConfigError
from shardwise.testing.faults.fault import Fault

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


def strike(fault: Fault, subject: object) -> None:
    """Do what ``fault`` does.  ``subject``: what the place is about, for faults that change it.

    Raises: ConfigError if this process ignores the signal that is the fault.
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


def is_left_out(fault: Fault) -> bool:
    """Return True if what begins at the place is not done."""
    return fault.kind == "drop"


def corrupt(subject: object) -> None:
    """Change the first element of the first tensor in ``subject`` that has any: its sign and its size."""
    with torch.no_grad():
        for tensor in _tensors(subject):
            local = torch_private.local_of(tensor).detach()
            if local.numel():
                place = (0,) * local.dim()
                local[place] = -2 * local[place] - 1
                return


def _tensors(subject: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a place is about: a tensor, or any nesting of sequences, or an end of a collective."""
    if isinstance(subject, torch.Tensor):
        yield subject
    elif isinstance(subject, Sequence):
        for each in cast(Sequence[object], subject):
            yield from _tensors(each)
    elif hasattr(subject, "full_parts"):
        yield from cast(Any, subject).full_parts(0)
    elif hasattr(subject, "shard"):
        yield cast(Any, subject).shard()
