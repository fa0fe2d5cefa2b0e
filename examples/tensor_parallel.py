"""Tensor parallelism inside, data parallelism outside: torch splits the matrices, fully_shard shards what is left.

torchrun --nproc-per-node 4 examples/tensor_parallel.py     # two by two; with 2 ranks, one by two
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import clip_grad_norm_, fully_shard


class MLP(nn.Module):
    """The first matrix is cut by columns, the second by rows, so that one all-reduce is enough."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def main(steps: int = 50, width: int = 64, tensor_ranks: int = 2) -> list[float]:
    """Train over a (dp, tp) mesh; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    sizes = (dist.get_world_size() // tensor_ranks, tensor_ranks)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))  # tp inside: its ranks are neighbours
    torch.manual_seed(0)
    model = nn.Sequential(MLP(width), MLP(width), nn.Linear(width, 1)).to(device)
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # one by one: they are on two meshes
    data, losses = torch.Generator().manual_seed(mesh.get_local_rank("dp")), []  # one tp group, one stream of data
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # over parameters of both meshes
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"dp x tp = {sizes[0]} x {sizes[1]}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
