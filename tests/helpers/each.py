"""One test for a rule that holds of each of many things."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def of_each(things: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated check for each of ``things``, its first argument, as one test that lists all that fail."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            failures: list[str] = []
            for thing in things:
                try:
                    check(thing, **fixtures)
                except AssertionError as error:
                    failures.append(f"{thing}: {error}")
            assert not failures, "\n".join(failures)

        _, *others = inspect.signature(check).parameters.values()
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.__signature__ = inspect.Signature(others)  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return decorate
