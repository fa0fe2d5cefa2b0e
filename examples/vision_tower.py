"""A vision tower that only the ranks with images in their batch run: the others need no dummy images.

torchrun --nproc-per-node 2 examples/vision_tower.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import fully_shard


class Block(nn.Module):
    """A residual MLP, as a transformer has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Text features and images (some rows have one) to one number per row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3 * 8 * 8, width), *[Block(width) for _ in range(2)])
        self.text = nn.Sequential(*[Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, text: torch.Tensor, images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if len(rows):  # decided on each rank alone
            text = text.index_add(0, rows, self.tower(images.flatten(1)))
        return self.head(self.text(text))


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train on batches of which about half have images; return the losses, averaged over ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = Model(width)
    for block in [*model.tower[1:], *model.text]:
        fully_shard(block)
    fully_shard(model.tower)
    fully_shard(model)
    model.set_allow_rank_divergence(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, losses, num_seen = torch.Generator().manual_seed(0), [], 0
    for _ in range(steps):  # all ranks draw the batch, each takes its rows
        text = torch.randn(64, width, generator=data)
        images = torch.randn(64, 3, 8, 8, generator=data)
        has_image = (torch.rand(4, 1, generator=data) < 0.5).expand(4, 16).flatten()  # by neighbours: all or none
        text, images, has_image = (each.chunk(size)[rank].to(device) for each in (text, images, has_image))
        rows = has_image.nonzero().flatten()
        target = text.mean(1) + has_image * images.mean((1, 2, 3))
        loss = (model(text, images[rows], rows).squeeze(1) - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_seen += bool(len(rows))
        dist.all_reduce(mean := loss.detach())
        losses.append(mean.item() / size)
    print(f"rank {rank}: {num_seen} of {steps} batches had images; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
