"""Check what ``shardwise train`` was asked for, then start ranks on this host, or run as the one that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from shardwise.cli.extras import check_extras
from shardwise.cli.local_ranks import launch_ranks
from shardwise.cli.restarts import launch_with_restarts
from shardwise.cli.train_args import TrainRequest
from shardwise.errors import ConfigError
from shardwise.one_host import usable_cores
from shardwise.recipes.config import check_ranks
from shardwise.recipes.run_folder import check_start, new_folder


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
    if request.only_plans:
        from shardwise.cli.plan_args import plan_training

        return plan_training(request.config, nproc, device_type)
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
    return launch_ranks(nproc, device_type, words)


def _run_here(request: TrainRequest, device_type: str) -> int:
    from shardwise.cli.rank import run_rank  # the launching process does without the trainer and its imports

    return run_rank(request, device_type, os.environ)


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
