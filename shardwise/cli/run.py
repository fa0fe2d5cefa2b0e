"""``shardwise run``: a user's own script or module on the ranks of this host."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.consistency.recorder import PATTERN
from shardwise.errors import ConfigError
from shardwise.loop.launch import ProgramOutcome, UserProgram, describe, noted_signals, run_program
from shardwise.one_host import ScratchFolder

_CPU_RANKS = 2


def add_run_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``run``."""
    parser = commands.add_parser(
        "run",
        help="start your own script on several ranks of this host",
        usage="shardwise run [-n N] [--max-restarts K] [--] SCRIPT ARGS ... | -m MODULE ARGS ...",
        description="Start a script, or a module as python -m does, on ranks of this host. "
        "dist.init_process_group() and fully_shard find what torchrun tells them. Nothing listens beyond loopback; signals "
        "reach all ranks, the first error is shown once, and no process is left over.",
    )
    parser.add_argument(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        help=f"ranks (default: the number of GPUs; {_CPU_RANKS} where there is none)",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="start all ranks again after a failure (default: 0)"
    )
    parser.add_argument("--nnodes", metavar="N", help=argparse.SUPPRESS)  # torchrun's: answered with torchrun's command
    parser.add_argument("-m", "--module", action="store_true", help="run the module of this name in place of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="a script and its arguments")


def run_run(arguments: argparse.Namespace) -> int:
    """Run the program; return 0, or the exit code of the rank that failed first.  Raises: ConfigError."""
    words: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        raise ConfigError("shardwise run: name a script, or a module after -m.")
    nproc = torch.cuda.device_count() or _CPU_RANKS if arguments.nproc is None else int(arguments.nproc)
    if nproc < 1:
        raise ConfigError(f"-n is {nproc}, expected at least 1.")
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts is {arguments.max_restarts}, expected at least 0.")
    if arguments.nnodes not in (None, "1"):
        command = ["torchrun", "--nnodes", arguments.nnodes, "--nproc-per-node", str(nproc), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "FIRST_HOST:29400", *["-m"] * arguments.module, *words]
        raise ConfigError(
            f"--nnodes {arguments.nnodes}: shardwise run starts the ranks of one host. Run this on every host: "
            f"{shlex.join(command)}"
        )
    if not arguments.module and not Path(words[0]).exists():
        raise ConfigError(f"{words[0]}: no such script.")
    if arguments.nproc is None:
        where = "one for each GPU" if torch.cuda.device_count() else "no GPU found"
        print(f"shardwise: {nproc} ranks ({where}; -n N changes it)", file=sys.stderr)
    return _run(UserProgram("module" if arguments.module else "script", tuple(words)), nproc, arguments.max_restarts)


def _run(program: UserProgram, nproc: int, max_restarts: int) -> int:
    with noted_signals() as received, ScratchFolder() as scratch:
        for number in range(max_restarts + 1):
            outcome = run_program(program, nproc, received, scratch.path, number)
            code = _conclude(outcome, received)
            if not code or received or number == max_restarts:
                return code
            print(f"shardwise: restart {number + 1} of {max_restarts}", file=sys.stderr)
    return 0


def _conclude(outcome: ProgramOutcome, received: Sequence[int]) -> int:
    if received:
        return 128 + received[0] if outcome.ended.codes else 0
    failure = outcome.failure
    if failure is None:
        return 0
    print(f"shardwise: error: {describe(failure)}; all ranks have been stopped", file=sys.stderr)
    if any(outcome.records.glob(PATTERN)):
        print(f"shardwise: what each rank did last: shardwise diagnose {outcome.records}", file=sys.stderr)
    return failure.code if failure.code > 0 else 128 - failure.code
