"""Backward whose end the user says (``set_manual_backward_finalization``): what may be called when."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.errors import StateError
from shardwise.events import unit_in_words
from shardwise.units.unit import Unit


class ManualFinalization:
    """Whether gradients are complete when a backward ends, or when the user says so.

    Attributes:
        is_on: gradients are set by ``finalize_backward``, after any number of backwards, not at the end of one.
        is_open: a backward has begun whose gradients are not complete.
        completion: stands for launched reductions that nobody has waited for.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_open = self._was_open = False
        self.completion: object | None = None

    @property
    def awaits_completion(self) -> bool:
        """True when gradients of a backward wait to be complete."""
        return self.is_open or self.completion is not None

    def set_on(self, is_on: bool, is_in_backward: bool, has_deferred: bool) -> None:
        """Begin or end it.  Raises: StateError if gradients of a backward are on their way."""
        if is_on == self.is_on:
            return
        if is_in_backward:
            raise StateError("set_manual_backward_finalization cannot change mode during backward; call it before")
        if self.awaits_completion or has_deferred:
            raise StateError(
                "set_manual_backward_finalization cannot change mode after backward starts: gradients of an earlier backward "
                f"wait for {'finalize_backward()' if self.is_on else 'a last backward'}; let them be set first"
            )
        self.is_on = is_on

    def inherit(self, old: ManualFinalization) -> None:
        """Be on if ``old``, of an engine that this one takes over, was."""
        self.is_on = self.is_on or old.is_on

    # ---- what happens ----

    def begin_backward(self) -> None:
        """A backward begins."""
        self._was_open, self.is_open = self.is_open, self.is_on

    def abort_backward(self) -> None:
        """It has raised."""
        self.is_open = self._was_open

    def launch(self) -> object:
        """All that is left has been launched; return what :meth:`complete` takes."""
        self.completion = object()
        return self.completion

    def complete(self) -> None:
        """Gradients are set."""
        self.is_open, self.completion = False, None

    def forget(self) -> None:
        """Gradients that have not been set are gone."""
        self.is_open = self._was_open = False
        self.completion = None

    def hold_open(self) -> None:
        """The rest is about to be launched; if that raises, it may be tried again."""
        self._was_open = self.is_open

    # ---- what may happen ----

    def check_launch(self, is_in_backward: bool) -> bool:
        """Return True if there is a backward to finalize.

        Raises: StateError in a backward, without manual finalization, or before an earlier call has been completed.
        """
        if is_in_backward:
            raise StateError(
                "finalize_backward must be called after backward completes; call it after the last backward()"
            )
        if self.completion is not None:
            raise StateError(
                "The previous gradient reduction must be waited on before finalizing backward again; call wait() on its handle"
            )
        if not self.is_on:
            raise StateError(
                "finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) on the "
                "root before forward"
            )
        return self.is_open

    def check_completion(self, completion: object) -> None:
        """Raise StateError if ``completion`` has been forgotten."""
        if completion is not self.completion:
            raise StateError(
                "This gradient reduction handle was invalidated by reset_iter_state(); its gradients are gone"
            )

    def check_completed(self, what: str) -> None:
        """Raise StateError if launched reductions have not been waited for before ``what``."""
        if self.completion is not None:
            raise StateError(
                f"The previous gradient reduction must be waited on before {what}: call wait() on the handle that "
                "finalize_backward(async_op=True) has returned"
            )

    def check_step(self, stepped: set[int], units: Iterable[Unit]) -> None:
        """Raise StateError if gradients are not complete of a parameter of ``units`` with an id in ``stepped``."""
        if not self.awaits_completion:
            return
        missing = "call finalize_backward()" if self.completion is None else "wait() for finalize_backward()"
        for unit in units:
            for param in unit.params:
                if id(param.sharded) in stepped:
                    raise StateError(
                        f"an optimizer steps on {param.fqn} ({unit_in_words(unit.name)}) before the gradients of its last "
                        f"backward are complete, in manual backward finalization; {missing} on the root module first"
                    )
