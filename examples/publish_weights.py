"""An RL loop in small: four ranks train, and two inference engines follow their weights, of which they read what has changed.

torchrun --nproc-per-node 4 examples/publish_weights.py     # vLLM's load_weights takes what reader.changed_tensors() returns
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from shardwise import WeightPublisher, WeightReader, shard_model


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)], nn.Linear(width, 1))


def batch_of(width: int) -> torch.Tensor:
    return torch.randn(32, width, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def engine(folder: str, width: int) -> None:
    """Follow the versions in ``folder`` until the trainer ends; then print the newest, and the loss of its weights."""
    model = build(width).to(torch.bfloat16).requires_grad_(False)
    reader, trainer = WeightReader(folder), os.getppid()
    while os.getppid() == trainer and not os.path.exists(f"{folder}/done"):
        reader.advance(model.state_dict())  # all of a version, or nothing
        time.sleep(0.01)
    print(reader.version, loss_of(model, batch_of(width).bfloat16()).item())


def main(steps: int = 50, width: int = 64, num_engines: int = 2) -> list[float]:
    """Train, and publish every few steps; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = shard_model(build(width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(places)
    command = [sys.executable, __file__, "engine", places[0], str(width)]
    engines = [subprocess.Popen(command, stdout=-1) for _ in range(num_engines * (dist.get_rank() == 0))]  # -1: a pipe
    publisher = WeightPublisher(model, places[0], dtype=torch.bfloat16, anchor_every=10)
    x, losses = batch_of(width).to(device), []
    for step in range(steps + 1):
        loss = loss_of(model, x)
        losses.append(loss.item())
        if step % 5 == 0 or step == steps:
            version = publisher.publish()  # each rank writes what has changed of its own shards
            publisher.wait_for(num_engines, version)  # before engines generate the next samples
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    publisher.close()
    open(f"{places[0]}/done", "w").close()
    for each in engines:
        newest, found = each.communicate()[0].split()
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; an engine has version {int(newest)}: {float(found):.4f}")
        assert abs(float(found) / losses[-1] - 1) < 0.1  # the same weights, in bfloat16
    return losses


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(sys.argv[2], int(sys.argv[3]))
    else:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        main()
        dist.destroy_process_group()
