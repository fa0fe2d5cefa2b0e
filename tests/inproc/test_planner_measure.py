"""What ``plan --measure`` times, and how: as a rank of this host will run it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.planner import measure
from shardwise.planner import measure as measure_shared
from shardwise.planner.dry_run import OpCall, TensorSpec, dry_run
from shardwise.planner.hardware import HARDWARE, Wire
from shardwise.planner.measure import OnOneHost, measured_shared

FOUND = OnOneHost(Wire(3e9, 1e-4), 2e-4, 3e-5)


@pytest.mark.parametrize(("ranks", "expected"), [(2, 2), (1, 3)])
def test_operations_of_ranks_that_share_a_host_are_timed_with_their_threads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, expected: int
) -> None:
    seen: set[int] = set()
    monkeypatch.setattr(measure, "measured_shared", lambda ranks: FOUND)
    monkeypatch.setattr(measure, "op_seconds", lambda *_: seen.add(torch.get_num_threads()) or 1e-6)
    run = dry_run(nn.Linear(4, 4), [torch.zeros(2, 4)], lambda model, x: model(x).sum())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = measure.measured(HARDWARE["cpu"], [run], ranks, threads=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {expected}
    assert found.op_seconds
    figures = (found.shared, found.host_s_per_unit, found.host_s_per_update)
    preset = HARDWARE["cpu"]
    assert figures == (
        (FOUND.wire, FOUND.host_s_per_unit, FOUND.host_s_per_update)
        if ranks > 1
        else (preset.shared, preset.host_s_per_unit, preset.host_s_per_update)
    )


def test_an_operation_is_timed_writing_to_memory_that_it_has_not_just_written() -> None:
    """In a step results of other operations lie between two of the same one."""
    results: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in results))
        results.append(weakref.ref(result := x + 1))
        return result

    call = OpCall(function, (TensorSpec((1 << 10,), (1,), torch.float32),), {})
    assert measure.op_seconds(call, torch.device("cpu"))
    assert most >= 4


def test_ranks_of_this_host_find_out_what_units_take() -> None:
    found = measured_shared(2)
    assert 1e7 < found.wire.bytes_per_s < 1e12
    assert 0 <= found.wire.latency_s < 1
    assert 0 <= found.host_s_per_unit < 1
    assert 0 < found.host_s_per_update < 1


def test_processes_that_end_without_figures_are_cited_and_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_shared, "_PROGRAM", "raise SystemExit('no memory here')")
    with pytest.raises(ConfigError, match="cannot be measured: no memory here; give 'shared'"):
        measured_shared(3)
    gc.collect()  # warns of open pipes, which fails this test
