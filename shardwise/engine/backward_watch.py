"""Whether a backward runs, has ended or has raised, as far as autograd tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from shardwise import torch_private
from shardwise.torch_private import innermost_transform


class BackwardEnd:
    """What autograd calls when a backward ends; it lets go of it without a call when that backward raises."""

    __slots__ = ("__weakref__", "_finish")

    def __init__(self, finish: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        finish = self._finish()
        if finish is not None:
            if innermost_transform() is None:
                finish()
            else:
                with torch_private.beside_transforms():
                    finish()


class BackwardWatch:
    """Watches one backward at a time.

    Args:
        finish: the bound method to call when it ends.  abort: the one to call when it has raised.

    Attributes:
        end: reference to the end of the backward that runs, dead if that has raised; None without one.
        task: autograd's number of it.
        makes_graph: it runs with ``create_graph=True``.
    """

    def __init__(self, finish: Callable[[], None], abort: Callable[[], None]) -> None:
        self._finish, self._abort = weakref.WeakMethod(finish), weakref.WeakMethod(abort)
        self.end: weakref.ref[BackwardEnd] | None = None
        self.task = -1
        self.makes_graph = False

    @property
    def is_running(self) -> bool:
        """True from :meth:`begin` on, until the backward has ended or raised."""
        return self.end is not None and self.end() is not None

    @property
    def has_raised(self) -> bool:
        """True if the backward that was begun has raised, and nobody has said so yet."""
        return self.end is not None and self.end() is None

    def begin(self) -> BackwardEnd:
        """Watch the running backward; the caller queues what is returned, when all else has been done for its begin."""
        end, this = BackwardEnd(self._finish), weakref.ref(self)

        def on_death(dead: weakref.ref[BackwardEnd]) -> None:
            watch = this()
            abort = watch._abort() if watch is not None and watch.end is dead else None
            if abort is not None:
                abort()

        self.end = weakref.ref(end, on_death)
        self.task = torch_private.graph_task_id()
        self.makes_graph = False
        return end

    def stop(self) -> None:
        """The backward is over, one way or the other."""
        self.end = None
