"""accelerate with data that resumes exactly: run it twice, on 1, 2 or 4 ranks; the second run begins within an epoch.

torchrun --nproc-per-node 2 examples/data_with_accelerate.py runs/data     # pip install accelerate
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from shardwise import Microbatches
from shardwise.checkpoint import finish, load, save


def main(folder: str, steps: int = 20, width: int = 64) -> list[float]:
    """Train ``steps`` more steps, from the newest checkpoint in ``folder`` if there is one; return the losses of all ranks."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = TensorDataset(torch.randn(90, width), torch.randn(90, 1))
    data = Microbatches(rows, num_microbatches=4, microbatch_size=4, seed=0)
    model, optimizer = accelerator.prepare(model, optimizer)  # data is not prepared: each rank reads its own
    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer.optimizer, "data": data}
    if Path(folder).is_dir():
        load(folder, state, fallback=True)
    begin, losses = data.step, []
    for step in range(begin, begin + steps):
        batches = [*data.of_step(step)]
        total = torch.zeros((), device=accelerator.device)
        for number, (x, y) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else accelerator.no_sync(model):
                loss = (model(x.to(accelerator.device)) - y.to(accelerator.device)).square().mean() / len(batches)
                accelerator.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "mean").item())
    save(folder, state, step=data.step, keep=2)
    finish(folder)
    accelerator.print(f"steps {begin + 1} to {data.step}: loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/data")
