"""A program whose sums are not exact, and whose ranks kill themselves: ``elastic_same_bits.py OUT STEP:RANK...``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.elastic.run import ElasticRun

NUM_STEPS, NUM_MICROBATCHES, WIDTH = 8, 12, 17


class Sequences:
    """Sequences of tokens, other ones for each microbatch, with a state."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch, self.number = microbatch, 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            self.number += 1
            yield [self.microbatch + self.number % 7] * (self.number % 5)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def make_data() -> dict[str, shardwise.Microbatches]:
    """Return packed sequences, read by workers, and a mixture."""
    sizes: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": 4}
    noise = [torch.randn(number, WIDTH, generator=torch.Generator("cpu").manual_seed(number)) for number in (70, 30)]
    mixture = shardwise.Mixture({"web": (noise[0], 0.7), "code": (noise[1], 0.3)})
    packed = shardwise.Microbatches(lambda k: shardwise.Packed(Sequences(k), WIDTH), **sizes, num_workers=1)
    return {"packed": packed, "mixed": shardwise.Microbatches(mixture, **sizes)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = (
            nn.Linear(WIDTH, 2 * WIDTH + 1),
            nn.Linear(2 * WIDTH + 1, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        shardwise.fully_shard(block)
    shardwise.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    fixed = shardwise.Reproducible(model, optimizer, num_microbatches=NUM_MICROBATCHES, seed=0)
    return {"model": model, "optimizer": optimizer, "fixed": fixed, **make_data()}


def main() -> None:
    out, kills = Path(sys.argv[1]), {tuple(map(int, each.split(":"))) for each in sys.argv[2:]}
    worlds, digests = list[int](), ExitStack()
    fixed: object = None

    def step(run: ElasticRun, **state: Any) -> torch.Tensor:
        nonlocal fixed, digests
        if state["fixed"] is not fixed:  # other ranks make the steps from here on
            fixed, digests = state["fixed"], ExitStack()
            digests.enter_context(shardwise.RunDigests(state["fixed"], out.with_name(f"{out.name}-digests")))
        worlds.append(dist.get_world_size())
        losses: list[torch.Tensor] = []
        packed, mixed = (state[name].of_step(run.number) for name in ("packed", "mixed"))
        for _, windows, rows in zip(state["fixed"].microbatches(), packed, mixed, strict=True):
            x = rows + windows["tokens"] / 10 + windows["positions"]
            loss = state["model"](x).square().mean() / NUM_MICROBATCHES
            loss.backward()
            losses.append(loss.detach())
            place = (run.number, dist.get_rank())
            mark = out.with_name(f"killed-{place}")
            if place in kills and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        state["fixed"].clip_grad_norm_(0.5)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return state["fixed"].sum(losses)

    def save_last(run: ElasticRun, loss: torch.Tensor) -> None:
        if run.number == NUM_STEPS:
            found = {name: param.full_tensor().detach() for name, param in run.state["model"].named_parameters()}
            if dist.get_rank() == 0:
                torch.save((found | {"loss": loss}, worlds), out)

    shardwise.elastic(build, step, num_steps=NUM_STEPS, num_microbatches=NUM_MICROBATCHES, on_commit=save_last)
    digests.close()


if __name__ == "__main__":
    main()
