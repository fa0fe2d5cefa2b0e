"""``.grad`` of shards while gradients wait for a backward with sync: clearing it drops them, any other use of it raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam

# What ``Optimizer.zero_grad(set_to_none=False)`` calls before the gradient is zeroed; it changes nothing.
_PASSIVE = ("__get__", "requires_grad_", "detach_", "size", "dim", "numel", "is_floating_point", "is_complex")
_ZEROING = ("zero_", "_foreach_zero_")


class WaitingGradient(torch.Tensor):
    """``.grad`` of a shard whose gradients wait for a backward with sync.

    The waiting gradients are local, or partial sums, so no number of them is the gradient.  Without something in ``.grad``,
    ``zero_grad()`` would have nothing to clear, and an optimizer would skip the parameter in silence.  It has no memory.

    Attributes:
        why: the text of the error for a use of it.
        param: weak reference to the parameter.
        before: the reduced gradient that ``.grad`` was; None if there was none.
    """

    why: str
    param: Callable[[], ShardedParam | None]
    before: torch.Tensor | None

    @classmethod
    def of(cls, param: ShardedParam, why: str) -> WaitingGradient:
        """Return one for ``param``."""
        mark = torch_private.tensor_without_memory(cls, param.sharded, param.dtype)
        mark.why, mark.param, mark.before = why, weakref.ref(param), None
        return mark

    def show(self, param: ShardedParam) -> None:
        """Be ``.grad`` of ``param``."""
        if param.sharded.grad is not self:
            self.before, param.sharded.grad = param.sharded.grad, self

    def withdraw(self, param: ShardedParam) -> bool:
        """Undo :meth:`show`; return False, with nothing done, if user code has cleared ``.grad``."""
        if param.sharded.grad is not self:
            return False
        param.sharded.grad, self.before = self.before, None
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Zero what waits if ``func`` does so; allow queries of attributes; refuse all else."""
        name = getattr(func, "__name__", "")
        if name in _ZEROING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for mark in (each for each in tensors if isinstance(each, cls)):
                if (param := mark.param()) is not None and param.sharded.grad is mark:
                    param.sharded.grad = torch.zeros_like(param.sharded, dtype=mark.dtype)
            others = [each for each in tensors if not isinstance(each, cls)]
            if others:
                func(others)
            return args[0] if name == "zero_" else None
        if name in _PASSIVE:
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        _refuse((args, *(kwargs or {}).values()))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse what reaches a waiting gradient past :meth:`__torch_function__`, such as autograd's accumulation."""
        _refuse((args, *(kwargs or {}).values()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"WaitingGradient(shape={tuple(self.shape)}: {self.why})"


def _refuse(value: Any) -> NoReturn:
    raise StateError(_why_in(value))


def _why_in(value: Any) -> str:
    if isinstance(value, WaitingGradient):
        return value.why
    return next((why for each in value if (why := _why_in(each))), "") if isinstance(value, (list, tuple)) else ""


def waits_for_sync(fqn: str) -> str:
    """Return the text of the error for a use of the gradient of ``fqn`` while backwards without sync wait for one with."""
    return (
        f"gradients of {fqn} wait for a backward with sync, so there is no gradient to clip, step on or read yet. Before the "
        "last backward of a step call set_requires_gradient_sync(True) (set_requires_all_reduce(True), "
        "set_is_last_backward(True), or leave policy(sync=False)), also if the last step of an epoch has fewer "
        "microbatches; zero_grad() drops the gradients that wait"
    )


def is_summed_later(fqn: str) -> str:
    """Return the text of the error for a use of the gradient of ``fqn`` before ``Reproducible`` has summed all of it."""
    return (
        f"the gradient of {fqn} was cleared, replaced or used in a loop over Reproducible.microbatches(), or after one that "
        "was left early: it is complete when all microbatches of the loop have run. Clear, scale, clip, read and step after it"
    )


@contextmanager
def withdrawn(waiting: Iterable[dict[ShardedParam, WaitingGradient]]) -> Generator[None]:
    """Have in ``.grad`` what was there before gradients waited, for code that copies or converts gradients."""
    # A parameter that user code has put in the place of one has none of its gradients; the next pass drops these.
    pairs = ((marks, param) for marks in waiting for param in marks if param.is_own(param.registrations[0].current))
    shown = [(marks, param) for marks, param in pairs if marks[param].withdraw(param)]
    try:
        yield
    finally:
        for marks, param in shown:
            param.adopt_registered()  # torch may have registered new parameters with the converted gradients
            if marks[param].dtype != param.dtype:
                marks[param] = WaitingGradient.of(param, marks[param].why)
            marks[param].show(param)
