"""Parameters whose new values are on their way: whoever reads one waits for it first.

Until then a parameter is of a class of its own, whose ``__torch_function__`` waits, makes it what it was, and goes on.  So
every way through torch's functions finds the new values, whoever takes it: modules, ``state_dict()``, users.  Views of
the memory that were made before, and arrays over it, are not asked.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shardwise import torch_private
from shardwise.comm.owned import PendingBroadcast


class Arrivals:
    """The values that are on their way to parameters of one optimizer, run by run."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # by the ids of the parameters, which the runs keep alive
        self._classes: dict[type, type] = {}

    @property
    def are_all_here(self) -> bool:
        """True if nothing is on its way."""
        return not self._runs

    def expect(self, params: Sequence[torch.Tensor], pending: Sequence[PendingBroadcast]) -> None:
        """Let who reads any of ``params`` wait for ``pending`` first."""
        if not pending:
            return
        run = _Run(params, pending)
        for param in params:
            self._runs[id(param)] = run
        try:
            for param in params:
                param.__class__ = self._class_for(type(param))
        except TypeError:  # a class that cannot be another for a while
            self._receive(run)

    def wait(self) -> None:
        """Wait for all that is on its way.  Raises: DesyncError if the owner or another rank did not take part."""
        while self._runs:
            self._receive(next(iter(self._runs.values())))

    def wait_for(self, values: object) -> None:
        """Wait for the parameters among the leaves of ``values``; for all if there are none."""
        runs = [run for leaf in torch_private.leaves_of(values) if (run := self._runs.get(id(leaf))) is not None]
        for run in runs:
            if not run.has_come:
                self._receive(run)
        if not runs:
            self.wait()

    def _receive(self, run: _Run) -> None:
        for pending in run.pending:
            pending.wait()
        run.has_come = True
        for param, kind in zip(run.params, run.kinds, strict=True):
            self._runs.pop(id(param), None)
            param.__class__ = kind

    def _class_for(self, kind: type) -> type:
        if kind not in self._classes:
            self._classes[kind] = _awaited_class(kind, self)
        return self._classes[kind]


class _Run:
    """Broadcasts that bring the new values of ``params``, which are of ``kinds`` otherwise."""

    __slots__ = ("has_come", "kinds", "params", "pending")

    def __init__(self, params: Sequence[torch.Tensor], pending: Sequence[PendingBroadcast]) -> None:
        self.params, self.pending, self.kinds = params, pending, [type(param) for param in params]
        self.has_come = False


def _awaited_class(kind: Any, arrivals: Arrivals) -> type:
    class Awaited(kind):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if func in _READ_NO_VALUES:
                with torch_private.without_torch_function():
                    return func(*args, **(kwargs or {}))
            arrivals.wait_for((args, kwargs))
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            arrivals.wait_for(self)
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            arrivals.wait_for(self)
            return self.__reduce_ex__(protocol)

    Awaited.__name__, Awaited.__qualname__, Awaited.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Awaited


def _accessors(*names: str) -> set[Any]:
    found = {getattr(torch.Tensor, name) for name in names}
    return {each for accessor in found for each in (accessor.__get__, accessor.__set__)}


# What loops do between a step and the next forward: gradients are dropped, and whether they are there is asked.
_READ_NO_VALUES = _accessors("grad", "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout")
