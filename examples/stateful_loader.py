"""A data loader that goes on at its position: torchdata's StatefulDataLoader, saved in the checkpoint beside the model.

torchrun --nproc-per-node 2 examples/stateful_loader.py runs/loader     # run it twice     (pip install torchdata)
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shardwise import shard_model
from shardwise.checkpoint import PerRank, RandomState, finish, load, save


def main(folder: str, steps: int = 20, width: int = 64) -> list[float]:
    """Train ``steps`` more steps, from the newest checkpoint in ``folder`` if there is one; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(320, width, generator=torch.Generator().manual_seed(0))
    sampler = StatefulDistributedSampler(rows, dist.get_world_size(), dist.get_rank(), shuffle=True)
    # Each pass over a loader draws a seed: from a generator of its own, so that a resumed run draws the same dropout.
    seeds = torch.Generator()
    loader = StatefulDataLoader(rows, batch_size=16, sampler=sampler, drop_last=True, generator=seeds)
    loop = {"epoch": 0}
    # Each rank has a position of its own: it can be restored at the same number of ranks alone.
    state = {"model": model, "optimizer": optimizer, "loader": PerRank(loader), "random": RandomState(), "loop": loop}
    begin = load(folder, state, fallback=True).step if Path(folder).is_dir() else 0
    losses = []
    while len(losses) < steps:
        sampler.set_epoch(loop["epoch"])
        for x in loader:  # after load: from the batch that comes next in that epoch
            loss = (model(x.to(device)) - x.to(device).mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                save(folder, state, step=begin + steps, keep=2)
                break
        else:
            loop["epoch"] += 1
    finish(folder)
    if dist.get_rank() == 0:
        print(f"steps {begin + 1} to {begin + steps}, epoch {loop['epoch']}: loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/loader")
    dist.destroy_process_group()
