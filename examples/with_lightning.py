"""Lightning's ModelParallelStrategy trains what configure_model shards: with shardwise here.

torchrun --nproc-per-node 2 examples/with_lightning.py     # pip install lightning
"""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from shardwise import fully_shard


class Module(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)]
        self.model, self.losses = nn.Sequential(*layers, nn.Linear(width, 1)), []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
        loss = (self.model(x) - x.mean(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 50, width: int = 64, ranks: int = 2) -> list[float]:
    """Train a module of Lightning; return the losses of this rank."""
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        devices=ranks,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module(width)
    rows = torch.randn(32 * ranks * steps, width, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(rows, batch_size=32))
    if trainer.is_global_zero:
        print(f"{type(module.model).__name__}: loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}")
    return module.losses


if __name__ == "__main__":
    main()
