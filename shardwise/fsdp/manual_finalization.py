"""Manual finalization (``set_manual_backward_finalization``): user code says when gradients are complete."""

from __future__ import annotations

from shardwise.errors import StateError


class ManualFinalization:
    """State of manual backward finalization, and checks of the order of its calls.

    Attributes:
        is_on: ``finalize_backward`` sets gradients, after any number of backwards; the end of a backward does not.
        is_open: a backward has begun whose gradients are not complete.  was_open: before the running one, which may raise.
        completion: identifies launched reductions that user code has not waited for; None if there are none.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_open = self.was_open = False
        self.completion: object | None = None

    @property
    def awaits_completion(self) -> bool:
        """True while the gradients of a backward are not complete."""
        return self.is_open or self.completion is not None

    def set_on(self, is_on: bool, is_in_backward: bool, has_deferred: bool) -> None:
        """Turn manual finalization on or off.  Raises: StateError while gradients of a backward are not set."""
        if is_on == self.is_on:
            return
        if is_in_backward:
            raise StateError("set_manual_backward_finalization cannot change mode during backward; call it before")
        if self.awaits_completion or has_deferred:
            raise StateError(
                "set_manual_backward_finalization cannot change mode after backward starts: gradients of an earlier backward "
                f"wait for {'finalize_backward()' if self.is_on else 'a last backward'}; run that first"
            )
        self.is_on = is_on

    # ---- transitions ----

    def forget(self) -> None:
        """Record that gradients are set, or that they are lost."""
        self.is_open = self.was_open = False
        self.completion = None

    # ---- checks ----

    def check_launch(self, is_in_backward: bool) -> None:
        """Raise StateError in a backward, without manual finalization, or before an earlier call has been completed."""
        if is_in_backward:
            raise StateError("finalize_backward must be called after backward completes")
        self.check_completed("finalizing backward again")
        if not self.is_on:
            raise StateError(
                "finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) first"
            )
        self.was_open = self.is_open  # it stays open if the launch that follows raises: user code may try again

    def check_completed(self, what: str) -> None:
        """Raise StateError if launched reductions were not waited for before ``what``."""
        if self.completion is not None:
            raise StateError(
                f"The previous gradient reduction must be waited on before {what}: call wait() on the handle that "
                "finalize_backward(async_op=True) returned"
            )
