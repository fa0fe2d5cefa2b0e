"""Another user of this host takes no rank's place, and reads no memory of a job."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, options
from helpers.forked_commands import start_forked
from helpers.network import listeners
from helpers.other_users import NOBODY, run_as_nobody, second_user, stranger_at
from helpers.ranks import on_ranks
from helpers.runs import write_text

from shardwise import ShardwiseError, fully_shard
from shardwise.collectives.local_peers import HEADER_BYTES, Segment
from shardwise.consistency.process_groups import check_peers
from shardwise.errors import TransportError


def _num_sockets() -> int:
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(link.startswith("socket:") for link in links)


@contextmanager
def _stranger_among_connections() -> Generator[None, None, None]:
    before = _num_sockets()
    ports = [each.port for each in listeners([os.getpid()])]
    with stranger_at(ports):
        while _num_sockets() < before + len(ports):  # until gloo has accepted it
            time.sleep(0.01)
        yield


@second_user
@on_ranks(2, fresh=True)
def test_a_connection_of_another_user_is_named_on_every_rank_before_anything_is_sent() -> None:
    dist.barrier()
    with _stranger_among_connections():
        dist.barrier()
        with pytest.raises(ShardwiseError, match=f"user {NOBODY} of this host is connected to port"):
            model = torch.nn.Linear(8, 8)
            fully_shard(model)
            model(torch.ones(1, 8))


@second_user
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])  # the kernel has a table for each kind
def test_a_connection_is_checked_by_the_user_at_its_other_end(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            check_peers()  # this user's own
        with stranger_at([port], address), server.accept()[0]:
            for _ in range(2):  # a check that failed does not pass the next time
                with pytest.raises(TransportError, match=f"user {NOBODY} of this host is connected to port {port} "):
                    check_peers()
        check_peers()


@second_user
def test_a_server_of_the_user_on_every_interface_may_be_asked_by_anybody() -> None:
    with socket.create_server(("", 0)) as server, stranger_at([server.getsockname()[1]]), server.accept()[0]:
        check_peers()


@second_user
def test_a_rank_of_the_command_sends_nothing_to_a_stranger_in_its_group(tmp_path: Path) -> None:
    run, text = tmp_path / "run", write_text(tmp_path)
    words = [*COMMAND, *options(data=text, out=run, nproc=2)]
    place = {"WORLD_SIZE": "2", "SHARDWISE_STORE": str(tmp_path / "store"), "SHARDWISE_LAUNCHER_PID": str(os.getpid())}
    with start_forked(words, place | {"RANK": "0"}) as first:
        while not (found := listeners([first.pid])):
            assert first.poll() is None
            time.sleep(0.02)
        with (
            stranger_at([each.port for each in found]) as stranger,
            start_forked(words, place | {"RANK": "1"}) as second,
        ):
            error = first.communicate(timeout=120)[1]
            second.kill()
            assert stranger.received() == 0
    assert f"shardwise: error: user {NOBODY} of this host is connected to port {found[0].port} of this rank" in error
    assert first.returncode == 1


@second_user
def test_another_user_does_not_open_memory_that_ranks_share() -> None:
    segment = Segment.create(HEADER_BYTES)
    place = f"/proc/{segment.address.pid}/fd/{segment.address.fd}"
    with open(place, "rb"):  # this user does, as the ranks do
        done = run_as_nobody("import sys; open(sys.argv[1], 'rb')", place)
    assert "PermissionError" in done.stderr
