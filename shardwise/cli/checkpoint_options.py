"""The options of ``shardwise checkpoint``, which must parse even if rich is not installed."""

from __future__ import annotations

import argparse

from shardwise.cli.train import read_num_bytes

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
        description="Write the model as Hugging Face has models (safetensors files and an index), or all state as one file of "
        "torch.save. Every byte that is read is verified.",
    )
    _add_place(export, "path")
    export.add_argument("out", metavar="OUT", help="a folder for safetensors files, a new file for torch.save")
    export.add_argument(
        "--format", choices=("safetensors", "torch"), default="safetensors", help="default: %(default)s"
    )
    export.add_argument(
        "--key", default="model", metavar="NAME", help="what the model was saved as (default: %(default)s)"
    )
    export.add_argument(
        "--file-bytes", type=read_num_bytes, default=5 * 10**9, metavar="SIZE", help="most in one file (default: 5 GB)"
    )
    export.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="FOLDER",
        help="copy config.json, the generation config and the tokenizer files of this model's folder too",
    )
    convert = actions.add_parser(
        "convert",
        help="make a checkpoint out of what other tools wrote",
        description="Make a checkpoint out of a DCP folder (of earlier runs, too) or safetensors files. Nothing in it is run.",
    )
    convert.add_argument(
        "path", metavar="PATH", help="a DCP folder, a safetensors file, or a folder of these with an index"
    )
    convert.add_argument("out", metavar="OUT", help="a folder of checkpoints, maybe new")
    convert.add_argument("--step", type=int, metavar="N", help="its step (default: by the name of PATH, else 0)")


def _add_place(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, metavar=name.upper(), help=PLACE)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (default: the newest)")
