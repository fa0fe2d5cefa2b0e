"""A program whose sums are not exact, and whose ranks kill themselves: ``elastic_same_bits.py OUT STEP:RANK...``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise

NUM_STEPS, NUM_MICROBATCHES, WIDTH = 8, 12, 17


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
    return {"model": model, "optimizer": optimizer, "fixed": fixed}


def main() -> None:
    out, kills = Path(sys.argv[1]), {tuple(map(int, each.split(":"))) for each in sys.argv[2:]}
    worlds, loss, digests = list[int](), torch.zeros(()), ExitStack()
    fixed = None
    for step in shardwise.elastic(build, num_steps=NUM_STEPS, num_microbatches=NUM_MICROBATCHES):
        with step as state:
            if step.state["fixed"] is not fixed:  # other ranks make the steps from here on
                fixed, digests = step.state["fixed"], ExitStack()
                digests.enter_context(shardwise.RunDigests(fixed, out.with_name(f"{out.name}-digests")))
            worlds.append(dist.get_world_size())
            losses: list[torch.Tensor] = []
            for number in state["fixed"].microbatches():
                noise = torch.Generator("cpu").manual_seed(100 * step.number + number)
                loss = state["model"](torch.randn(4, WIDTH, generator=noise)).square().mean() / NUM_MICROBATCHES
                loss.backward()
                losses.append(loss.detach())
                place = (step.number, dist.get_rank())
                mark = out.with_name(f"killed-{place}")
                if place in kills and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            state["fixed"].clip_grad_norm_(0.5)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            loss = state["fixed"].sum(losses)
        if step.number == NUM_STEPS - 1:
            found = {name: param.full_tensor().detach() for name, param in state["model"].named_parameters()}
            if dist.get_rank() == 0:
                torch.save((found | {"loss": loss}, worlds), out)
    digests.close()


if __name__ == "__main__":
    main()
