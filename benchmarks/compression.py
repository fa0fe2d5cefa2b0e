"""What 8 bits cost in loss: the demo model trained to the end of a run in float32 and with int8, in turns.

``python benchmarks/compression.py [--ranks 4] [--steps 400] [--out FILE]`` trains a small byte-level GPT of
``shardwise train`` on the standard library's text over gloo, with the same batches, and prints
validation loss, bytes and the largest errors.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardwise import CompressionPolicy, set_default_transport, shard_model
from shardwise.recipes.config import ModelShape
from shardwise.recipes.data import find_sources, open_windows, split_sources, write_cache
from shardwise.recipes.gpt import build_gpt, next_byte_loss

POLICIES = {
    "float32": None,
    "int8": CompressionPolicy(gather="int8", reduce="int8"),
    "int8, no feedback": CompressionPolicy(gather="int8", reduce="int8", error_feedback=False),
    "bf16": CompressionPolicy(gather="bf16", reduce="bf16"),
}
SHAPE = ModelShape(layers=4, width=128, heads=4, context=64)
BATCH, VALIDATION = 8, 256


def train(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Train one model for each policy, in turns; rank 0 prints and writes what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", options.ranks), rank=rank, world_size=options.ranks
    )
    set_default_transport("collective")
    models: dict[str, nn.Module] = {}
    for name in options.policies:
        models[name] = shard_model(build_gpt(SHAPE, seed=0), min_unit_bytes=0, compression=POLICIES[name])
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    windows = open_windows(Path(folder) / "text" / "train.bin", SHAPE.context)
    seconds = dict.fromkeys(models, 0.0)
    for step in range(options.steps):
        chosen = torch.randint(len(windows), (options.ranks, BATCH), generator=torch.Generator().manual_seed(step))
        tokens, targets = windows.stack(chosen[rank].tolist())
        for name, model in models.items():
            begin = time.perf_counter()
            for group in optimizers[name].param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * max(0.1, 1 - step / options.steps)
            next_byte_loss(model, tokens, targets).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name] += time.perf_counter() - begin
    rows = [_row(name, model, seconds[name], options, folder) for name, model in models.items()]
    if rank == 0:
        for row in rows:
            row["against_float32_percent"] = 100 * (row["validation_loss"] / rows[0]["validation_loss"] - 1)
            print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"ranks": options.ranks, "steps": options.steps, "rows": rows}, indent=1))
    dist.destroy_process_group()


def _row(name: str, model: nn.Module, seconds: float, options: argparse.Namespace, folder: str) -> dict[str, object]:
    windows = open_windows(Path(folder) / "text" / "validation.bin", SHAPE.context)
    chosen = torch.randint(len(windows), (options.ranks, VALIDATION), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = next_byte_loss(model, *windows.stack(chosen[dist.get_rank()].tolist()))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    report = model.compression_report()
    traffic = [each for unit in report for each in (unit.gathers, unit.reductions)]
    plain = sum(each.plain_bytes for each in traffic)
    return {
        "policy": name,
        "validation_loss": loss.item(),
        "step_ms": 1e3 * seconds / options.steps,
        "bytes_sent_over_float32": sum(each.sent_bytes for each in traffic) / plain if plain else 1.0,
        "worst_gather_error": max((unit.gathers.worst_error for unit in report), default=0.0),
        "worst_reduce_error": max((unit.reductions.worst_error for unit in report), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["float32", "int8"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        description, sources = find_sources(None)
        (Path(folder) / "text").mkdir()
        write_cache(Path(folder) / "text", description, split_sources(sources))
        mp.start_processes(train, (options, folder), options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
