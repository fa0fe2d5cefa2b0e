"""Time a step of the same GPT with every API of ours, DDP, torch's ZeRO and FSDP2, in turns; then each one's memory alone.

Run: ``python benchmarks/bench.py [--shape deep] [--ranks 4] [--only NAME ...] [--out DIR]``.  It prints a table; ``--out``
writes JSON and a chart too.  Losses are compared before anything is timed: if a contender trains differently, the exit code
is 1.  Only ratios within a run carry over to other machines.  Memory is measured with one contender at a time in new
processes; other traffic on the loopback device counts, so measure on a quiet host.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_contenders import (
    BACKENDS,
    CONTENDERS,
    SHAPES,
    BenchConfig,
    check_fit,
    choose_names,
    count_parameters,
    settle_ranks,
)
from bench_figures import (
    MeasuredMemory,
    describe_machine,
    disturbances,
    draw_chart,
    format_table,
    load_of,
    make_rows,
    title_of,
    write_json,
)
from bench_timing import RankTimes, available_bytes, measure_memory, time_steps

from shardwise import ConfigError
from shardwise.one_host import usable_cores
from shardwise.testing import RankFailure, WorkerPool

# ---- The options, read into a frozen request.


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for.  ``out`` None: print only; ``with_memory`` False: leave the second phase out."""

    config: BenchConfig
    out: Path | None
    with_memory: bool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Time a step of the same GPT with every API of ours, DDP, torch's ZeRO and FSDP2, in turns.",
        epilog=f"contenders: {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="wide", help="the model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, metavar="W", help="ranks (default: every GPU, or the CPU cores up to 2)")
    for name, default, meaning in (
        ("batch", 2, "sequences per rank and step"),
        ("rounds", 15, "timed rounds; each steps every contender once"),
        ("seed", 0, "of weights, tokens and order"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="gloo = CPU, nccl = one GPU per rank (default: by host)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="contenders, * and ? allowed; local is always one (default: all that fit)",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="time each contender in processes of its own (default: in turns with the others)",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out memory, page faults and bytes on the wire")
    parser.add_argument("--out", metavar="DIR", help="folder for bench_SHAPE_wW_BACKEND.json and .png")
    return parser


def read_bench_request(arguments: argparse.Namespace, num_gpus: int, num_cores: int) -> BenchRequest:
    """Turn parsed options into a checked request for a host with so many GPUs and usable cores.  Raises: ConfigError."""
    ranks: int | None = arguments.ranks
    for name in ("ranks", "batch", "rounds"):
        value: int | None = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1.")
    backend, settled = settle_ranks(arguments.backend, ranks, num_gpus, num_cores)
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, expected a folder or a name for a new one.")
    config = BenchConfig(
        shape=arguments.shape,
        ranks=settled,
        batch=arguments.batch,
        rounds=arguments.rounds,
        backend=backend,
        seed=arguments.seed,
        names=choose_names(arguments.only, settled, backend),
        alone=arguments.alone,
    )
    return BenchRequest(config, out, not arguments.no_memory)


TIMING_LIMIT_S, MEMORY_LIMIT_S, COLLECTIVE_LIMIT_S = 4 * 3600.0, 1200.0, 600.0
_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 2 for wrong arguments, else that of :func:`run_bench`."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = build_parser().parse_args(words)
        return run_bench(read_bench_request(arguments, torch.cuda.device_count(), usable_cores()), words)
    except ConfigError as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2


def run_bench(request: BenchRequest, words: Sequence[str]) -> int:
    """Measure and report; return the exit code: 0, or 1 if a rank failed or a contender computes something else.

    Raises: ConfigError if memory for all contenders at once is missing.
    """
    config = request.config
    available = _available_bytes(config)
    if available is not None:
        check_fit(config, count_parameters(SHAPES[config.shape].model), available)
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"num_ranks": config.ranks, "backend": _BACKENDS[config.backend]}
    options["group_timeout_s"] = COLLECTIVE_LIMIT_S
    try:
        with WorkerPool(config.ranks) as pool:
            _say(f"timing {len(config.names)} contenders, {config.rounds} round(s) on {config.ranks} rank(s)")
            times = _time(pool, config, options)
            wrong = tuple(text for each in times for text in each[0].wrong)
            if wrong:
                return _fail("contenders that do not train like the others, so nothing was timed", wrong)
            memory = _measure_memory(pool, config, options) if request.with_memory else {}
    except RankFailure as failure:
        return _fail("a rank failed", (str(failure),))
    _report(request, words, times, memory)
    return 0


def _time(pool: WorkerPool, config: BenchConfig, options: Mapping[str, Any]) -> list[Sequence[RankTimes]]:
    """Return the times of all ranks: of one run of all contenders, or of a run of each."""
    if not config.alone:
        return [pool.run(time_steps, timeout_s=TIMING_LIMIT_S, config=config, **options)]
    found: list[Sequence[RankTimes]] = []
    for name in config.names:
        _say(f"{name} alone")
        one = replace(config, names=(name,))
        found.append(pool.run(time_steps, timeout_s=TIMING_LIMIT_S, fresh=True, config=one, **options))
    return found


def _available_bytes(config: BenchConfig) -> int | None:
    if config.backend == "nccl":
        return sum(torch.cuda.mem_get_info(index)[0] for index in range(config.ranks))
    return available_bytes()


def _measure_memory(
    pool: WorkerPool, config: BenchConfig, options: Mapping[str, Any]
) -> dict[str, list[MeasuredMemory]]:
    found: dict[str, list[MeasuredMemory]] = {}
    for number, name in enumerate(config.names, start=1):
        _say(f"memory of {name} ({number} of {len(config.names)})")
        found[name] = pool.run(
            measure_memory, timeout_s=MEMORY_LIMIT_S, fresh=True, name=name, config=config, **options
        )
    return found


def _report(
    request: BenchRequest,
    words: Sequence[str],
    times: Sequence[Sequence[RankTimes]],
    memory: dict[str, list[MeasuredMemory]],
) -> None:
    config = request.config
    contenders = [CONTENDERS[name] for name in config.names]
    seconds = [{name: s for run in times for name, s in run[rank].seconds.items()} for rank in range(config.ranks)]
    losses = {name: loss for run in times for name, loss in run[0].losses.items()}
    rows = make_rows(contenders, seconds, losses, memory, config.tokens_per_step)
    disturbed = disturbances(load_of([[each.host for each in run] for run in times]), rows)
    num_parameters = count_parameters(SHAPES[config.shape].model)
    title = title_of(config, num_parameters)
    print(f"{title}\n\n{format_table(rows)}")
    if disturbed:
        print("\ndisturbed, measure again on a quiet host:", *disturbed, sep="\n  ")
    if request.out is None:
        return
    stem = request.out / config.label
    machine = describe_machine(times[0][0].num_threads) | {"disturbed": disturbed}
    write_json(
        stem.with_suffix(".json"), config, rows, machine, shlex.join(["benchmarks/bench.py", *words]), num_parameters
    )
    draw_chart(stem.with_suffix(".png"), title, rows)
    print(f"\n{stem}.json\n{stem}.png")


def _fail(what: str, reasons: Sequence[str]) -> int:
    print(f"bench.py: error: {what}:", *reasons, sep="\n  ", file=sys.stderr)
    return 1


def _say(text: str) -> None:
    print(f"bench.py: {text} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
