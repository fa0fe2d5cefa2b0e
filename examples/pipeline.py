"""A pipeline of two stages, each sharded over its data ranks: torch's stages and schedules, unchanged.

torchrun --nproc-per-node 4 examples/pipeline.py     # two stages of two ranks; with 2 ranks, two stages of one
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardwise import fully_shard

STAGES, MICROBATCHES, ROWS = 2, 4, 32


def mse(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().mean()


def main(steps: int = 50, width: int = 64) -> list[float]:
    """Train over a (pp, dp) mesh; return the losses of the last stage, on all ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    mesh = init_device_mesh(device.type, (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
    stage, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(stage)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(width, 1 if stage == STAGES - 1 else width)).to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)  # whole over the microbatches of a step
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    pipeline = PipelineStage(model, stage, STAGES, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=mse)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, means = torch.Generator().manual_seed(data_rank), []  # the stages of one pipeline draw the same
    for _ in range(steps):
        x, losses = torch.randn(ROWS, width, generator=data).to(device), []
        inputs = (x,) if stage == 0 else ()
        schedule.step(*inputs, target=x.mean(1, keepdim=True), losses=losses)  # gradients are reduced once
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack(losses).mean() if losses else torch.zeros((), device=device))
    found = torch.stack(means).detach() / mesh["dp"].size()
    dist.all_reduce(found)  # of the data ranks of the last stage; the others have none
    if dist.get_rank() == 0:
        print(f"pp x dp = {STAGES} x {mesh['dp'].size()}: loss {found[0]:.4f} -> {found[-1]:.4f}")
    return found.tolist()


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
