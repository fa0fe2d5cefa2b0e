"""What ``shardwise plan`` says beside what a rank really holds and how long its step really takes, on this machine.

Memory is counted where torch allocates tensors, at every operation of the third step, the largest of all ranks: what
``torch.cuda.max_memory_allocated`` says of a GPU.  Buffers inside gloo are not torch's and do not count.  Time is that of
the thread that makes the step, which other processes on the same cores do not change: the median of steps beside a plan
with figures of this rank, measured in turns with the steps.

Run: python benchmarks/plan_accuracy.py [--only NAME ...] [--time] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import shard_model
from shardwise.planner.advice import evaluate, step_under
from shardwise.planner.dry_run import DryRun, TensorSplit, dry_run
from shardwise.planner.hardware import HARDWARE, Hardware
from shardwise.planner.measure import OnOneHost, measured, measured_shared, with_ranks
from shardwise.planner.profile import ONE_UNIT, SEND_RECV, SHARED, UNIT_STRATEGIES, Setting
from shardwise.planner.rank_step import KINDS, RankMemory
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.gpt import GPT
from shardwise.recipes.memory import LiveBytes
from shardwise.recipes.sharding import HEADS, STRATEGIES, split_heads
from shardwise.testing import WorkerPool
from shardwise.testing.models import TiedModel

WARM_STEPS = 2
EVEN, UNEVEN = ModelShape(4, 384, 6, 256), ModelShape(3, 330, 5, 200)


@dataclass(frozen=True)
class Case:
    """One configuration: a model, a batch per rank, and how it is trained."""

    name: str
    setting: Setting
    model: str = "gpt"
    batch: int = 4
    transport: str = "collective"

    @property
    def config(self) -> TrainConfig:
        setting = self.setting
        return TrainConfig(
            model=EVEN if self.model == "gpt" else UNEVEN,
            shard=setting.strategy,
            replicas=setting.replicas,
            dtype=setting.precision,
            recompute=setting.recompute,
            accumulate=setting.accumulate,
            min_unit_bytes=setting.min_unit_bytes,
            transport=self.transport,
            tp=setting.tensor,
        )

    @property
    def ranks(self) -> int:
        return self.setting.ranks * self.setting.tensor

    def build(self) -> nn.Module:
        if self.model == "tied":
            model = TiedModel(width=320, vocabulary=3000, num_blocks=4)
            # As language models do: with torch's N(0, 1) logits are in the hundreds, and what softmax makes of them is
            # denormal, too; no plan knows values.
            nn.init.normal_(model.embed.weight, std=0.02)
            return model
        return GPT(self.config.model, recompute=self.setting.recompute)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.model == "tied":
            chosen = torch.randint(3000, (2, self.batch * 64), generator=torch.Generator().manual_seed(0))
            return chosen[0], chosen[1]
        shape = (self.batch, self.config.model.context)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


FULL = Setting(strategy="zero3", ranks=2)
CASES = (
    Case("full", FULL),
    Case("full, one unit", replace(FULL, min_unit_bytes=ONE_UNIT)),
    Case("full, merged units", replace(FULL, min_unit_bytes=10 << 20)),
    Case("full, recompute", replace(FULL, recompute=True)),
    Case("full, bf16", replace(FULL, precision="bf16")),
    Case("full, bf16, recompute", replace(FULL, precision="bf16", recompute=True)),
    Case("full, 2 microbatches", replace(FULL, accumulate=2)),
    Case("full, 3 microbatches, bf16", replace(FULL, accumulate=3, precision="bf16")),
    Case("full, uneven", FULL, model="uneven"),
    Case("full, tied", FULL, model="tied"),
    Case("full, 4 ranks", replace(FULL, ranks=4), batch=2),
    Case("hybrid 2x2", Setting(strategy="hsdp", ranks=4, replicas=2), batch=2),
    Case("full, shared memory", replace(FULL, transport=SHARED), transport="auto"),
    Case("full, shared memory, bf16", replace(FULL, transport=SHARED, precision="bf16"), transport="auto"),
    Case(
        "hybrid 2x2, shared memory",
        Setting(strategy="hsdp", ranks=4, replicas=2, transport=SHARED, near_replicas=True),
        batch=2,
        transport="auto",
    ),
    Case("full, send/recv", replace(FULL, transport=SEND_RECV), transport="gloo"),
    Case("full, send/recv, bf16", replace(FULL, transport=SEND_RECV, precision="bf16"), transport="gloo"),
    Case("full 2, tp 2", replace(FULL, tensor=2), batch=2),
    Case("replicate", Setting(strategy="ddp", ranks=2)),
    Case(
        "replicate, shared memory",
        Setting(strategy="ddp", ranks=2, transport=SHARED, near_replicas=True),
        transport="auto",
    ),
    Case("replicate, bf16", Setting(strategy="ddp", ranks=2, precision="bf16")),
    Case("ZeRO-2", Setting(strategy="zero2", ranks=2)),
    Case("ZeRO-1 under DDP", Setting(strategy="zero1", ranks=2)),
    Case("DDP, bf16, recompute", Setting(strategy="none", ranks=2, precision="bf16", recompute=True)),
)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def shard_tied(case: Case, model: nn.Module, mesh: Any) -> nn.Module:
    sharded: Any = shard_model(model, min_unit_bytes=case.setting.min_unit_bytes, mesh=mesh)
    sharded.set_transport(case.transport)
    return sharded


class Job:
    """Model and optimizer with the API of a case."""

    def __init__(self, case: Case) -> None:
        setting = case.setting
        sizes = (setting.replicas, setting.num_shards) if setting.strategy == "hsdp" else (setting.ranks,)
        names = ("replicate", "shard") if setting.strategy == "hsdp" else ("dp",)
        mesh = init_device_mesh("cpu", (*sizes, setting.tensor), mesh_dim_names=(*names, "tp"))
        split, mesh = mesh["tp"], mesh[names if len(names) > 1 else names[0]]
        self.config, self.strategy, self.accumulate = case.config, STRATEGIES[setting.strategy], setting.accumulate
        torch.manual_seed(0)  # ranks must begin with the same values
        plain = case.build()
        if setting.tensor > 1:
            split_heads(plain, split)
        self.model = (
            shard_tied(case, plain, mesh) if case.model == "tied" else self.strategy.wrap(plain, self.config, mesh)
        )
        self.optimizer = self.strategy.build_optimizer(self.model, self.config)
        # Nothing is learned: from one batch again and again a model makes denormals within some steps, with which products
        # take up to ten times as long.
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for microbatch in range(self.accumulate):
            with self.strategy.sync(self.model, microbatch == self.accumulate - 1):
                with self.strategy.precision(self.config, torch.device("cpu")):
                    loss = loss_of(self.model, inputs, targets)
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def held_on_rank(case: Case) -> dict[str, Any]:
    """Return the peak of the third step on this rank."""
    meter = LiveBytes(torch.device("cpu"))
    with meter.watching():
        job = Job(case)
        inputs = case.inputs()
        for _ in range(WARM_STEPS):
            job.step(*inputs)
        meter.restart()
        job.step(*inputs)
        return {"peak": meter.peak, "at": meter.at, "between": meter.live}


def profile_of(case: Case) -> DryRun:
    with torch.device("meta"):
        model = case.build()
    split = TensorSplit(case.setting.tensor, HEADS) if case.setting.tensor > 1 else None
    return dry_run(model, case.inputs(), loss_of, precision=case.setting.computes_in, split=split)


def predict(case: Case, run: DryRun) -> RankMemory:
    return step_under(run.profile, case.setting, HARDWARE["cpu"]).memory


def compare_memory(case: Case, pool: WorkerPool) -> dict[str, Any]:
    found = pool.run(held_on_rank, num_ranks=case.ranks, timeout_s=300, case=case)
    measured = max(found, key=lambda each: each["peak"])
    peak = predict(case, profile_of(case)).peak
    return {
        "name": case.name,
        "measured": measured["peak"],
        "planned": peak.total,
        "error": peak.total / measured["peak"] - 1,
        "at": measured["at"],
        "between": measured["between"],
        "place": peak.place,
        "held": dict(zip(KINDS, peak.held, strict=True)),
    }


ROUNDS = 3  # figures and steps take turns, so that both see the same machine


def timed_with_figures(case: Case, steps: int) -> dict[str, Any]:
    """Return this rank's own figures, measured on all ranks at the same time, and its steps, in turns."""
    torch.set_num_threads(1)
    job, inputs, run = Job(case), case.inputs(), profile_of(case)
    for _ in range(WARM_STEPS):
        job.step(*inputs)
    figures: list[Hardware] = []
    clock: list[float] = []
    own: list[float] = []
    fresh: list[int] = []
    for _ in range(ROUNDS):
        dist.barrier()
        figures.append(measured(HARDWARE["cpu"], [run]))
        job.step(*inputs)  # finds caches and the heap as the figures left them
        for _ in range(steps // ROUNDS):
            dist.barrier()
            begin = time.perf_counter(), time.thread_time()
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            job.step(*inputs)
            clock.append(time.perf_counter() - begin[0])
            own.append(time.thread_time() - begin[1])
            fresh.append(resource.getpagesize() * (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults))
    names = set.intersection(*[set(each.op_seconds) for each in figures])
    ops = {name: statistics.median([each.op_seconds[name] for each in figures]) for name in names}
    rates = ("memory_bytes_per_s", "host_s_per_op", "cast_elements_per_s", "update_elements_per_s")
    return {
        "clock": statistics.median(clock),
        "own": statistics.median(own),
        "fresh": statistics.median(fresh),
        "ops": ops,
        "rates": {name: statistics.median([getattr(each, name) for each in figures]) for name in rates},
    }


def compare_time(case: Case, pool: WorkerPool, shared: OnOneHost) -> dict[str, Any]:
    case = replace(case, transport="auto")  # what ranks of one host use unless they are told otherwise
    found = pool.run(timed_with_figures, num_ranks=case.ranks, timeout_s=300, case=case, steps=9)
    slowest = max(found, key=lambda each: each["own"])
    hardware = replace(
        with_ranks(HARDWARE["cpu"], shared), op_seconds=slowest["ops"], ranks_per_host=case.ranks, **slowest["rates"]
    )
    planned = evaluate(profile_of(case).profile, case.setting, hardware).time
    is_shared = case.setting.strategy in UNIT_STRATEGIES  # then what is exposed are this rank's own copies
    work, own = planned.step_s - (0.0 if is_shared else planned.exposed_s), slowest["own"]
    return {
        "name": case.name,
        "measured": own,
        "planned": work,
        "error": work / own - 1,
        "clock": slowest["clock"],
        "parts": {"compute": planned.compute_s, "host": planned.host_s, "optimizer": planned.optimizer_s},
        "at": f"by the clock {1e3 * slowest['clock']:.2f} ms, {slowest['fresh'] / 1e6:.1f} MB of fresh pages",
        "place": ", ".join(
            f"{name} {1e3 * seconds:.2f}"
            for name, seconds in (
                ("compute", planned.compute_s),
                ("copies and waits", planned.exposed_s),
                ("host", planned.host_s),
                ("optimizer", planned.optimizer_s),
            )
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--time", action="store_true", help="seconds in place of bytes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    rows: list[dict[str, Any]] = []
    shared = measured_shared(2) if options.time else None
    with WorkerPool(max_ranks=4) as pool:
        for case in chosen:
            rows.append(compare_time(case, pool, shared) if shared else compare_memory(case, pool))
            row = rows[-1]
            scale, unit = (1e-3, "ms") if options.time else (1e6, "MB")
            print(
                f"{row['name']:30} measured {row['measured'] / scale:8.2f} {unit}  "
                f"planned {row['planned'] / scale:8.2f} {unit}  "
                f"{100 * row['error']:+.2f} %  ({row['at']} | {row['place']})",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
