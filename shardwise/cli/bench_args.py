"""The options of ``shardwise bench``, read into a frozen request."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.recipes.bench.contenders import CONTENDERS, choose_names
from shardwise.recipes.bench.request import BACKENDS, SHAPES, BenchConfig, settle_ranks

_COUNTS = (
    ("batch", 2, "sequences per rank and step"),
    ("rounds", 15, "timed rounds; each steps every contender once"),
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for.  ``out`` None: print only; ``with_memory`` False: leave the second phase out."""

    config: BenchConfig
    out: Path | None
    with_memory: bool


def add_bench_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``bench``."""
    parser = commands.add_parser(
        "bench",
        help="time ours beside DDP, torch's ZeRO and FSDP2, on this host",
        description="Step a GPT in turns: without communication, with DDP, torch's ZeRO and FSDP2, and with every door "
        "of ours; then measure the memory of each alone. Prints a table; --out writes JSON and a chart too.",
        epilog=f"contenders: {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="wide", help="the model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, metavar="W", help="ranks (default: every GPU, or the CPU cores up to 2)")
    for name, default, meaning in _COUNTS:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)"
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, tokens and order (default: 0)")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="gloo = CPU, nccl = one GPU per rank (default: by host)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="contenders, * and ? allowed; local is always one (default: all that fit)",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out memory, page faults and bytes on the wire")
    parser.add_argument("--out", metavar="DIR", help="folder for bench_SHAPE_wW_BACKEND.json and .png")


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
    )
    return BenchRequest(config, out, not arguments.no_memory)
