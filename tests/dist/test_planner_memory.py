"""What a plan says a rank holds and sends is what it does, to the byte or nearly."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import CompressionPolicy, fully_shard
from shardwise.planner.dry_run import dry_run
from shardwise.planner.profile import Setting
from shardwise.planner.rank_units import rank_units
from shardwise.testing import WorkerPool
from shardwise.testing.models import Block

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"
NAMES = ("full, tied",)  # the smallest; the benchmark has all


def held_on_rank(names: tuple[str, ...]) -> list[dict[str, Any]]:
    bench = runpy.run_path(str(BENCHMARK))
    return [bench["held_on_rank"](case) for case in bench["CASES"] if case.name in names]


def test_planned_peaks_are_measured_peaks(pool: WorkerPool) -> None:
    bench = runpy.run_path(str(BENCHMARK))
    cases = [case for case in bench["CASES"] if case.name in NAMES]
    found = pool.run(held_on_rank, num_ranks=2, names=NAMES)
    for number, case in enumerate(cases):
        measured = max(each[number]["peak"] for each in found)
        planned = bench["predict"](case, bench["profile_of"](case)).peak.total
        assert abs(planned / measured - 1) < 0.01, (case.name, planned, measured)


@on_ranks(2)
def test_planned_bytes_of_coded_tensors_are_those_that_travel() -> None:
    both = CompressionPolicy(gather="int8", reduce="bf16", min_bytes=1024, exact=("*down*",))
    between = CompressionPolicy(reduce="int8", min_bytes=1024, error_feedback=False)
    for policy, sizes, setting in (
        (both, (1, 2), Setting(ranks=2, min_unit_bytes=0, compression=both)),
        (between, (2, 1), Setting(strategy="hsdp", ranks=2, replicas=2, min_unit_bytes=0, compression=between)),
    ):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(*[Block(45, 201) for _ in range(3)])
        planned = rank_units(dry_run(model, [torch.empty(4, 45)]).profile, setting, "cpu")
        for module in (*model, model):
            fully_shard(module, mesh=mesh["shard"] if sizes[0] == 1 else mesh, compression=policy)
        model(torch.ones(4, 45)).sum().backward()
        units = {unit.name: unit for unit in model.compression_report()}  # pyright: ignore[reportCallIssue]
        assert len(units) == 3
        for unit in planned[1:]:
            found = units[unit.facts.name]
            if policy is both:
                assert found.gathers.sent_bytes == found.gathers.num_calls * unit.moved_bytes // 2
                assert found.reductions.sent_bytes == unit.scattered_bytes // 2
            else:  # what is summed over replicas without coding is not of the report
                exact = 4 * (45 + 45 + 201)
                assert found.reductions.sent_bytes == unit.summed_bytes // 2 - exact
