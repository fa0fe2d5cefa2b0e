"""Nobody else's process reaches the ranks of one host: they listen on loopback alone, and nothing they hear is run.

The command runs in interpreters of its own here, so what it writes when a rank is killed is read here, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, options, start, wait_for_training
from helpers.network import Listener, Networks, listeners, two_networks
from helpers.ranks import on_ranks
from helpers.runs import write_text

from shardwise.consistency.recorder import diagnose, find_records, in_words
from shardwise.loop.launch import private_network
from shardwise.recipes.sharding import RunRanks

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="reads the tables of sockets from /proc"
)


@dataclass(frozen=True)
class Running:
    """A job that trains, its folder, the sockets of its processes, and the networks it was started in, if that was allowed."""

    process: subprocess.Popen[str]
    ranks: list[int]
    folder: Path
    sockets: list[Listener]
    networks: Networks | None


def _another_interface() -> str:
    return next((name for name in os.listdir("/sys/class/net") if name != "lo"), "lo")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running, None, None]:
    run = tmp_path_factory.mktemp("runs") / "endless"
    text = write_text(tmp_path_factory.mktemp("text"))
    words = [*COMMAND, *options(data=text, out=run, nproc=2, steps=1_000_000, eval_every=1_000_000, save_every=5)]
    with two_networks() as networks:
        inside = networks.enter(networks.inside) if networks else []
        interface = "inside" if networks else _another_interface()
        with start([*inside, *words], {"GLOO_SOCKET_IFNAME": interface}) as process:
            ranks = wait_for_training(process, run)
            yield Running(process, ranks, run, listeners([process.pid, *ranks]), networks)
            process.send_signal(signal.SIGKILL)


def test_ranks_of_one_host_listen_on_loopback_alone_whatever_was_chosen_for_many(running: Running) -> None:
    assert len(running.ranks) >= 2
    assert running.sockets, "gloo listens somewhere"
    assert [each for each in running.sockets if not each.address.is_loopback] == []


def test_another_network_finds_every_port_of_the_job_closed(running: Running) -> None:
    if running.networks is None:
        pytest.skip("this user may not make networks")
    with running.networks.open_port() as port:
        assert running.networks.connect(port) == "open", "else this test would see nothing"
    assert {running.networks.connect(each.port) for each in running.sockets} == {"refused"}


def test_ranks_have_a_network_of_their_own_where_the_kernel_allows_one(running: Running) -> None:
    with private_network(True) as network:
        is_allowed = bool(network)
    found = {os.readlink(f"/proc/{pid}/ns/net") for pid in running.ranks}
    assert len(found) == 1
    assert (found != {os.readlink(f"/proc/{running.process.pid}/ns/net")}) == is_allowed


def test_the_others_write_into_the_folder_of_the_run_by_themselves_when_a_rank_is_killed(running: Running) -> None:
    os.kill(running.ranks[-1], signal.SIGKILL)
    running.process.communicate(timeout=60)
    found = diagnose(find_records(running.folder)[0])
    assert (found.num_ranks, len(found.missing)) == (2, 1)
    assert [each.rank for each in found.failures] == [1 - found.missing[0]]
    assert "/recipes/" in "\n".join(in_words(found))  # the line of the program in which it was


@on_ranks(2)
def test_workers_of_a_pool_listen_on_loopback_alone() -> None:
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    dist.barrier()
    found = listeners([os.getpid()])
    assert found
    assert all(each.address.is_loopback for each in found)


@on_ranks(2)
def test_what_ranks_of_a_run_tell_each_other_is_no_pickle() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = RunRanks(rank, size, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_pickler", None)
        patch.setattr(dist.distributed_c10d, "_unpickler", None)
        said = {"rank": rank, "text": "é" * (1 + 100 * rank), "none": None}
        assert ranks.gather(said) == [{"rank": r, "text": "é" * (1 + 100 * r), "none": None} for r in range(size)]
        assert ranks.from_first([1.5, "a"] if rank == 0 else None) == [1.5, "a"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        ranks.gather(object())
