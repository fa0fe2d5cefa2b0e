"""Resume at another number of ranks: run it twice, with any numbers, and the second run goes on where the first ended.

torchrun --nproc-per-node 2 examples/resume.py runs/resume
torchrun --nproc-per-node 1 examples/resume.py runs/resume
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise import shard_model
from shardwise.checkpoint import finish, load, save

BATCH = 32  # of all ranks together, so that the losses do not depend on their number


def main(folder: str, steps: int = 20, width: int = 64) -> list[float]:
    """Train ``steps`` more steps, from the newest checkpoint in ``folder`` if there is one; return the losses of all ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    begin = load(folder, state, fallback=True).step if Path(folder).is_dir() else 0
    losses = []
    for step in range(begin + 1, begin + steps + 1):
        x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank].to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / num_ranks)
    save(folder, state, step=begin + steps, keep=2)
    finish(folder)
    if rank == 0:
        print(f"{num_ranks} rank(s), steps {begin + 1} to {begin + steps}: loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/resume")
    dist.destroy_process_group()
