"""ZeRO-2: parameters gathered once per step, gradients and optimizer state sharded; clipped, saved, loaded.

torchrun --nproc-per-node 2 examples/zero2.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from shardwise import clip_grad_norm_, shard_model
from shardwise.checkpoint import finish, load, save


def main(folder: str | None = None, steps: int = 50, width: int = 64) -> list[float]:
    """Train, save after half of the steps and at the end, load what was saved; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1)).to(device)
    shard_model(model, strategy="zero2", min_unit_bytes=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    if folder is None:  # a folder that all ranks see: rank 0 says which
        names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(names)
        folder = names[0]
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(32, width, generator=data).to(device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()  # gradients are averaged, and every rank keeps its part
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step in (steps // 2, steps):
            save(folder, state, step=step, keep=2, wait=False)  # written by a thread while training goes on
    finish(folder)  # waits, and raises what the last save failed of
    found = load(folder, state)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; loaded step {found.step} from {found.path}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
