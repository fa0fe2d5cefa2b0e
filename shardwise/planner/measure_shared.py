"""How fast ranks of this host read each other's memory, and what the host takes for a unit: models without work, in
processes of their own.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shardwise.api.fully_shard import fully_shard
from shardwise.comm.sync import all_have_come
from shardwise.errors import ConfigError
from shardwise.planner.hardware import Wire

_SMALL, _LARGE = 1 << 10, 1 << 21  # elements
_UNITS, _LAYERS = 4, 2  # of a model that has nothing but host time; a layer has two parameters
_TIMES, _WARM = 12, 3
_PATIENCE_S = 120
_PROGRAM = (  # not multiprocessing, which would run the program that plans once more in every rank
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.planner.measure_shared import run_rank; run_rank(*map(int, sys.argv[2:]))"
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one of the ranks has found.

    Attributes:
        small_s, large_s: by which a gather makes a forward longer, of few elements and of many.
        unit_s: by which a unit makes forward and backward longer, with few elements.
        update_s: of AdamW, fused, for one parameter with few elements.
    """

    small_s: float
    large_s: float
    unit_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class OnOneHost:
    """What ranks of this host take to run units.

    Attributes:
        wire: bytes are those of all sections that a rank copies; the seconds of a collective of few.
        host_s_per_unit: forward and backward of a unit, beside the latency of its collectives.
        host_s_per_update: of the optimizer for one sharded parameter.
    """

    wire: Wire
    host_s_per_unit: float
    host_s_per_update: float


def measured_shared(ranks: int) -> OnOneHost:
    """Return the figures of ``ranks`` processes, started here for some seconds: the slowest of them counts.

    With one thread the rank's own time counts, as for operations.
    Raises: ConfigError with the last words of a process that ended without figures.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    with ExitStack() as stack:
        started = [stack.enter_context(_start([*command, str(rank), str(ranks), str(port)])) for rank in range(ranks)]
        for process in started:
            stack.callback(process.kill)
        return _slowest([_figures_of(process) for process in started])


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _slowest(found: list[Figures]) -> OnOneHost:
    small, large = max(each.small_s for each in found), max(each.large_s for each in found)
    rate = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    latency = max(small - 4 * _SMALL / rate, 0.0)
    # Two gathers and a reduction, each of which takes the latency wherever it is planned.
    unit = max(max(each.unit_s for each in found) - 3 * latency, 0.0)
    return OnOneHost(Wire(rate, latency), unit, max(each.update_s for each in found))


def _figures_of(process: subprocess.Popen[str]) -> Figures:
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
    return Figures(**json.loads(said.strip().splitlines()[-1]))


def run_rank(rank: int, ranks: int, port: int) -> None:
    """Be one of the processes: print what it finds, as JSON."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=_PATIENCE_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=patience)
    found = Figures(_gather_s(_SMALL), _gather_s(_LARGE), *_unit_and_update_s())
    print(json.dumps(asdict(found)), flush=True)
    dist.destroy_process_group()


def _gather_s(numel: int) -> float:
    """Return the seconds for one of several units, so that what a forward takes for itself is spread."""
    x = torch.zeros(1, device="cpu")
    with torch.no_grad():
        plain, sharded = ([_NoWork(numel) for _ in range(_UNITS)] for _ in range(2))
        alone, together = nn.Sequential(*plain), fully_shard(nn.Sequential(*(fully_shard(each) for each in sharded)))
        return max(_own_s(lambda: together(x)) - _own_s(lambda: alone(x)), 0.0) / _UNITS


def _unit_and_update_s() -> tuple[float, float]:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(_LAYERS))) for _ in range(_UNITS)))

    plain, sharded = build(), build()
    for unit in sharded:
        fully_shard(unit)
    fully_shard(sharded)
    x = torch.zeros(1, 8, device="cpu")
    alone, together = _own_s(lambda: plain(x).sum().backward()), _own_s(lambda: sharded(x).sum().backward())
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    return max(together - alone, 0.0) / _UNITS, _own_s(optimizer.step) / (2 * _LAYERS * _UNITS)


class _NoWork(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


def _own_s(call: Callable[[], object]) -> float:
    world = dist.group.WORLD
    assert world is not None
    seconds: list[float] = []
    for _ in range(_TIMES):
        all_have_come(world)
        begin = time.thread_time()
        call()
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds[_WARM:])
