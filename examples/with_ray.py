"""Ray Train starts the ranks: a TorchTrainer whose workers shard with shardwise and save to storage that all of them see.

python examples/with_ray.py 2 runs/ray     # number of workers, folder; run it twice     (pip install 'ray[train]')
"""

import sys
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn

from shardwise import shard_model
from shardwise.checkpoint import finish, load, save


def train(config: dict) -> tuple[int, float]:
    """Run on every worker, return the last step and loss; Ray has joined the process group and chosen the GPU of this one."""
    device, folder = ray.train.torch.get_device(), config["folder"]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    # A worker that Ray starts again after a failure, on any number of workers, goes on here.
    begin = load(folder, state, fallback=True).step if Path(folder).is_dir() else 0
    for step in range(begin + 1, begin + config["steps"] + 1):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).chunk(dist.get_world_size())[
            dist.get_rank()
        ]
        loss = (model(x.to(device)) - x.to(device).mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach())
        if step % 10 == 0:
            save(folder, state, step=step, keep=2, wait=False)
            ray.train.report({"step": step, "loss": mean.item() / dist.get_world_size()})
    finish(folder)
    return step, mean.item() / dist.get_world_size()


def main(num_workers: int, folder: str, steps: int = 20) -> None:
    """Train on workers of Ray, local or of a cluster."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(Path(folder).resolve()), "steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=torch.cuda.is_available()),
    )
    step, loss = trainer.fit().return_value
    print(f"{num_workers} worker(s), step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2] if len(sys.argv) > 2 else "runs/ray")
