"""What is recorded of some steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import nn

from shardwise import Trace, trace

StepWatch = Callable[[int], AbstractContextManager[None]]


def unwatched(number: int) -> AbstractContextManager[None]:
    """Record nothing of step ``number``."""
    del number
    return nullcontext()


def traced_steps(model: nn.Module | None, steps: int, write: Callable[[Trace], None]) -> StepWatch:
    """Return what traces steps 1 to ``steps`` (0-based; the first one warms up) and calls ``write`` after the last."""
    stack = ExitStack()
    traces: list[Trace] = []

    @contextmanager
    def watch(number: int) -> Generator[None, None, None]:
        if number == 1:
            traces.append(stack.enter_context(trace(model)))
        try:
            yield
        except BaseException:
            stack.close()
            raise
        if number == steps and traces:
            stack.close()
            write(traces.pop())

    return watch
