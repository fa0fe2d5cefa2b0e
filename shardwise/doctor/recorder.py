"""``shardwise.record``: let a rank write down what it did last, whenever something fails."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from shardwise import black_box
from shardwise.doctor.rank_record import Event, Reason, Record, Stack, to_lines
from shardwise.doctor.user_code import lines_of, lines_of_trace, own_line
from shardwise.doctor.watch import Watch
from shardwise.safe_files import move_file, replace_file
from shardwise.torch_private import timeout_s_of

PATTERN = "rank-*.jsonl"
BLACK_BOX = "black_box"  # the folder of records in the folder of a run
BEFORE = "before"  # in the folder: records of the start before this one
STALL_S = 60.0
_MOST_REASONS, _MOST_STACKS = 16, 128
_MOST_JOBS = 4  # whose records are kept in the temporary folder
_OWN_FILES = ("/shardwise/doctor/recorder.py", "/shardwise/black_box.py", "/shardwise/errors.py")
_QUIET = ("ConfigError", "LayoutError")  # wrong arguments: nobody waits, and the message says all


_open: list[Recorder] = []  # those of this process that are open; changed by open() and close() alone


class Recorder:
    """Writes the record of this process.  Nothing that goes wrong in writing ever reaches the program."""

    def __init__(self, folder: Path, stall_s: float | None) -> None:
        self.folder = folder
        self._stall_s = stall_s
        self._pid = os.getpid()
        self._began_s = time.monotonic()  # what was before has nothing to do with this run
        self._rank: int | None = None
        self._num_ranks = 0
        self._reasons: list[Reason] = []
        self._stacks: list[Stack] = []
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._write_raised(error, trace)
        self.close()

    def close(self) -> None:
        """Write no more, and leave signals and hooks as they were."""
        self._stack.close()

    def write(self, reason: str) -> Path | None:
        """Write the last events, and where every thread is now; return the file, None if that could not be done."""
        return self._write(reason, ())

    def place(self) -> Path | None:
        """Return the folder; None while it is not known."""
        return self.folder

    @property
    def is_silent(self) -> bool:
        """True if this recorder writes nothing: it is closed, another one writes, or this process is a fork."""
        return self not in _open or os.getpid() != self._pid

    def _write_raised(self, error: BaseException, trace: TracebackType | None) -> None:
        if self.is_silent:
            return
        frames = lines_of_trace(trace)
        known = black_box.explain_end(error)
        self._write("; ".join(part for part in (_describe(error, frames), known) if part), frames)

    def _write(self, reason: str, raised: tuple[str, ...]) -> Path | None:
        if self.is_silent or not self._lock.acquire(timeout=1.0):  # a signal handler may run while it writes
            return None
        try:
            now_s = time.time()
            self._add(now_s, reason, raised)
            return self._put(self._record(now_s))
        except Exception:  # a full disk, a folder that is gone, an interpreter on its way out: training goes on
            return None
        finally:
            self._lock.release()

    def _add(self, now_s: float, reason: str, raised: tuple[str, ...]) -> None:
        self._learn_rank()
        self._reasons = [*self._reasons, Reason(now_s, reason)][-_MOST_REASONS:]
        self._stacks = [*self._stacks, *_stacks_of_all_threads(now_s, raised)][-_MOST_STACKS:]

    # ---- what triggers it ----

    def open(self) -> None:
        """Begin to watch."""
        self._learn_rank()
        self._put_last_run_aside()
        self._hear_errors()
        watch = Watch(self._signalled, self._stalled, self._limit_s)
        self._stack.callback(watch.close)
        watch.open()

    def _hear_errors(self) -> None:
        _open.append(self)
        self._stack.callback(_open.remove, self)
        self._stack.enter_context(black_box.witnessing(self._on_error))
        self._stack.enter_context(_excepthook(self._write_raised))

    def _on_error(self, text: str) -> None:
        if not text.startswith(_QUIET):
            self.write(text)

    def _signalled(self) -> None:
        self.write("asked by SIGUSR1")

    def _stalled(self, idle_s: float) -> None:
        self.write(f"nothing has moved for {idle_s:.0f} s")

    def _limit_s(self) -> float:
        if self._stall_s is not None:
            return self._stall_s
        if not dist.is_initialized() or dist.group.WORLD is None or dist.get_backend() == "fake":
            return STALL_S
        return min(STALL_S, timeout_s_of(dist.group.WORLD) / 2)

    # ---- what is written ----

    def _learn_rank(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def _put_last_run_aside(self) -> None:
        if self._rank is None:
            return
        kept = self.folder / BEFORE / self._file_name()
        with contextlib.suppress(OSError):
            if kept.parent.is_dir() and not kept.parent.is_symlink():
                kept.unlink(missing_ok=True)  # of a start before that one
            move_file(self.folder, self._file_name(), f"{BEFORE}/{self._file_name()}")

    def _file_name(self) -> str:
        return f"rank-p{self._pid}.jsonl" if self._rank is None else f"rank-{self._rank:05d}.jsonl"

    def _record(self, now_s: float) -> Record:
        since = now_s - time.monotonic()
        events = [Event(entry[0] + since, entry[1], *map(_plain, entry[2:])) for entry in self._entries()]
        main = threading.main_thread().ident or 0
        return Record(
            self._rank,
            self._num_ranks,
            platform.node(),
            self._pid,
            main,
            now_s,
            tuple(self._reasons),
            tuple(self._stacks),
            tuple(events),
            black_box.groups_of(dict.fromkeys(event.track for event in events if event.track)),
        )

    def _entries(self) -> list[black_box.Entry]:
        return [entry for entry in black_box.entries() if entry[0] >= self._began_s]

    def _put(self, record: Record) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder, self._file_name(), "\n".join(to_lines(record)) + "\n")
        return self.folder / self._file_name()


class DefaultRecorder(Recorder):
    """Writes the record of a process that has not called :func:`record`, into the system's temporary folder.

    It handles no signals.  Folders of this user's last jobs are kept; older ones are removed.  A program may catch
    thousands of errors, so an error that is not the program's end is written by :meth:`flush`.

    Args:
        name: returns the name of the job; None while it is not known.
    """

    def __init__(self, name: Callable[[], str | None]) -> None:
        super().__init__(default_place(), None)
        self._name, self._job = name, ""
        self._is_unwritten = False  # reasons and stacks since the last write

    def flush(self) -> None:
        """Write what errors have left since the last write; call it periodically, and before the process exits."""
        if self._is_unwritten and not self.is_silent and self._lock.acquire(timeout=1.0):
            try:
                with contextlib.suppress(Exception):  # as in _write
                    self._put(self._record(time.time()))
            finally:
                self._lock.release()

    def _on_error(self, text: str) -> None:
        if not text.startswith(_QUIET) and not self.is_silent and self._lock.acquire(timeout=1.0):
            try:
                self._add(time.time(), text, ())
                self._is_unwritten = True
            finally:
                self._lock.release()

    def place(self) -> Path | None:
        """Return the folder of the job, once its name is known."""
        if not self._job:
            self._job = self._name() or ""
            self.folder = self.folder / self._job
        return self.folder if self._job else None

    def open(self) -> None:
        """Start to record errors."""
        self._hear_errors()

    @property
    def is_silent(self) -> bool:
        """True also while the user's own recorder is open."""
        return super().is_silent or any(type(each) is Recorder for each in _open)

    def _put(self, record: Record) -> Path:
        self._is_unwritten = False
        if self.place() is None:
            raise OSError("the job has no name yet")
        place = self.folder.parent
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():  # another user created it first
            raise OSError(f"{place} belongs to another user")
        for old in sorted(each for each in place.iterdir() if each != self.folder)[: 1 - _MOST_JOBS]:
            shutil.rmtree(old, ignore_errors=True)
        return super()._put(record)


def default_place() -> Path:
    """Return where processes that have not called :func:`record` write their records: it has one folder per job."""
    return Path(tempfile.gettempdir()) / f"shardwise-records-{os.geteuid()}"


def place_of_records() -> Path | None:
    """Return the folder into which this process writes its record when something fails; None if it writes none."""
    return next((each.place() for each in reversed(_open) if not each.is_silent), None)


def record(folder: str | Path, *, stall_s: float | None = None) -> Recorder:
    """From here on write ``folder/rank-NNNNN.jsonl`` whenever something fails on this rank; ``shardwise diagnose`` reads it.

    Without this call, records are written after errors and long waits (:func:`set_wait_report`) from the first sharded model
    or optimizer on, a few seconds later or when the process exits, to one folder per job in the system's temporary folder
    (``shardwise-records-UID``). Those of the last four jobs are kept.

    Written are the last few thousand events and the stack of every thread, when: an error of shardwise is raised that ranks
    meet in; an exception is not caught; the process gets SIGUSR1 (a handler of Python's that was there is called, too);
    nothing has moved for a while.  Each time the file is replaced.  Nothing is written while all goes well, and nothing that
    goes wrong in writing reaches the program.

    Args:
        folder: a place that outlives the job; the same for all ranks.
        stall_s: after how long without an event to write, once until something moves again (default: 60 s, or half the
            timeout of the process group if that is less).

    Returns: a context manager, with ``write(reason)`` and ``close()``; leaving it by an exception writes.  SIGUSR1 is heard
        if this is called on the main thread.

    Example:
        >>> with shardwise.record("run/black_box"):  # doctest: +SKIP
        ...     train()
    """
    recorder = Recorder(Path(folder).absolute(), stall_s)
    recorder.open()
    return recorder


@contextlib.contextmanager
def _excepthook(hear: Callable[[BaseException, TracebackType | None], None]) -> Generator[None, None, None]:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hear(error, trace)
        before(kind, error, trace)

    sys.excepthook = hook
    try:
        yield
    finally:
        if sys.excepthook is hook:
            sys.excepthook = before


def _describe(error: BaseException, frames: tuple[str, ...]) -> str:
    return f"{type(error).__name__}: {error}"[:300] + (f" [{own_line(frames)}]" if frames else "")


def _stacks_of_all_threads(now_s: float, raised: tuple[str, ...]) -> list[Stack]:
    """Return where every thread is, the main one first; the calling one was at ``raised`` if that is not empty."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  the documented way to all threads
    main, mine = threading.main_thread().ident, threading.get_ident()
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    lines = {ident: _lines_of(frames[ident]) for ident in order} | ({mine: raised} if raised else {})
    return [Stack(now_s, ident, names.get(ident, "?"), lines[ident]) for ident in order]


def _lines_of(frame: FrameType | None) -> tuple[str, ...]:
    while frame is not None and frame.f_code.co_filename.endswith(_OWN_FILES):
        frame = frame.f_back
    return lines_of(frame)


def _plain(value: Any) -> Any:
    return value if type(value) in (str, int) else str(getattr(value, "value", value))
