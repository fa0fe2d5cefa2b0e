"""``shardwise prove``: is this training right?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.formatting import plain
from shardwise.prove.run import LIMIT, LIMIT_S, ProveOptions, compare_folders, prove


def add_prove_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``prove``."""
    parser = commands.add_parser(
        "prove",
        help="hold your training script against plain data parallelism",
        usage="shardwise prove [-n N] [options] [--] SCRIPT ARGS ... | -m MODULE ARGS ... | --compare A B",
        description="Run a script as it is, as plain data parallelism, and once more moved by rounding; name the first tensor "
        "that differs. Exit code 0: right, 1: it differs, 2: it cannot be proven. The script runs three times: the second and "
        "third time in a copy of this folder; what it writes outside of this folder is written three times.",
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--rtol",
        type=float,
        default=LIMIT,
        metavar="X",
        help="a fault is X times what rounding does (default: %(default)g)",
    )
    parser.add_argument("--exact", action="store_true", help="every difference of a bit is a fault")
    parser.add_argument("--only", metavar="GLOB", help="compare modules and parameters of these names")
    parser.add_argument("--init", action="store_true", help="compare initial values, too")
    parser.add_argument("--strict", action="store_true", help="notes about the script are faults")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings there")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="S", help="seconds of one run (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument(
        "--compare", action="store_true", help="compare two folders of shardwise.recorded in place of a script"
    )
    parser.add_argument("-m", "--module", action="store_true", help="run the module of this name in place of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="a script and its arguments")


def run_prove(arguments: argparse.Namespace) -> int:
    """Print the verdict; return its code.  Raises: ConfigError."""
    words: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if arguments.nproc < 1 or arguments.steps < 1 or not arguments.rtol > 0 or not arguments.limit_s > 0:
        raise ConfigError(
            f"-n is {arguments.nproc}, --steps {arguments.steps}, --rtol {arguments.rtol:g}, --limit-s {arguments.limit_s:g}; "
            "expected at least 1 rank and step, and positive limits"
        )
    options = ProveOptions(
        arguments.steps,
        arguments.rtol,
        arguments.only,
        arguments.keep,
        arguments.init,
        arguments.exact,
        arguments.strict,
        arguments.limit_s,
    )
    if arguments.compare:
        if len(words) != 2:
            raise ConfigError(f"--compare takes two folders, found {words}")
        verdict = compare_folders(Path(words[0]), Path(words[1]), options)
    else:
        if not words or not (arguments.module or Path(words[0]).exists()):
            raise ConfigError(f"shardwise prove: no such script: {words[:1]}. Name a script, or a module after -m")
        kind = "module" if arguments.module else "script"
        verdict = prove(kind, words, arguments.nproc, options, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(verdict.as_dict(), indent=2))
    else:
        print("\n".join(map(plain, verdict.lines())), file=sys.stderr if verdict.reason else sys.stdout)
    return verdict.code
