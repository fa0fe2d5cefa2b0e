"""``shardwise prove``: is this training right?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.formatting import plain
from shardwise.prove.compare import ProveOptions
from shardwise.prove.run import compare_folders, prove

_DEFAULT = ProveOptions()
_OPTIONS: dict[str, tuple[str, Any]] = {  # by their words for ProveOptions: what it takes, and what it does
    "steps": ("K", "optimizer steps (default: %(default)s)"),
    "rtol": ("X", "a fault is X times what rounding does (default: %(default)g)"),
    "only": ("GLOB", "compare modules and parameters of these names"),
    "keep": ("FOLDER", "keep the recordings there"),
    "limit_s": ("S", "seconds of one run (default: %(default)g)"),
    "exact": ("", "every difference of a bit is a fault"),
    "init": ("", "compare initial values, too"),
    "strict": ("", "notes about the script are faults"),
    "json": ("", "print the verdict as JSON"),
    "compare": ("", "compare two folders of shardwise.recorded in place of a script"),
}
_KINDS: dict[str, Any] = {"steps": int, "rtol": float, "limit_s": float, "keep": Path}


def add_prove_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``prove``."""
    parser = commands.add_parser(
        "prove",
        help="hold your training script against plain data parallelism",
        usage="shardwise prove [-n N] [options] [--] SCRIPT ARGS ... | --compare A B",
        description="Run a script as it is, as plain data parallelism, and once more moved by rounding; name the first tensor "
        "that differs. Exit code 0: right, 1: it differs, 2: it cannot be proven. The script runs three times: the second and "
        "third time in a copy of this folder; what it writes outside of this folder is written three times.",
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    for name, (what, text) in _OPTIONS.items():
        word, default = f"--{name.replace('_', '-')}", getattr(_DEFAULT, name, None)
        if what:
            parser.add_argument(word, type=_KINDS.get(name, str), default=default, metavar=what, help=text)
        else:
            parser.add_argument(word, action="store_true", help=text)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="a script and its arguments")


def run_prove(arguments: argparse.Namespace) -> int:
    """Print the verdict; return its code.  Raises: ConfigError."""
    words: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    options = ProveOptions(**{each.name: getattr(arguments, each.name) for each in fields(ProveOptions)})
    if arguments.nproc < 1 or options.steps < 1 or not options.rtol > 0 or not options.limit_s > 0:
        raise ConfigError(
            f"-n is {arguments.nproc}, --steps {options.steps}, --rtol {options.rtol:g}, --limit-s {options.limit_s:g}; "
            "expected at least 1 rank and step, and positive limits"
        )
    if arguments.compare and len(words) != 2:
        raise ConfigError(f"--compare takes two folders, found {words}")
    if not arguments.compare and not (words and Path(words[0]).exists()):
        raise ConfigError(f"shardwise prove: no such script: {words[:1]}. Name a script")
    if arguments.compare:
        verdict = compare_folders(Path(words[0]), Path(words[1]), options)
    else:
        verdict = prove(words, arguments.nproc, options, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(verdict.as_dict(), indent=2))
    else:
        print("\n".join(map(plain, verdict.lines())), file=sys.stderr if verdict.reason else sys.stdout)
    return verdict.code
