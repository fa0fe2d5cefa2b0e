"""Publish weights to an inference engine, as RL trainers do after each phase: full tensors, one unit at a time.

torchrun --nproc-per-node 2 examples/publish_weights.py     # vLLM's load_weights takes the same pairs of name and tensor
"""

import os
import struct
import subprocess
import sys

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from shardwise import full_tensors, shard_model


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)], nn.Linear(width, 1))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def engine(width: int) -> None:
    """Receive weights until an empty message, then answer with the loss that they have."""
    model = build(width).to(torch.bfloat16).requires_grad_(False)
    weights = model.state_dict()
    while num_bytes := struct.unpack("q", sys.stdin.buffer.read(8))[0]:
        for name, tensor in safetensors.torch.load(sys.stdin.buffer.read(num_bytes)).items():
            weights[name].copy_(tensor)
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    print(loss_of(model, x.to(torch.bfloat16)).item())


def publish(model: nn.Module, width: int) -> float:
    """Send the weights of ``model`` to a new engine; return the loss that it reports, on rank 0."""
    command = [sys.executable, __file__, "engine", str(width)]
    sender = subprocess.Popen(command, stdin=-1, stdout=-1) if dist.get_rank() == 0 else None  # -1: a pipe
    for name, tensor in full_tensors(model, dtype=torch.bfloat16):  # all ranks gather, rank 0 sends
        if sender is not None:
            message = safetensors.torch.save({name: tensor.cpu()})
            sender.stdin.write(struct.pack("q", len(message)) + message)
    return 0.0 if sender is None else float(sender.communicate(struct.pack("q", 0))[0])


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train, publish, train on; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = shard_model(build(width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for step in range(steps + 1):
        loss = loss_of(model, x)
        if step == steps // 2:
            published = publish(model, width)  # between forward and backward, too
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; of the engine {published:.4f}, here {losses[steps // 2]:.4f}")
        assert abs(published / losses[steps // 2] - 1) < 0.02  # the same weights, in bfloat16
    return losses


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(int(sys.argv[2]))
    else:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        main()
        dist.destroy_process_group()
