"""Your own loop: parameters, gradients and optimizer state sharded over all ranks.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import describe_units, shard_model


class Block(nn.Module):
    """A residual MLP, as a transformer has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train to predict the mean of the features; return the losses, averaged over ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*[Block(width) for _ in range(4)], nn.Linear(width, 1))
    shard_model(model)  # or fully_shard(block) for each block, then fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # after sharding: its state is sharded too
    data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()  # gradients arrive averaged over ranks, as shards
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}\n{describe_units(model)}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
