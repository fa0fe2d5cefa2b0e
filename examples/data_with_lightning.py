"""Lightning with data that resumes exactly: run it twice, on 1, 2 or 4 ranks; the second run begins within an epoch.

torchrun --nproc-per-node 2 examples/data_with_lightning.py runs/data     # pip install lightning
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise import Microbatches, fully_shard
from shardwise.checkpoint import finish, load, save


class Checkpoints(lightning.Callback):
    """Load the newest checkpoint of ``folder`` before the first step; save after the last one."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.state = {"model": module, "optimizer": trainer.optimizers[0], "data": module.data}
        if Path(self.folder).is_dir():
            load(self.folder, self.state, fallback=True)

    def on_fit_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        module.data.step += trainer.global_step  # a loader of one's own has read them
        save(self.folder, self.state, step=module.data.step, keep=2)
        finish(self.folder)


class Module(lightning.LightningModule):
    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.steps, self.losses = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)),
            steps,
            [],
        )
        self.rows = TensorDataset(torch.randn(90, width), torch.randn(90, 1))
        self.data = Microbatches(self.rows, num_microbatches=4, microbatch_size=4, seed=0)

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> DataLoader:
        steps = range(self.data.step, self.data.step + self.steps)
        return DataLoader(self.rows, batch_sampler=self.data.batch_sampler(steps))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, steps: int = 20, width: int = 64) -> list[float]:
    """Train ``steps`` more steps, from the newest checkpoint in ``folder`` if there is one; return the losses of all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "use_distributed_sampler"), False)
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    options |= {"strategy": strategy, "callbacks": [Checkpoints(folder)], "accumulate_grad_batches": 4 // ranks}
    trainer = lightning.Trainer(devices=ranks, max_steps=steps, **options)
    trainer.fit(module := Module(width, steps))
    losses = trainer.strategy.reduce(torch.stack(module.losses).view(steps, -1).mean(1), reduce_op="mean")
    return losses.tolist()


if __name__ == "__main__":
    losses = main(sys.argv[1] if len(sys.argv) > 1 else "runs/data")
    print(f"loss {losses[0]:.5f} -> {losses[-1]:.5f}")
