"""Broadcast plans: few calls, in place where memory allows, and an order that every rank derives alike."""

import json

import torch

from shardwise.collectives.owned import PACK_BELOW_BYTES, Owned, plan_broadcasts
from shardwise.consistency.agreement import first_difference
from shardwise.zero.partition import flat_like, flat_view

BIG = PACK_BELOW_BYTES // 4


def test_small_tensors_share_a_message_per_owner_and_dtype() -> None:
    small = [Owned(rank, torch.zeros(5)) for rank in (0, 1, 0, 1, 0)] + [Owned(0, torch.zeros(5, dtype=torch.double))]
    plan = plan_broadcasts(small)
    assert sorted((call.owner, len(call.tensors)) for call in plan) == [(0, 1), (0, 3), (1, 2)]


def test_large_tensors_go_in_place_and_owners_alternate() -> None:
    owned = [Owned(rank, torch.zeros(BIG)) for rank in (0, 0, 0, 1, 1, 2)]
    plan = plan_broadcasts([*owned, Owned(3, torch.zeros(0))])
    assert [call.owner for call in plan] == [0, 1, 2, 0, 1, 0]  # an empty one is not sent
    addresses = {call.tensors[0].data_ptr() for call in plan}
    assert addresses == {item.tensor.data_ptr() for item in owned}


def test_flat_views_follow_memory() -> None:
    last = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    view = flat_view(last)
    assert view.data_ptr() == last.data_ptr()
    assert torch.equal(flat_like(last.contiguous(), last), view)
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert flat_view(turned).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_first_difference_names_ranks_and_values() -> None:
    facts = {rank: ["3 tensors", "a", "b" if rank != 5 else "c"] for rank in range(12)}
    text = first_difference(json.loads(json.dumps(facts), object_hook=lambda d: {int(k): v for k, v in d.items()}))
    assert text == "ranks 0, 1, 2, 3, 4, 6, 7, 8, ...: b; rank 5: c"
    assert first_difference({0: ["a"], 1: ["a", "b"]}) == "rank 0: nothing; rank 1: b"
