"""``shardwise`` in processes forked from a server that has imported torch: a start takes milliseconds, not seconds of CPU.

Processes, their parents, signals, exit codes, folder, environment and output are those of a new interpreter.  What differs:
its options and encodings, and the network namespace of ranks, which stays that of the test.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.commands import COMMAND, Ended, clean_environment
from helpers.jobs import PRELOAD
from shardwise.cli import LAUNCHER_VARIABLE
from shardwise.loop import launch


class Forked:
    """The part of ``subprocess.Popen`` that the launcher uses, for a ``multiprocessing`` process that has been started."""

    note: Callable[[str], None] | None = None  # see launch.Rank

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        if self.returncode is not None and self.note is not None:
            note, self.note = self.note, None
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            note(f"-{self.pid}")
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        return self._process.exitcode


class ForkedCommand(Forked):
    """Runs ``shardwise WORDS`` with standard output and error in files; ``out``: another file for the output, or a FIFO."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        largest_file: int | None = None,
        out: Path | None = None,
    ) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-command-")
        folder = Path(self._folder.name)
        self._out, self._err = out or folder / "out", folder / "err"
        process = context.Process(
            target=_run_command,
            args=(list(words), dict(environment), os.getcwd(), (self._out, self._err), largest_file),
        )
        process.start()
        super().__init__(process)

    def output(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def errors(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        assert self.returncode is not None, f"the command has not ended within {timeout:g} s: {self.errors()}"
        return self.output(), self.errors()

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        self.wait()
        self._folder.cleanup()


def start_forked(
    words: Sequence[str], environment: Mapping[str, str] | None = None, out: Path | None = None
) -> ForkedCommand:
    """Start ``words``, which begin as :data:`helpers.commands.COMMAND` does."""
    return ForkedCommand(_own(words), clean_environment() | dict(environment or {}), out=out)


def run_forked(words: Sequence[str], largest_file: int | None = None, **more: str) -> Ended:
    """Do as :func:`helpers.commands.run`; ``largest_file``: the bytes that a file may have."""
    with ForkedCommand(_own(words), clean_environment() | more, largest_file) as command:
        out, err = command.communicate(timeout=120)
        assert command.returncode is not None
        return Ended(command.returncode, out, err)


def _own(words: Sequence[str]) -> list[str]:
    num_python = COMMAND.index("train")
    assert list(words[:num_python]) == COMMAND[:num_python]
    return list(words[num_python:])


def _run_command(
    words: list[str], environment: dict[str, str], place: str, outputs: tuple[Path, Path], largest_file: int | None
) -> None:
    _write_to(outputs)
    os.chdir(place)
    sys.path.insert(0, place)  # as ``python -m`` does
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    launch._start = _fork_rank  # pyright: ignore
    if LAUNCHER_VARIABLE in environment:
        environment[LAUNCHER_VARIABLE] = str(os.getppid())  # the server stands for the launcher
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, which a suite may run under, a command ignores hangups
    _run_main(words, environment)


def _write_to(outputs: tuple[Path, Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  of the whole process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def run_main_script(script: str, environment: dict[str, str], outputs: tuple[Path, Path]) -> None:
    """Run ``script`` as ``python`` does, with standard output and error in files."""
    _write_to(outputs)
    tempfile.tempdir = None  # of another TMPDIR
    run_code(["-c", f"import runpy; runpy.run_path({script!r}, run_name='__main__')"], environment)


def start_torchrun(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Start an agent of torchrun that forks its ranks, whose output and its own are appended to ``log``."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_run_torchrun, args=(list(words), dict(environment), log))
    process.start()
    return Forked(process)


def _run_torchrun(words: list[str], environment: dict[str, str], log: Path) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def fork(_: object, words: Sequence[str], environment: Mapping[str, str]) -> Forked:
        code = (
            f"import runpy; runpy.run_path({words[2]!r}, run_name='__main__')"  # words: the interpreter and its option
        )
        return _fork_rank(["-c", code, *words[3:]], environment, launch.LaunchContext(own_sessions=True))

    _write_to((log, log))
    os.environ.clear()
    os.environ.update(environment)
    SubprocessHandler._popen = fork  # pyright: ignore
    run.main(words)


def _fork_rank(
    words: Sequence[str], environment: Mapping[str, str], place: launch.LaunchContext, fds: tuple[int, ...] = ()
) -> Forked:
    kept: Any = () if place.own_sessions else launch._KEPT_FROM_RANKS  # pyright: ignore
    signal.pthread_sigmask(signal.SIG_BLOCK, kept)
    try:
        arguments = (list(words), dict(environment), place.own_sessions, fds)
        process = mp.get_context("fork").Process(target=_run_rank, args=arguments)
        process.start()
        return Forked(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, kept)


def _run_rank(words: list[str], environment: dict[str, str], own_session: bool, shared: tuple[int, ...]) -> None:
    if own_session:
        os.setsid()
    with open(os.devnull) as nothing:  # ``exec`` closes descriptors, such as those of the launcher's locks
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nothing.fileno(), *shared}:
            with contextlib.suppress(OSError):  # that of the list itself
                if not os.get_inheritable(fd):
                    os.dup2(nothing.fileno(), fd, inheritable=False)
    for number in (*launch.SIGNALS, signal.SIGUSR1, signal.SIGTSTP):  # handlers end where a new interpreter begins
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if words[0] == "-c":
        run_code(words, environment)
    _run_main(words[2:], environment)


def run_code(words: list[str], environment: dict[str, str]) -> None:
    """Run ``words`` as ``python`` does and exit with its code; the first word is ``-c``."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *words[2:]]
    try:
        exec(words[1], {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException:
        kind, error, trace = sys.exc_info()
        sys.excepthook(kind, error, trace and trace.tb_next)  # pyright: ignore  # without this frame
        if kind is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    sys.exit(0)


def _run_main(words: list[str], environment: dict[str, str]) -> None:
    from shardwise.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of another TMPDIR
    sys.exit(main(words))
