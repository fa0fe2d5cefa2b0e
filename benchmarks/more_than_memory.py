"""One step of a model whose states exceed the memory of this machine, with optimizer state on disk.

Run: ``python benchmarks/more_than_memory.py [--num-ranks 2] [--blocks 120] [--out FILE]``; it needs 24 bytes of disk per
parameter in the folder for temporary files.  Parameters are in bf16; the state of the optimizer, a user's own, is an fp32
copy of them and AdamW's two averages of it: with gradients 16 bytes per parameter, of which 4 are in memory.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from over_ranks import Knob, measure_over_ranks
from torch import nn

from shardwise import OptimizerOffload, ShardedOptimizer, fully_shard
from shardwise.one_host import host_memory_bytes

WIDTH = 4096


class MixedAdamW(torch.optim.Optimizer):
    """AdamW over bf16 parameters, with an fp32 copy of them in its state."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            (slow, fast), lr, eps = group["betas"], group["lr"], group["eps"]
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                if not state:
                    averages = (torch.zeros_like(param, dtype=torch.float32) for _ in range(2))
                    state |= {
                        "step": 0,
                        "master": param.detach().float(),
                        **dict(zip(("mean", "square"), averages, strict=True)),
                    }
                state["step"] += 1
                gradient = param.grad.float()
                state["mean"].lerp_(gradient, 1 - slow)
                state["square"].mul_(fast).addcmul_(gradient, gradient, value=1 - fast)
                scale = (1 - fast ** state["step"]) ** 0.5
                root = gradient.copy_(state["square"]).sqrt_().div_(scale).add_(eps)
                state["master"].addcdiv_(state["mean"], root, value=-lr / (1 - slow ** state["step"]))
                param.copy_(state["master"])


def measure_rank(blocks: int) -> dict[str, Any]:
    """Make one step, and a second one, which reads the state; return what it took."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(blocks)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.to_local().normal_(std=WIDTH**-0.5, generator=torch.Generator().manual_seed(number))  # pyright: ignore
    data = torch.randn(16, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(dist.get_rank()))
    with tempfile.TemporaryDirectory() as folder:
        offload = OptimizerOffload(folder=folder, undo=False)
        optimizer = ShardedOptimizer(dict(model.named_parameters()), MixedAdamW, offload=offload)
        losses: list[float] = []
        seconds: list[float] = []
        for _ in range(2):
            began = time.perf_counter()
            loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            losses.append(float(loss))
            seconds.append(round(time.perf_counter() - began, 1))
    numel = sum(param.numel() for param in model.parameters())
    return {
        "parameters": numel,
        "losses": losses,
        "s per step": seconds,
        "peak resident GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's figures, the states, and the memory that there is."""
    of = every[0]
    states = {
        "states GB": round(16 * of["parameters"] / 1e9, 1),
        "memory of the host GB": (host_memory_bytes() or 0) / 1e9,
    }
    return of | states | {"free disk GB": round(os.statvfs(tempfile.gettempdir()).f_bavail * 4096 / 1e9, 1)}


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("blocks", 120), measure_rank, summary)
