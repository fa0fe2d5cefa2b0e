"""Ranks of this host as processes of this one: started, told of signals, and never outliving each other.

They meet through a file in a folder of this user: nothing listens for them, and nothing is read from a socket here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from shardwise.cli.exits import (
    ATTEMPT_VARIABLE,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINAL,
    LAUNCHER_VARIABLE,
    STORE_VARIABLE,
)
from shardwise.consistency.recorder import BLACK_BOX, PATTERN
from shardwise.errors import ConfigError
from shardwise.one_host import ScratchFolder, read_proc, stay_on_loopback
from shardwise.recipes.config import TrainConfig, check_ranks
from shardwise.recipes.run_folder import steps_in

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


def needs_no_network(config: TrainConfig, device_type: str) -> bool:
    """Return True if ranks never need the host's network: a user's own model may (downloads), and so may NCCL."""
    return config.model_from is None and device_type == "cpu"


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


POLL_S = 0.05
GRACE_S = 1.5  # after one rank has failed: what others may take to notice and to write down what they did
LEAVE_S = 10.0  # after a signal, when the first rank has left: what the others may take
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SAID = (EXIT_FAILED, EXIT_CONFIG, EXIT_FINAL)  # of a rank that has said why
_KEPT_FROM_RANKS = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}  # a terminal sends these to every process


@dataclass(frozen=True, slots=True)
class FailedRank:
    """The rank that failed first, and its exit code: negative for the number of a signal."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How ranks ended by themselves: the first failure, the exit codes of those that failed, how many were killed."""

    failure: FailedRank | None
    codes: tuple[int, ...] = ()

    @property
    def num_killed(self) -> int:
        """Ranks that were ended by a signal."""
        return sum(code < 0 for code in self.codes)


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Where ranks meet, the signals that their launcher has received, and further variables of their environment.

    ``network``: descriptors of the namespaces that ranks run in; empty: they share those of the launcher.
    """

    store: Path
    received: Sequence[int]
    told: Mapping[str, str]
    network: tuple[int, ...] = ()


def launch_ranks(nproc: int, device_type: str, words: Sequence[str], run: Path | None, is_private: bool = False) -> int:
    """Run the command with the same arguments in ``nproc`` processes; return the exit code.

    The first signal is passed on, as SIGTERM: ranks save and leave.  The second one ends them at once.
    ``is_private``: run them in a network namespace of their own, where the kernel allows one.
    """
    with noted_signals() as received, ScratchFolder() as folder, private_network(is_private) as network:
        ended = run_ranks(nproc, device_type, words, LaunchContext(folder.path / "store", received, {}, network))
    return conclude(ended, received, run)


def run_ranks(nproc: int, device_type: str, words: Sequence[str], place: LaunchContext) -> Ended:
    """Run the command in ``nproc`` processes until all have ended; none is left, whatever is raised here."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nproc):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            own |= {LAUNCHER_VARIABLE: os.getpid(), STORE_VARIABLE: place.store, **place.told}
            ranks.append(_start(words, _environment(own, device_type), place.network))
        with _passing_on(signal.SIGUSR1, ranks):
            failure = _watch(ranks, place.received)
        return Ended(failure, tuple(rank.returncode for rank in ranks if rank.returncode))
    finally:
        _kill(ranks)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a killed rank 0 cannot give the cursor back itself
            sys.stdout.flush()


def conclude(ended: Ended, received: Sequence[int], run: Path | None) -> int:
    """Say how the ranks ended, unless one has said so, and how to read their records in ``run``; return the exit code."""
    if ended.failure is not None:
        return _explain(ended.failure, run)
    if received:
        print(f"shardwise: ended by {signal.Signals(received[0]).name}; every rank has ended too", file=sys.stderr)
        return 128 + received[0]
    return 0


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Generator[None, None, None]:
    """Let ``handler`` take these signals within the body; after it they do what they did."""
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
    stay_on_loopback(environment)
    return environment | {name: str(value) for name, value in place.items()}


def _start(words: Sequence[str], environment: Mapping[str, str], network: tuple[int, ...]) -> subprocess.Popen[bytes]:
    # Blocked here, inherited there: a rank hears of Ctrl-C from this process alone, once, and no moment is left in between.
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_FROM_RANKS)
    try:
        command = entering(network, [sys.executable, "-m", "shardwise.cli.main", *words])
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=network)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_FROM_RANKS)


def _passing_on(number: int, ranks: Sequence[subprocess.Popen[bytes]]) -> AbstractContextManager[None]:
    """Let ranks that have a handler for a signal get it, too: it asks them to write down what they do."""

    def pass_on(number: int, _frame: object) -> None:
        for rank in ranks:
            caught = re.search(r"SigCgt:\s*([0-9a-f]+)", read_proc(f"{rank.pid}/status"))
            if caught is not None and int(caught[1], 16) >> (number - 1) & 1:
                _send(rank, number)

    return handled([number], pass_on)


def _send(rank: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        if rank.poll() is None:
            os.kill(rank.pid, number)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> FailedRank | None:
    """Return when every rank has ended, or when those that have not can be killed: the first failure, if there is one."""
    first: FailedRank | None = None
    deadline = float("inf")
    is_told, told_s = False, float("inf")
    while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline and len(received) < 2:
        if received and not is_told:
            is_told = True
            told_s = time.monotonic()
            for rank in ranks:
                rank.terminate()
                _send(rank, signal.SIGCONT)  # one that is stopped leaves with the others
        first = first or _first_failure(ranks, is_told)
        for rank in ranks if time.monotonic() > told_s + LEAVE_S else ():
            state = read_proc(f"{rank.pid}/stat").rpartition(")")[2].strip()[:1]
            if state in ("T", "t"):  # stopped again, or by a debugger: the others wait for it in vain
                rank.kill()
        has_left = is_told and any(rank.returncode is not None for rank in ranks)
        wait_s = GRACE_S if first is not None else LEAVE_S if has_left else float("inf")
        deadline = min(deadline, time.monotonic() + wait_s)
        time.sleep(POLL_S)
    return first or _first_failure(ranks, is_told)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], is_told: bool) -> FailedRank | None:
    """Return a rank that has failed, one that was killed before one that said why; None if there is none.

    After a signal was passed on, only a rank that said why it failed counts.
    """
    ended = [FailedRank(rank, process.returncode) for rank, process in enumerate(ranks) if process.returncode]
    failed = [each for each in ended if each.code in _SAID] if is_told else ended
    return min(failed, key=lambda each: (each.code, each.rank), default=None)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


def _explain(failure: FailedRank, run: Path | None) -> int:
    if failure.code in _SAID:  # that rank has said why
        return EXIT_FAILED if failure.code == EXIT_FINAL else failure.code
    print(f"shardwise: error: {describe(failure)}; all ranks have been stopped", file=sys.stderr)
    if run is not None and any((run / BLACK_BOX).glob(PATTERN)):
        print(f"shardwise: what each rank did last: shardwise diagnose {run}", file=sys.stderr)
    return EXIT_FAILED


def describe(failure: FailedRank) -> str:
    """Return how a rank ended."""
    if failure.code in _SAID:
        return f"rank {failure.rank} failed"
    how = f"exit code {failure.code}"
    if failure.code < 0:
        how = signal.Signals(-failure.code).name
        how += " (often: out of memory)" if how == "SIGKILL" else ""
    return f"rank {failure.rank} was ended by {how}"


# ---- ``shardwise train --max-restarts N``: ranks that failed are started again, from the newest checkpoint that
# verifies.

MOST_STUCK = 2  # restarts in a row that come no further: a third would not either


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the ranks of one start are told: the run's folder, where to say how far they are, and which restart it is.

    ``number`` 0: the first start; ``cause``: of the restart.
    """

    folder: str
    step_file: str
    number: int = 0
    cause: str = ""


def attempt_from(environment: Mapping[str, str]) -> Attempt | None:
    """Return what the launcher has told this rank; None without ``--max-restarts``."""
    text = environment.get(ATTEMPT_VARIABLE)
    return None if text is None else Attempt(**json.loads(text))


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often ranks are started again, and on how few; ``min_nproc`` None: always on as many as before."""

    max_restarts: int
    min_nproc: int | None


@dataclass(frozen=True, slots=True)
class RestartProgress:
    """How far all starts together have come: ``furthest`` step, and the last restarts that came no further than that."""

    furthest: int = -1
    num_stuck: int = 0

    def after(self, step: int) -> RestartProgress:
        """Return the progress once a start has ended with ``step`` steps done.

        Example:
            >>> Progress().after(7).after(3).after(7)
            Progress(furthest=7, num_stuck=2)
        """
        return RestartProgress(step) if step > self.furthest else RestartProgress(self.furthest, self.num_stuck + 1)


def launch_with_restarts(
    folder: Path, config: TrainConfig, terms: RestartPolicy, nproc: int, device_type: str, words: Sequence[str]
) -> int:
    """Run the command with the same arguments in ``nproc`` processes, again if they fail; return the exit code.

    Again only for what may be another time: see :func:`why_not`.
    """
    progress, number, cause = RestartProgress(), 0, ""
    is_private = needs_no_network(config, device_type)
    with noted_signals() as received, ScratchFolder() as scratch, private_network(is_private) as network:
        while True:
            attempt = Attempt(str(folder.absolute()), str(scratch.path / f"step-{number}"), number, cause)
            told = {ATTEMPT_VARIABLE: json.dumps(asdict(attempt))}
            place = LaunchContext(scratch.path / f"store-{number}", received, told, network)
            ended = run_ranks(nproc, device_type, words, place)
            code = conclude(ended, received, folder)
            if ended.failure is None or received:
                return code
            progress = progress.after(steps_in(Path(attempt.step_file)))
            reason = why_not(ended, progress, terms, number)
            if reason is not None:
                print(f"shardwise: not started again: {reason}", file=sys.stderr)
                return code
            number, cause = number + 1, describe(ended.failure)
            nproc = ranks_for(config, nproc, ended.num_killed, terms.min_nproc)
            print(f"shardwise: restart {number} of {terms.max_restarts}, on {nproc} rank(s)", file=sys.stderr)


def why_not(ended: Ended, progress: RestartProgress, terms: RestartPolicy, number: int) -> str | None:
    """Return why ranks that ended like this are not started again, None if they are; ``number``: restarts so far."""
    if {EXIT_CONFIG, EXIT_FINAL} & set(ended.codes):
        return "a restart would end alike"
    if progress.num_stuck >= MOST_STUCK:
        return (
            f"{progress.num_stuck} restarts in a row have come no further than step {progress.furthest}; look for what fails "
            "there"
        )
    if number >= terms.max_restarts:
        return f"--max-restarts {terms.max_restarts}"
    return None


def ranks_for(config: TrainConfig, nproc: int, num_killed: int, min_nproc: int | None) -> int:
    """Return on how many ranks to go on: the most of those left that the options can use, or ``nproc`` as before.

    Example:
        >>> ranks_for(TrainConfig(batch=12), 4, 1, 2)
        3
        >>> ranks_for(TrainConfig(batch=32), 4, 1, 2)
        2
        >>> ranks_for(TrainConfig(batch=32), 4, 1, None)
        4
    """
    if min_nproc is None:
        return nproc
    for fewer in range(nproc - num_killed, min_nproc - 1, -1):
        try:
            check_ranks(config, fewer)
        except ConfigError:
            continue
        return fewer
    return nproc


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return a name of the process that starts this rank, and would start it again; None if none would.

    The same for all ranks and starts of one launcher on a host, and never that of another one.
    """
    if ATTEMPT_VARIABLE not in environment and "TORCHELASTIC_RESTART_COUNT" not in environment:
        return None
    from shardwise.checkpoint.files import note_of

    return json.dumps(note_of(os.getppid()))
