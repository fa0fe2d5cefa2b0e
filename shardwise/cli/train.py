"""Check what ``shardwise train`` was asked for, then start ranks on this host, or run as the one that a launcher started."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.cli import (
    CAUSE_VARIABLE,
    COUNT,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINAL,
    LAUNCHER_VARIABLE,
    SIZE,
    STORE_VARIABLE,
    SWITCH,
    Row,
    add_command,
    add_options,
    check_extras,
    format_size,
)
from shardwise.cli.local_ranks import (
    LAUNCH_OPTIONS,
    RestartPolicy,
    job_of,
    launch_elastic,
    launch_ranks,
    read_terms,
)
from shardwise.collectives.streams import watch_device
from shardwise.consistency.process_groups import check_peers
from shardwise.consistency.store import default_store, wait_until
from shardwise.elastic.membership import VARIABLE
from shardwise.errors import ConfigError, DesyncError, ShardwiseError, TransportError, did_you_mean
from shardwise.formatting import format_bytes, plain
from shardwise.loop.launch import PATIENCE_S, end_with_parent, handled, is_lost_peer
from shardwise.one_host import host_memory_bytes, stay_on_loopback, usable_cores
from shardwise.recipes.config import (
    PRESETS,
    ModelShape,
    TrainConfig,
    check_config,
    check_ranks,
    config_to_toml,
    refuse_beside,
)
from shardwise.recipes.data import open_vocabulary
from shardwise.recipes.run_folder import (
    CONFIG,
    Restart,
    Start,
    check_start,
    merge_resumed,
    new_folder,
    read_run_config,
    tokenizer_of,
    with_overrides,
)
from shardwise.recipes.sharding import RunRanks, check_memory, check_module

# ---- SIGTERM and Ctrl-C while a run trains: the first asks it to save and leave, the second ends it at once.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(second_ends: bool) -> Generator[Callable[[], int], None, None]:
    """Note the first signal; give a function that returns its number, 0 before.

    Args:
        second_ends: leave the second one to the system: it ends this process also where Python does not run, in a
            collective that waits.  False where a launcher sees to it, and one Ctrl-C may come by two ways.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        for each in SIGNALS if second_ends else ():
            signal.signal(each, signal.SIG_DFL)
        if second_ends and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # whoever is ended by the system cannot give the cursor back
            sys.stdout.flush()

    with handled(SIGNALS, note):
        yield lambda: noted[0] if noted else 0


# ---- The options of ``shardwise train``, read into a frozen request.

DEVICES = ("auto", "cpu", "cuda")
_OF_SHAPE = tuple(each.name for each in fields(ModelShape))
_OF_CONFIG = frozenset({*_OF_SHAPE, *(each.name for each in fields(TrainConfig))} - {"model"})


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What was asked for.  ``nproc`` None means: choose; ``launched_ranks`` is set when a launcher started us.

    ``terms``: of restarts by our own launcher.  ``only``: "plan" or "print_config": print that and stop.
    """

    config: TrainConfig
    start: Start
    nproc: int | None
    device: str
    launched_ranks: int | None
    terms: RestartPolicy
    only: str = ""


def add_train_arguments(commands: Any) -> None:
    """Add ``train``.  Options not given leave no attribute, so that --resume can tell them from defaults."""
    described = "Train a byte-level GPT on text, on all local cores or GPUs, or under torchrun."
    parser = add_command(commands, "train", ("train a byte-level GPT on text", described), ())
    parser.argument_default = argparse.SUPPRESS
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for title, rows in (("model", _MODEL), ("training", _options_of(TrainConfig)), ("run", _RUN)):
        add_options(parser.add_argument_group(title), rows)


def with_config_file(arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return ``words`` with the options of ``--config FILE`` before them: ranks need not read it.  Raises: ConfigError."""
    given = vars(arguments)
    if given.get("config") is None:
        return list(words)
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise ConfigError("--config is given twice, expected one file that holds all options.")
    return ["train", *config_words(Path(given["config"]), resumes="resume" in given), *words[1:], "--config="]


_KINDS: Mapping[type, Mapping[str, Any]] = {  # of options, by the type of their defaults
    bool: {"action": argparse.BooleanOptionalAction},
    int: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    str: {},
    type(None): {"metavar": "PATH"},
}


def _options_of(kind: type[TrainConfig | ModelShape]) -> Iterator[Row]:
    """Yield the options that are fields of ``kind``."""
    for each in fields(kind):
        if "text" in each.metadata:
            text, value = each.metadata["text"], cast(Any, each.default)
            more = SIZE if each.name == "min_unit_bytes" else each.metadata["more"]
            if "(default: " not in text and value is not MISSING:
                text += f" (default: {'off' if value is False else format_size(value) if more is SIZE else value})"
            yield f"--{each.name.replace('_', '-')}", text, {**_KINDS.get(type(value), COUNT), **more}


_MODEL: tuple[Row, ...] = (
    ("--model", "a preset of sizes (default: tiny)", {"dest": "preset", "choices": tuple(PRESETS)}),
    (
        "--model-from",
        "train the model that this function returns: int64 tokens (batch, seq) to logits (batch, seq, vocabulary); it is given "
        "vocabulary and context if it has such parameters (default: shardwise's own GPT)",
        {"metavar": "MODULE:FUNCTION"},
    ),
    *_options_of(ModelShape),
)
_RUN: tuple[Row, ...] = (
    ("--config", "read options from this .toml file; options given beside it win", {"metavar": "FILE"}),
    ("--print-config", "print all options as TOML, and stop", SWITCH),
    ("--out", "run folder, new or empty (default: runs/<time>)", {"metavar": "FOLDER"}),
    ("--resume", "continue this run folder from its last checkpoint", {"metavar": "RUN"}),
    ("--nproc", "local ranks (default: every GPU, or the CPU cores up to 2)", COUNT),
    *LAUNCH_OPTIONS,
    (
        "--trace",
        "record every call of STEPS steps after the first, one file per rank",
        {"type": int, "metavar": "STEPS"},
    ),
    (
        "--record-digests",
        "with --reproducible: write digests of the parameters, outputs and gradients of every step to digests.jsonl",
        SWITCH,
    ),
    (
        "--compare-with",
        "record digests, and end at the first step and tensor that differ from those of this run folder",
        {"metavar": "RUN"},
    ),
    ("--plan", "say what the run would hold and take, and stop", SWITCH),
    ("--memory", "of a rank (2GiB): plan the run, and choose what is recomputed or on disk such that it fits", SIZE),
    ("--device", "where to compute (default: auto = GPUs if there are any)", {"choices": DEVICES}),
)


def read_train_request(arguments: argparse.Namespace, environment: Mapping[str, str]) -> TrainRequest:
    """Turn parsed options into a checked request.  Raises: ConfigError."""
    given: dict[str, Any] = dict(vars(arguments))
    launched_ranks = _launched_ranks(environment)
    terms = read_terms(given)
    if terms.max_restarts and "RANK" in environment and LAUNCHER_VARIABLE not in environment:
        raise ConfigError("--max-restarts: these ranks were started by another launcher. Give the option to torchrun.")
    out, resume = (None if given.get(name) is None else Path(given[name]) for name in ("out", "resume"))
    records, other = given.get("record_digests", False), given.get("compare_with")
    start = Start(
        out,
        resume,
        trace_steps=given.get("trace", 0),
        record_digests=records,
        compare_with=None if other is None else Path(other),
        memory_bytes=given.get("memory"),
    )
    start = _restarted(start, environment)
    if given.get("trace", 1) < 1:
        raise ConfigError(f"--trace is {given['trace']}, expected at least 1 step.")
    config = _read_config(given, start)
    own = {"preset": "model"} | {name: name.replace("_", "-") for name in _OF_SHAPE if name != "context"}
    sizes = [f"--{option}" for name, option in own.items() if name in given]
    if config.model_from is not None and sizes:
        raise ConfigError(
            f"{', '.join(sizes)}: of shardwise's own GPT. Leave them out: --model-from {config.model_from} says its own."
        )
    check_config(config)
    if (records or other is not None) and not config.reproducible:
        raise ConfigError(
            "--record-digests and --compare-with need --reproducible V: without it runs differ at other numbers of ranks."
        )
    nproc = given.get("nproc")
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc is {nproc}, expected at least 1.")
    if start.memory_bytes is not None:
        _check_fit(given, config)
    only = "print_config" if given.get("print_config") else "plan" if given.get("plan") else ""
    return TrainRequest(config, start, nproc, given.get("device", "auto"), launched_ranks, terms, only)


def _check_fit(given: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse what --memory does not go with.  Raises: ConfigError."""
    chosen, unplanned = "it chooses that", "memory is not planned there"
    others = {
        "--recompute": given.get("recompute") and chosen,
        "--offload": given.get("offload") and chosen,
        "--plan": given.get("plan") and "it prints a plan, too",
        "--experts": config.model.experts and unplanned,
        "--reproducible": config.reproducible and unplanned,
        "--tp": config.tp > 1 and unplanned,
        f"--shard {config.shard}": config.shard not in ("zero3", "zero2") and unplanned,
    }
    refuse_beside("--memory", others)


def _restarted(start: Start, environment: Mapping[str, str]) -> Start:
    """Return ``start`` with what the process that starts this rank, and would start it again, has told it.

    Raises: ConfigError if it could not find the run again.
    """
    job = job_of(environment)
    if job is None:
        return start
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) and start.out is None and start.resume is None:
        raise ConfigError(
            "torchrun --max-restarts: a restart would not find its run. Name the run's folder with --out."
        )
    number = int(environment["TORCHELASTIC_RESTART_COUNT"])
    cause = environment.get(CAUSE_VARIABLE, "torchrun has started all ranks again")
    return replace(start, job=job, restart=Restart(number, cause) if number else None)


def _read_config(given: Mapping[str, Any], start: Start) -> TrainConfig:
    values = {name: value for name, value in given.items() if name in _OF_CONFIG}
    if start.resume is None:
        preset = PRESETS[given.get("preset", "tiny")]
        return with_overrides(TrainConfig(model=preset), values)
    if start.out is not None:
        raise ConfigError("--resume continues in its own folder: leave --out out.")
    saved = read_run_config(start.resume)
    if "model_from" not in given and saved.model_from is not None:
        raise ConfigError(
            f"--resume {start.resume}: its model is that of {saved.model_from!r}, and no run folder chooses what is imported. "
            f"Say it with --model-from {saved.model_from}."
        )
    if "preset" in given:
        shape = PRESETS[given["preset"]]
        values = {name: getattr(shape, name) for name in ("layers", "width", "heads", "context")} | values
    return merge_resumed(saved, with_overrides(saved, values), start.resume)


def _launched_ranks(environment: Mapping[str, str]) -> int | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    try:
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError("RANK and WORLD_SIZE must both be set to whole numbers, as torchrun does.") from error
    if not 0 <= rank < num_ranks and VARIABLE not in environment:
        raise ConfigError(f"RANK is {rank}, expected 0 to {num_ranks - 1} (WORLD_SIZE is {num_ranks}).")
    return num_ranks


# ---- One rank of ``shardwise train``: join the process group, train, and say once why the run failed if it does.

TIMEOUT = timedelta(minutes=10)
_CLAIM = "shardwise/failure"
_REFUSING_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def run_rank(request: TrainRequest, device_type: str, environment: Mapping[str, str]) -> int:
    """Train as one rank; return 0, or 128 plus the signal on which it saved and left; a failure ends this process at once."""
    from shardwise.recipes.train import (
        listen_to_nobody,
        train,
        train_elastic,
    )  # need the packages that run_train has looked for

    warnings.filterwarnings("ignore", module=r"torch\.")
    logging.disable(logging.ERROR)  # torch logs tracebacks of failures that are reported below, once
    if LAUNCHER_VARIABLE in environment:
        _end_with(int(environment[LAUNCHER_VARIABLE]))
    elif request.launched_ranks is None:
        stay_on_loopback(os.environ)
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # as Ctrl-C: leave in order
    if device_type == "cpu" and "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(1)
    claim: Callable[[], bool] = lambda: environment.get("RANK", "0") == "0"  # noqa: E731  replaced below
    try:
        device = _choose_own_device(device_type, environment)
        if request.terms.num_spares is not None:
            is_ours = VARIABLE in environment
            claim = lambda: not is_ours or cast(Any, default_store()).add(_CLAIM, 1) == 1  # noqa: E731
            # Another launcher ends ranks by SIGTERM also to start more of them: no rank saves, the state is in memory.
            listening = partial(stop_on_signals, False) if is_ours else listen_to_nobody
            number = train_elastic(request.start, request.config, device, listening)
            dist.destroy_process_group()
            return 128 + number if number else 0
        (store, rank), num_ranks = _meet(request, environment), request.launched_ranks or 1
        claim = lambda: store.add(_CLAIM, 1) == 1  # noqa: E731
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if device_type == "cuda":  # our watch raises, and names; torch's would end the process by SIGABRT
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        check_peers()
        watch_device(device)
        is_alone = request.launched_ranks is None
        listening = partial(stop_on_signals, second_ends=is_alone)
        number = train(request.start, request.config, RunRanks(rank, num_ranks, device), listening)
        dist.destroy_process_group()
        if number and is_alone:
            print(f"shardwise: ended by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number if number else 0
    except KeyboardInterrupt:
        if request.launched_ranks is None:
            raise
        _end(128 + signal.SIGINT)
    except Exception as error:
        _fail(error, claim, environment.get("RANK", "0"), request.start.resume or request.start.out)
    return EXIT_FAILED


def _meet(request: TrainRequest, environment: Mapping[str, str]) -> tuple[dist.Store, int]:
    """Return the store through which the ranks meet, and the rank of this process."""
    if request.launched_ranks is None:
        return dist.HashStore(), 0
    if STORE_VARIABLE not in environment:
        found, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun keeps its store from start to start; what it holds of earlier ones is not for these ranks
        count = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"shardwise/{count}", found), rank
    store = dist.FileStore(environment[STORE_VARIABLE], request.launched_ranks)
    store.set_timeout(TIMEOUT)
    return store, int(environment["RANK"])


def _choose_own_device(device_type: str, environment: Mapping[str, str]) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}. "
            f"Start at most that many ranks per host."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _fail(error: Exception, claim: Callable[[], bool], rank: str, run: Path | None) -> None:
    """Print the reason once over all ranks and end this process, so that the launcher ends the others."""
    message = explain(error)
    if is_lost_peer(error):
        time.sleep(PATIENCE_S)
        message = message or "another rank ended without giving a reason (killed, or out of memory?)"
    try:
        is_speaker = claim()
    except Exception:  # the store went with the rank that failed first, which has spoken
        is_speaker = rank == "0"
    if is_speaker:
        if message is None:
            traceback.print_exception(error)
            message = f"rank {rank} failed unexpectedly ({type(error).__name__}); the traceback is above"
        print(f"shardwise: error: {plain(message)}", file=sys.stderr)
        if run is not None and (isinstance(error, DesyncError | TransportError) or is_lost_peer(error)):
            print(f"shardwise: what each rank did last: shardwise diagnose {run}", file=sys.stderr)
    is_final = LAUNCHER_VARIABLE in os.environ and would_fail_again(error)
    _end(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FINAL if is_final else EXIT_FAILED)


def would_fail_again(error: BaseException) -> bool:
    """Return True for what a restart cannot repair: training that diverged, output nobody reads, a disk that takes nothing.

    Example:
        >>> would_fail_again(OSError(errno.ENOSPC, "No space left on device")), would_fail_again(MemoryError())
        (True, False)
    """
    from shardwise.recipes.train import DivergedError

    found: BaseException | None = error
    while found is not None:
        if isinstance(found, DivergedError | BrokenPipeError):
            return True
        if isinstance(found, OSError) and found.errno in _REFUSING_DISK:
            return True
        found = found.__cause__
    return False


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # an ordinary exit waits for threads that may wait for other ranks


def explain(error: BaseException) -> str | None:
    """Return one sentence a user can act on, or None if the error is not one we expect."""
    if isinstance(error, ShardwiseError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return "standard output was closed; the run stopped. Continue it with --resume."
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory. Use a smaller --batch or more --accumulate, more ranks, or a smaller model."
    if isinstance(error, OSError) and not is_lost_peer(error):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot read or write{where}: {error.strerror or error}. Complete checkpoints are as they were."
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
        return f"the port at which the ranks meet is in use ({error}). Choose another MASTER_PORT."
    return None


def _end_with(launcher: int) -> None:
    """End this process at once when the launcher is gone: no rank outlives it, or has a last word."""
    end_with_parent()  # all ranks at one moment: none is left that could report the others' end as a failure

    def watch() -> None:
        wait_until(lambda: os.getppid() != launcher, pauses_s=(0.5, 0.5))
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def run_train(request: TrainRequest, words: Sequence[str]) -> int:
    """Check what can be checked in one process, then train; return the exit code.  Raises: ConfigError."""
    device_type = choose_device(request.device)
    if request.only == "print_config":
        nproc = request.nproc or request.launched_ranks or default_nproc(device_type)
        print(config_to_toml(request.config, nproc, device_type), end="")
        return 0
    check_extras(("rich", "tensorboard"))
    if request.launched_ranks is not None:
        if LAUNCHER_VARIABLE not in os.environ:  # else our own launcher has looked
            local = int(os.environ.get("LOCAL_WORLD_SIZE", request.launched_ranks))
            _check_memory(request, device_type, request.launched_ranks, local)
            if request.terms.num_spares is not None:
                _check_restarted(request)
        return run_rank(request, device_type, os.environ)
    if request.config.model_from is not None:
        check_module(request.config.model_from)
    nproc = request.nproc or default_nproc(device_type)
    if device_type == "cuda" and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc {nproc}: this host has {torch.cuda.device_count()} GPU(s), and every rank needs one of its own. "
            f"Use --nproc {torch.cuda.device_count()}, or --device cpu."
        )
    if request.only == "plan":
        from shardwise.cli.plan import plan_training

        experts = request.config.model.experts
        why = "what experts compute and hold depends on the text; a run ends with its measured memory"
        refuse_beside(f"--experts {experts}", {"--plan": experts and why})
        check_ranks(request.config, nproc)
        vocabulary = open_vocabulary(tokenizer_of(request.start, request.config)).size
        return plan_training(request.config, nproc, device_type, vocabulary, request.terms.num_spares is not None)
    _check_memory(request, device_type, nproc, nproc)
    check_start(request.start, request.config)
    request.terms.check(nproc)
    folder, is_elastic = request.start.resume or request.start.out, request.terms.num_spares is not None
    if is_elastic:
        _check_elastic(request)
    if request.start.resume is None and (is_elastic or request.terms.max_restarts):
        folder = new_folder(request.start.out)
        words = [*words, "--out", str(folder.absolute())]  # where the next start of a rank finds its run
    if is_elastic:
        return launch_elastic(request.terms, nproc, words)
    if nproc == 1 and not request.terms.max_restarts:
        return run_rank(request, device_type, os.environ)
    return launch_ranks(folder, request.config, request.terms, nproc, device_type, words)


def _check_elastic(request: TrainRequest) -> None:
    config, start = request.config, request.start
    others = {
        "--trace": start.trace_steps,
        "--record-digests": start.record_digests,
        "--compare-with": start.compare_with,
        "--memory": start.memory_bytes,
        "--tp": config.tp > 1,
        "--shard hsdp": config.shard == "hsdp",
    }
    refuse_beside("--elastic", {name: value and "it needs the ranks of the start" for name, value in others.items()})


def _check_restarted(request: TrainRequest) -> None:
    """Check what ``--elastic`` needs under another launcher, whose next start, or job, goes on in the same folder."""
    start, terms = request.start, request.terms
    _check_elastic(request)
    if terms.num_spares or terms.min_nproc is not None:
        raise ConfigError("--spares and --min-nproc are for ranks of this command; torchrun has --nnodes MIN:MAX.")
    folder = start.resume or start.out
    if folder is None:
        raise ConfigError("--elastic under torchrun: name the run's folder, in which a restart goes on, with --out.")
    if (folder / CONFIG).exists():
        merge_resumed(read_run_config(folder), request.config, folder)


def _check_memory(request: TrainRequest, device_type: str, num_ranks: int, local_ranks: int) -> None:
    check_ranks(request.config, num_ranks)
    host = host_memory_bytes()
    limit, place = sys.maxsize, ""
    if host is not None:
        limit, place = host // local_ranks, f"this host has {format_bytes(host)} for {local_ranks} of them"
    if device_type == "cuda":
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        num_bytes = min(gpu.total_memory for gpu in gpus)
        limit = num_bytes + limit * request.config.offload
        place = f"the smallest GPU here has {format_bytes(num_bytes)}"
    vocabulary = open_vocabulary(tokenizer_of(request.start, request.config))
    check_memory(request.config, num_ranks, limit, place, vocabulary.size)


def choose_device(asked: str) -> str:
    """Return "cuda" or "cpu".  Raises: ConfigError if GPUs are asked for and there are none."""
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU on this host. Use --device cpu or auto.")
    return "cuda" if has_gpu and asked != "cpu" else "cpu"


def default_nproc(device_type: str) -> int:
    """Return every GPU, or the usable CPU cores up to 2."""
    if device_type == "cuda":
        return torch.cuda.device_count()
    return min(2, usable_cores())


# ---- ``--config FILE``: a TOML file of options, turned into the words of a command line.


def config_words(path: Path, resumes: bool) -> list[str]:
    """Return the words for the options in the file ``path``; ``resumes``: leave out its run folder.

    Raises: ConfigError that names the file, and the key if one is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    _add_options(parser)
    options = [name for action in parser._actions for name in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    known = sorted({name.removeprefix("--") for name in options} - {"config", "print-config"})
    words: dict[str, str] = {}
    for key, value in _read_file(path).items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigError(f"{path}: there is no option {key!r}.{did_you_mean(name, known)}")
        if name in words:
            raise ConfigError(f"{path}: {name} is given twice, also as {name.replace('-', '_')}.")
        words[name] = f"--{name}={value}"
        if isinstance(value, bool):  # "off" is said by an option of its own, if there is one
            words[name] = f"--{name}" if value else f"--no-{name}" if f"no-{name}" in known else ""
        if "\0" in words[name]:  # no command line can hold it
            raise ConfigError(f"{path}: {name} is {value!r}, expected a text without zero bytes.")
    if resumes:  # it names the folder
        words.pop("out", None)
    found = [word for word in words.values() if word]
    try:
        parser.parse_args(found)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{path}: {error}.") from error
    return found


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix.lower() != ".toml":
        raise ConfigError(f"--config {path}: expected a file that ends in .toml.")
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name).loads(path.read_text(encoding="utf-8-sig"))
    except ImportError as error:
        raise ConfigError(f"--config {path}: needs {name}. Install it (pip install {name}).") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}).") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}.") from error
