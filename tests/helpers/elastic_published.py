"""A program that publishes after each step while a rank is killed: ``elastic_published.py SETTINGS``, a JSON object."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import WeightPublisher, WeightReader, full_tensors
from shardwise.elastic.run import ElasticRun
from shardwise.testing import faults

BF16 = torch.bfloat16
NUM_STEPS, LOST_IN = 6, 3


def main(folder: str, victim: int) -> None:
    """Kill process ``victim`` in a step; note, in each step, what an engine on each rank has."""
    process, reader, weights = int(os.environ["RANK"]), WeightReader(folder), dict[str, torch.Tensor]()
    publishers: list[WeightPublisher] = []
    os.makedirs(folder, exist_ok=True)

    def build() -> dict[str, object]:
        torch.manual_seed(0)
        model = shardwise.fully_shard(nn.Linear(64, 48))
        publishers[:] = [WeightPublisher(model, folder, dtype=BF16, anchor_every=100)]
        weights.update({name: torch.zeros(value.shape, dtype=BF16) for name, value in model.state_dict().items()})
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    with ExitStack() as stack:

        def step(run: ElasticRun, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if run.number == LOST_IN and process == victim:
                stack.enter_context(faults.kill_at("optimizer step", rank=None))
            model(torch.full((2, 64), run.number + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            version = publishers[0].publish(wait=run.number % 2 == 0)
            publishers[0].wait_for(0, version)
            reader.advance(weights)
            tensors = full_tensors(model, dtype=BF16)
            unlike = [name for name, each in tensors if not torch.equal(weights[name], each)]
            with Path(folder, f"seen-{process}").open("a") as log:
                log.write(json.dumps([run.number, dist.get_world_size(), version, reader.version, unlike]) + "\n")

        shardwise.elastic(build, step, num_steps=NUM_STEPS, num_microbatches=6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
