"""One step in a transaction: the object that users hold in ``with``."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Literal, NoReturn

from shardwise.comm import alarm
from shardwise.errors import RejectedStep, StepError
from shardwise.transaction.first_cause import Choice, Report, make_report
from shardwise.transaction.ledger import Ledger

Types = tuple[type[BaseException], ...]
Outcome = Literal["running", "committed", "again", "skipped", "undone", "lost"]


class Transaction:
    """A step that happens on all ranks or on none.

    Attributes:
        outcome: "committed": it was made, on all ranks.  On none: "again": it is to be made once more; "skipped"; "undone":
            its exception was raised.  "lost": it ended within an optimizer's step that was not to be undone.
        cause: what ended it, if an exception did: its rank, class, text and place, as the error on other ranks says it.
        num_bytes: copied to keep the state before it.
    """

    def __init__(self, ledger: Ledger, retry: Types, skip: Types) -> None:
        self._ledger, self._retry, self._skip = ledger, retry, skip
        self.outcome: Outcome = "running"
        self.cause: StepError | None = None

    @property
    def again(self) -> bool:
        """True if an exception of a type in ``retry`` has undone it: all ranks are to make it once more."""
        return self.outcome == "again"

    @property
    def num_bytes(self) -> int:
        """Bytes copied to keep the state before the last transaction."""
        return self._ledger.num_bytes

    def reject(self, reason: str) -> NoReturn:
        """Give this step up, on all ranks.  Raises: RejectedStep."""
        raise RejectedStep(reason)

    def __enter__(self) -> Transaction:
        self._ledger.begin()
        self.outcome, self.cause = "running", None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        ledger = self._ledger
        try:
            if error is None:
                error = self._arrive()
            if error is None:
                self.outcome = "committed"
                return False
            return self._fail(error, is_own=kind is not None)
        finally:
            ledger.close()
            del error, trace  # they refer to this frame

    def _arrive(self) -> BaseException | None:
        agreement = self._ledger.agreement
        try:
            if agreement is not None and not self._ledger.is_agreed:
                agreement.arrive(self._ledger.number)
        except BaseException as error:
            return error
        return None

    def _fail(self, error: BaseException, is_own: bool) -> bool:
        """Undo the step with all ranks; return True if nobody is to hear of it."""
        ledger, agreement = self._ledger, self._ledger.agreement
        alarm.leave()  # from here on all ranks meet
        if ledger.is_agreed:
            self._end(error)
        cause = self._report(error)
        mine = cause.order
        if agreement is not None:
            found = agreement.hear(ledger.number, cause)
            if found is None:
                self.outcome = "committed"
                if not isinstance(error, Exception):
                    raise error
                return False
            mine, cause = cause.order, found
        if cause.choice == "end":
            self._raise_end(cause, error)
        is_hidden = cause.choice != "raise"
        if is_hidden:
            traceback.clear_frames(error.__traceback__)  # they hold activations
        self._go_back()
        self.cause = StepError(_text_of(cause), cause.rank, cause.kind, cause.text, cause.place)
        self.outcome = "undone" if not is_hidden else "skipped" if cause.choice == "skip" else "again"
        if is_hidden or (is_own and mine == cause.order):
            return is_hidden  # raised again as it is, if it is
        raise self.cause from error

    def _end(self, error: BaseException) -> NoReturn:
        """Raise that a step has ended that cannot be undone, on this rank and on all that hear of it."""
        agreement = self._ledger.agreement
        known = None if agreement is None else agreement.ended()
        if known is not None:
            self._raise_end(known, error)
        rank = 0 if agreement is None else agreement.rank
        cause = make_report(error, rank, 1, "end")
        if agreement is not None:
            agreement.end(cause)
        self._raise_end(cause, error)

    def _raise_end(self, cause: Report, error: BaseException) -> NoReturn:
        self.outcome = "lost"
        text = (
            f"rank {cause.rank} raised {cause.kind} at {cause.place}: {cause.text}\nAll ranks had agreed on the optimizer's "
            "step, which undoes_optimizer=False does not undo: parameters may differ between ranks. Start again from a "
            "checkpoint, or use undoes_optimizer=True"
        )
        self.cause = StepError(text, cause.rank, cause.kind, cause.text, cause.place)
        raise self.cause from error

    def _report(self, error: BaseException) -> Report:
        ledger, agreement = self._ledger, self._ledger.agreement
        order = 1 if agreement is None else agreement.claim(ledger.number)
        rank = 0 if agreement is None else agreement.rank
        return make_report(error, rank, order, self._choice(error))

    def _choice(self, error: BaseException) -> Choice:
        if isinstance(error, self._retry):
            return "retry"
        return "skip" if isinstance(error, self._skip) else "raise"

    def _go_back(self) -> None:
        ledger, agreement = self._ledger, self._ledger.agreement
        problem: Exception | None = None
        try:
            ledger.undo()
        except Exception as found:
            problem = found
        try:
            if agreement is not None:
                agreement.meet_again(ledger.number, "" if problem is None else f"{type(problem).__name__}: {problem}")
            elif problem is not None:
                raise problem
        finally:
            del problem
        ledger.reconnect()


def _text_of(cause: Report) -> str:
    return (
        f"rank {cause.rank} raised {cause.kind} at {cause.place}: {cause.text}\nAll ranks have undone the step: parameters, "
        "gradients, buffers and optimizer state are those before it. To go on without a word, name the exception in retry= or "
        "skip= of shardwise.transaction"
    )
