"""The key-value store of the job, with a named error where it does not answer any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import TransportError

_T = TypeVar("_T")


class JobStore:
    """What shardwise asks of torch's stores.

    Raises: TransportError, from every method, where the process that keeps the store has ended.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """Put ``text`` under ``key``."""
        _ask(lambda: self._store.set(key, text))

    def get(self, key: str) -> str:
        """Return what lies under ``key``, which is there."""
        return _ask(lambda: self._store.get(key)).decode()

    def peek(self, key: str) -> str | None:
        """Return what lies under ``key``, None if nothing does; does not wait."""
        return self.get(key) if self.check([key]) else None

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all ``keys`` are there."""
        return _ask(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; return the sum."""
        return _ask(lambda: self._store.add(key, amount))

    def delete(self, key: str) -> None:
        """Forget ``key``, where the store can."""
        try:
            self._store.delete_key(key)
        except (RuntimeError, NotImplementedError):
            return  # a few hundred bytes stay


def _ask(question: Callable[[], _T]) -> _T:
    try:
        return question()
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TransportError(
            "the store of the job does not answer: the process that keeps it (rank 0, unless the launcher does) has ended "
            f"or cannot be reached: {first}"
        ) from error
