"""The ``shardwise`` command, and its subcommands that start no job: info, diagnose, the options of checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from torch.cuda.nccl import version as nccl_version

from shardwise import __version__
from shardwise.checks.root import CHECKS, mode_of
from shardwise.cli import (
    COUNT,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    SIZE,
    SWITCH,
    Row,
    add_command,
    check_extras,
)
from shardwise.cli.local_ranks import add_prove_arguments, add_run_arguments, run_prove, run_run
from shardwise.cli.plan import add_plan_arguments, run_plan
from shardwise.cli.train import add_train_arguments, read_train_request, run_train, with_config_file
from shardwise.collectives.local_peers import HEADER_BYTES, Segment, can_share_memory
from shardwise.consistency.recorder import diagnose, find_records, in_words, last_job
from shardwise.errors import ShardwiseError, did_you_mean
from shardwise.formatting import drop_output, format_bytes, plain
from shardwise.loop.launch import private_network
from shardwise.one_host import UNKNOWN, cpu_model, find_version, host_memory_bytes, usable_cores

# ---- What this host and this installation offer to shardwise, and why not more: checked, never guessed.

PACKAGES = (
    "numpy", "safetensors", "xxhash", "rich", "tensorboard", "tokenizers", "datasets", "pyarrow",
    "transformers", "accelerate", "lightning",
)  # fmt: skip
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS",
    "GLOO_DEVICE_TRANSPORT",
)  # fmt: skip
_BACKENDS: Mapping[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
}
_OPEN_LIMIT_S = 30.0


Facts = dict[str, dict[str, str]]  # by section


def feature(detail: str = "", why_not: str = "") -> str:
    """Return whether a host has something, in words; ``why_not``: why not, "" if it has; ``detail``: more about it.

    Example:
        >>> feature("2.1", "torch finds no GPU")
        'no (2.1): torch finds no GPU'
    """
    detail = f" ({detail})" if detail else ""
    return f"no{detail}: {why_not}" if why_not else f"yes{detail}"


def look_at_host(environment: Mapping[str, str]) -> Facts:
    """Return what ``shardwise info`` prints, in order; nothing in it names the host or its user.

    Takes about a second on a host with GPUs, which are initialized; starts one small process.
    """
    gpus = {f"GPU {index}": _gpu(index) for index in range(torch.cuda.device_count())}
    return {
        "software": _software(),
        "backends": {name: feature(_nccl_version(name), _why_no(name)) for name in _BACKENDS},
        "devices": _cores() | (gpus or {"GPUs": "none that torch can use"}),
        "transports": _transports(),
        "packages": {name: find_version(name).replace(UNKNOWN, "not installed") for name in PACKAGES},
        "environment": {CHECKS: mode_of(environment)}
        | {name: environment[name] for name in VARIABLES if name in environment},
    }


def _software() -> dict[str, str]:
    cuda = torch.version.cuda or torch.version.hip
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    return {
        "shardwise": __version__,
        "torch": f"{torch.__version__} ({f'for GPUs, {cuda}' if cuda else 'a build without GPUs'})",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())).strip(),
        "compiler": compiler or "none found: torch.compile needs one on CPU",
    }


def _nccl_version(name: str) -> str:
    return ".".join(map(str, nccl_version())) if name == "nccl" and _BACKENDS[name]() else ""


def _why_no(name: str) -> str:
    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    if not _BACKENDS[name]():
        return "not in this build of torch"
    return "torch finds no GPU" if name == "nccl" and not torch.cuda.is_available() else ""


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {found.name}, {format_bytes(found.total_memory)}, capability {found.major}.{found.minor}"


def _cores() -> dict[str, str]:
    memory = host_memory_bytes()
    return {
        "processor": cpu_model(),
        "cores": f"{usable_cores()} usable by this process, {os.cpu_count()} in all",
        "threads": f"{torch.get_num_threads()} in torch",
        "memory": "not told by this system" if memory is None else f"{format_bytes(memory)} for all processes together",
    }


def _transports() -> dict[str, str]:
    gloo, shared = _why_no_gloo(), why_no_shared_memory()
    with private_network(True) as network:
        refused = (
            "" if network else "the kernel does not let this user create one; owners of connections are still checked"
        )
    return {
        "shared memory": feature("CPU ranks of one host; --transport auto", shared or gloo),
        "messages": feature("CPU ranks, over gloo; --transport gloo", gloo),
        "gloo collectives": feature("CPU ranks; --transport collective", gloo),
        "NCCL collectives": feature("GPU ranks", _why_no("nccl")),
        "a network of their own": feature("CPU ranks of shardwise train on one host", refused),
    }


def _why_no_gloo() -> str:
    if why_not := _why_no("gloo"):
        return f"gloo: {why_not}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return f"nothing can listen on the loopback interface: {error.strerror or error}"
    return ""


def why_no_shared_memory() -> str:
    """Return "" if another process of this user can open memory of this one, as ranks of one host do, else the reason."""
    problem = can_share_memory()
    if problem:
        return problem
    try:
        segment = Segment.create(HEADER_BYTES)
    except (OSError, AttributeError) as error:
        return f"no nameless file in memory: {error}"
    place = f"/proc/{segment.address.pid}/fd/{segment.address.fd}"
    words = [sys.executable, "-IS", "-c", f"import os; os.open({place!r}, os.O_RDWR)"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_OPEN_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no second process could try it: {error}"
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return f"another process cannot open it: {last}" if done.returncode else ""


# ---- The options of ``shardwise info``.


def add_info_arguments(commands: Any) -> None:
    """Add ``info``."""
    described = (
        "Print versions, backends, devices, cores, and which transports work here and why others do not. Nothing in it names "
        "the host or its user: paste it into a report of a bug."
    )
    row = ("--json", "print JSON", SWITCH)
    add_command(commands, "info", ("say what this host and installation offer", described), [row])


def run_info(arguments: argparse.Namespace) -> int:
    """Print the facts; return 0."""
    facts = look_at_host(os.environ)
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(in_lines(facts)))
    return 0


def in_lines(facts: Facts) -> Iterator[str]:
    """Yield the facts as lines of text, with a heading for each section after the first."""
    for number, (heading, values) in enumerate(facts.items()):
        if number:
            yield f"\n{heading}"
        width = max(map(len, values))
        for name, value in values.items():
            yield f"{'  ' * bool(number)}{name.ljust(width)}  {value}"


# ---- The ``shardwise`` command.


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
    add_prove_arguments(commands)
    return parser


def prepare_output() -> None:
    """Make every text printable, also if a stream is closed or ASCII, or a name is not UTF-8."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115  for the rest of the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]


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


# ---- The options of ``shardwise checkpoint``: they must parse where rich, which its module needs, is not installed.

_PLACE = "a run, a folder of checkpoints, or one checkpoint"
_OF_ONE: tuple[Row, ...] = (
    ("path", _PLACE, {"metavar": "PATH"}),
    ("--step", "the checkpoint after N steps (default: the newest)", COUNT),
)
_ACTIONS: Mapping[str, tuple[tuple[str, str], tuple[Row, ...]]] = {
    "show": (
        ("what a checkpoint holds: tensors, dtypes, shapes, sizes, values, files", ""),
        (*_OF_ONE, ("--sums", "read every tensor, and show a sum of its bytes", SWITCH)),
    ),
    "verify": (
        (
            "compare every byte with its sum",
            "Compare every byte of every checkpoint, or of that of --step, with the sums of its save. Exit code 1 if one is "
            "not what was written.",
        ),
        _OF_ONE,
    ),
    "diff": (
        (
            "which tensors and values differ, and by how much",
            "Compare two checkpoints by the names of tensors, whatever ranks and API saved them. Exit code 1 if they differ.",
        ),
        tuple((name, f"{_PLACE} (then its newest)", {"metavar": name.upper()}) for name in ("first", "second")),
    ),
    "export": (
        (
            "write a checkpoint for other tools",
            "Write the model as Hugging Face has models (safetensors files and an index). Every byte that is read is verified.",
        ),
        (
            *_OF_ONE,
            ("out", "a folder for safetensors files", {"metavar": "OUT"}),
            ("--key", "what the model was saved as (default: model)", {"default": "model", "metavar": "NAME"}),
            ("--file-bytes", "most in one file (default: 5 GB)", {**SIZE, "default": 5 * 10**9}),
        ),
    ),
    "convert": (
        (
            "make a checkpoint out of a DCP folder",
            "Make a checkpoint out of a folder of torch.distributed.checkpoint. Nothing in it is run.",
        ),
        (
            ("path", "a DCP folder", {"metavar": "PATH"}),
            ("out", "a folder of checkpoints, maybe new", {"metavar": "OUT"}),
            ("--step", "its step (default: by the name of PATH, else 0)", COUNT),
        ),
    ),
}


def add_checkpoint_arguments(commands: Any) -> None:
    """Add ``checkpoint`` and its subcommands."""
    text = "look into checkpoints, verify and compare them"
    described = "Look into checkpoints, verify and compare them. Nothing in a checkpoint is run or changed."
    actions = add_command(commands, "checkpoint", (text, described), ()).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    for name, (texts, rows) in _ACTIONS.items():
        add_command(actions, name, texts, rows)


# ---- ``shardwise diagnose``: read the records of the ranks of a failed job, and explain what happened.


def add_diagnose_arguments(commands: Any) -> None:
    """Add ``diagnose``."""
    described = (
        "Read the records that the ranks of a failed or hanging job have written (shardwise train into its run folder, your "
        "own loop into the folder of shardwise.record), and say which failed first, and who waits for whom."
    )
    text = "a run folder, or the folder of shardwise.record (default: of your last shardwise run on this host)"
    row = ("folder", text, {"metavar": "FOLDER", "nargs": "?"})
    add_command(commands, "diagnose", ("say in plain words why a job failed or hangs", described), [row])


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


# Of the commands that are imported with this file; the others need packages that these do not.
_RUNS = {"run": run_run, "diagnose": run_diagnose, "info": run_info, "prove": run_prove, "plan": run_plan}


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    if arguments.command == "checkpoint":
        check_extras(("rich",), "checkpoint")
        from shardwise.cli.checkpoint import run_checkpoint

        return run_checkpoint(arguments)
    if arguments.command == "train":
        return run_train(read_train_request(arguments, os.environ), words)
    return _RUNS[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
