"""One rank of ``shardwise train``: join the process group, train, and say once why the run failed if it does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.cli.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_FINAL, LAUNCHER_VARIABLE, STORE_VARIABLE
from shardwise.cli.signals import stop_on_signals
from shardwise.cli.starts import name_start
from shardwise.cli.train_args import TrainRequest
from shardwise.comm.device_watch import watch_device
from shardwise.comm.peer_owner import check_peers
from shardwise.errors import ConfigError, DesyncError, ShardwiseError, TransportError
from shardwise.one_host import stay_on_loopback
from shardwise.recipes.plain_text import plain
from shardwise.recipes.ranks import RunRanks
from shardwise.recipes.stop import DivergedError
from shardwise.recipes.train import train

TIMEOUT = timedelta(minutes=10)
_CLAIM = "shardwise/failure"
_REFUSING_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the signal that this process gets when its parent ends
_PATIENCE_S = 3.0  # the rank that failed first has the better reason, and a launcher the best
_LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket timeout",
    " is gone",
    " are gone",
    " did not all make this call",
)


def run_rank(request: TrainRequest, device_type: str, environment: Mapping[str, str]) -> int:
    """Train as one rank; return 0, or 128 plus the signal on which it saved and left; a failure ends this process at once."""
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
        place = _meet(request, environment)
        claim = lambda: place.store.add(_CLAIM, 1) == 1  # noqa: E731
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if device_type == "cuda":  # our watch raises, and names; torch's would end the process by SIGABRT
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            backend, store=place.store, rank=place.rank, world_size=place.num_ranks, timeout=TIMEOUT
        )
        check_peers()
        watch_device(device)
        is_alone = request.launched_ranks is None
        listening = partial(stop_on_signals, second_ends=is_alone)
        number = train(request.start, request.config, RunRanks(place.rank, place.num_ranks, device), listening)
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


@dataclass(frozen=True, slots=True)
class _RankPlace:
    """Where this process stands among the ranks, and the store through which they meet."""

    store: dist.Store
    rank: int
    num_ranks: int


def _meet(request: TrainRequest, environment: Mapping[str, str]) -> _RankPlace:
    if request.launched_ranks is None:
        return _RankPlace(dist.HashStore(), 0, 1)
    if STORE_VARIABLE not in environment:
        found, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
        name = name_start(found, rank, num_ranks, TIMEOUT.total_seconds())
        return _RankPlace(dist.PrefixStore(f"shardwise/{name}", found), rank, num_ranks)
    store = dist.FileStore(environment[STORE_VARIABLE], request.launched_ranks)
    store.set_timeout(TIMEOUT)
    return _RankPlace(store, int(environment["RANK"]), request.launched_ranks)


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
    if _is_lost_peer(error):
        time.sleep(_PATIENCE_S)
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
        if run is not None and (isinstance(error, DesyncError | TransportError) or _is_lost_peer(error)):
            print(f"shardwise: what each rank did last: shardwise diagnose {run}", file=sys.stderr)
    is_final = LAUNCHER_VARIABLE in os.environ and would_fail_again(error)
    _end(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FINAL if is_final else EXIT_FAILED)


def would_fail_again(error: BaseException) -> bool:
    """Return True for what a restart cannot mend: training that diverged, output that nobody reads, a disk that takes nothing.

    Example:
        >>> would_fail_again(OSError(errno.ENOSPC, "No space left on device")), would_fail_again(MemoryError())
        (True, False)
    """
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
    if isinstance(error, OSError) and not _is_lost_peer(error):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot read or write{where}: {error.strerror or error}. Complete checkpoints are as they were."
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
        return f"the port at which the ranks meet is in use ({error}). Choose another MASTER_PORT."
    return None


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(words in text for words in _LOST_PEER)


def _end_with(launcher: int) -> None:
    """End this process at once when the launcher is gone: no rank outlives it, or has a last word."""
    if sys.platform == "linux":  # all ranks at one moment: none is left that could report the others' end as a failure
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()
