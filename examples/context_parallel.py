"""Context parallelism beside fully_shard: each sequence is split over the ranks of `cp`, parameters are sharded over all ranks.

torchrun --nproc-per-node 4 examples/context_parallel.py     # (dp, cp) = (2, 2); with 2 ranks (1, 2)
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardwise import shard_model


class Attention(nn.Module):
    """Causal attention of this rank's queries over the keys and values of the whole sequence.

    Keys and values are all-gathered; their gradients are reduce-scattered.  On GPUs torch's `context_parallel` passes them
    around in a ring instead, in less memory; its attention has no kernel for CPUs.
    """

    def __init__(self, width: int, heads: int, cp: DeviceMesh) -> None:
        super().__init__()
        self.heads, self.cp = heads, cp
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(x, self.cp, [Shard(2)], run_check=False).full_tensor(grad_placements=[Partial()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape  # time: of this rank
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = self.whole(k), self.whole(v)
        begin = self.cp.get_local_rank() * time
        is_seen = torch.arange(k.size(2)) <= torch.arange(begin, begin + time)[:, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen.to(x.device))
        return x + self.out(y.transpose(1, 2).reshape(batch, time, width))


def main(steps: int = 50, width: int = 64, context_ranks: int = 2) -> list[float]:
    """Learn running means over sequences; return the losses, averaged over ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    num_ranks = dist.get_world_size()
    cp = min(context_ranks, num_ranks)
    mesh = init_device_mesh(device.type, (num_ranks // cp, cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = nn.Sequential(Attention(width, 4, mesh["cp"]), Attention(width, 4, mesh["cp"]), nn.Linear(width, width))
    shard_model(model)  # over all ranks: they hold different tokens, so gradients are averaged over dp and cp
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 16, width, generator=torch.Generator().manual_seed(step))
        target = x.cumsum(1) / torch.arange(1, 17)[:, None]
        mine = [  # rows of this dp rank, positions of this cp rank
            each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")].chunk(cp, dim=1)[mesh.get_local_rank("cp")]
            for each in (x, target)
        ]
        loss = nn.functional.mse_loss(model(mine[0].to(device)), mine[1].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / num_ranks)
    if dist.get_rank() == 0:
        print(f"dp x cp = {num_ranks // cp} x {cp}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
