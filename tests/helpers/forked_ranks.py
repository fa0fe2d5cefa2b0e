"""Ranks of the launcher forked from a server that has imported torch, instead of new interpreters: a start takes no time."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from helpers.forked_commands import Forked
from helpers.jobs import PRELOAD
from shardwise.cli.exits import LAUNCHER_VARIABLE
from shardwise.loop import launch


class ForkedRank(Forked):
    """A rank of a launcher in this process, noted in ``started``."""

    started: list[ForkedRank] = []

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], _place: launch.LaunchContext) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        process = context.Process(target=_run, args=(list(words[2:]), dict(environment)))
        process.start()
        super().__init__(process)
        self.rank = int(environment["RANK"])
        ForkedRank.started.append(self)


def _run(words: list[str], environment: dict[str, str]) -> None:
    from shardwise.cli.main import main

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of the whole process
    sys.modules["torch.utils.tensorboard"] = cast(ModuleType, SimpleNamespace(SummaryWriter=MagicMock()))
    sys.modules["shardwise.recipes.report"] = cast(ModuleType, SimpleNamespace(draw_report=lambda *_: None))
    os.environ.update(environment)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())  # the server
    os._exit(main(words))


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
