"""Elastic runs under torchrun: its agents are the hosts, all on this machine; their ranks start again from memory."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import elastic_restarted
from helpers.commands import clean_environment
from helpers.elastic_program import NUM_STEPS, read_outcome
from helpers.forked_commands import Forked, start_torchrun

import shardwise
from shardwise.errors import ConfigError

TORCHRUN = ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d"]
KEEPER = "shardwise/elastic/keeper.py"


class Agents:
    """Agents of torchrun, and where they meet: a store of this process, so that any of them may be killed."""

    def __init__(self, folder: Path, words: Sequence[str], settings: dict[str, Any]) -> None:
        self.folder, self._words, self._settings = folder, words, {"folder": str(folder), **settings}
        listening = socket.create_server(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        fd, limit = listening.detach(), timedelta(seconds=60)
        self._store = dist.TCPStore("127.0.0.1", self._port, None, True, limit, False, master_listen_fd=fd)
        self.all: list[Forked] = []

    def start(self) -> Forked:
        """Start an agent, whose output goes to the file ``log``."""
        where = ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "run"]
        conf = ["--rdzv-conf", "is_host=0,last_call_timeout=1,keep_alive_interval=1"]
        words = [*TORCHRUN, *where, *conf, *self._words, elastic_restarted.__file__, json.dumps(self._settings)]
        environment = {**clean_environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.all.append(start_torchrun(words, environment, self.folder / "log"))
        return self.all[-1]

    def wait(self, *agents: Forked) -> list[int]:
        """Return the exit codes of ``agents``, or of all."""
        return [each.wait(200) for each in agents or self.all]

    def notes(self, word: str) -> list[str]:
        """Return what the first ranks have noted that begins with ``word``."""
        lines = (self.folder / "notes").read_text().splitlines() if (self.folder / "notes").exists() else []
        return [line.partition(" ")[2] for line in lines if line.split()[1] == word]

    def wait_for(self, note: str) -> None:
        """Return once a rank has noted it."""
        deadline = time.monotonic() + 60
        while note not in self.notes(note.split()[0]):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def outcome(self) -> dict[str, Any]:
        """Compare the parameters with one process, to the bit; return what the run says of itself."""
        assert (self.folder / "out").exists(), (self.folder / "log").read_text()
        return read_outcome(self.folder / "out")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def agents(folder: Path, words: Sequence[str], **settings: Any) -> Generator[Agents, None, None]:
    """Yield agents, none started; end those that are left, and see that no keeper outlives them."""
    found = Agents(folder, words, settings)
    try:
        yield found
    finally:
        for each in found.all:
            with suppress(ProcessLookupError):
                each.kill()
            each.wait()
    pids = [each.pid for each in found.all]
    deadline = time.monotonic() + 10
    while left := [pid for pid, agent in keepers() if agent in pids]:
        assert time.monotonic() < deadline, f"keepers {left} outlive their agents"
        time.sleep(0.02)


def keepers() -> list[tuple[int, int]]:
    """Return the keepers of this machine, and the agent of each."""
    found: list[tuple[int, int]] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if any(word.endswith(KEEPER) for word in words):
                found.append((int(path.parent.name), int(words[-2])))
    return found


def test_a_killed_rank_and_then_all_of_a_host_come_back_from_memory(tmp_path: Path) -> None:
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"]
    with agents(tmp_path, words, kills=[[2, 1, "rank"], [5, 0, "workers"]]) as found:
        found.start()
        assert found.wait() == [0], found.log
        found.outcome()
        assert [each.split()[1] for each in found.notes("begins")] == ["0", "2", "5"], "from the step that was lost"
        assert found.notes("commits") == [f"commits {number}" for number in range(1, NUM_STEPS + 1)]
        assert "all ranks were started again; 2 ranks go on after step 2" in found.log


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["rank", "workers"])
def test_ranks_of_two_hosts_start_again_without_a_loss(what: str, tmp_path: Path) -> None:
    words = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "4"]
    with agents(tmp_path, words, kills=[[2, 3, what], [5, 1, what]]) as found:
        found.start()
        found.start()
        assert found.wait() == [0, 0], found.log
        found.outcome()
        assert [each.split()[1] for each in found.notes("begins")] == ["0", "2", "5"]
        assert found.notes("commits") == [f"commits {number}" for number in range(1, NUM_STEPS + 1)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 3])
def test_the_other_host_goes_on_without_one_and_takes_it_back(rank: int, tmp_path: Path) -> None:
    words = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "4"]
    settings: dict[str, Any] = {"kills": [[3, rank, "agent"]], "num_steps": NUM_STEPS, "slow_ms": 1000}
    with agents(tmp_path, words, **settings) as found:
        both = [found.start(), found.start()]
        found.wait_for("kills agent 3")
        end_s = time.monotonic() + 60
        while not (ended := [each for each in both if each.poll() is not None]) and time.monotonic() < end_s:
            time.sleep(0.05)
        (lost,) = ended
        assert lost.returncode == -signal.SIGKILL
        left = both[lost is both[0]]
        found.wait_for("commits 4")
        again = found.start()
        assert found.wait(left, again) == [0, 0], found.log
        found.outcome()


@pytest.mark.exhaustive
def test_two_neighbours_are_lost_and_the_newest_checkpoint_follows(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "4"]
    checkpoints = str(tmp_path / "checkpoints")
    with agents(tmp_path, words, kills=[[3, 0, "agent"], [3, 1, "agent"]], checkpoints=checkpoints) as found:
        both = [found.start(), found.start()]
        assert found.wait(*both) == [-signal.SIGKILL] * 2
        assert found.wait(found.start(), found.start()) == [0, 0], found.log
        found.outcome()
        assert [each.split()[1] for each in found.notes("begins")] == ["0", "3"]


@pytest.mark.exhaustive
def test_ranks_that_do_not_divide_the_microbatches_wait(tmp_path: Path) -> None:
    words = ["--nnodes", "1", "--nproc-per-node", "3", "--max-restarts", "1"]
    with agents(tmp_path, words, kills=[[2, 1, "rank"]], V=4) as found:
        found.start()
        assert found.wait() == [0], found.log
        assert set(found.outcome()["worlds"]) == {2}
        assert "1 of 3 processes wait: num_microbatches is divisible by 2, not by more" in found.log


@pytest.mark.exhaustive
def test_an_exception_is_the_users_and_uses_up_the_restarts(tmp_path: Path) -> None:
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0"]
    with agents(tmp_path, words, kills=[[2, 1, "leaves"]]) as found:
        found.start()
        assert found.wait() == [1]
        assert "ValueError: no such column" in found.log
        assert "torchrun --max-restarts is 0: a lost rank ends the run" in found.log


def test_a_store_whose_address_may_be_an_old_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_RESTARTS": "1", "USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        shardwise.elastic(dict[str, int], dict[str, int], num_steps=1)
