"""The ``shardwise`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

from shardwise.cli.bench import add_bench_arguments, read_bench_request
from shardwise.cli.checkpoint_options import add_checkpoint_arguments
from shardwise.cli.diagnose import add_diagnose_arguments, run_diagnose
from shardwise.cli.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, check_extras
from shardwise.cli.info import add_info_arguments
from shardwise.cli.plan import add_plan_arguments, run_plan
from shardwise.cli.run import add_run_arguments, run_run
from shardwise.cli.train import add_train_arguments, read_train_request, with_config_file
from shardwise.errors import ShardwiseError, did_you_mean
from shardwise.formatting import drop_output, plain, prepare_output
from shardwise.version import __version__


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the most similar option for a misspelt one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        """Parse, and exit with an error for unknown options."""
        found, rest = super().parse_known_args(args, namespace)
        wrong = next((word for word in rest if word.startswith("--")), None)
        if wrong is not None:
            name, known = wrong.partition("=")[0], [each for action in self._actions for each in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(rest)}.{did_you_mean(name, known)}")
        return found, rest


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    made = Parser(prog="shardwise", description="Sharded data-parallel training for PyTorch.")
    parser = cast(argparse.ArgumentParser, made)
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train_arguments(commands)
    add_run_arguments(commands)
    add_bench_arguments(commands)
    add_checkpoint_arguments(commands)
    add_diagnose_arguments(commands)
    add_info_arguments(commands)
    add_plan_arguments(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 (the run failed), 2 (wrong arguments or files), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_output()
    try:
        arguments = build_parser().parse_args(words)
        if getattr(arguments, "config", None):
            words = with_config_file(arguments, words)
            arguments = build_parser().parse_args(words)
        if getattr(arguments, "private", False):
            os.umask(0o077)
        return _run(arguments, words)
    except ShardwiseError as error:
        print(f"shardwise: error: {plain(str(error))}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:
        drop_output()
        return EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"shardwise: error: {plain(f'{where}{error.strerror or error}')}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    if arguments.command == "bench":
        from shardwise.cli.bench import count_host, run_bench

        return run_bench(read_bench_request(arguments, *count_host()), words)
    if arguments.command == "run":
        return run_run(arguments)
    if arguments.command == "diagnose":
        return run_diagnose(arguments)
    if arguments.command == "info":
        from shardwise.cli.info import run_info

        return run_info(arguments)
    if arguments.command == "plan":
        return run_plan(arguments)
    if arguments.command == "checkpoint":
        check_extras(("rich",), "checkpoint")
        from shardwise.cli.checkpoint import run_checkpoint

        return run_checkpoint(arguments)
    from shardwise.cli.train import run_train

    return run_train(read_train_request(arguments, os.environ), words)


if __name__ == "__main__":
    sys.exit(main())
