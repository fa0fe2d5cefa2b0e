"""Ranks of the launcher forked from a server that has imported torch, instead of new interpreters: a start takes no time."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from helpers.commands import Ended, clean_environment
from helpers.forked_commands import Forked, run_code, run_main_script
from helpers.jobs import PRELOAD
from shardwise.cli import LAUNCHER_VARIABLE
from shardwise.loop import launch


class ForkedRank(Forked):
    """A rank of a launcher in this process, noted in ``started``."""

    started: list[ForkedRank] = []

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        _place: launch.LaunchContext,
        _fds: tuple[int, ...] = (),
    ) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        process = context.Process(target=_run, args=(list(words[2:]), dict(environment)))
        process.start()
        super().__init__(process)
        self.rank = int(environment["RANK"])
        ForkedRank.started.append(self)


def _run(words: list[str], environment: dict[str, str]) -> None:
    import shardwise.recipes.train  # noqa: F401  before what it imports is replaced: the server may have been started without it
    from shardwise.cli.main import main

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of the whole process
    sys.modules["torch.utils.tensorboard"] = cast(ModuleType, SimpleNamespace(SummaryWriter=MagicMock()))
    os.environ.update(environment)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())  # the server
    os._exit(main(words))


class ForkedCall(Forked):
    """A rank of ``notebook_launch`` in this process."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        place: launch.LaunchContext,
        _fds: tuple[int, ...] = (),
    ) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        assert place.output is not None
        process = context.Process(target=_call, args=(list(words), dict(environment), reduction.DupFd(place.output)))
        process.start()
        super().__init__(process)


def _call(words: list[str], environment: dict[str, str], output: Any) -> None:
    os.setsid()
    fd = output.detach()
    for number in (1, 2):
        os.dup2(fd, number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  of the whole process
    words[2] = str(os.getppid())  # the server stands for the launcher
    run_code(words, environment)


def fork_calls(patch: pytest.MonkeyPatch) -> None:
    """Let ``notebook_launch`` in this process fork its ranks."""
    patch.setattr(launch, "_start", ForkedCall)


def run_script(script: Path, num_ranks: int, **more: str) -> Ended:
    """Run ``script`` on ranks that are told what torchrun tells them; return the largest exit code and what all printed."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(num_ranks)}
    with tempfile.TemporaryDirectory(prefix="shardwise-script-") as folder:
        outputs = (Path(folder) / "out", Path(folder) / "err")
        processes = []
        for rank in range(num_ranks):
            told = clean_environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more
            processes.append(context.Process(target=run_main_script, args=(str(script), told, outputs)))
            processes[-1].start()
        for process in processes:
            process.join()
        return Ended(max(process.exitcode for process in processes), *(path.read_text() for path in outputs))


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let the launcher of this process fork its ranks."""
    ForkedRank.started = []
    patch.setattr(launch, "_start", ForkedRank)
    patch.setattr(launch, "POLL_S", 0.01)


def alive(since: float = 10.0) -> list[int]:
    """Return the ranks that have not ended ``since`` seconds from now."""
    deadline = time.monotonic() + since
    while (found := [rank.pid for rank in ForkedRank.started if rank.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
