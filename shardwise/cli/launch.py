"""Start the ranks of ``shardwise train`` on this host, or run as the one that a launcher started."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

from shardwise import torch_private
from shardwise.cli.exits import EXIT_CONFIG, EXIT_FAILED, LAUNCHER_VARIABLE
from shardwise.cli.train_args import TrainRequest
from shardwise.errors import ConfigError
from shardwise.recipes.config import check_ranks
from shardwise.recipes.run_folder import check_start

SHUTDOWN_S = 5  # between asking a rank to end and killing it


def run_train(request: TrainRequest, words: Sequence[str]) -> int:
    """Check what can be checked in one process, then train; return the exit code.  Raises: ConfigError."""
    check_extras(("rich", "tensorboard", "matplotlib"))
    device_type = choose_device(request.device)
    if request.launched_ranks is not None:
        return _run_here(request, device_type)
    nproc = request.nproc or default_nproc(device_type)
    if device_type == "cuda" and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc {nproc}: this host has {torch.cuda.device_count()} GPU(s), and every rank needs one of its own. "
            f"Use --nproc {torch.cuda.device_count()}, or --device cpu."
        )
    check_ranks(request.config, nproc)
    check_start(request.start, request.config)
    if nproc == 1:
        return _run_here(request, device_type)
    check_port(request.master_port)
    return launch_ranks(nproc, request.master_port, device_type, words)


def _run_here(request: TrainRequest, device_type: str) -> int:
    from shardwise.cli.rank import run_rank  # the launching process does without the trainer and its imports

    return run_rank(request, device_type, os.environ)


def check_extras(names: Sequence[str], command: str = "train") -> None:
    """Refuse to start without the packages that only ``command`` needs.  Raises: ConfigError."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"shardwise {command} needs {', '.join(missing)}, which is not installed here. "
            f"Install with: pip install 'shardwise[train]'"
        )


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(2, cores or 1)


def check_port(port: int) -> None:
    """Refuse a port that cannot be listened on; 0 means any.  Raises: ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} cannot be used: {error.strerror}. Leave the option out to get a free port."
            ) from error


def launch_ranks(nproc: int, port: int, device_type: str, words: Sequence[str]) -> int:
    """Start ``nproc`` processes with the same arguments through torch's elastic launcher; return the exit code."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d's stack traces would bury the one line that says why
    if device_type == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":  # a host name that does not resolve must not matter on one host
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.ERROR)  # the agent's own report of a failed rank would bury the message of that rank
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        config = torch_private.launch_config(
            SHUTDOWN_S,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"shardwise-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "ranks")),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shardwise.cli.main", *words)
        except ChildFailedError as error:
            return _explain_failure(error.get_first_failure())
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            print(f"shardwise: ended by {name}; every rank has ended too", file=sys.stderr)
            return 128 + int(error.sigval)
        finally:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # a killed rank 0 cannot give the cursor back itself
                sys.stdout.flush()
    return 0


def _explain_failure(first: tuple[int, ProcessFailure]) -> int:
    rank, failure = first
    if failure.exitcode in (EXIT_FAILED, EXIT_CONFIG):  # that rank has said why
        return failure.exitcode
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = signal.Signals(-failure.exitcode).name
        how += " (often: out of memory)" if how == "SIGKILL" else ""
    print(f"shardwise: error: rank {rank} was ended by {how}; all ranks have been stopped", file=sys.stderr)
    return EXIT_FAILED
