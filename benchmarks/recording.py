"""Time steps of the small GPT that are recorded, as ``shardwise prove`` records them, beside steps that are not, in turns.

Run: ``python benchmarks/recording.py [--width 128 512] [--rounds 15] [--repeats 3] [--out FILE]``.  One process, one thread,
four blocks, AdamW, 1,024 tokens a step.  Seconds are CPU time of the process, which other programs on the host change less;
the cost is the ratio of medians, once per repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.prove.record import RunRecorder, Terms
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import build_gpt, next_byte_loss

LAYERS, BATCH, CONTEXT = 4, 8, 128


def measure(width: int, rounds: int) -> dict[str, Any]:
    """Return median seconds of steps in both ways, what recording costs, and the bytes on disk per tensor and step."""
    torch.manual_seed(0)
    model = build_gpt(ModelShape(layers=LAYERS, width=width, heads=width // 32, context=CONTEXT), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))

    def step() -> float:
        start = time.process_time()
        next_byte_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        recorder, seconds = RunRecorder(Terms(folder)), dict[str, list[float]](plain=[], recorded=[])
        for way, found in [*seconds.items()] * (rounds + 2):
            with recorder.install() if way == "recorded" else contextlib.nullcontext():
                found.append(step())
        line = Path(folder, "rank-0.jsonl").read_text().splitlines()[-1]
    plain, recorded = (statistics.median(found[2:]) for found in seconds.values())
    num = len(json.loads(line)["values"])
    cost = round(recorded / plain - 1, 3)
    return {
        "plain_s": plain,
        "recorded_s": recorded,
        "cost": cost,
        "tensors": num,
        "bytes_per_tensor": len(line) // num,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"width {width}": [measure(width, args.rounds) for _ in range(args.repeats)] for width in args.width}
    text = json.dumps(found, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
