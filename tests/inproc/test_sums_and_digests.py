"""Partial sums are added in the order of the tree."""

from __future__ import annotations

import torch

from shardwise.reproducible.sums import add_alike, add_up
from shardwise.reproducible.tree import Node


def test_tensors_of_several_chunks_are_added_whole() -> None:
    first, second, third = values = torch.randn(3, 300_000)
    out = torch.empty(299_990)  # the rest is padding
    add_up([(Node(number, 1), value) for number, value in enumerate(values)], out)
    assert torch.equal(out, (first + second + third)[:299_990])


def test_sums_that_replicas_receive_later_do_not_use_the_memory_of_messages() -> None:
    arrived = torch.arange(6.0).view(3, 2)
    found = add_alike([(Node(number, 1), value) for number, value in enumerate(arrived)])
    arrived.zero_()  # the next message
    assert [(node, value.tolist()) for node, value in found] == [(Node(0, 2), [2.0, 4.0]), (Node(2, 1), [4.0, 5.0])]
