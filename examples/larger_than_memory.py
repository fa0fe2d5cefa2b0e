"""A step that is made to fit: blocks recompute, and state, parameters and gradients go to a disk, as far as it needs.

torchrun --nproc-per-node 2 examples/larger_than_memory.py "600 MiB"
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from shardwise import MemoryLimit, ShardedOptimizer, clip_grad_norm_, shard_model
from shardwise.checkpoint import load, save


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(memory: str = "4 GiB", steps: int = 20, width: int = 256) -> list[float]:
    """Train in ``memory`` of a rank, save and load; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(8)]).to(device)
    folder = tempfile.gettempdir()  # of a local disk; what is written there has no name, and ends with the process
    limit = MemoryLimit(memory, (torch.empty(1024, width),), folder=folder)
    shard_model(model, memory=limit)
    assert limit.plan is not None
    if dist.get_rank() == 0:
        print(limit.plan.why())
    optimizer = ShardedOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=1e-3, fused=True, offload=limit.offload
    )
    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        x = torch.randn(1024, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    state = {"model": model, "optimizer": optimizer}
    save(names[0], state, step=steps)  # it waits: a copy for a thread would take the memory
    load(names[0], state)  # with the same state in memory, on a disk, or anywhere else
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    losses = main(*sys.argv[1:])
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()
