"""The key-value store of the job, with a named error if it stops answering.

A stopped process keeps its connections open: torch's client would wait for its answer forever.  So a store that another
process hosts is queried on a separate thread, and callers wait for that thread with a timeout.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise.errors import DesyncError, TransportError
from shardwise.torch_private import store_of, timeout_s_of

# ---- Digests and sketches, by which ranks compare tensors without sending them.

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


@dataclass(frozen=True, slots=True)
class Sketch:
    """Numbers that show how far apart two tensors are.

    Attributes:
        norm: of all values.  projections: sums of the values with random signs.
        tolerance: the distance, relative to the norm, that rounding in their dtype may cause.
    """

    norm: float
    projections: Sequence[float]
    tolerance: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Sketch:
        """Return the sketch of ``values``; up to rounding it is the same on every device."""
        noise = torch.Generator("cpu").manual_seed(0)
        total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device="cpu")
        square = 0.0
        flat = torch.view_as_real(values) if values.is_complex() else values
        for chunk in flat.detach().reshape(-1).split(_SKETCHED_NUMEL):
            numbers, shape = chunk.to("cpu", torch.float64), (NUM_PROJECTIONS, chunk.numel())
            signs = torch.randint(0, 2, shape, generator=noise, dtype=torch.int8, device="cpu") * 2 - 1
            total += signs.double() @ numbers
            square += float(numbers.square().sum())
        eps = torch.finfo(flat.dtype).eps if flat.dtype.is_floating_point else 0.0
        return cls(math.sqrt(square), total.tolist(), min(256 * eps, 0.02))

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the norm of the difference, over the larger norm; nan if unknown."""
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(squares) / NUM_PROJECTIONS) / max(self.norm, other.norm, 1e-300)


# ---- Waits by polling, for what other threads and processes do.

_T = TypeVar("_T")
LOOK_S = 0.5  # between two checks whether the awaited event can still happen
STORE_PAUSES_S = 1e-4, 2e-2  # first and longest pause between two store requests
MEMORY_PAUSES_S = 20e-6, 1e-3  # between two reads of shared memory
_GROWTH = 1.5
_YIELDS = 200


def comes_soon(condition: Callable[[], object]) -> bool:
    """Return True once ``condition()`` holds; False if it does not while other threads get the core a few times."""
    return any(condition() or os.sched_yield() for _ in range(_YIELDS))


def wait_until(
    condition: Callable[[], _T],
    limit_s: float = math.inf,
    alarm: Callable[[], object] | None = None,
    is_hopeless: Callable[[], object] | None = None,
    pauses_s: tuple[float, float] = STORE_PAUSES_S,
) -> _T:
    """Return the result of ``condition()`` once it is true; else its last result, when the wait is over.

    The wait is over after ``limit_s`` seconds, or once ``is_hopeless()``, which costs more than a condition and is
    called every ``LOOK_S``.  In both cases the condition is checked once more.  ``alarm()`` may raise; it is called
    before each pause.
    """
    start = looked = time.monotonic()
    pause_s, longest_s = pauses_s
    while not (found := condition()):
        if alarm is not None:
            alarm()
        now = time.monotonic()
        is_over = now - start >= limit_s
        if is_hopeless is not None and not is_over and now - looked >= LOOK_S:
            looked = now
            is_over = is_hopeless()
        if is_over:
            return condition()
        time.sleep(min(pause_s, max(start + limit_s - now, 0.0)))
        pause_s = min(_GROWTH * pause_s, longest_s)
    return found


# ---- Interruption of waits, once a rank has reported that it will not arrive.
# A loop that polls (words in shared memory, the store) calls :func:`look` between two polls. A wait inside a backend's
# collective is interrupted through its connections (:mod:`shardwise.consistency.process_groups`).

# Of this process, by thread: a background write of a checkpoint is not interrupted. Only listen and leave change it.
_checks: dict[int, Callable[[], None]] = {}


def listen(check: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``check``, which raises if a rank will not arrive, whenever this thread waits; return what was called before.

    That, of a block around this one, goes on being called, too.
    """
    thread = threading.get_ident()
    outer = _checks.get(thread)

    def both() -> None:
        check()
        if outer is not None:
            outer()

    _checks[thread] = both
    return outer


def leave(outer: Callable[[], None] | None = None) -> None:
    """Call nothing more than ``outer``, which :func:`listen` has returned, whenever this thread waits."""
    if outer is None:
        _checks.pop(threading.get_ident(), None)
    else:
        _checks[threading.get_ident()] = outer


deadlock: list[str] = []  # why no rank can go on, once that is known; only the watch of waits writes it


def refuse_deadlock() -> None:
    """Raise DesyncError if this process waits in a deadlock, which :mod:`failure_report` has found."""
    if deadlock:
        raise DesyncError(deadlock[0])


def end_waits(thread: int) -> None:
    """Raise :data:`deadlock` in ``thread``, one of this process, where it polls."""
    earlier = _checks.get(thread)

    def check() -> None:
        if earlier is not None:
            _checks[thread] = earlier
        else:
            del _checks[thread]  # what runs after the error may wait for ranks that report theirs
        refuse_deadlock()

    _checks[thread] = check


def look() -> None:
    """Raise what the check of this thread raises; without a check it costs one test of an empty dict."""
    if _checks:
        check = _checks.get(threading.get_ident())
        if check is not None:
            check()


PATIENCE_S = 30.0  # or the timeout of the job, if that is less
BRIEF_S = 2.0  # for a store that may itself be the reason of a wait


class JobStore:
    """The operations of torch's stores that shardwise uses.

    Args:
        patience_s: how long an answer may take; None for as long as the job waits for a rank, at most half a minute.
    Raises: TransportError, from every method, if the process that hosts the store has ended, is stopped or out of
    reach.
    """

    def __init__(self, store: dist.Store, patience_s: float | None = None) -> None:
        self._store = store
        self._patience_s = _patience_s() if patience_s is None else patience_s
        self._thread = _thread_for(store)

    def set(self, key: str, text: str) -> None:
        """Store ``text`` under ``key``."""
        self._query(lambda: self._store.set(key, text))

    def peek(self, key: str) -> str | None:
        """Return the value of ``key``, None if it does not exist; does not wait."""
        return self._query(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all ``keys`` exist."""
        return self._query(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; return the sum."""
        return self._query(lambda: self._store.add(key, amount))

    def append(self, key: str, text: str) -> None:
        """Append ``text`` to the value of ``key``."""
        self._query(lambda: cast(Any, self._store).append(key, text))  # not in the stub

    def _query(self, request: Callable[[], _T]) -> _T:
        try:
            return request() if self._thread is None else self._thread.query(request, self._patience_s)
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


class _StoreThread:
    """The thread that queries a store; while one request waits for its answer, later ones wait too."""

    def __init__(self) -> None:
        self._requests: _Requests = SimpleQueue()
        self._is_silent = False
        self.pid = os.getpid()
        threading.Thread(target=_serve, args=(self._requests,), name="shardwise-store", daemon=True).start()

    def query(self, request: Callable[[], _T], limit_s: float) -> _T:
        if self._is_silent:
            raise TransportError(f"{SILENCE}: an earlier request got no answer")
        answer: Future[_T] = Future()
        self._requests.put((answer, request))
        try:
            return answer.result(limit_s)
        except TimedOut:
            if answer.done():
                raise  # the store's own timeout
            self._is_silent = True
            answer.add_done_callback(lambda _: setattr(self, "_is_silent", False))
            raise TransportError(f"{SILENCE}: no answer for {limit_s:.0f} s") from None

    def __del__(self) -> None:
        self._requests.put(None)


_Requests = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _serve(requests: _Requests) -> None:
    while (each := requests.get()) is not None:
        answer, request = each
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)
        del each, answer, request


# By address: torch creates a new Python object for the inner store at each access, and the state of a thread must
# outlive it. Threads live as long as a store that uses them.
_threads: weakref.WeakValueDictionary[tuple[str, int], _StoreThread] = weakref.WeakValueDictionary()
_thread_of: weakref.WeakKeyDictionary[dist.Store, _StoreThread | None] = weakref.WeakKeyDictionary()


def innermost_store(store: dist.Store) -> dist.Store:
    """Return the store under the prefixes of ``store``."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def default_store() -> dist.Store | None:
    """Return the store of the default process group; None without a group, or if it is unusable (a fake group's)."""
    world = dist.group.WORLD if dist.is_available() else None
    if world is None or type(innermost_store(store := store_of(world))).__name__ in ("Store", "FakeStore"):
        return None
    return store


def are_threads() -> bool:
    """Return True if the ranks are threads of this process, as in torch's tests: their store is its memory."""
    store = store_of(cast(dist.ProcessGroup, dist.group.WORLD))
    return type(innermost_store(store)) is dist.HashStore and dist.get_world_size() > 1


def keeps_store(store: dist.Store) -> bool:
    """Return True if ``store`` may end with this process: rank 0 hosts it, unless the launcher does."""
    return isinstance(innermost_store(store), dist.TCPStore) and dist.get_rank() == 0


def _thread_for(store: dist.Store) -> _StoreThread | None:
    """Return the thread that queries ``store``, None for a store that no other process hosts."""
    if store in _thread_of:
        thread = _thread_of[store]
        if thread is None or thread.pid == os.getpid():  # a fork has no threads
            return thread
    inner, thread = innermost_store(store), None
    if isinstance(inner, dist.TCPStore):
        address = inner.host, inner.port
        thread = _threads.get(address)
        if thread is None or thread.pid != os.getpid():
            thread = _threads[address] = _StoreThread()
    _thread_of[store] = thread
    return thread
