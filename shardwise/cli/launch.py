"""Check what ``shardwise train`` was asked for, then start ranks on this host, or run as the one that a launcher started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from shardwise.cli.exits import LAUNCHER_VARIABLE
from shardwise.cli.extras import check_extras
from shardwise.cli.local_ranks import launch_ranks
from shardwise.cli.private_network import needs_no_network
from shardwise.cli.restarts import launch_with_restarts
from shardwise.cli.train_args import TrainRequest
from shardwise.errors import ConfigError
from shardwise.one_host import host_memory_bytes, usable_cores
from shardwise.recipes.config import check_ranks
from shardwise.recipes.held_bytes import format_bytes
from shardwise.recipes.least_bytes import MemoryLimit, check_room
from shardwise.recipes.run_folder import check_start, new_folder, tokenizer_of
from shardwise.recipes.tokens import open_vocabulary


def run_train(request: TrainRequest, words: Sequence[str]) -> int:
    """Check what can be checked in one process, then train; return the exit code.  Raises: ConfigError."""
    check_extras(("rich", "tensorboard", "matplotlib"))
    device_type = choose_device(request.device)
    if request.launched_ranks is not None:
        if LAUNCHER_VARIABLE not in os.environ:  # else our own launcher has looked
            local = int(os.environ.get("LOCAL_WORLD_SIZE", request.launched_ranks))
            _check_room(request, device_type, request.launched_ranks, local)
        return _run_here(request, device_type)
    if request.config.model_from is not None:
        from shardwise.recipes.own_model import check_module  # as little of the trainer as there is need for

        check_module(request.config.model_from)
    nproc = request.nproc or default_nproc(device_type)
    if device_type == "cuda" and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc {nproc}: this host has {torch.cuda.device_count()} GPU(s), and every rank needs one of its own. "
            f"Use --nproc {torch.cuda.device_count()}, or --device cpu."
        )
    if request.only_plans:
        from shardwise.cli.plan_args import plan_training

        check_ranks(request.config, nproc)
        return plan_training(request.config, nproc, device_type)
    _check_room(request, device_type, nproc, nproc)
    check_start(request.start, request.config)
    if request.terms.min_nproc is not None and request.terms.min_nproc > nproc:
        raise ConfigError(
            f"--min-nproc is {request.terms.min_nproc}, expected at most the {nproc} rank(s) of the start."
        )
    if request.terms.max_restarts:
        folder = request.start.resume or new_folder(request.start.out)
        return launch_with_restarts(folder, request.config, request.terms, nproc, device_type, words)
    if nproc == 1:
        return _run_here(request, device_type)
    is_private = needs_no_network(request.config, device_type)
    return launch_ranks(nproc, device_type, words, request.start.resume or request.start.out, is_private)


def _run_here(request: TrainRequest, device_type: str) -> int:
    from shardwise.cli.rank import run_rank  # the launching process does without the trainer and its imports

    return run_rank(request, device_type, os.environ)


def _check_room(request: TrainRequest, device_type: str, num_ranks: int, local_ranks: int) -> None:
    check_ranks(request.config, num_ranks)
    room = _room_of(device_type, local_ranks)
    if room is not None:
        vocabulary = open_vocabulary(tokenizer_of(request.start, request.config))
        check_room(request.config, num_ranks, room, vocabulary.size)


def _room_of(device_type: str, local_ranks: int) -> MemoryLimit | None:
    """Return the memory of one of ``local_ranks`` ranks on this host; None where the system does not tell."""
    host = host_memory_bytes()
    share = sys.maxsize if host is None else host // local_ranks
    if device_type == "cuda":
        each = (torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
        num_bytes = min(each)
        return MemoryLimit(num_bytes, share, f"the smallest GPU here has {format_bytes(num_bytes)}")
    if host is None:
        return None
    whole = f"this host has {format_bytes(host)}"
    return MemoryLimit(
        share, None, whole if local_ranks == 1 else f"{whole} for {local_ranks} ranks: {format_bytes(share)} each"
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
    return min(2, usable_cores())
