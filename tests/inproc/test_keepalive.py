"""Connections to other hosts of the job break soon when the host does; all others stay as they are."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from shardwise import ConfigError, set_host_timeout
from shardwise.consistency import process_groups
from shardwise.consistency.store import JobStore


@pytest.fixture
def connections() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connections of this process: to a host of the job (127.0.0.2), and to another."""
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for address in ("127.0.0.2", "127.0.0.3"):
            server = stack.enter_context(socket.create_server((address, 0)))
            found.append(stack.enter_context(socket.create_connection(server.getsockname())))
        yield found[0], found[1]


def _store(*hosts: str) -> dist.Store:
    store = dist.HashStore()
    for host in hosts:
        store.append("shardwise/addresses", f"{host}\n")
    return store


def _is_watched(connection: socket.socket) -> bool:
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) in (0, 5000)
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) and bool(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    )


def test_connections_to_hosts_of_the_job_are_probed_and_no_others(
    connections: tuple[socket.socket, socket.socket],
) -> None:
    assert process_groups.enable_keepalive(_store("10.0.0.1 127.0.0.2", "10.0.0.3")) == 1
    to_job, elsewhere = connections
    assert _is_watched(to_job)
    assert not _is_watched(elsewhere)


@pytest.mark.parametrize("hosts", [(), ("10.0.0.1 127.0.0.2",)])
def test_a_job_on_one_host_has_no_cables(
    connections: tuple[socket.socket, socket.socket], hosts: tuple[str, ...]
) -> None:
    assert process_groups.enable_keepalive(_store(*hosts)) == 0
    assert not _is_watched(connections[0])


def test_they_can_be_left_alone(connections: tuple[socket.socket, socket.socket]) -> None:
    set_host_timeout(0)
    try:
        assert process_groups.enable_keepalive(_store("127.0.0.2", "10.0.0.3")) == 0
    finally:
        set_host_timeout(5)
    assert not _is_watched(connections[0])


@pytest.mark.parametrize("seconds", [-1, 0.5, 2.9, float("inf"), float("nan")])
def test_a_limit_that_one_lost_packet_reaches_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        set_host_timeout(seconds)


def test_a_host_says_once_where_it_is() -> None:
    store = dist.HashStore()
    for host in ("one", "one", "two"):
        process_groups.post_addresses(JobStore(store), host)
    line = " ".join(process_groups.own_addresses())
    assert store.get("shardwise/addresses").decode() == f"{line}\n{line}\n"
    assert not any(address.startswith("127.") for address in line.split())
