"""The key-value store of the job, with a named error where it does not answer any more.

A process that is stopped keeps its connections: torch's client would wait for its answer for ever, with no limit of time.  So
a store that another process keeps is asked on a thread of its own, and given up on by whoever waits for that thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardwise.errors import TransportError
from shardwise.torch_private import timeout_s_of

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
