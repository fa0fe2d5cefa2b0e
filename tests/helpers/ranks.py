"""Tests that run on every rank of a group."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardwise import set_default_transport, set_wait_report
from shardwise.testing import WorkerPool

Test = Callable[..., None]
KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD
FOUR: Any = pytest.param(4, marks=pytest.mark.exhaustive)  # a size whose case guards no rule alone


@dataclass(frozen=True)
class Body:
    """Stands for a test's body on its way to a worker, which finds it behind the test's name."""

    module: str
    __name__: str  # heads the report of a failure
    num_ranks: int | None = None  # for a body that asks for it

    def __reduce__(self) -> tuple[Callable[..., Test], tuple[str, str, int | None]]:
        return _find_body, (self.module, self.__name__, self.num_ranks)


def _find_body(module: str, name: str, num_ranks: int | None) -> Test:
    """Import a test's module before its rank has a group: some of torch's keep the one that they find, and its threads."""
    body: Test = getattr(importlib.import_module(module), name).__wrapped__
    torch.manual_seed(0)  # ranks outlive tests, each of which has drawn another number of numbers on them
    set_default_transport("auto")  # nor does a test inherit what the one before it has set
    set_wait_report(30.0)
    return body if num_ranks is None else functools.partial(body, num_ranks=num_ranks)


def on_ranks(*sizes: int, **options: Any) -> Callable[[Test], Test]:
    """Run the decorated test on every rank of a group of each of ``sizes``, in the session's workers.

    The body sees a process group, and one seed on all ranks; pytest's arguments (parametrize, fixtures) reach it from the one
    process that collects tests, so they must be picklable.  ``monkeypatch`` is refused: ranks would get copies that nobody
    undoes, and outlive the test; ``with pytest.MonkeyPatch.context()`` in the body does.  A failure comes back with every
    rank's traceback.

    Args:
        sizes: numbers of ranks, one test each; none if the test is parametrized with ``num_ranks`` (and what goes with it).
        options: of :meth:`WorkerPool.run`: fresh, backend, timeout_s, group_timeout_s.

    Example:
        >>> @on_ranks(2, 4)
        ... def test_every_rank_is_counted() -> None:
        ...     ones = torch.ones(())
        ...     dist.all_reduce(ones)
        ...     assert ones == dist.get_world_size()
    """

    def decorate(body: Test) -> Test:
        taken = list(inspect.signature(body).parameters)
        if "monkeypatch" in taken:
            raise TypeError(f"{body.__name__}: take pytest.MonkeyPatch.context() in the body: ranks outlive a test")
        several = len(sizes) != 1

        @functools.wraps(body)
        def test(pool: WorkerPool, **arguments: Any) -> None:
            num_ranks = arguments["num_ranks"] if several else sizes[0]
            passed = {name: value for name, value in arguments.items() if name in taken and name != "num_ranks"}
            told = num_ranks if "num_ranks" in taken else None
            pool.run(Body(body.__module__, body.__name__, told), num_ranks=num_ranks, **options, **passed)

        names = dict.fromkeys(["pool", *taken, *["num_ranks"] * several])
        test.__signature__ = inspect.Signature([inspect.Parameter(name, KEYWORD) for name in names])
        if len(sizes) > 1:
            return pytest.mark.parametrize("num_ranks", sizes, ids=lambda size: f"{size}-ranks")(test)
        return test

    return decorate
