"""The fuzzer without torch's own classes compares with one process alone."""

from __future__ import annotations

from pathlib import Path

from fuzz import peers
from fuzz.case import Contender

CONTENDERS = [Contender(api) for api in ("fully_shard", "torch_fully_shard", "zero1", "torch_zero", "ddp")]


def test_without_the_file_of_the_tests_torchs_own_classes_are_left_out() -> None:
    assert [each.api for each in peers.able(CONTENDERS, Path("nowhere.py"))] == ["fully_shard", "zero1", "ddp"]


def test_in_a_checkout_they_are_there() -> None:
    assert peers.able(CONTENDERS) == CONTENDERS
