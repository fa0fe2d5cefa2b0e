"""A mixture of experts in which each rank runs only the experts that its own tokens need: every expert is a unit.

torchrun --nproc-per-node 2 examples/experts.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import fully_shard


class Expert(nn.Sequential):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class MoE(nn.Module):
    """A router that sends each token to its ``top_k`` best experts.  Shape: (tokens, width) -> the same."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.router, self.top_k = nn.LayerNorm(width), nn.Linear(width, num_experts), top_k
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        weights, chosen = self.router(inner).softmax(-1).topk(self.top_k)
        self.used = chosen.unique().tolist()  # ranks have different tokens, and so different experts
        for number in self.used:
            token, place = (chosen == number).nonzero(as_tuple=True)
            x = x.index_add(0, token, self.experts[number](inner[token]) * weights[token, place, None])
        return x


def main(steps: int = 50, width: int = 64, num_experts: int = 8, top_k: int = 2) -> list[float]:
    """Train two layers of experts; return the losses, averaged over ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*[MoE(width, num_experts, top_k) for _ in range(2)], nn.Linear(width, 1))
    for layer in model[:2]:
        for expert in layer.experts:
            fully_shard(expert)
        fully_shard(layer)
    fully_shard(model)
    model.set_allow_rank_divergence(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, losses = torch.Generator().manual_seed(0), []  # all ranks draw the batch, each takes its rows
    for _ in range(steps):
        topics = torch.randn(4, 1, width, generator=data)  # neighbouring rows have one topic, and use the same experts
        x = (topics + 0.3 * torch.randn(4, 16, width, generator=data)).flatten(0, 1).chunk(size)[rank].to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()  # gradients of an expert are averaged over all ranks; a rank without tokens for it adds zeros
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach())
        losses.append(mean.item() / size)
    print(
        f"rank {rank}: the last step ran experts {[layer.used for layer in model[:2]]} of {num_experts} in each layer"
    )
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
