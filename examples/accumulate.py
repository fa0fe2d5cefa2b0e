"""Gradient accumulation: several microbatches per step, gradients reduced with the last of them.

torchrun --nproc-per-node 2 examples/accumulate.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import policy, shard_model


def main(steps: int = 50, width: int = 64, microbatches: int = 4) -> list[float]:
    """Train with ``microbatches`` forwards and backwards per step; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        batch = torch.randn(8 * microbatches, width, generator=data).to(device)
        total = 0.0
        for number, x in enumerate(batch.chunk(microbatches), 1):
            # Without sync gradients wait on their rank, unsharded: communication for memory.
            with policy(model, sync=number == microbatches):
                loss = (model(x) - x.mean(1, keepdim=True)).square().mean() / microbatches
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if dist.get_rank() == 0:
        print(f"{microbatches} microbatches per step: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
