"""Muon over sharded matrices, AdamW for the rest: each matrix is gathered to one rank, updated there, and scattered back.

torchrun --nproc-per-node 2 examples/muon.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import ShardedOptimizer, shard_model


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train with two optimizers; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    shard_model(model)
    hidden = {name: param for name, param in model.named_parameters() if param.ndim == 2 and param.shape[0] > 1}
    rest = {name: param for name, param in model.named_parameters() if name not in hidden}
    optimizers = [
        ShardedOptimizer(hidden, torch.optim.Muon, lr=0.02, weight_decay=0.0),
        ShardedOptimizer(rest, torch.optim.AdamW, lr=3e-3),  # element by element: no communication
    ]
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{len(hidden)} matrices with Muon: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
