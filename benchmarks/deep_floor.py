"""A step of ``fully_shard`` on many small parameters, beside its floor: what torch's AdamW takes more over DTensors.

The floor is a local step, and the difference of a step of torch's AdamW over the sharded parameters as DTensors, without any
engine, and over plain tensors of the same sizes.  Each pair is timed step by step in turns in one process per rank; medians.

Run: python benchmarks/deep_floor.py [--rounds 20] [--shape deep]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from bench_contenders import CONTENDERS, BenchConfig, adamw, build_trained, make_setup
from bench_timing import take_step
from divergence import RANKS, in_turns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shape", default="deep")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        sys.exit(subprocess.run([*command, __file__, *sys.argv[1:]]).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ("local", "shardwise full")
    config = BenchConfig(options.shape, RANKS, batch=2, rounds=options.rounds, seed=0, backend="gloo", names=names)
    setup, mesh = make_setup(config), init_device_mesh("cpu", (RANKS,))
    local, full = [build_trained(CONTENDERS[name], setup.build_model(), setup) for name in names]
    plain, dtensors = nn.Module(), nn.Module()
    for number, param in enumerate(setup.build_model().parameters()):
        shard = distribute_tensor(param.detach().clone(), mesh, [Shard(0)])
        for module, value in ((plain, shard.to_local().clone()), (dtensors, shard)):
            module.register_parameter(str(number), each := nn.Parameter(value))
            each.grad = torch.ones_like(value)
    steps = [adamw(module).step for module in (plain, dtensors)]
    local_ms, full_ms, ratio = in_turns(lambda: take_step(local, setup), lambda: take_step(full, setup), options.rounds)
    plain_ms, dtensor_ms, _ = in_turns(steps[0], steps[1], options.rounds)
    if not dist.get_rank():
        floor = (local_ms + dtensor_ms - plain_ms) / local_ms
        print(f"{options.shape}: local {local_ms:.1f} ms, shardwise full {full_ms:.1f} ms, full / local {ratio:.3f}")
        print(
            f"AdamW over plain shards {plain_ms:.1f} ms, over DTensors {dtensor_ms:.1f} ms; floor / local {floor:.3f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
