"""Threads of the host on a fake accelerator: what they do is after what gave it to them, and before what waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fake_accelerator.timeline import Clock, Timeline


class FakeThread:
    """Stands for a ``ThreadPoolExecutor`` of one thread.

    Args:
        is_late: jobs run when somebody waits for one of them; else at once.  These are the two ends of what a thread may do.
    """

    def __init__(self, timeline: Timeline, is_late: bool) -> None:
        self.timeline, self._is_late = timeline, is_late
        self.lane = timeline.new_thread("updates")
        self._jobs: deque[FakeJob] = deque()

    def submit(self, function: Callable[..., Any], *args: Any) -> FakeJob:
        """Give a job to the thread."""
        timeline = self.timeline
        timeline.begin(timeline.thread, "submit")
        job = FakeJob(self, lambda: function(*args), dict(timeline.clocks[timeline.thread]))
        self._jobs.append(job)
        if not self._is_late:
            self.run()
        return job

    def run(self) -> None:
        """Do all jobs."""
        while self._jobs:
            self._jobs.popleft().run()


class FakeJob:
    """Stands for the future of a job."""

    def __init__(self, thread: FakeThread, function: Callable[[], Any], after: Clock) -> None:
        self._thread, self._function, self._clock = thread, function, after
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the job in its thread."""
        timeline, lane = self._thread.timeline, self._thread.lane
        with timeline.in_thread(lane, self._clock):
            try:
                self._result = self._function()
            except Exception as error:
                self._error = error
            timeline.begin(lane, "end of a job")
            self._clock = dict(timeline.clocks[lane])

    def done(self) -> bool:
        """Return whether a list of jobs may leave this one out; it never does, and so its clock is joined."""
        return False

    def exception(self) -> BaseException | None:
        """Wait for the job; return what it raised."""
        self._thread.run()
        self._thread.timeline.join(self._clock)
        return self._error

    def result(self) -> Any:
        """Wait for the job; return what it returned."""
        if (error := self.exception()) is not None:
            raise error
        return self._result
