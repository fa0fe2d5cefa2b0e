"""Ranks of one host listen on loopback alone."""

from __future__ import annotations

import os

import pytest

from shardwise.one_host import stay_on_loopback


def test_what_was_chosen_for_many_hosts_does_not_hold_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "HOME": os.curdir}
    stay_on_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HOME": os.curdir}
