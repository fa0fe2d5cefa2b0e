"""The options of ``shardwise train``, read into a frozen request."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cli.exits import LAUNCHER_VARIABLE
from shardwise.cli.restarts import RestartPolicy, attempt_from, job_of
from shardwise.comm.links.link import TRANSPORTS
from shardwise.errors import ConfigError
from shardwise.recipes.config import DTYPES, PRESETS, SHARDS, TrainConfig, check_config
from shardwise.recipes.doors import DOORS
from shardwise.recipes.restart_log import Restart
from shardwise.recipes.run_folder import Start, check_own_module, merge_resumed, read_run_config, with_overrides

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kKmMgG]?)(?:i?[bB])?")
_SIZES = {"preset": "model", "layers": "layers", "width": "width", "heads": "heads"}
DEVICES = ("auto", "cpu", "cuda")
_NOT_CONFIG = frozenset(
    {"command", "preset", "nproc", "device", "out", "resume", "max_restarts", "min_nproc", "plan", "trace", "private"}
)


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What was asked for.  ``nproc`` None means: choose; ``launched_ranks`` is set when a launcher started us.

    ``terms``: of restarts by our own launcher.  ``only_plans``: say what the run would hold and take, and stop.
    """

    config: TrainConfig
    start: Start
    nproc: int | None
    device: str
    launched_ranks: int | None
    terms: RestartPolicy
    only_plans: bool = False


def add_train_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``train``.  Options not given leave no attribute, so that --resume can tell them from defaults."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level GPT on text",
        description="Train a byte-level GPT on text, on all local cores or GPUs, or under torchrun.",
        argument_default=argparse.SUPPRESS,
    )
    _add_model_options(parser)
    _add_training_options(parser)
    _add_run_options(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", dest="preset", choices=tuple(PRESETS), help="a preset of sizes (default: tiny)")
    group.add_argument(
        "--model-from",
        metavar="MODULE:FUNCTION",
        help="train the model that this function returns: int64 tokens (batch, seq) to logits (batch, seq, vocabulary); it is "
        "given vocabulary and context if it has such parameters (default: shardwise's own GPT)",
    )
    for name, meaning in (
        ("layers", "number of blocks"),
        ("width", "features per position; divisible by --heads"),
        ("heads", "attention heads"),
        ("context", "bytes, or tokens, that the model sees at once"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=meaning)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    default = TrainConfig()
    doors = "; ".join(f"{name} = {door.summary}" for name, door in DOORS.items())
    group = parser.add_argument_group("training")
    group.add_argument("--shard", choices=SHARDS, help=f"{doors} (default: {default.shard})")
    for name, meaning in (
        ("offload", "keep shards, gradients and optimizer state in host memory"),
        ("recompute", "keep only the inputs of blocks for backward, and compute blocks again there"),
        ("compile", "compile the attention and MLP of every block with torch.compile"),
    ):
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=f"{meaning} (default: off)")
    group.add_argument(
        "--min-unit-bytes",
        type=read_num_bytes,
        metavar="SIZE",
        help="merge neighbouring blocks until a unit has this many bytes of parameters, with --shard full and hybrid; "
        f"512k, 1.5M (powers of 1024); 0: never (default: {default.min_unit_bytes / 2**20:g}M)",
    )
    group.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="how CPU ranks exchange tensors, with --shard full and hybrid: auto = shared memory within a host, gloo = "
        f"messages, collective = gloo's collectives (default: {default.transport})",
    )
    group.add_argument("--compile-backend", metavar="NAME", help=argparse.SUPPRESS)
    group.add_argument("--dtype", choices=DTYPES, help=f"type of the computation (default: {default.dtype})")
    group.add_argument(
        "--data",
        metavar="PATH",
        help="a text, .jsonl or .parquet file, a folder of such files, or one that datasets.save_to_disk wrote (default: "
        "Python's standard library)",
    )
    group.add_argument(
        "--text-column",
        metavar="NAME",
        help=f"of JSONL, Parquet and datasets: the text (default: {default.text_column})",
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json of the tokenizers package (default: bytes)"
    )
    group.add_argument(
        "--init", metavar="PATH", help="begin with these safetensors weights, a file or a folder (default: random)"
    )
    for name, meaning in (
        ("replicas", "whole copies of the model, with --shard hybrid"),
        ("tp", "ranks that share the heads and columns of every block (tensor parallelism)"),
        ("steps", "optimizer steps in all"),
        ("batch", "sequences per step, of all ranks together"),
        ("accumulate", "microbatches per step and rank"),
        ("warmup", "steps of linear warm-up, before the cosine"),
        ("seed", "of the weights, the order of the text and the sample"),
        ("log-every", "steps between two lines of figures"),
        ("eval-every", "steps between two validations"),
        ("eval-windows", "windows of the validation text to measure"),
        ("save-every", "steps between two checkpoints"),
        ("keep", "checkpoints to keep"),
        ("sample-bytes", "length of the sample at the end, in bytes or tokens"),
    ):
        value = getattr(default, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: {value})")
    for name, meaning in (
        ("lr", "highest learning rate"),
        ("weight-decay", "of AdamW, on matrices"),
        ("clip", "largest norm of the gradients; 0: clip nothing"),
    ):
        value = getattr(default, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=float, metavar="X", help=f"{meaning} (default: {value})")


def read_num_bytes(text: str) -> int:
    """Read ``0``, ``4096``, ``512k``, ``1.5M`` or ``2GiB``; units are powers of 1024.  Raises: ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size, expected a number of bytes such as 0, 4096, 512k or 1.5M"
        )
    return int(float(match["number"]) * 1024 ** " kmg".index(match["unit"].lower() or " "))


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--out", metavar="FOLDER", help="run folder, new or empty (default: runs/<time>)")
    group.add_argument("--resume", metavar="RUN", help="continue this run folder from its last checkpoint")
    group.add_argument(
        "--nproc", type=int, metavar="N", help="local ranks (default: every GPU, or the CPU cores up to 2)"
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start ranks that failed again, up to N times, from the newest checkpoint that is whole (default: 0)",
    )
    group.add_argument(
        "--min-nproc",
        type=int,
        metavar="M",
        help="restart on the ranks that are left after some were killed, if M are (default: always on as many as before)",
    )
    group.add_argument(
        "--trace", type=int, metavar="STEPS", help="record every call of STEPS steps after the first, one file per rank"
    )
    group.add_argument("--plan", action="store_true", help="say what the run would hold and take, and stop")
    group.add_argument(
        "--private", action="store_true", help="let no other user read what is written (default: as umask says)"
    )
    group.add_argument("--device", choices=DEVICES, help="where to compute (default: auto = GPUs if there are any)")


def read_train_request(arguments: argparse.Namespace, environment: Mapping[str, str]) -> TrainRequest:
    """Turn parsed options into a checked request.  Raises: ConfigError."""
    given: dict[str, object] = dict(vars(arguments))
    launched_ranks = _launched_ranks(environment)
    terms = _read_terms(given, environment)
    start = Start(_path(given.get("out")), _path(given.get("resume")), trace_steps=_trace_steps(given.get("trace")))
    start = _restarted(start, environment)
    config = _read_config(given, start)
    sizes = [f"--{_SIZES[name]}" for name in _SIZES if name in given]
    if config.model_from is not None and sizes:
        raise ConfigError(
            f"{', '.join(sizes)}: of shardwise's own GPT. Leave them out: --model-from {config.model_from} says its own."
        )
    check_config(config)
    nproc = given.get("nproc")
    assert nproc is None or isinstance(nproc, int)
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc is {nproc}, expected at least 1.")
    device, only_plans = str(given.get("device", "auto")), bool(given.get("plan", False))
    return TrainRequest(config, start, nproc, device, launched_ranks, terms, only_plans)


def _read_terms(given: Mapping[str, object], environment: Mapping[str, str]) -> RestartPolicy:
    most, least = given.get("max_restarts", 0), given.get("min_nproc")
    assert isinstance(most, int)
    assert least is None or isinstance(least, int)
    if most < 0:
        raise ConfigError(f"--max-restarts is {most}, expected 0 or more.")
    if least is not None and (least < 1 or not most):
        raise ConfigError(f"--min-nproc is {least}, expected at least 1, together with --max-restarts.")
    if most and "RANK" in environment and LAUNCHER_VARIABLE not in environment:
        raise ConfigError("--max-restarts: these ranks were started by another launcher. Give the option to torchrun.")
    return RestartPolicy(most, least)


def _restarted(start: Start, environment: Mapping[str, str]) -> Start:
    """Return ``start`` with what the process that starts this rank, and would start it again, has told it.

    Raises: ConfigError if it could not find the run again.
    """
    attempt, job = attempt_from(environment), job_of(environment)
    if attempt is not None:
        out = Path(attempt.folder) if start.resume is None else None
        restart = Restart(attempt.number, attempt.cause) if attempt.number else None
        return replace(start, out=out, job=job, restart=restart, step_file=Path(attempt.step_file))
    if job is None:
        return start
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) and start.out is None and start.resume is None:
        raise ConfigError(
            "torchrun --max-restarts: a restart would not find its run. Name the run's folder with --out."
        )
    number = int(environment["TORCHELASTIC_RESTART_COUNT"])
    cause = "torchrun has started all ranks again"
    return replace(start, job=job, restart=Restart(number, cause) if number else None)


def _trace_steps(value: object) -> int:
    if value is None:
        return 0
    assert isinstance(value, int)
    if value < 1:
        raise ConfigError(f"--trace is {value}, expected at least 1 step.")
    return value


def _path(value: object) -> Path | None:
    return None if value is None else Path(str(value))


def _read_config(given: Mapping[str, object], start: Start) -> TrainConfig:
    values = {name: value for name, value in given.items() if name not in _NOT_CONFIG}
    if start.resume is None:
        preset = PRESETS[str(given.get("preset", "tiny"))]
        return with_overrides(TrainConfig(model=preset), values)
    if start.out is not None:
        raise ConfigError("--resume continues in its own folder: leave --out out.")
    saved = read_run_config(start.resume)
    if "model_from" not in given:
        check_own_module(start.resume, saved)
    if "preset" in given:
        shape = PRESETS[str(given["preset"])]
        values = {name: getattr(shape, name) for name in ("layers", "width", "heads", "context")} | values
    return merge_resumed(saved, with_overrides(saved, values), start.resume)


def _launched_ranks(environment: Mapping[str, str]) -> int | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    try:
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError("RANK and WORLD_SIZE must both be set to whole numbers, as torchrun does.") from error
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"RANK is {rank}, expected 0 to {num_ranks - 1} (WORLD_SIZE is {num_ranks}).")
    return num_ranks
