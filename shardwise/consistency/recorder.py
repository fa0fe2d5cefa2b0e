"""Where ranks are, in words, and records: each rank writes its last events whenever something fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import observe
from shardwise.errors import ConfigError
from shardwise.formatting import format_ranks
from shardwise.observe import ERROR, WAITS, Entry, entries, live_tracks
from shardwise.safe_files import MOST_BYTES, move_file, open_input, replace_file

# ---- Find the lines of a stack that are user code, not this package, torch or the standard library. Pure.

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = re.compile(r"/torch/|/lib/python3[.\d]*/(?!(site|dist)-packages/)|^<|/(threading|contextlib)\.py")
_OTHERS = re.compile(r"/(site|dist)-packages/")
_MOST_FRAMES = 40
_USER, _PROGRAM, _OTHER, _LIBRARY = range(4)  # kinds of lines, the most informative first


def own_line(frames: Sequence[str]) -> str:
    """Return the innermost of ``frames`` that is user code, and the function that runs; without user code, a library's line.

    Lines of a program of this package (``shardwise train``) are marked as such.

    Args:
        frames: "file:line function", the innermost last.
    """
    if not frames:
        return "nowhere"
    place = innermost(frames, _OTHER)
    called = f"in {frames[-1].rsplit(' ', 1)[-1]}()"
    if place is None:
        return f"outside your code, {called}"
    prefix = "shardwise's own program, " if whose(frames[place]) == _PROGRAM else ""
    return f"{prefix}{frames[place]}" + (f", {called}" if place < len(frames) - 1 else "")


def innermost(frames: Sequence[str], least: int = _USER) -> int | None:
    """Return the index of the innermost of ``frames`` that is user code, or else of the best kind up to ``least``."""
    kinds = [whose(frame) for frame in frames]
    best = min(kinds, default=_LIBRARY)
    return None if best > least else len(kinds) - 1 - kinds[::-1].index(best)


def whose(frame: str) -> int:
    """Return the kind of a frame: user code, a program of this package, another package, or a library."""
    path = frame.rsplit(":", 1)[0]
    return _USER if path.startswith("<") and frame.endswith(" <module>") else _whose_file(path)  # python -c


@functools.lru_cache(maxsize=4096)
def _whose_file(path: str) -> int:
    tail = path.rpartition("/shardwise/")[2] if "/shardwise/" in path else ""
    if tail.startswith("recipes/"):  # it calls the library as a user does
        return _PROGRAM
    if tail and (_PACKAGE / tail).is_file():  # a folder of the user may also be called shardwise
        return _LIBRARY
    if _LIBRARIES.search(path):
        return _LIBRARY
    return _OTHER if _OTHERS.search(path) else _USER


def lines_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the stack that ends in ``frame``: its innermost lines, and only user code of the outer ones."""
    found: list[str] = []
    while frame is not None and len(found) < 2 * _MOST_FRAMES:
        line = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        if len(found) < _MOST_FRAMES or whose(line) == _USER:
            found.append(line)
        frame = frame.f_back
    return tuple(reversed(found))


def lines_of_trace(trace: TracebackType | None) -> tuple[str, ...]:
    """Return the lines of a traceback, the innermost last, with the limits of :func:`lines_of`."""
    found: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    outer = [line for line in found[:-_MOST_FRAMES] if whose(line) == _USER]
    return (*outer[-_MOST_FRAMES:], *found[-_MOST_FRAMES:])


# ---- The record of one rank: its last events, why it was written, and where its threads were. Pure; one line of JSON.

VERSION = 1
MOST_RANKS = 2**20  # the report of missing ranks takes memory for each
MOST_TEXT = 400  # characters of one text
_HEAD: dict[str, Callable[[Any], Any]] = {
    "num_ranks": int,
    "host": str,
    "pid": int,
    "main_thread": int,
    "written_s": float,
}


class Event(NamedTuple):
    """One event; ``time_s`` in seconds since the epoch; ``track`` is empty for events of this rank only."""

    time_s: float
    thread: int
    track: str
    number: int
    place: str
    what: str


class Reason(NamedTuple):
    """Why, and when, a rank wrote its record."""

    time_s: float
    text: str


class Stack(NamedTuple):
    """Where a thread was when the rank wrote; ``frames``: "file:line function", the innermost last."""

    time_s: float
    thread: int
    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one rank.

    Attributes:
        rank: global; None if it was unknown.  num_ranks: of the job; 0 if unknown.
        host, pid: of the process.  main_thread: the thread that runs the program.
        written_s: time of the last write.
    """

    rank: int | None
    num_ranks: int
    host: str
    pid: int
    main_thread: int
    written_s: float
    reasons: tuple[Reason, ...] = ()
    stacks: tuple[Stack, ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)


_ROWS: dict[str, tuple[type[Any], tuple[Callable[[Any], Any], ...]]] = {  # the values of each, in order
    "reasons": (Reason, (float, str)),
    "stacks": (Stack, (float, int, str, lambda lines: tuple(map(str, lines)))),
    "events": (Event, (float, int, str, int, str, str)),
}


def to_text(record: Record) -> str:
    """Return ``record`` as one JSON object."""
    rows = {name: [[*map(_short, each)] for each in getattr(record, name)] for name in _ROWS}
    return json.dumps({"version": VERSION} | {name: getattr(record, name) for name in ("rank", *_HEAD)} | rows)


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value[:MOST_TEXT] if isinstance(value, str) else value


def read_record(path: Path) -> Record | None:
    """Return the record in the file ``path``; None if it cannot be read."""
    try:
        with open_input(path.parent, path.name, MOST_BYTES) as file:
            return from_text(file.read().decode(errors="replace"))
    except OSError:
        return None


def from_text(text: str) -> Record | None:
    """Return the record in ``text``; None if it is not one."""
    try:
        found = json.loads(text)
        head = {name: kind(found[name]) for name, kind in _HEAD.items()}
        rank = None if found["rank"] is None else int(found["rank"])
        if not -1 <= (-1 if rank is None else rank) < MOST_RANKS or not 0 <= head["num_ranks"] <= MOST_RANKS:
            return None  # no job has so many ranks
        rows: dict[str, Any] = {
            name: tuple([kind(*[of(each) for of, each in zip(kinds, row, strict=True)]) for row in found[name]])
            for name, (kind, kinds) in _ROWS.items()
        }
        return Record(rank, **head, **rows)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


# ---- The recorder of this process, and the folders of records.

PATTERN = "rank-*.jsonl"
NOTHING_MOVES = "nothing has moved"  # begins the reason of a record that a wait report has caused
BLACK_BOX = "black_box"  # the folder of records in the folder of a run
BEFORE = "before"  # in the folder: records of the previous start
_MOST_REASONS, _MOST_STACKS = 16, 128
_MOST_JOBS = 4  # jobs whose records are kept in the temporary folder
_OWN_FILES = ("/shardwise/consistency/recorder.py", "/shardwise/observe.py", "/shardwise/errors.py")
_QUIET = ("ConfigError", "LayoutError")  # wrong arguments: no rank waits, and the message suffices


_open: list[Recorder] = []  # the open recorders of this process; only open() and close() change it


class Recorder(ExitStack):
    """Write the record of this process until it is closed.  A failed write never affects the program.

    Args:
        folder: where; one in :func:`default_place` is made at the first write.
        rank, num_ranks: as a launcher has told them, for failures before or in ``init_process_group``.
    """

    def __init__(self, folder: Path, rank: int | None = None, num_ranks: int = 0) -> None:
        super().__init__()
        self.folder = folder
        self._rank, self._num_ranks = rank, num_ranks
        self._pid = os.getpid()
        self._began_s = time.monotonic()  # earlier events do not belong to this run
        self._reasons: list[Reason] = []
        self._stacks: list[Stack] = []
        self._lock = threading.Lock()

    def __exit__(self, *raised: Any) -> bool:
        _, error, trace = raised
        if error is not None:
            self._write_raised(error, trace)
        return bool(super().__exit__(*raised))

    @property
    def is_silent(self) -> bool:
        """True if this recorder writes nothing: it is closed, another one writes, or this process is a fork."""
        return self not in _open or os.getpid() != self._pid

    def _write_raised(self, error: BaseException, trace: TracebackType | None) -> None:
        if self.is_silent:
            return
        frames = lines_of_trace(trace)
        known = observe.explain_end(error)
        self.write("; ".join(part for part in (_describe(error, frames), known) if part), frames)

    def write(self, reason: str, raised: tuple[str, ...] = ()) -> Path | None:
        """Write the last events, and where every thread is now; return the file, None if that failed.

        ``raised``: where the calling thread was instead.
        """
        if self.is_silent or not self._lock.acquire(timeout=1.0):  # an error of another thread may be written
            return None
        try:
            now_s = time.time()
            self._update_rank()
            self._reasons = [*self._reasons, Reason(now_s, reason)][-_MOST_REASONS:]
            self._stacks = [*self._stacks, *_stacks_of_all_threads(now_s, raised)][-_MOST_STACKS:]
            return self._put(self._record(now_s))
        except Exception:  # a full disk, a deleted folder, an interpreter that exits: training continues
            return None
        finally:
            self._lock.release()

    # ---- triggers ----

    def open(self) -> None:
        """Start to watch."""
        self._update_rank()
        self._move_last_run()
        _open.append(self)
        self.callback(_open.remove, self)
        self.enter_context(observe.observing(self._on_error))
        self.enter_context(excepthook(self._write_raised))

    def _on_error(self, text: str) -> None:
        if not text.startswith(_QUIET):
            self.write(text)

    # ---- contents ----

    def _update_rank(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def _move_last_run(self) -> None:
        if self._rank is None:
            return
        kept = self.folder / BEFORE / self._file_name()
        with contextlib.suppress(OSError):
            if kept.parent.is_dir() and not kept.parent.is_symlink():
                kept.unlink(missing_ok=True)  # of an earlier start
            move_file(self.folder, self._file_name(), f"{BEFORE}/{self._file_name()}")

    def _file_name(self) -> str:
        return f"rank-p{self._pid}.jsonl" if self._rank is None else f"rank-{self._rank:05d}.jsonl"

    def _record(self, now_s: float) -> Record:
        since = now_s - time.monotonic()
        found = [entry for entry in observe.entries() if entry[0] >= self._began_s]
        events = [Event(entry[0] + since, entry[1], *map(_plain, entry[2:])) for entry in found]
        main = threading.main_thread().ident or 0
        who = self._rank, self._num_ranks, platform.node(), self._pid, main
        return Record(*who, now_s, tuple(self._reasons), tuple(self._stacks), tuple(events))

    def _put(self, record: Record) -> Path:
        if self.folder.parent == default_place():
            _make_default_place(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder, self._file_name(), to_text(record) + "\n")
        return self.folder / self._file_name()


def _make_default_place(folder: Path) -> None:
    """Create the place of job ``folder``, and remove folders of older jobs.  Raises: OSError if it is another user's."""
    place = folder.parent
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():  # another user created it first
        raise OSError(f"{place} belongs to another user")
    for old in sorted(each for each in place.iterdir() if each != folder)[: 1 - _MOST_JOBS]:
        shutil.rmtree(old, ignore_errors=True)


def default_place() -> Path:
    """Return where ranks of ``shardwise run`` write their records: it has one folder per job."""
    return Path(tempfile.gettempdir()) / f"shardwise-records-{os.geteuid()}"


def place_of_records() -> Path | None:
    """Return the folder into which this process writes its record when something fails; None if it writes none."""
    return next((each.folder for each in reversed(_open) if not each.is_silent), None)


def write_all(reason: str) -> None:
    """Write the record of this process because of ``reason``."""
    for recorder in list(_open):
        recorder.write(reason)


def record(folder: str | Path) -> Recorder:
    """Start to write ``folder/rank-NNNNN.jsonl`` whenever something fails on this rank; ``shardwise diagnose`` reads it.

    A record contains the last few thousand events and the stack of every thread.  It is written when an error of
    shardwise is raised that concerns several ranks, when an exception is not caught, and when a long wait is reported
    (:func:`set_wait_report`).  Each write replaces the file.
    Nothing is written without a failure, and a failed write does not affect the program.

    Args:
        folder: a place that outlives the job; the same for all ranks.

    Returns: a context manager, with ``write(reason)`` and ``close()``; an exception that leaves it is written.

    Example:
        >>> with shardwise.record("run/black_box"):  # doctest: +SKIP
        ...     train()
    """
    recorder = Recorder(Path(folder).absolute())
    recorder.open()
    return recorder


def last_job() -> Path:
    """Return the folder with the records of the last job of ``shardwise run`` on this host.

    Raises: ConfigError if there is none.
    """
    place = default_place()
    jobs = sorted(place.iterdir()) if place.is_dir() else []
    if not jobs:
        raise ConfigError(f"{place} has no record of a job; name the run folder, or that given to shardwise.record")
    return jobs[-1]


def find_records(folder: Path) -> tuple[list[Record], bool]:
    """Return the readable records of ``folder``, and True if they are of the previous start.

    Raises: ConfigError with what is there instead.
    """
    place = folder / BLACK_BOX if (folder / BLACK_BOX).is_dir() else folder
    if not place.is_dir():
        raise ConfigError(f"{folder}: no such folder.")
    last, before = _records_in(place), _records_in(place / BEFORE)
    if not last and not before:
        raise ConfigError(
            f"{place} has no record of a rank: nothing has failed there, or its ranks wrote elsewhere. "
            "A job that hangs writes them when its long wait is reported (set_wait_report)."
        )
    return (last, False) if last else (before, True)


def _records_in(place: Path) -> list[Record]:
    return [record for path in sorted(place.glob(PATTERN)) if (record := read_record(path)) is not None]


@contextlib.contextmanager
def excepthook(on_error: Callable[[BaseException, TracebackType | None], object]) -> Generator[None, None, None]:
    """Call ``on_error`` with an exception that ends the program, before Python prints it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(error, trace)
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
    """Return the stacks of all threads, the main one first; the calling thread was at ``raised`` if that is not empty."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  the documented way to all threads
    main, mine = threading.main_thread().ident, threading.get_ident()
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    lines = {ident: _without_own(lines_of(frames[ident])) for ident in order} | ({mine: raised} if raised else {})
    return [Stack(now_s, ident, names.get(ident, "?"), lines[ident]) for ident in order]


def _without_own(lines: tuple[str, ...]) -> tuple[str, ...]:
    while lines and lines[-1].rpartition(":")[0].endswith(_OWN_FILES):
        lines = lines[:-1]
    return lines


def _plain(value: Any) -> Any:
    return value if type(value) in (str, int) else str(getattr(value, "value", value))


# ---- Combine the records of all ranks: who is missing, who failed first.  Pure.

_GAP_S = 30.0  # between two writes: an earlier write belongs to a trouble that has passed
_MOVED = 16  # events between two writes for the same trouble: ranks that fail clean up and query each other
_BEFORE_S = 1.0  # how long before its writes an error may be


class Failure(NamedTuple):
    """The first error of a rank."""

    rank: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of :func:`diagnose`.

    Attributes:
        num_ranks: of the job.  missing: those without a record.
        failures: first errors, the earliest first; those that name another failed rank come last.
        stacks: per rank, where its main thread was at the first write for its last trouble.
        reasons: of each rank that has a record, why it wrote.
    """

    num_ranks: int
    missing: tuple[int, ...]
    failures: tuple[Failure, ...]
    stacks: Mapping[int, Stack]
    reasons: Mapping[int, tuple[Reason, ...]]


def diagnose(records: Sequence[Record]) -> Diagnosis:
    """Return what ``records``, of one job, show together; some may be missing or truncated.

    Of several records of one rank the newest counts.
    """
    by_rank = newest(records)
    num_ranks = max([0, *(each.num_ranks for each in by_rank.values()), *(rank + 1 for rank in by_rank)])
    missing = tuple(rank for rank in range(num_ranks) if rank not in by_rank)
    failures = [found for rank, each in by_rank.items() if (found := _failure(rank, each)) is not None]
    in_turn = sorted(failures, key=lambda each: (_is_because_of_others(each, failures), each.time_s, each.rank))
    known = sorted(by_rank.items())
    stacks = {rank: found for rank, each in known if (found := _main_stack(each)) is not None}
    return Diagnosis(num_ranks, missing, tuple(in_turn), stacks, {rank: each.reasons for rank, each in known})


def _is_because_of_others(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Return True if ``failure`` names another rank that has failed: a skewed clock may show it as the first."""
    named = {int(number) for number in re.findall(r"\brank (\d+)", failure.text)}
    return any(each.rank in named for each in failures if each.rank != failure.rank)


def newest(records: Sequence[Record]) -> dict[int, Record]:
    """Return the newest of ``records`` of every rank that has one."""
    in_turn = sorted(records, key=lambda each: each.written_s)
    return {record.rank: record for record in in_turn if record.rank is not None}


def _failure(rank: int, record: Record) -> Failure | None:
    since_s = _began_s(record) - _BEFORE_S
    errors = [Failure(rank, e.time_s, e.what) for e in record.events if e.place == ERROR and e.time_s >= since_s]
    reasons = [each for each in record.reasons if not each.text.startswith(NOTHING_MOVES)]
    reported = [Failure(rank, *each) for each in reasons if each.time_s >= since_s]
    return min([*errors, *reported], key=lambda each: each.time_s, default=None)


def _main_stack(record: Record) -> Stack | None:
    """Return the stack of the main thread at the first write for the last trouble."""
    since_s = _began_s(record)
    mine = (stack for stack in record.stacks if stack.thread == record.main_thread and stack.time_s >= since_s)
    return next(mine, None)


def _began_s(record: Record) -> float:
    """Return when the rank first wrote because of its last trouble."""
    began_s = record.written_s
    for reason in reversed(record.reasons):
        moved = sum(1 for event in record.events if event.track and reason.time_s < event.time_s < began_s)
        if began_s - reason.time_s > _GAP_S or moved > _MOVED:
            break
        began_s = reason.time_s
    return began_s


# ---- A diagnosis in words: what happened, where, and since when. Pure.

_MOST_LISTED, _MOST_PLACES = 8, 16


def in_words(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{_count(len(diagnosis.reasons), 'record')} of {_count(diagnosis.num_ranks, 'rank')}"
    yield ""
    yield "what happened"
    yield from (f"  {line}" for line in _happened(diagnosis))
    yield ""
    yield "where the program was"
    stacks = list(diagnosis.stacks.items())[:_MOST_PLACES]
    yield from (f"  rank {rank}: {own_line(stack.frames)}" for rank, stack in stacks)


def _happened(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.missing:
        yield (
            f"{format_ranks(diagnosis.missing)} left no record: killed (SIGKILL leaves none: often out of memory), stopped, on "
            "another disk, or never started"
        )
    for place, failure in enumerate(diagnosis.failures[:_MOST_LISTED]):
        yield _describe_failure(failure, is_first=place == 0 and len(diagnosis.failures) > 1)
    texts = [reason.text for reasons in diagnosis.reasons.values() for reason in reasons]
    if waits := [text for text in texts if NOTHING_MOVES in text]:
        yield max(waits, key=len)  # that of the rank which reported who waits for whom
    if not (diagnosis.missing or diagnosis.failures or waits):
        yield "nothing that differs between the ranks, and no error"


def _describe_failure(failure: Failure, is_first: bool) -> str:
    first_line = failure.text.split("\n")[0][:240]
    return f"rank {failure.rank}{' first' if is_first else ''}, {_clock(failure.time_s)}: {first_line}"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s * 1000) % 1000:03d}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# ---- Where a rank is, a sentence about several ranks, and which of them wait for each other.

_DISTRIBUTED = "/torch/distributed/"
_WRAPPERS = (" checked", " outside")  # functions around those that user code calls
_JOIN_EXIT = "Join's exit"
# The last frames of a wait for all ranks, and of one that polls until the awaited rank has come.
_COLLECTIVE = re.compile(
    r"/distributed_c10d\.py:\d+ |_functional_collectives\.py:\d+ wait|process_groups\.py:\d+ (await_collective|outlast)$"
)
_POLL = re.compile(r"/shardwise/consistency/store\.py:\d+ wait_until$")
# Calls that wait for one rank of a group.
_OF_PAIRS = re.compile(r"\b(send|recv|isend|irecv|batch_isend_irecv|send_object_list|recv_object_list)\(")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The position of a rank.

    Attributes:
        rank: global.
        line: "file:line" of user code; empty if there is none.
        call: the function that the user's line has called, such as "save()"; empty if user code runs.
        waits_for: "rank 3" or "all ranks"; empty if it does not wait for others.
        passes: by engine, "forward" and "backward": how many of each have begun.
        running: by engine: which of the two runs, if one does.
        still_s: how long it has been there; 0 if it has moved since the last check.
        raised: the class of the exception that ended the program there; empty while it runs.
        has_ended: the program has ended without an exception.
        polls: it waits for ``waits_for`` until that rank has written something, which it would see at once.
        awaited: names of the process groups of the collective that it may wait in.
        collectives: by process group: how many collectives it has begun.
    """

    rank: int
    line: str = ""
    call: str = ""
    waits_for: str = ""
    passes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    running: Mapping[str, str] = field(default_factory=dict[str, str])
    still_s: float = 0.0
    raised: str = ""
    has_ended: bool = False
    polls: bool = False
    awaited: tuple[str, ...] = ()
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_text(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self))


def status_from_text(text: str) -> RankStatus:
    """Return the status that :meth:`RankStatus.to_text` wrote."""
    return RankStatus(**json.loads(text))


def status_at(rank: int, frames: Sequence[str], last: Entry | None, raised: str = "") -> RankStatus:
    """Return the status of this process, global ``rank``, whose program is at ``frames``, after its event ``last``."""
    place = innermost(frames)
    called = frames[place + 1 :] if place is not None else frames
    call = waits_for = ""
    # The outermost frame is the call that user code makes.
    for frame in called:
        if _DISTRIBUTED in frame and "c10d_logger" not in frame:
            call, waits_for = f"torch.distributed.{frame.rsplit(' ', 1)[-1]}()", "all ranks"
            call = _JOIN_EXIT if call == "torch.distributed.__exit__()" else call
            break
        if "/torch/nn/utils/" in frame:
            call = f"torch.nn.utils.{frame.rsplit(' ', 1)[-1]}()"
            break
        if "/shardwise/" in frame and not frame.endswith(_WRAPPERS):
            call = f"{frame.rsplit(' ', 1)[-1]}()"
            break
    if call and any(_COLLECTIVE.search(frame) for frame in called):
        waits_for = "all ranks"
    elif call and last is not None and last[4].startswith(WAITS):
        waits_for = last[4][len(WAITS) :]
    line = frames[place].rsplit(" ", 1)[0].removeprefix(f"{os.getcwd()}/") if place is not None else ""
    recent = [*dict.fromkeys(entry[2] for entry in reversed(entries()))]  # a process may have other models
    newest = {track.name: track for track in sorted(live_tracks, key=lambda track: track.age)}
    tracks = [track for track in newest.values() if track.num_forwards and track.is_of_several]
    tracks.sort(key=lambda track: recent.index(track.name) if track.name in recent else len(recent))
    passes = {track.name: {"forward": track.num_forwards, "backward": track.num_backwards} for track in tracks}
    running, polls = {each.name: each.running for each in tracks if each.running}, any(map(_POLL.search, called))
    return RankStatus(rank, line, call, waits_for, passes, running, raised=raised, polls=polls)


def awaited_groups(frame: FrameType | None) -> tuple[str, ...]:
    """Return the names of the process groups that the functions from ``frame`` outwards to user code work with."""
    found: dict[str, None] = {}
    while frame is not None and innermost([f"{frame.f_code.co_filename}:1 {frame.f_code.co_name}"]) is None:
        values = [*frame.f_locals.values()]
        is_default = "group" in frame.f_locals and frame.f_locals["group"] is None
        values += [dist.group.WORLD] if is_default and _DISTRIBUTED in frame.f_code.co_filename else []
        found |= dict.fromkeys(group.group_name for each in values for group in _groups_of_value(each))
        frame = frame.f_back
    return tuple(found)


def _groups_of_value(value: object) -> Iterator[dist.ProcessGroup]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, DTensor | DeviceMesh):
        yield from (value.device_mesh if isinstance(value, DTensor) else value).get_all_groups()


def statuses_in_words(statuses: Sequence[RankStatus]) -> str:
    """Return one sentence about where these ranks are, and whether they ran different numbers of forwards or backwards.

    Example:
        >>> first = RankStatus(0, "a.py:3", "f()", "rank 1", {"e": {"forward": 4}}, {"e": "forward"}, 30.0)
        >>> statuses_in_words([first, RankStatus(1, "a.py:9", "save()", "", {"e": {"forward": 3}}, {}, 29.0)])
        'rank 0 is in its 4th forward (a.py:3, waits for rank 1, for 30 s); rank 1 is in save() after its 3rd forward (a.py:9, \
for 29 s): they ran different numbers of forwards, which `with Join([model]):` allows'
    """
    is_join = any(each.call == _JOIN_EXIT for each in statuses)  # numbers of passes may differ there
    track, kind = ("", "") if is_join else _difference(statuses)
    alike: dict[str, list[RankStatus]] = {}
    for each in statuses:
        alike.setdefault(_what(replace(each, still_s=0.0), track, kind), []).append(each)
    parts: list[str] = []
    for same in alike.values():
        longest = replace(same[0], still_s=max(each.still_s for each in same))
        parts.append(f"{format_ranks([each.rank for each in same])} {_what(longest, track, kind, len(same) > 1)}")
    if is_join:
        parts[-1] += ": ranks that have left a Join serve forwards, backwards and steps only; make other calls after it"
    # Most often one rank has more batches.
    unlike = f": they ran different numbers of {kind}s, which `with Join([model]):` allows" if kind else ""
    return "; ".join(parts) + unlike


def _difference(statuses: Sequence[RankStatus]) -> tuple[str, str]:
    """Return the engine, and "forward" or "backward", for which waiting ranks have begun different numbers.

    Ranks that compute are not compared: they may just be late.
    """
    still = [each for each in statuses if each.still_s and each.waits_for]
    for track in {name: None for each in still for name in each.passes}:
        for kind in ("forward", "backward"):
            if len({each.passes[track].get(kind, 0) for each in still if track in each.passes}) > 1:
                return track, kind
    return "", ""


def _what(status: RankStatus, track: str, kind: str, is_many: bool = False) -> str:
    track = track or next(iter(status.running), next(iter(status.passes), ""))
    running, passes, its = status.running.get(track, ""), status.passes.get(track, {}), "their" if is_many else "its"
    counted = kind or "forward"
    after = f" after {its} {_ordinal(passes[counted])} {counted}" if passes.get(counted) else ""
    if status.has_ended:
        return f"ended without an exception{after}"
    if running:
        doing = f"in {its} {_ordinal(passes[running])} {running}"
    else:
        doing = (f"in {status.call}" if status.call else "in your code" if status.line else "outside your code") + after
    verb = f"raised {status.raised}" if status.raised else "are" if is_many else "is"
    notes = [
        status.line,
        f"waits for {status.waits_for}" if status.waits_for and not status.raised else "",
        f"for {status.still_s:.0f} s" if status.still_s else "",
    ]
    return f"{verb} {doing} ({', '.join(filter(None, notes))})".removesuffix(" ()")


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def deadlocked(statuses: Sequence[RankStatus], least_s: float) -> list[int]:
    """Return the ranks that wait for each other, so that none of them can go on; empty if that is not certain.

    A rank is ahead of another if it has begun what the other has not: a collective of a group of both, a forward, a
    wait for a word of the other.  Ranks that make the same calls in the same order can be in many places at a time, while
    messages are in flight, but of two of them only one can be ahead.  So a cycle of ranks that are ahead of each other
    shows that they make different calls.  They count only if each has waited for ``least_s`` seconds: ranks whose calls
    differ on purpose, as the stages of a pipeline do, go on.
    """
    still = {each.rank: each for each in statuses if each.waits_for and each.still_s >= least_s and not each.raised}
    pairs = [(each, other) for each in still.values() for other in still.values() if each is not other]
    ahead = [(each.rank, other.rank) for each, other in pairs if _is_ahead(each, other)]
    left = set(still)
    while free := left - {rank for rank, other in ahead if {rank, other} <= left}:
        left -= free
    return sorted(left)


def _is_ahead(mine: RankStatus, other: RankStatus) -> bool:
    if mine.polls and mine.waits_for == f"rank {other.rank}":
        return True
    for track, kind in mine.running.items():
        if track in other.passes and mine.passes[track][kind] > other.passes[track].get(kind, 0):
            return _JOIN_EXIT not in (mine.call, other.call)
    for group in () if _OF_PAIRS.search(mine.call) else mine.awaited:
        more = mine.collectives.get(group, 0) - other.collectives.get(group, 1 << 60)
        is_other_call = group in other.awaited and mine.call != other.call and not _OF_PAIRS.search(other.call)
        if more == 1 or (more == 0 and is_other_call):
            return True
    return False
