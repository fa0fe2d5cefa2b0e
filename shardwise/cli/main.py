"""The ``shardwise`` command."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from shardwise import __version__
from shardwise.cli import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, check_extras
from shardwise.cli.info import add_info_arguments
from shardwise.cli.local_ranks import add_run_arguments, run_run
from shardwise.cli.plan import add_plan_arguments, run_plan
from shardwise.cli.train import add_train_arguments, read_num_bytes, read_train_request, with_config_file
from shardwise.consistency.diagnosis import diagnose, in_words
from shardwise.consistency.recorder import find_records, last_job
from shardwise.errors import ShardwiseError, did_you_mean
from shardwise.formatting import drop_output, plain, prepare_output


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


# ---- The options of ``shardwise checkpoint``: they must parse where rich, which its module needs, is not installed.

PLACE = "a run, a folder of checkpoints, or one checkpoint"


def add_checkpoint_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``checkpoint`` and its subcommands."""
    parser = commands.add_parser(
        "checkpoint",
        help="look into checkpoints, verify and compare them",
        description="Look into checkpoints, verify and compare them. Nothing in a checkpoint is run or changed.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what a checkpoint holds: tensors, dtypes, shapes, sizes, values, files")
    _add_place(show, "path")
    show.add_argument("--sums", action="store_true", help="read every tensor, and show a sum of its bytes")
    verify = actions.add_parser(
        "verify",
        help="compare every byte with its sum",
        description="Compare every byte of every checkpoint, or of that of --step, with the sums of its save. Exit code 1 if "
        "one is not what was written.",
    )
    _add_place(verify, "path")
    diff = actions.add_parser(
        "diff",
        help="which tensors and values differ, and by how much",
        description="Compare two checkpoints by the names of tensors, whatever ranks and API saved them. Exit code 1 if they "
        "differ.",
    )
    for name in ("first", "second"):
        diff.add_argument(name, metavar=name.upper(), help=f"{PLACE} (then its newest)")
    export = actions.add_parser(
        "export",
        help="write a checkpoint for other tools",
        description="Write the model as Hugging Face has models (safetensors files and an index). Every byte that is read is "
        "verified.",
    )
    _add_place(export, "path")
    export.add_argument("out", metavar="OUT", help="a folder for safetensors files")
    export.add_argument(
        "--key", default="model", metavar="NAME", help="what the model was saved as (default: %(default)s)"
    )
    export.add_argument(
        "--file-bytes", type=read_num_bytes, default=5 * 10**9, metavar="SIZE", help="most in one file (default: 5 GB)"
    )
    convert = actions.add_parser(
        "convert",
        help="make a checkpoint out of a DCP folder",
        description="Make a checkpoint out of a folder of torch.distributed.checkpoint. Nothing in it is run.",
    )
    convert.add_argument("path", metavar="PATH", help="a DCP folder")
    convert.add_argument("out", metavar="OUT", help="a folder of checkpoints, maybe new")
    convert.add_argument("--step", type=int, metavar="N", help="its step (default: by the name of PATH, else 0)")


def _add_place(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, metavar=name.upper(), help=PLACE)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (default: the newest)")


# ---- ``shardwise diagnose``: read the records of the ranks of a failed job, and explain what happened.


def add_diagnose_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``diagnose``."""
    parser = commands.add_parser(
        "diagnose",
        help="say in plain words why a job failed or hangs",
        description="Read the records that the ranks of a failed or hanging job have written (shardwise train into its run "
        "folder, your own loop into the folder of shardwise.record), and say where ranks differ, and "
        "who waits for whom. For a job that hangs, first send every rank: kill -USR1 PID.",
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="a run folder, or the folder of shardwise.record (default: of your last shardwise run on this host)",
    )


def run_diagnose(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 0.  Raises: ConfigError for a folder without records."""
    folder = last_job() if arguments.folder is None else Path(arguments.folder)
    records, is_before = find_records(folder)
    if arguments.folder is None:
        written = time.localtime(max(record.written_s for record in records))
        print(
            plain(f"the last job of this host that failed: {folder}, {time.strftime('%Y-%m-%d %H:%M:%S', written)}\n")
        )
    if is_before:
        print("nothing has failed since the last start; this is what ended the start before\n")
    for line in in_words(diagnose(records)):
        print(plain(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
