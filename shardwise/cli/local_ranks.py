"""Ranks of this host as processes of this one: started, told of signals, and never outliving each other.

They meet through a file in a folder of this user: nothing listens for them, and nothing is read from a socket here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_FINAL, LAUNCHER_VARIABLE, STORE_VARIABLE
from shardwise.cli.private_network import entering, private_network
from shardwise.doctor.recorder import BLACK_BOX, PATTERN
from shardwise.one_host import ScratchFolder, stay_on_loopback

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
def noted_signals() -> Generator[list[int], None, None]:
    """Note signals, in the order in which they come, instead of being ended by them."""
    received: list[int] = []
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    noted = [number for number in SIGNALS if number != signal.SIGHUP or not is_nohup]
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in noted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


@contextmanager
def _passing_on(number: int, ranks: Sequence[subprocess.Popen[bytes]]) -> Generator[None, None, None]:
    """Let ranks that have a handler for a signal get it, too: it asks them to write down what they do."""

    def pass_on(number: int, _frame: object) -> None:
        for rank in ranks:
            caught = re.search(r"SigCgt:\s*([0-9a-f]+)", _read_proc(rank.pid, "status"))
            if caught is not None and int(caught[1], 16) >> (number - 1) & 1:
                _send(rank, number)

    before = signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, before)


def _send(rank: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        if rank.poll() is None:
            os.kill(rank.pid, number)


def _state_of(pid: int) -> str:
    return _read_proc(pid, "stat").rpartition(")")[2].strip()[:1]


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


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
            if _state_of(rank.pid) in ("T", "t"):  # stopped again, or by a debugger: the others wait for it in vain
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
