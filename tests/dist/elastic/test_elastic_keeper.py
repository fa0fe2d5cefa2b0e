"""The keeper of a host: what it holds outlives ranks, and nobody else gets any of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import keeper_client
from helpers.other_users import NOBODY, second_user

from shardwise.elastic import keeper

KEEPER = Path(keeper.__file__)


def words(*more: object) -> list[str]:
    return [sys.executable, keeper_client.__file__, str(KEEPER), *map(str, more)]


def run(*more: object) -> str:
    return subprocess.run(words(*more), capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture
def agent() -> subprocess.Popen[bytes]:
    """A launcher that runs each line that it reads, in a session of its own."""
    lines = "import shlex, subprocess, sys\nfor line in sys.stdin: subprocess.run(shlex.split(line), start_new_session=True)"
    return subprocess.Popen([sys.executable, "-IS", "-c", lines], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def rank(agent: subprocess.Popen[bytes], what: str, text: str = "-") -> str:
    """Return what a rank of ``agent`` prints."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write((" ".join(words("rank", agent.pid, what, text)) + "\n").encode())
    agent.stdin.flush()
    return agent.stdout.readline().decode().strip()


def running(agent: int) -> list[int]:
    """Return the keepers of ``agent``."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            each = path.read_bytes().decode().split("\0")
            if str(KEEPER) in each and each[-2:-1] == [str(agent)] and "rank" not in each:
                found.append(int(path.parent.name))
    return found


def test_files_outlive_ranks_and_end_with_their_launcher(agent: subprocess.Popen[bytes]) -> None:
    with agent:
        name = rank(agent, "put", "state").split()[0]
        (found,) = running(agent.pid)
        assert os.getsid(found) != os.getsid(agent.pid), "a signal to the ranks, or to a terminal, does not reach it"
        assert rank(agent, "get") == f"{name} {2 * keeper.NUM_FILES} state"
        assert running(agent.pid) == [found]
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        deadline = time.monotonic() + 10
        while running(agent.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@second_user
def test_ranks_end_a_keeper_one_after_another(agent: subprocess.Popen[bytes]) -> None:
    with agent:
        first, second = [keeper.Keeper(agent.pid) for _ in range(2)]
        first.finish()
        while running(agent.pid):
            time.sleep(0.02)
        second.finish()
        for fd in (*first.fds, *second.fds):
            os.close(fd)
        assert agent.stdin is not None
        agent.stdin.close()


def test_another_user_gets_nothing_and_changes_nothing(agent: subprocess.Popen[bytes]) -> None:
    with agent:
        name = rank(agent, "put", "state").split()[0]
        assert f"@{name}" in Path("/proc/net/unix").read_text(), "which anybody can read"
        assert run("stranger", NOBODY, name, *running(agent.pid)) == "[]"
        assert rank(agent, "get") == f"{name} {2 * keeper.NUM_FILES} state"
        agent.kill()


@second_user
def test_another_user_who_has_taken_the_name_is_named(agent: subprocess.Popen[bytes]) -> None:
    with agent:
        name = rank(agent, "put", "state").split()[0]
        os.kill(running(agent.pid)[0], signal.SIGKILL)
        with subprocess.Popen(words("squat", NOBODY, name), stdout=subprocess.PIPE) as squatting:
            assert squatting.stdout is not None
            assert squatting.stdout.readline() == b"taken\n"
            assert rank(agent, "get").startswith(f"user {NOBODY} of this host has taken")
            squatting.kill()
        agent.kill()
