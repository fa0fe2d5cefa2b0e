"""accelerate shards with torch's FSDP2; inside of use_in its plugin shards with shardwise.

torchrun --nproc-per-node 2 examples/with_accelerate.py     # pip install accelerate; on GPUs: it shards nothing on CPU ranks
"""

import torch
import torch.distributed.fsdp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

from shardwise import use_in


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(self.norm(x)))


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train a model that accelerate has prepared; return the losses of this rank."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(width) for _ in range(4)], nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with use_in(torch.distributed.fsdp):
        model, optimizer = accelerator.prepare(model, optimizer)
    data, losses = torch.Generator().manual_seed(accelerator.process_index), []
    for _ in range(steps):
        x = torch.randn(32, width, generator=data).to(accelerator.device)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"{type(model).__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
