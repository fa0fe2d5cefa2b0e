"""The disk tier: what is loaded is what was stored last, whatever was read ahead or left in user's hands."""

from __future__ import annotations

import itertools
import os
import random
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError, StateError
from shardwise.offload.disk import DiskTier
from shardwise.one_host import resident_bytes

SIZES = (3000, 1, 7001)


def values(number: int) -> list[torch.Tensor]:
    return [torch.full((SIZES[number],), 1.0), torch.full((2, 3), number), torch.zeros(0)]


def are_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_what_is_loaded_is_what_was_stored_last_in_any_order_of_units_and_reads(tmp_path: Path) -> None:
    rng, tier = random.Random(0), DiskTier(tmp_path)
    truth: list[list[torch.Tensor]] = [[] for _ in SIZES]
    held: list[Sequence[torch.Tensor]] = [() for _ in SIZES]
    escaped: list[tuple[Sequence[torch.Tensor], list[torch.Tensor]]] = []

    def update(unit: int) -> list[torch.Tensor]:
        state = list(tier.load(unit, held[unit])) or values(unit)
        assert are_equal(state, truth[unit] or values(unit))
        for each in state:
            each.add_(1)
        held[unit] = tier.store(unit, state)
        assert all(each.is_meta for each in held[unit])
        return [each + 1 for each in truth[unit] or values(unit)]

    for _ in range(60):
        for unit in rng.sample(range(len(SIZES)), rng.randint(1, len(SIZES))):
            truth[unit] = update(unit)
        if rng.random() < 0.3:  # a state dict: nothing writes to its tensors but the next update of the same unit
            for unit in range(len(SIZES)):
                held[unit] = tier.load(unit, held[unit], is_read=True)
            escaped = [(held[unit], [each.clone() for each in held[unit]]) for unit in range(len(SIZES))]
            truth[0] = update(0)
            assert are_equal(*escaped[1])
            assert are_equal(*escaped[2])
        if rng.random() < 0.3:
            tier.rest()
    assert not list(tmp_path.iterdir())


def test_a_tier_that_rests_has_no_memory_but_reads_what_was_written(tmp_path: Path) -> None:
    tier, held = DiskTier(tmp_path), [list[torch.Tensor]() for _ in range(3)]

    def step() -> None:
        for unit, state in enumerate(held):
            state = tier.load(unit, state) or [torch.zeros(1 << 23)]
            held[unit] = list(tier.store(unit, [each.add_(1) for each in state]))

    def wait_for_memory_below(num_buffers: float) -> None:
        """The threads that write let buffers go a little later than ``store`` returns."""
        last = time.monotonic() + 60
        while resident_bytes() - started > num_buffers * (1 << 25):
            assert time.monotonic() < last
            time.sleep(0.01)

    started = resident_bytes()
    step()
    wait_for_memory_below(2.5)  # of the last unit, and one more
    step()
    tier.rest()
    wait_for_memory_below(0.5)
    step()
    assert all(tier.load(unit, state)[0].eq(3).all() for unit, state in enumerate(held))


def test_state_that_was_read_is_stored_again_in_any_order(tmp_path: Path) -> None:
    tier, held = DiskTier(tmp_path), [values(number) for number in range(len(SIZES))]
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]

    def run() -> None:
        """Read all units in one order, and store them in another."""
        for read, stored in itertools.product(orders, orders):
            for unit in read:
                held[unit] = list(tier.load(unit, held[unit]))
                assert are_equal(held[unit], values(unit))
            for unit in stored:
                held[unit] = list(tier.store(unit, held[unit]))
        done.set()

    done = threading.Event()
    threading.Thread(target=run, daemon=True).start()  # which ends with the tests if it waits for a buffer for ever
    assert done.wait(60)


def test_a_full_disk_and_torn_bytes_are_named(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(StateError, match=r"optimizer state on disk \(.*\): no space for .* more: File too large"):
            tier.store(0, values(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tier = DiskTier(tmp_path)
    held = tier.store(0, values(0))
    loaded = tier.load(0, held)
    assert are_equal(loaded, values(0))
    links = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    for link in links.values():
        if os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path)):
            with open(link, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for begin in range(0, size, 4096):
                    os.pwrite(file.fileno(), b"torn", begin)
    with pytest.raises(StateError, match="is not the one that was written"):
        tier.load(0, held)


def test_a_write_that_fails_later_is_raised_by_the_next_call(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tier.store(0, values(0))
    tier.rest()  # it is written
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        held = tier.store(0, values(0))
        with pytest.raises(StateError, match="a write failed: File too large"):
            tier.load(0, held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rank 0 cannot write to the folder .*file"):
        DiskTier(tmp_path / "file")
