"""What earlier backwards have left of a unit's gradients, until a later one sums it all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.units.local_gradients import Gradients, add_gradients
from shardwise.units.param import UnitParam


class EarlierGradients:
    """Gradients that are neither on their way nor in ``.grad`` of a shard.  The methods alone write the attributes.

    Attributes:
        held: of backwards without sync, per parameter, in the reduce dtype.
        partial: sums over the shard axis that replicas have not been summed into.
        hidden: of plain parameters that stay registered, taken away while a backward adds new ones.
        unsynced: plain parameters whose gradients, which users see, are of this rank alone.
    """

    def __init__(self) -> None:
        self.held: Gradients = {}
        self.partial: Gradients = {}
        self.hidden: Gradients = {}
        self.unsynced: set[UnitParam] = set()

    def hold(self, gradients: Gradients) -> None:
        """Keep ``gradients`` for a later backward."""
        self.held = add_gradients(self.held, gradients)

    def keep_partial(self, sums: Gradients) -> None:
        """Keep ``sums`` over the shard axis for a later backward; they hold what was kept before."""
        self.partial.update(sums)

    def take(self, params: Iterable[UnitParam]) -> tuple[Gradients, Gradients]:
        """Give up all that is held, and the partial sums of ``params`` and of what is held: return both."""
        held, self.held = self.held, {}
        if not self.partial:
            return held, {}
        wanted = {*params, *held}
        return held, {param: self.partial.pop(param) for param in list(self.partial) if param in wanted}

    def put_back(self, held: Gradients, partial: Gradients) -> None:
        """Undo :meth:`take`."""
        self.held, self.partial = {**self.held, **held}, {**self.partial, **partial}

    def forget(self) -> None:
        """Drop what no user can see."""
        self.held, self.partial = {}, {}

    def hide(self, params: Sequence[UnitParam]) -> None:
        """Take the gradients of plain ``params`` from where a backward is about to accumulate new ones."""
        for param in params:
            gradient, param.sharded.grad = param.sharded.grad, None
            if gradient is None:
                self.unsynced.discard(param)
            elif param in self.unsynced:
                self.held[param] = gradient
            else:
                self.hidden[param] = gradient

    def show(self, params: Sequence[UnitParam]) -> None:
        """Put them back, with what a backward has added."""
        for param in params:
            parts = [self.hidden.pop(param, None), self.held.get(param), param.sharded.grad]
            first, *others = [part for part in parts if part is not None] or [None]
            for other in others:
                assert first is not None
                first = first.add_(other) if other is not None else first
            param.sharded.grad = first
            if self.held.pop(param, None) is None:
                self.unsynced.discard(param)
            else:
                self.unsynced.add(param)
