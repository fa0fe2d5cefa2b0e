"""From which size on the parameters of a unit are better off as messages than in gloo's collectives.

``python benchmarks/small_units.py [--ranks 2] [--rounds 14]``: a step of layers of one size whose tensors all go as
messages, however small, in turns with the same step over collectives; medians, by bytes of a unit.
``shardwise/collectives/host/send_recv.py::LEAST_BYTES_ON_HOST`` is where the ratio passes one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.collectives.host import send_recv
from shardwise.collectives.routes import Transport
from shardwise.testing import WorkerPool

LAYERS = {128: 12, 181: 12, 256: 12, 362: 12, 512: 12, 724: 8, 1024: 6}  # how many, by their width
WAYS: dict[str, Transport] = {"messages": "gloo", "collectives": "collective"}
WARM = 3


def built(width: int, transport: Transport) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS[width])])
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model).set_transport(transport)
    return model


def steps(rounds: int) -> dict[int, dict[str, float]]:
    """Return the median seconds of a step by width and way."""
    torch.set_num_threads(1)
    found: dict[int, dict[str, float]] = {}
    with mock.patch.object(send_recv, "LEAST_BYTES_ON_HOST", 0):
        for width in LAYERS:
            models = {way: built(width, transport) for way, transport in WAYS.items()}
            inputs = torch.randn(8, width)
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(WARM + rounds):
                for way, model in models.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    model(inputs).square().mean().backward()
                    model.zero_grad()
                    if number >= WARM:
                        taken[way].append(time.perf_counter() - begin)
            found[width] = {way: statistics.median(each) for way, each in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    with WorkerPool(max_ranks=options.ranks) as pool:
        found = pool.run(steps, num_ranks=options.ranks, timeout_s=600, rounds=options.rounds)[0]
    for width, ms in found.items():
        ratio = ms["messages"] / ms["collectives"]
        times = ", ".join(f"{way} {1e3 * each:7.1f} ms" for way, each in ms.items())
        print(f"{width * width * 4 / 1024:6.0f} KiB a unit: {times}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
