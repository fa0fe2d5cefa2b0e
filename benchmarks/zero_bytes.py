"""Count the bytes that one step moves: DDP with torch's ZeroRedundancyOptimizer, and with ours.

Run: ``python benchmarks/zero_bytes.py [--num-ranks 2] [--width 512]``.  Counts come from the c10d operators as torch
dispatches them (DDP's own all-reduce included), not from timings, so they repeat exactly.

One unit of volume is what a broadcast of all parameters from their owners moves: (W - 1) / W of the parameters' bytes,
sent per rank on average.  An all-reduce is two units (reduce-scatter and all-gather), an all-to-all one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from over_ranks import Knob, measure_over_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import shard_model
from shardwise.torch_private import local_of
from shardwise.zero.optimizer import ZeroRedundancyOptimizer
from shardwise.zero.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

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


def count_step(make: Callable[[Any], tuple[Any, bool]], width: int, num_steps: int = 4) -> dict[str, Any]:
    """Train a small model; return the units of the last step per operator, and bytes of optimizer state held."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(6)])
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = model if make is ours_zero2 else DDP(model, bucket_cap_mb=1)
    optimizer, steps_itself = make(trained)
    counter = CountBytes()
    for _ in range(num_steps):
        counter = CountBytes()
        with counter:
            trained.zero_grad()
            trained(torch.randn(2, width)).square().mean().backward()
            if not steps_itself:
                optimizer.step()
    local = getattr(optimizer, "optim", optimizer)
    state_bytes = sum(
        local_of(value).numel() * value.element_size()
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


def ours_in_backward(ddp: DDP) -> tuple[Any, bool]:
    """DDP's all-reduce, stepping at the end of backward."""
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    return zero, True


def ours_interleaved(ddp: DDP) -> tuple[Any, bool]:
    """The same, interleaved, with the even partition."""
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition="even", lr=1e-3
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(None, ddp, zero))
    return zero, True


def ours_zero2(model: nn.Module) -> tuple[Any, bool]:
    """ZeRO-2: parameters gathered once, gradients reduce-scattered, by the operators of torch's backend."""
    sharded = shard_model(model, strategy="zero2", min_unit_bytes=0)
    sharded.set_transport("collective")
    return torch.optim.AdamW(model.parameters(), lr=1e-3), False


WAYS = {way.__name__: way for way in (torch_zero, ours_after, ours_in_backward, ours_interleaved, ours_zero2)}


def count_all(width: int) -> dict[str, dict[str, Any]]:
    """Return the counts of every way, on this rank of the default group."""
    return {name: count_step(way, width) for name, way in WAYS.items()}


def _summary(every: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ways = {
        name: {**found, "max_state_bytes_share": max(each[name]["state_bytes_share"] for each in every)}
        for name, found in every[0].items()
    }
    return {"ways": ways}


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("width", 512), count_all, _summary)
