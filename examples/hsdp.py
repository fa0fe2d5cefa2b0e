"""HSDP: sharded within groups of ranks that share fast links, whole copies between the groups.

torchrun --nproc-per-node 4 examples/hsdp.py     # two groups of two; with 2 ranks, two groups of one
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import MixedPrecisionPolicy, shard_model


def main(steps: int = 50, width: int = 64, groups: int = 2) -> list[float]:
    """Train in bf16, reduced in fp32, over ``groups`` replicas; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    shards = dist.get_world_size() // groups
    mesh = init_device_mesh(device.type, (groups, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x).float() - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{groups} groups of {shards} rank(s): loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
