"""Run ``shardwise bench``: two phases on processes of this host, then table, JSON and chart."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch

from shardwise.cli.bench_args import BenchRequest
from shardwise.cli.exits import EXIT_FAILED
from shardwise.cli.extras import check_extras
from shardwise.one_host import usable_cores
from shardwise.recipes.bench.contenders import CONTENDERS
from shardwise.recipes.bench.figures import MeasuredMemory, make_rows
from shardwise.recipes.bench.fit import check_fit
from shardwise.recipes.bench.machine import describe_machine
from shardwise.recipes.bench.peaks import measure_memory
from shardwise.recipes.bench.probe import available_bytes
from shardwise.recipes.bench.request import SHAPES, BenchConfig
from shardwise.recipes.bench.setup import count_parameters
from shardwise.recipes.bench.tables import format_table, title_of, write_json
from shardwise.recipes.bench.timing import RankTimes, time_steps
from shardwise.testing import RankFailure, WorkerPool

TIMING_LIMIT_S, MEMORY_LIMIT_S, COLLECTIVE_LIMIT_S = 4 * 3600.0, 1200.0, 600.0
_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def count_host() -> tuple[int, int]:
    """Return the GPUs and the usable cores of this host."""
    return torch.cuda.device_count(), usable_cores()


def run_bench(request: BenchRequest, words: Sequence[str]) -> int:
    """Measure and report; return the exit code: 0, or 1 if a rank failed or a contender computes something else.

    Raises: ConfigError if the package for the chart is missing, or memory for all contenders at once.
    """
    config = request.config
    available = _available_bytes(config)
    if available is not None:
        check_fit(config, count_parameters(SHAPES[config.shape].model), available)
    if request.out is not None:
        check_extras(("matplotlib",), "bench")
        request.out.mkdir(parents=True, exist_ok=True)
    try:
        with WorkerPool(config.ranks) as pool:
            times = _time(pool, config)
            if times[0].wrong:
                return _fail("contenders that do not train like the others, so nothing was timed", times[0].wrong)
            memory = _measure_memory(pool, config) if request.with_memory else {}
    except RankFailure as failure:
        return _fail("a rank failed", (str(failure),))
    _report(request, words, times, memory)
    return 0


def _available_bytes(config: BenchConfig) -> int | None:
    if config.backend == "nccl":
        return sum(torch.cuda.mem_get_info(index)[0] for index in range(config.ranks))
    return available_bytes()


def _time(pool: WorkerPool, config: BenchConfig) -> list[RankTimes]:
    _say(f"timing {len(config.names)} contenders, {config.rounds} round(s) on {config.ranks} rank(s)")
    return pool.run(
        time_steps,
        num_ranks=config.ranks,
        backend=_BACKENDS[config.backend],
        timeout_s=TIMING_LIMIT_S,
        group_timeout_s=COLLECTIVE_LIMIT_S,
        config=config,
    )


def _measure_memory(pool: WorkerPool, config: BenchConfig) -> dict[str, list[MeasuredMemory]]:
    found: dict[str, list[MeasuredMemory]] = {}
    for number, name in enumerate(config.names, start=1):
        _say(f"memory of {name} ({number} of {len(config.names)})")
        found[name] = pool.run(
            measure_memory,
            num_ranks=config.ranks,
            backend=_BACKENDS[config.backend],
            timeout_s=MEMORY_LIMIT_S,
            group_timeout_s=COLLECTIVE_LIMIT_S,
            fresh=True,
            config=config,
            name=name,
        )
    return found


def _report(
    request: BenchRequest, words: Sequence[str], times: Sequence[RankTimes], memory: dict[str, list[MeasuredMemory]]
) -> None:
    config = request.config
    contenders = [CONTENDERS[name] for name in config.names]
    rows = make_rows(contenders, [t.seconds for t in times], times[0].losses, memory, config.tokens_per_step)
    num_parameters = count_parameters(SHAPES[config.shape].model)
    title = title_of(config, num_parameters)
    print(f"{title}\n\n{format_table(rows)}")
    if request.out is None:
        return
    from shardwise.recipes.bench.chart import draw_chart  # matplotlib, which printing does without

    stem = request.out / config.label
    machine = describe_machine(times[0].num_threads)
    write_json(stem.with_suffix(".json"), config, rows, machine, shlex.join(["shardwise", *words]), num_parameters)
    draw_chart(stem.with_suffix(".png"), title, rows)
    print(f"\n{stem}.json\n{stem}.png")


def _fail(what: str, reasons: Sequence[str]) -> int:
    print(f"shardwise: error: {what}:", *reasons, sep="\n  ", file=sys.stderr)
    return EXIT_FAILED


def _say(text: str) -> None:
    print(f"shardwise bench: {text} ...", file=sys.stderr, flush=True)
