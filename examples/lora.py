"""LoRA: a frozen model, sharded like any other, with two small trained matrices beside each of its linear layers.

torchrun --nproc-per-node 2 examples/lora.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import shard_model


class LoRA(nn.Module):
    """A frozen linear layer, and what is learned of its change: B A, of a low rank.  Source: arXiv 2106.09685."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))  # at first nothing changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train the adapters and nothing else; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).requires_grad_(False)
    for layer in layers:
        layer[1] = LoRA(layer[1])
    shard_model(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()  # frozen parameters have no gradient, and none is reduced
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{len(trained)} of {len(list(model.parameters()))} tensors: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
