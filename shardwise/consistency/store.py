"""The key-value store of the job, with a named error where it does not answer any more.

A process that is stopped keeps its connections: torch's client would wait for its answer for ever, with no limit of time.  So
a store that another process keeps is asked on a thread of its own, and given up on by whoever waits for that thread.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise.errors import TransportError
from shardwise.torch_private import timeout_s_of

# ---- Numbers by which ranks compare tensors without sending them.

CHUNK_NUMEL = 1 << 20
SAMPLE_NUMEL = 1 << 16
NUM_PROJECTIONS = 16
_SKETCHED_NUMEL = 1 << 12
_ODD = -7046029254386353131  # 2**64 / golden ratio, as a signed number: spreads consecutive integers over all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(values: torch.Tensor) -> int:
    """Return a number that depends on every bit of ``values`` and on their order; 0 for zeros."""
    values = torch.view_as_real(values) if values.is_complex() else values
    numbers = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    weights = torch.arange(1, min(CHUNK_NUMEL, numbers.numel()) + 1, device=values.device) * _ODD
    weights = (weights ^ (weights >> 31)) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in numbers.split(CHUNK_NUMEL):
        total = total * _ODD + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return int(total.item())


def sample_of(local: torch.Tensor, most: int = SAMPLE_NUMEL) -> torch.Tensor:
    """Return at most ``most`` elements of ``local``, 1-D: all of them, or evenly spaced ones and the last ones."""
    flat = local.reshape(-1)
    if flat.numel() <= most:
        return flat
    half = most // 2
    return torch.cat([flat[:: -(-flat.numel() // half)], flat[-half:]])


@functools.cache
def _signs() -> torch.Tensor:
    noise = torch.Generator("cpu").manual_seed(1)
    return _random_signs(NUM_PROJECTIONS * _SKETCHED_NUMEL, noise).view(NUM_PROJECTIONS, _SKETCHED_NUMEL)


def _random_signs(numel: int, noise: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (numel,), generator=noise, dtype=torch.int8, device="cpu") * 2 - 1


@dataclass(frozen=True, slots=True)
class Sketch:
    """What tells a tensor from another by more than yes or no.

    Attributes:
        norm: of all values.  projections: their sums with random signs.
        tolerance: how far apart, of the norm, rounding in their dtype may bring two of them.
    """

    norm: float
    projections: Sequence[float]
    tolerance: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Sketch:
        """Return the sketch of ``values``, the same on every device but for rounding."""
        noise = torch.Generator("cpu").manual_seed(0)
        total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device="cpu")
        square = 0.0
        flat = torch.view_as_real(values) if values.is_complex() else values
        for chunk in flat.detach().reshape(-1).split(_SKETCHED_NUMEL):
            numbers = chunk.to("cpu", torch.float64)
            # All chunks share their signs, each chunk multiplied by a random sign: drawing a sign per element would dominate.
            turns = _random_signs(NUM_PROJECTIONS, noise).double()
            total += turns * (_signs()[:, : numbers.numel()].double() @ numbers)
            square += float(numbers.square().sum())
        eps = torch.finfo(flat.dtype).eps if flat.dtype.is_floating_point else 0.0
        return cls(math.sqrt(square), total.tolist(), min(256 * eps, 0.02))

    @property
    def told(self) -> list[object]:
        """What to make it of again on another rank, as JSON has it."""
        return [self.norm, list(self.projections), self.tolerance]

    def distance(self, other: Sketch) -> float:
        """Return about the norm of the difference, over the larger norm; nan if that cannot be known."""
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(squares) / NUM_PROJECTIONS) / max(self.norm, other.norm, 1e-300)


# ---- What wakes a thread that waits for other ranks once one of them has said that it will not come.
# Whoever waits by looking again and again (at words in shared memory, at the store) calls :func:`look` between two looks.  A
# wait inside a backend's collective ends by its connections (:mod:`shardwise.consistency.process_groups`).

# Of this process, by thread: a checkpoint that is written beside the step waits on.  Changed by listen and leave alone.
_checks: dict[int, Callable[[], None]] = {}


def listen(check: Callable[[], None]) -> None:
    """Let ``check``, which raises if a rank will not come, be called while this thread waits."""
    _checks[threading.get_ident()] = check


def leave() -> None:
    """Take it away again."""
    _checks.pop(threading.get_ident(), None)


def look() -> None:
    """Raise what the check of this thread raises; costs a look into an empty dict where there is none."""
    if _checks:
        check = _checks.get(threading.get_ident())
        if check is not None:
            check()


_T = TypeVar("_T")
PATIENCE_S = 30.0  # or the timeout of the job, if that is less
BRIEF_S = 2.0  # for a store that may itself be the reason of a wait


class JobStore:
    """What shardwise asks of torch's stores.

    Args:
        patience_s: how long an answer may take; None: as long as the job waits for a rank, at most half a minute.
    Raises: TransportError, from every method, if the keeper of the store has ended, is stopped or out of reach.
    """

    def __init__(self, store: dist.Store, patience_s: float | None = None) -> None:
        self._store = store
        self._patience_s = _patience_s() if patience_s is None else patience_s
        self._line = _line_to(store)

    def set(self, key: str, text: str) -> None:
        """Put ``text`` under ``key``."""
        self._ask(lambda: self._store.set(key, text))

    def get(self, key: str) -> str:
        """Return what lies under ``key``, which is there."""
        return self._ask(lambda: self._store.get(key)).decode()

    def peek(self, key: str) -> str | None:
        """Return what lies under ``key``, None if nothing does; does not wait."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all ``keys`` are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; return the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def append(self, key: str, text: str) -> None:
        """Put ``text`` after what lies under ``key``."""
        self._ask(lambda: cast(Any, self._store).append(key, text))  # not in the stub

    def delete(self, key: str) -> None:
        """Forget ``key``, where the store can."""
        try:
            self._ask(lambda: self._store.delete_key(key))
        except (RuntimeError, NotImplementedError):
            return  # a few hundred bytes stay

    def _ask(self, question: Callable[[], _T]) -> _T:
        try:
            return question() if self._line is None else self._line.ask(question, self._patience_s)
        except TransportError:
            raise
        except (RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TransportError(f"{SILENCE}: {first}") from error


SILENCE = (
    "the store of the job does not answer: the process that keeps it (rank 0, unless the launcher does) has ended, is stopped "
    "or cannot be reached"
)


def _patience_s() -> float:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return PATIENCE_S if world is None else min(PATIENCE_S, timeout_s_of(world))


class _Line:
    """The thread on which a store is asked; while a question waits for its answer, so do all that come after."""

    def __init__(self) -> None:
        self._questions: _Questions = SimpleQueue()
        self._is_silent = False
        self.pid = os.getpid()
        threading.Thread(target=_answer_all, args=(self._questions,), name="shardwise-store", daemon=True).start()

    def ask(self, question: Callable[[], _T], limit_s: float) -> _T:
        if self._is_silent:
            raise TransportError(f"{SILENCE}: a question before has had no answer")
        answer: Future[_T] = Future()
        self._questions.put((answer, question))
        try:
            return answer.result(limit_s)
        except TimedOut:
            if answer.done():
                raise  # what the store itself says
            self._is_silent = True
            answer.add_done_callback(lambda _: setattr(self, "_is_silent", False))
            raise TransportError(f"{SILENCE}: no answer for {limit_s:.0f} s") from None

    def __del__(self) -> None:
        self._questions.put(None)


_Questions = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _answer_all(questions: _Questions) -> None:
    while (each := questions.get()) is not None:
        answer, question = each
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)
        del each, answer, question


# By address: torch makes a new Python object for the store inside another whenever it is asked for, and what a line has found
# out must outlive that.  Lines live as long as a store that was asked on them.
_lines: weakref.WeakValueDictionary[tuple[str, int], _Line] = weakref.WeakValueDictionary()
_line_of: weakref.WeakKeyDictionary[dist.Store, _Line | None] = weakref.WeakKeyDictionary()


def keeps_store(store: dist.Store) -> bool:
    """Return True if ``store`` may end with this process: rank 0 keeps it, unless the launcher does."""
    return isinstance(_innermost(store), dist.TCPStore) and dist.get_rank() == 0


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _line_to(store: dist.Store) -> _Line | None:
    """Return the thread that asks ``store``, None for one that no other process keeps."""
    if store in _line_of:
        line = _line_of[store]
        if line is None or line.pid == os.getpid():  # a fork has no threads
            return line
    inner, line = _innermost(store), None
    if isinstance(inner, dist.TCPStore):
        address = inner.host, inner.port
        line = _lines.get(address)
        if line is None or line.pid != os.getpid():
            line = _lines[address] = _Line()
    _line_of[store] = line
    return line
