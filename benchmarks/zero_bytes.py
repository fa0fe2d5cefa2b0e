"""Count the bytes that one step moves: DDP with torch's ZeroRedundancyOptimizer, and with ours.

Run: ``python benchmarks/zero_bytes.py [--num-ranks 2] [--width 512]``.  Counts come from the c10d operators as torch
dispatches them (DDP's own all-reduce included), not from timings, so they repeat exactly.

One unit of volume is what a broadcast of all parameters from their owners moves: (W - 1) / W of the parameters' bytes,
sent per rank on average.  An all-reduce is two units (reduce-scatter and all-gather), an all-to-all one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.api.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.api.zero import ZeroRedundancyOptimizer

UNITS_PER_BYTE = {"allreduce_": 2, "broadcast_": 1, "reduce_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1}


class CountBytes(TorchDispatchMode):
    """Count units of volume of the collectives issued inside, from the sizes of their inputs.

    ``units`` maps the operator's name to bytes times units; an all-to-all counts what this rank puts in, of which 1/W
    stays here, as in a ring all-reduce.  The extra factor (W - 1) / W is common to all and left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            # (output, input, ...) for the base variants, (tensors, ...) for the rest
            counted = args[1] if name in ("alltoall_base_", "_reduce_scatter_base_") else args[0]
            size = sum(t.numel() * t.element_size() for t in tree_leaves(counted) if isinstance(t, torch.Tensor))
            self.units[name] = self.units.get(name, 0.0) + UNITS_PER_BYTE.get(name, 1) * size
        return func(*args, **(kwargs or {}))


def count_step(make: Callable[[DDP], tuple[Any, bool]], width: int, num_steps: int = 4) -> dict[str, Any]:
    """Train a small model; return the units of the last step per operator, and bytes of optimizer state held."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(6)])
    ddp = DDP(model, bucket_cap_mb=1)
    optimizer, steps_itself = make(ddp)
    counter = CountBytes()
    for _ in range(num_steps):
        counter = CountBytes()
        with counter:
            ddp.zero_grad()
            ddp(torch.randn(2, width)).square().mean().backward()
            if not steps_itself:
                optimizer.step()
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    local = getattr(optimizer, "optim", optimizer)
    state_bytes = sum(
        value.numel() * value.element_size()
        for values in local.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    return {
        "units": round(sum(counter.units.values()) / num_bytes, 4),
        "by_operator": {name: round(units / num_bytes, 4) for name, units in sorted(counter.units.items())},
        "state_bytes_share": round(state_bytes / (2 * num_bytes), 4),
    }


def torch_zero(ddp: DDP) -> tuple[Any, bool]:
    """DDP's all-reduce, then torch's ZeroRedundancyOptimizer."""
    return TorchZero(ddp.parameters(), torch.optim.AdamW, lr=1e-3), False


def ours_after(ddp: DDP) -> tuple[Any, bool]:
    """DDP's all-reduce, then our step."""
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3), False


def ours_owner(ddp: DDP) -> tuple[Any, bool]:
    """Gradients only to their owners, stepping at the end of backward."""
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero, reduce="owner"))
    return zero, True


def ours_owner_even(ddp: DDP) -> tuple[Any, bool]:
    """The same, interleaved, with the even partition."""
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition="even", lr=1e-3
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(None, ddp, zero, reduce="owner"))
    return zero, True


WAYS = {way.__name__: way for way in (torch_zero, ours_after, ours_owner, ours_owner_even)}


def count_all(width: int) -> dict[str, dict[str, Any]]:
    """Return the counts of every way, on this rank of the default group."""
    return {name: count_step(way, width) for name, way in WAYS.items()}


def _main(rank: int, num_ranks: int, width: int, store_path: str, out: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = count_all(width)
    ranks: list[Any] = [None] * num_ranks
    dist.all_gather_object(ranks, found)
    dist.destroy_process_group()
    if rank == 0:
        rows = {
            name: {**found[name], "max_state_bytes_share": max(r[name]["state_bytes_share"] for r in ranks)}
            for name in found
        }
        text = json.dumps({"num_ranks": num_ranks, "width": width, "ways": rows}, indent=2)
        print(text)
        if out:
            Path(out).write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", default="", help="file for the result as JSON")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(
            _main, (args.num_ranks, args.width, str(Path(directory) / "store"), args.out), args.num_ranks
        )
