"""Processes of this host that are the ranks of one job: started, passed signals, and never outliving their launcher.

Ranks of ``shardwise train`` meet through a file.  Ranks of a user's program (``shardwise run``, ``notebook_launch``) meet as
under torchrun, at a store of the launcher that listens on loopback alone.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import getpass
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from shardwise.consistency.recorder import Recorder, default_place
from shardwise.errors import ConfigError, RankError
from shardwise.one_host import PREFIX, read_proc, stay_on_loopback

# ---- A network namespace for the ranks of one host, so that other users neither see their ports nor can connect.

# Root needs no user namespace, and inside one it could not read files of other users.  Any other user maps to itself.
_MAKE = """
import ctypes, fcntl, os, socket, struct, sys
uid, gid, libc = os.geteuid(), os.getegid(), ctypes.CDLL(None)
if libc.unshare(0x40000000 | (0x10000000 if uid else 0)): sys.exit(1)
maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"} if uid else {}
for name in maps:
    with open(f"/proc/self/{name}", "w") as file: file.write(maps[name])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh22x", b"lo", 1))
print("ready", flush=True)
sys.stdin.read()
"""
_ENTER = """
import ctypes, os, sys
count, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
for fd in sys.argv[2:2 + count]:
    if libc.setns(int(fd), 0): sys.exit(os.strerror(ctypes.get_errno()))
    os.close(int(fd))
os.execv(sys.argv[2 + count], sys.argv[2 + count:])
"""


@contextmanager
def private_network(is_wanted: bool) -> Generator[tuple[int, ...], None, None]:
    """Yield descriptors of a new network namespace that only has a loopback interface, for :func:`entering`.

    The tuple is empty if none is wanted or the kernel does not allow one (many containers).  Cost: one small process.
    """
    with ExitStack() as stack:
        if not is_wanted or sys.platform != "linux":
            yield ()
            return
        command = [sys.executable, "-IS", "-c", _MAKE]
        pipe = subprocess.PIPE
        holder = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
        assert holder.stdout is not None
        found: list[int] = []
        if holder.stdout.readline():
            with contextlib.suppress(OSError):
                for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
                    found.append(os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
                    stack.callback(os.close, found[-1])
        holder.communicate()
        yield tuple(found)


def entering(network: tuple[int, ...], command: list[str]) -> list[str]:
    """Return the command line that runs ``command`` in ``network``; the new process must inherit these descriptors."""
    if not network:
        return command
    return [sys.executable, "-IS", "-c", _ENTER, str(len(network)), *map(str, network), *command]


LOOPBACK = "127.0.0.1"
POLL_S = 0.05
GRACE_S = 1.5  # after one rank has failed: what others may take to notice and to write down what they did
LEAVE_S = 10.0  # the default of LaunchContext.leave_s
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_KEPT_FROM_RANKS = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}  # a terminal sends these to every process


@dataclass(frozen=True, slots=True)
class FailedRank:
    """The rank that failed first, and its exit code: negative for the number of a signal.

    ``kind``: "process" where ranks outlive each other, so that the number of a process is not its rank.
    """

    rank: int
    code: int
    kind: str = "rank"


@dataclass(frozen=True, slots=True)
class Ended:
    """How ranks ended.

    Attributes:
        failure: the first of them that failed by itself.  codes: of all that did.
        stopped: ranks that still ran after a signal, and were killed; why: "10 s after the first rank had left".
    """

    failure: FailedRank | None
    codes: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    why: str = ""

    @property
    def num_killed(self) -> int:
        """Ranks that were ended by a signal."""
        return sum(code < 0 for code in self.codes)


class Supervisor(Protocol):
    """What decides about ranks that outlive each other; their numbers count processes in the order of their start."""

    def prepare(self, rank: int) -> tuple[Mapping[str, object], tuple[int, ...]]:
        """Return variables and descriptors of the process that is about to start, for it alone."""
        ...

    def started(self, rank: int, pid: int) -> None:
        """Note the process that :meth:`prepare` has prepared."""
        ...

    def outlives(self, rank: int, code: int) -> bool:
        """Return True if the others go on without a rank that has ended with ``code``."""
        ...

    def more(self) -> int:
        """Return how many processes are to be started now.  Raises: RankError if the run cannot go on."""
        ...

    def pause(self, is_ending: bool) -> None:
        """Answer ranks for :data:`POLL_S` seconds, or until one has something to say; ``is_ending``: they are to leave."""
        ...

    def close(self) -> None:
        """Free what it has for the ranks, which have ended."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What ranks share with their launcher.

    Attributes:
        received: the signals that the launcher has received.
        told: further variables of the ranks' environment.
        network: descriptors of the namespaces that ranks run in; empty: they share those of the launcher.
        reported: exit codes that are a rank's own failure although a signal was passed on to it.
        own_sessions: a rank leads a session: it receives the launcher's signals as they came, none of a terminal, and the
            processes that it started end with it.  Else every signal is passed on as SIGTERM.
        output: descriptor for standard output and error of the ranks; None: those of the launcher.
        each_poll: called about every :data:`POLL_S` seconds while ranks run.
        leave_s: after a signal, when the first rank has left: seconds that the others may take.
        supervisor: decides how the others go on without a rank that has ended; None: they do not.
    """

    received: Sequence[int] = ()
    told: Mapping[str, object] = field(default_factory=dict[str, object])
    network: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    own_sessions: bool = False
    output: int | None = None
    each_poll: Callable[[], None] = lambda: None
    leave_s: float = LEAVE_S
    supervisor: Supervisor | None = None


def run_ranks(nproc: int, device_type: str, words: Sequence[str], place: LaunchContext) -> Ended:
    """Run Python with the arguments ``words`` in ``nproc`` processes until all have ended; none is left, whatever is raised."""
    ranks: list[Rank] = []
    with ExitStack() as stack:
        if place.supervisor is not None:
            stack.callback(place.supervisor.close)
        note = stack.enter_context(_reaper()) if place.own_sessions else None
        stack.callback(_kill, ranks)

        def start() -> None:
            rank, supervisor = len(ranks), place.supervisor
            own = {"RANK": rank, "LOCAL_RANK": rank % nproc, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            more, fds = ({}, ()) if supervisor is None else supervisor.prepare(rank)
            ranks.append(_start(words, _environment({**own, **place.told, **more}, device_type), place, fds))
            ranks[-1].number = rank
            if supervisor is not None:
                supervisor.started(rank, ranks[-1].pid)
            if note is not None:
                ranks[-1].note = note
                note(f"+{ranks[-1].pid}")

        for _ in range(nproc):
            start()
        if place.own_sessions:
            stack.enter_context(_stopping(ranks))
        failure = _watch(ranks, place, start)
        place.each_poll()
        codes = tuple(rank.returncode for rank in ranks if rank.returncode)
        running = [process.number for process in ranks if place.received and process.poll() is None]
        is_second = len(place.received) > 1
        why = "at the second signal" if is_second else f"{place.leave_s:g} s after the first rank had left"
        return Ended(failure, codes, tuple(running), why)


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Generator[None, None, None]:
    """Let ``handler`` take these signals within the body; after it they do what they did.

    Without effect outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def noted_signals() -> Generator[list[int], None, None]:
    """Note signals, in the order in which they come, instead of being ended by them."""
    received: list[int] = []
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    noted = [number for number in SIGNALS if number != signal.SIGHUP or not is_nohup]
    with handled(noted, lambda number, _: received.append(number)):
        yield received


def _environment(place: Mapping[str, object], device_type: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d's stack traces would bury the one line that says why
    if device_type == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    if "TMPDIR" in place:  # what is compiled outlives the processes
        folder = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    stay_on_loopback(environment)
    return environment | {name: str(value) for name, value in place.items()}


class Rank(subprocess.Popen[bytes]):
    """A process that is a rank; ``note``: set if it leads a session, which ends with it."""

    number = 0
    note: Callable[[str], None] | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; once it has ended, end what it has left in its session."""
        code = super().poll()
        if code is not None and self.note is not None:
            note, self.note = self.note, None
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            note(f"-{self.pid}")
        return code


# Ends the sessions of ranks when the launcher is gone: it may have been killed.
_REAPER = """
import os, signal, sys
pids = set()
for line in sys.stdin: (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
for pid in pids:
    try: os.killpg(pid, signal.SIGKILL)
    except OSError: pass
"""


@contextmanager
def _reaper() -> Generator[Callable[[str], None], None, None]:
    """Yield a function that notes the begin (``+pid``) or the end (``-pid``) of a session."""
    command = [sys.executable, "-IS", "-c", _REAPER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    stdin = process.stdin
    assert stdin is not None

    def note(line: str) -> None:
        with suppress(OSError):  # somebody has killed it
            stdin.write(f"{line}\n")

    try:
        yield note
    finally:
        with suppress(OSError):
            stdin.close()
        process.wait()


@contextmanager
def _stopping(ranks: Sequence[Rank]) -> Generator[None, None, None]:
    """Stop and continue ranks together with this process: a terminal's Ctrl-Z does not reach their sessions."""

    def stop(_number: int, _frame: object) -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                if rank.returncode is None:
                    with suppress(OSError):
                        os.killpg(rank.pid, number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), number)  # returns when this process is continued

    with handled([signal.SIGTSTP], stop):
        yield


def _start(
    words: Sequence[str], environment: Mapping[str, str], place: LaunchContext, fds: tuple[int, ...] = ()
) -> Rank:
    # Blocked here, inherited there: a rank gets Ctrl-C from this process alone, once, and no moment is left in between.
    blocked = () if place.own_sessions else _KEPT_FROM_RANKS
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return Rank(
            entering(place.network, [sys.executable, *words]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=place.output,
            stderr=place.output,
            pass_fds=(*place.network, *fds),
            start_new_session=place.own_sessions,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _send(rank: Rank, number: int) -> None:
    with suppress(ProcessLookupError):
        if rank.poll() is None:
            os.kill(rank.pid, number)


def _watch(ranks: Sequence[Rank], place: LaunchContext, start: Callable[[], None]) -> FailedRank | None:
    """Return when every rank has ended, or when those that have not can be killed: the first failure, if there is one."""
    first: FailedRank | None = None
    received, reported, supervisor = place.received, place.reported, place.supervisor
    deadline = float("inf")
    is_told, told_s = False, float("inf")
    while time.monotonic() < deadline and len(received) < 2:
        is_running = None in [rank.poll() for rank in ranks]
        if received and not is_told:
            is_told = True
            told_s = time.monotonic()
            for rank in ranks:
                _send(rank, received[0] if place.own_sessions else signal.SIGTERM)
                _send(rank, signal.SIGCONT)  # one that is stopped leaves with the others
        first = first or _first_failure(ranks, reported if is_told else None, supervisor)
        num_more = 0 if supervisor is None or first is not None or received else supervisor.more()
        for _ in range(num_more):
            start()
        if not is_running and not num_more:
            break
        place.each_poll()
        for rank in ranks if time.monotonic() > told_s + place.leave_s else ():
            state = read_proc(f"{rank.pid}/stat").rpartition(")")[2].strip()[:1]
            if state in ("T", "t"):  # stopped again, or by a debugger: the others wait for it in vain
                rank.kill()
        has_left = is_told and any(rank.returncode is not None for rank in ranks)
        wait_s = GRACE_S if first is not None else place.leave_s if has_left else float("inf")
        deadline = min(deadline, time.monotonic() + wait_s)
        if supervisor is None:
            time.sleep(POLL_S)
        else:
            supervisor.pause(first is not None or bool(received))
    return first or _first_failure(ranks, reported if is_told else None, supervisor)


def _first_failure(
    ranks: Sequence[Rank], reported: Sequence[int] | None, supervisor: Supervisor | None
) -> FailedRank | None:
    """Return a rank that has failed, one that was killed before one that reported why; None if there is none.

    ``reported``: the exit codes that count, once a signal was passed on; None: all that the others do not outlive.
    """
    kind = "rank" if supervisor is None else "process"
    ended = [FailedRank(process.number, process.returncode, kind) for process in ranks if process.returncode]
    if reported is None and supervisor is not None:
        ended = [each for each in ended if not supervisor.outlives(each.rank, each.code)]
    failed = ended if reported is None else [each for each in ended if each.code in reported]
    return min(failed, key=lambda each: (each.code, each.rank), default=None)


def _kill(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()
        rank.poll()
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a killed rank 0 cannot show the cursor again
        sys.stdout.flush()


def describe(failure: FailedRank) -> str:
    """Return how a rank ended."""
    if failure.code > 0:
        return f"{failure.kind} {failure.rank} failed with exit code {failure.code}"
    number = -failure.code
    how = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"  # a real-time signal
    how += " (often: out of memory)" if how == "SIGKILL" else ""
    return f"{failure.kind} {failure.rank} was ended by {how}"


# ---- A user's program on the ranks of this host: they meet at a store of the launcher, as under torchrun.

# Ctrl-C while ranks still import: they say nothing, as later, and their launcher does.
START_RANK = """try: from shardwise.loop.launch import start_user_program
except KeyboardInterrupt: raise SystemExit(130)
start_user_program()"""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the signal that this process gets when its parent ends
EXIT_S = 30.0  # after an exception that ends a rank: what its other threads and exit hooks may take
PATIENCE_S = 3.0  # the rank that failed first has the better reason, and a launcher the best
_LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket timeout",
    " is gone",
    " are gone",
    " did not all make this call",
)


_OUTSIDE = (__file__, runpy.__file__, "<frozen runpy>", "<string>")  # files of frames around a user's program


def is_lost_peer(error: BaseException) -> bool:
    """Return True if ``error`` only reports that another rank has ended."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(words in text for words in _LOST_PEER)


@dataclass(frozen=True, slots=True)
class UserProgram:
    """What every rank runs.

    Attributes:
        kind: "script", "module" (``python -m``) or "call" (a pickled function, :func:`notebook_launch`).
        words: the script, module or file of the call, and its arguments.
        place: what its ranks share with their launcher, beside what :func:`run_program` adds.
        supervise: returns what decides about ranks that outlive each other, given a folder that nobody else can open.
    """

    kind: str
    words: tuple[str, ...]
    place: LaunchContext = LaunchContext()
    supervise: Callable[[Path], Supervisor] | None = None


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How one start of a program ended.

    Attributes:
        ended: all ranks.  raised: the rank whose exception was reported first; None if no rank reported one.
        records: the folder of the ranks' records, which exists if there are any.
    """

    ended: Ended
    raised: int | None
    records: Path

    @property
    def failure(self) -> FailedRank | None:
        """The rank that failed first: one that was killed before one that raised, before one that exited."""
        failure = self.ended.failure
        if failure is None or failure.code < 0 or self.raised is None:
            return failure
        return replace(failure, rank=self.raised, code=1)


def run_program(
    program: UserProgram,
    nproc: int,
    received: Sequence[int],
    scratch: Path,
    number: int = 0,
    leave_s: float = LEAVE_S,
) -> ProgramOutcome:
    """Run ``program`` on ``nproc`` ranks until all have ended; ``number``: of the restart.

    ``dist.init_process_group()`` finds what torchrun would tell it; what ranks open listens on loopback alone.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}" + f"-{number}" * bool(number)
    records, claim = default_place() / name, scratch / f"failed-{number}"
    store = _open_store()
    told: dict[str, object] = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": store.port,
        "GROUP_RANK": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": number,
        "TORCHELASTIC_RUN_ID": name,
        **program.place.told,
    }
    supervisor = None if program.supervise is None else program.supervise(scratch)
    own: dict[str, Any] = {"own_sessions": True, "leave_s": leave_s, "supervisor": supervisor}
    place = replace(program.place, received=received, told=told, **own)
    words = ("-c", START_RANK, str(os.getpid()), str(claim), str(records), program.kind, *program.words)
    ended = run_ranks(nproc, "cpu" if nproc > 1 else "cuda", words, place)
    return ProgramOutcome(ended, int(os.readlink(claim)) if claim.is_symlink() else None, records)


def _open_store() -> dist.TCPStore:
    """Return a store at which ranks meet; torch's own would listen on every interface."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def end_with_parent() -> None:
    """End this process at once when its launcher is gone, which may be killed together with what ends sessions."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start_user_program() -> None:
    """Run in this rank what :func:`run_program` has put into ``sys.argv``."""
    launcher, claim, records, kind, *words = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(launcher):  # it was killed before it noted this process
        os._exit(1)
    sys.argv = words
    if isinstance(sys.stdout, io.TextIOWrapper):  # each line by one write: ranks share this file
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = partial(_report, Path(claim), None if kind != "call" else Path(words[0]))
    Recorder(Path(records), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).open()
    try:
        if kind == "call":
            _call(Path(words[0]))
        elif kind == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(os.path.abspath(words[0]), run_name="__main__")  # python, too, makes __file__ absolute
    except SystemExit as error:
        if isinstance(error.code, str):  # Python would print it on every rank
            sys.excepthook(SystemExit, error, None)
            raise SystemExit(1) from None
        raise


def _report(
    claim: Path, call: Path | None, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an exception that ends this rank, unless another rank has reported one: all would say the same.

    Args:
        claim: the link that the first rank makes.  call: the file of a pickled call, beside which its error is written.
    """
    if issubclass(kind, KeyboardInterrupt):
        return
    # A thread of the user's that goes on would keep all ranks waiting.
    leave = threading.Timer(EXIT_S, os._exit, [1])
    leave.daemon = True
    leave.start()
    if is_lost_peer(error):
        time.sleep(PATIENCE_S)
    rank = os.environ["RANK"]
    try:
        os.symlink(rank, claim)
    except FileExistsError:
        return
    while trace is not None and trace.tb_frame.f_code.co_filename in _OUTSIDE:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace)) if kind is not SystemExit else f"{error}\n"
    if call is None:
        name = "process" if "SHARDWISE_ELASTIC" in os.environ else "rank"
        sys.stderr.write(f"shardwise: {name} {rank} raised:\n{text}")
        return
    try:
        whole = pickle.dumps((error, text))
        pickle.loads(whole)
    except Exception:  # an exception that cannot travel: its text does
        whole = pickle.dumps((None, text))
    call.with_name("error").write_bytes(whole)


# ---- A function of a notebook on the ranks of this host.

_INSTALL = "Install cloudpickle (pip install cloudpickle), or define it in a module that ranks can import"


def notebook_launch(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Call ``function(*args)`` on ``num_ranks`` new processes of this host, from a notebook; return what rank 0 returned.

    Each rank finds what torchrun would tell it, so ``dist.init_process_group()`` and ``fully_shard`` need no arguments.  What
    ranks print appears in the cell.  The function and its arguments travel by ``cloudpickle`` where that is installed, which
    functions and classes that are defined in the notebook need; the result travels the same way.

    Raises: the first exception of a rank, from a :class:`RankError` that holds its traceback, once all ranks have ended;
        RankError itself if a rank was killed or its exception cannot be pickled.  KeyboardInterrupt ends all ranks.

    Example:
        >>> shardwise.notebook_launch(train, 2, "data.txt")  # doctest: +SKIP
    """
    if num_ranks < 1:
        raise ConfigError(f"notebook_launch: num_ranks is {num_ranks}, expected 1 or more")
    with TemporaryDirectory(prefix=PREFIX) as folder, ExitStack() as stack:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((sys.path, _packed((function, args), "notebook_launch: function or args"))))
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        copy = codecs.getincrementaldecoder("utf-8")("replace")

        def show() -> None:
            # Ranks that print without a pause must not keep the launcher from watching them.
            end = time.monotonic() + POLL_S
            with suppress(BlockingIOError):
                while time.monotonic() < end:
                    sys.stdout.write(copy.decode(os.read(reading, 1 << 16)))

        program = UserProgram("call", (str(call),), LaunchContext(output=writing, each_poll=show))
        outcome = run_program(program, num_ranks, (), Path(folder))
        failure = outcome.failure
        if failure is None:
            with suppress(FileNotFoundError):
                return pickle.loads(call.with_name("result").read_bytes())
            raise RankError(
                "rank 0 exited with exit code 0 before the function returned. Return from it instead of calling sys.exit()"
            )
        found = call.with_name("error")
        if failure.code < 0 or not found.exists():
            raise RankError(f"{describe(failure)}; all ranks have been stopped. shardwise diagnose reads their records")
        error, text = pickle.loads(found.read_bytes())
        cause = RankError(f"rank {failure.rank} raised; its traceback:\n{text}")
        if error is None:
            raise cause
        raise error from cause


def _packed(values: object, what: str) -> bytes:
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    advice = _INSTALL if pickler is pickle else "Give something that can be"
    try:
        packed: bytes = pickler.dumps(values)
    except Exception as error:
        raise ConfigError(f"{what} cannot be pickled ({error}). {advice}") from error
    if pickler is pickle and b"__main__" in packed:
        raise ConfigError(f"{what}: something of it is defined in the notebook. {advice}")
    return packed


def _call(path: Path) -> None:
    sys.path[:], packed = pickle.loads(path.read_bytes())
    function, args = pickle.loads(packed)
    value = function(*args)
    if os.environ["RANK"] == "0":
        path.with_name("result").write_bytes(_packed(value, "notebook_launch: what the function returned on rank 0"))
