"""Lightning's ModelParallelStrategy trains what configure_model shards: with shardwise here, which saves, too.

torchrun --nproc-per-node 2 examples/with_lightning.py runs/lightning     # run it twice     (pip install lightning)
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from shardwise import fully_shard
from shardwise.checkpoint import finish, load, save


class Checkpoints(lightning.Callback):
    """Load the newest checkpoint of ``folder`` before the first step; save every ``every`` steps and at the end."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = folder, every

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.state = {"model": module, "optimizer": trainer.optimizers[0]}
        if Path(self.folder).is_dir():
            module.begin = load(self.folder, self.state, fallback=True).step

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *_: object) -> None:
        if trainer.global_step % self.every == 0:
            save(self.folder, self.state, step=module.begin + trainer.global_step, keep=2, wait=False)

    def on_fit_end(self, *_: object) -> None:
        finish(self.folder)


class Module(lightning.LightningModule):
    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
        self.model, self.losses = nn.Sequential(*layers, nn.Linear(width, 1)), []
        self.width, self.steps, self.begin = width, steps, 0

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh)

    def train_dataloader(self) -> DataLoader:
        seeds = [torch.Generator().manual_seed(self.begin + number) for number in range(self.steps)]
        batches = [torch.randn(64, self.width, generator=seed).chunk(self.trainer.world_size) for seed in seeds]
        return DataLoader([batch[self.global_rank] for batch in batches], batch_size=None)

    def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
        loss = (self.model(x) - x.mean(1, keepdim=True)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 50, width: int = 64, ranks: int = 2, folder: str = "") -> list[float]:
    """Train a module of Lightning; return the losses of this rank."""
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "use_distributed_sampler"), False)
    options["callbacks"] = [Checkpoints(folder, every=steps)] if folder else []
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(strategy=strategy, devices=ranks, max_steps=steps, **options)
    trainer.fit(module := Module(width, steps))
    if trainer.is_global_zero:
        print(f"{type(module.model).__name__}: loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}")
    return [loss.item() for loss in module.losses]


if __name__ == "__main__":
    main(folder=sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
