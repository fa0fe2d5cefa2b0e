"""How fast ranks of this host read each other's memory: forwards of a model without work, in processes of their own."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shardwise.api.fully_shard import fully_shard
from shardwise.comm.sync import all_have_come
from shardwise.errors import ConfigError
from shardwise.planner.hardware import Wire

_SMALL, _LARGE = 1 << 10, 1 << 21  # elements
_TIMES, _WARM = 12, 3
_PATIENCE_S = 120
_PROGRAM = (  # not multiprocessing, which would run the program that plans once more in every rank
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.planner.measure_shared import run_rank; run_rank(*map(int, sys.argv[2:]))"
)


def measured_shared(ranks: int) -> Wire:
    """Return the link of ``ranks`` processes, started here for some seconds: the slowest of them counts.

    Bytes are those of all sections that a rank copies; with one thread the rank's own time counts, as for operations.
    Raises: ConfigError with the last words of a process that ended without a figure.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        seconds = [_seconds_of(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    small, large = (max(each[place] for each in seconds) for place in (0, 1))
    rate = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    return Wire(rate, max(small - 4 * _SMALL / rate, 0.0))


def _seconds_of(process: subprocess.Popen[str]) -> list[float]:
    try:
        said, complained = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        said, complained = "", f"nothing within {_PATIENCE_S} s"
    if process.returncode or not said.strip():
        last = (complained.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(
            f"shared memory between ranks of this host cannot be measured: {last}; give 'shared' in a hardware file, or plan "
            "without measuring"
        )
    return [float(each) for each in json.loads(said.strip().splitlines()[-1])]


def run_rank(rank: int, ranks: int, port: int) -> None:
    """Be one of the processes: print the median seconds by which an all-gather makes a forward longer, for both sizes."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=_PATIENCE_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=patience)
    seconds: list[float] = []
    for numel in (_SMALL, _LARGE):
        plain, sharded = _Idle(numel), fully_shard(_Idle(numel))
        alone, together = _forward_s(plain), _forward_s(sharded)
        seconds.append(max(together - alone, 0.0))
    print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


class _Idle(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


@torch.no_grad()
def _forward_s(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
    x, world = torch.zeros(1), dist.group.WORLD
    assert world is not None
    seconds: list[float] = []
    for _ in range(_TIMES):
        all_have_come(world)
        begin = time.thread_time()
        model(x)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds[_WARM:])
