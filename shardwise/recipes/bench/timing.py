"""Phase 1, on every rank: all contenders built in one process and stepped in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.recipes.bench.contenders import CONTENDERS, Contender, Trained, build_trained
from shardwise.recipes.bench.figures import find_wrong_losses
from shardwise.recipes.bench.request import BenchConfig
from shardwise.recipes.bench.setup import Setup, adamw, make_setup
from shardwise.recipes.gpt import next_byte_loss
from shardwise.recipes.ranks import RunRanks

WARM_UP = 4  # steps of each contender before the first that counts; the loss of the last of them is checked


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured.

    ``seconds``: of each round, by contender; empty if ``wrong`` names contenders with wrong losses.  ``losses``: means
    over ranks after WARM_UP - 1 updates, the same on all ranks.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    wrong: tuple[str, ...]
    num_threads: int


def time_steps(config: BenchConfig, contenders: Mapping[str, Contender] = CONTENDERS) -> RankTimes:
    """Build ``config.names`` of ``contenders``, check their losses, then time rounds of one step each.

    The order within a round is drawn from the seed, so that ranks agree.  A time lies between two barriers.  Collective.
    """
    setup = make_setup(config)
    ranks = RunRanks(dist.get_rank(), config.ranks, setup.device)
    alone, averaged = ranks.mean([_reference_loss(setup, average) for average in (False, True)])
    trained = {name: build_trained(contenders[name], setup.build_model(), setup) for name in config.names}
    losses: dict[str, float] = {}
    for _ in range(WARM_UP):
        last = [take_step(trained[name], setup) for name in config.names]
        losses = dict(zip(config.names, ranks.mean(last), strict=True))
    expected = {name: alone if contenders[name].family == "local" else averaged for name in config.names}
    wrong = find_wrong_losses(losses, expected, {name: contenders[name].dtype for name in config.names})
    seconds = {} if wrong else _time_rounds(config, trained, setup)
    return RankTimes(seconds, losses, wrong, torch.get_num_threads())


def take_step(trained: Trained, setup: Setup) -> Tensor:
    """Train on this rank's batch once; return the loss before the update.  Shape of the result: ().  Collective."""
    loss = next_byte_loss(trained.model, setup.tokens[:, :-1], setup.tokens[:, 1:])
    loss.backward()
    trained.contender.reduce(trained.optimizer)
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    return loss.detach()


def wait_for_all(setup: Setup) -> None:
    """Return when every rank has come here and the devices have done what was asked of them."""
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
    dist.barrier()


def _time_rounds(config: BenchConfig, trained: Mapping[str, Trained], setup: Setup) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in config.names}
    order = random.Random(config.seed)
    for _ in range(config.rounds):
        for name in order.sample(config.names, len(config.names)):
            wait_for_all(setup)
            start = time.perf_counter()
            take_step(trained[name], setup)
            wait_for_all(setup)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _reference_loss(setup: Setup, average: bool) -> Tensor:
    """Train without any door, gradients averaged over ranks one by one if asked; return the loss to be reached."""
    model = setup.build_model()
    optimizer = adamw(model)
    loss = torch.zeros(())
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        loss = next_byte_loss(model, setup.tokens[:, :-1], setup.tokens[:, 1:])
        loss.backward()
        for param in model.parameters() if average else ():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return loss.detach()
