"""Measure this machine: the operations of a dry run one by one, its memory, and a link between two of its ranks."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.consistency.process_groups import all_have_come
from shardwise.errors import ConfigError
from shardwise.fsdp.api import fully_shard
from shardwise.planner.dry_run import DryRun, OpCall, TensorSpec, dry_run, num_bytes_of, numel_of
from shardwise.planner.hardware import Hardware, Wire

# ---- The speed at which ranks of this host read each other's memory, and the host time of a unit: models without work,
# in processes of their own.

_SMALL, _LARGE = 1 << 10, 1 << 21  # elements
_UNITS, _LAYERS = 4, 2  # of a model that costs only host time; a layer has two parameters
_TIMES, _WARM = 12, 3
_PATIENCE_S = 120
_PROGRAM = (  # not multiprocessing, which would run the planning program again in every rank
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.planner.measure import run_rank; run_rank(*map(int, sys.argv[2:]))"
)


@dataclass(frozen=True, slots=True)
class OnOneHost:
    """The costs of units on ranks of this host.

    Attributes:
        wire: bytes are those of all sections that a rank copies; seconds are those of a collective with few bytes.
        host_s_per_unit: forward and backward of a unit, without the latency of its collectives.
        host_s_per_update: of the optimizer for one sharded parameter.
    """

    wire: Wire
    host_s_per_unit: float
    host_s_per_update: float


def measured_shared(ranks: int) -> OnOneHost:
    """Return the measurements of ``ranks`` processes, which run here for some seconds; the slowest of them counts.

    With one thread the rank's own CPU time counts, as for operations. Raises: ConfigError with the last output of a
    process that ended without measurements.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            words = [*command, str(rank), str(ranks), str(port)]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.append(stack.enter_context(process))
        for process in started:
            stack.callback(process.kill)
        found = [_seconds_of(process) for process in started]
    small, large, unit, update = (max(each) for each in zip(*found, strict=True))
    rate = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    latency = max(small - 4 * _SMALL / rate, 0.0)
    # two gathers and a reduction; plans add the latency of each
    return OnOneHost(Wire(rate, latency), max(unit - 3 * latency, 0.0), update)


def _seconds_of(process: subprocess.Popen[str]) -> list[float]:
    """Return what :func:`run_rank` has printed there."""
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
    return json.loads(said.strip().splitlines()[-1])


def run_rank(rank: int, ranks: int, port: int) -> None:
    """Print, as JSON, the seconds that were measured on one of the processes.

    They are the additional ones of a forward for a gather of few elements, and of many; of forward and backward for a unit
    with few elements; and of AdamW, fused, for one parameter with few elements.
    """
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=_PATIENCE_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=patience)
    print(json.dumps([_gather_s(_SMALL), _gather_s(_LARGE), *_unit_and_update_s()]), flush=True)
    dist.destroy_process_group()


def _gather_s(numel: int) -> float:
    """Return the seconds of one of several units, over which the forward's own time is spread."""
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


_LEAST_S, _MOST_CALLS, _LEAST_CALLS = 0.02, 50, 3
_COPIED_BYTES = 32 << 20
_CACHE_BYTES, _MOST_SETS = 32 << 20, 8


def measured(hardware: Hardware, runs: Iterable[DryRun], ranks: int = 1, threads: int = 1) -> Hardware:
    """Return ``hardware`` with the measured seconds of the operations of ``runs``, its memory and its links.

    ``ranks``: of the plan; as many of them as a CPU host has are started to measure how they read each other's memory,
    and operations are timed with ``threads``, as each rank will have them.

    Operations run on random tensors of their shapes, on the CPU or the GPU that ``hardware`` names; one that cannot be
    repeated alone keeps its estimate.  Cost: some hundredths of a second for each distinct operation.
    """
    near = min(ranks, hardware.ranks_per_host)
    shares_host = hardware.device == "cpu" and near > 1
    if shares_host:
        hardware = with_ranks(hardware, measured_shared(near))
    before = torch.get_num_threads()
    torch.set_num_threads(threads if shares_host else before)
    try:
        return _with_own(hardware, runs)
    finally:
        torch.set_num_threads(before)


def _with_own(hardware: Hardware, runs: Iterable[DryRun]) -> Hardware:
    device = torch.device(hardware.device)
    seconds = dict(hardware.op_seconds)
    for run in runs:
        for name, call in zip(run.profile.op_names, run.calls, strict=True):
            if name not in seconds:
                found = op_seconds(call, device)
                if found is not None:
                    seconds[name] = found
    rate = _copy_rate(device)
    is_host = device.type == "cpu"
    return replace(
        hardware,
        name=f"{hardware.name} (measured)",
        op_seconds=seconds,
        memory_bytes_per_s=2 * rate,
        inside=Wire(rate / 4, hardware.inside.latency_s) if is_host else hardware.inside,
        host_s_per_op=_host_s_per_op(device, hardware.host_s_per_op),
        cast_elements_per_s=_cast_rate(device),
        update_elements_per_s=_update_rate(device),
    )


def with_ranks(hardware: Hardware, found: OnOneHost) -> Hardware:
    """Return ``hardware`` with the joint measurements of ranks of this host."""
    return replace(
        hardware,
        shared=found.wire,
        host_s_per_unit=found.host_s_per_unit,
        host_s_per_update=found.host_s_per_update,
    )


def op_seconds(call: OpCall, device: torch.device) -> float | None:
    """Return the median seconds of an operation on tensors like its arguments; None if it cannot run on them."""
    try:
        # Rotate over as much memory as the caches: in a step, neither the operands nor the outputs of an operation are
        # in the caches. Results are kept for one rotation.
        sets = [_made((call.args, call.kwargs), device) for _ in range(_num_sets(call))]
        turns = cycle(sets)
        results = deque[object](maxlen=len(sets))

        def run() -> None:
            args, kwargs = next(turns)
            results.append(call.function(*args, **kwargs))

        for _ in range(len(sets) + 1):
            run()

        return _median_s(run, device)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _num_sets(call: OpCall) -> int:
    specs = [each for each in torch_private.leaves_of((call.args, call.kwargs)) if isinstance(each, TensorSpec)]
    num_bytes = sum(num_bytes_of(spec) for spec in specs)
    return max(1, min(_CACHE_BYTES // max(num_bytes, 1), _MOST_SETS))


def _made(tree: object, device: torch.device) -> tuple[tuple[object, ...], dict[str, object]]:
    def make(value: object) -> object:
        if isinstance(value, TensorSpec):
            return _tensor(value, device)
        if isinstance(value, (list, tuple)):
            items = [make(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {str(key): make(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return device if isinstance(value, torch.device) else value

    args, kwargs = make(tree)  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    return args, kwargs  # pyright: ignore[reportUnknownVariableType]


def _tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    numel = numel_of(spec)
    if spec.dtype.is_floating_point:
        flat = torch.randn(numel, device=device).mul_(0.1).to(spec.dtype)
    else:
        flat = torch.zeros(numel, dtype=spec.dtype, device=device)
    return flat.as_strided(spec.shape, spec.stride)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    # With one thread its own CPU time counts, so that other processes on the same cores do not distort it.
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < _LEAST_CALLS or (time.perf_counter() - begin < _LEAST_S and len(seconds) < _MOST_CALLS):
        before = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - before)
    return statistics.median(seconds)


def _copy_rate(device: torch.device) -> float:
    """Return the bytes per second of a copy within memory, read and written at the same time."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _COPIED_BYTES / _median_s(lambda: target.copy_(source), device)


def _cast_rate(device: torch.device) -> float:
    """Return elements per second from fp32 to bf16 and back, whichever is slower."""
    full, half = torch.ones(_COPIED_BYTES // 4, device=device), torch.ones(_COPIED_BYTES // 4, device=device).bfloat16()
    slower = max(_median_s(lambda: half.copy_(full), device), _median_s(lambda: full.copy_(half), device))
    return full.numel() / slower


def _update_rate(device: torch.device) -> float:
    """Return elements per second of AdamW, fused, over tensors of a mebibyte each."""
    params = [torch.nn.Parameter(torch.ones(1 << 18, device=device)) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)
    return sum(param.numel() for param in params) / _median_s(optimizer.step, device)


def _host_s_per_op(device: torch.device, default: float) -> float:
    """Return the seconds of modules, autograd and its graph per operation, in a model that computes little."""
    width, blocks = 8, 8
    layers = [
        part
        for _ in range(blocks)
        for part in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    ]
    model, inputs = nn.Sequential(*layers).to(device), torch.ones(4, width, device=device)
    run = dry_run(model, [inputs], lambda model, x: model(x).sum())
    counts: dict[int, int] = {}
    for stretch in run.profile.stretches:
        for number, count in stretch.work.ops:
            counts[number] = counts.get(number, 0) + count
    alone = {number: op_seconds(run.calls[number], device) for number in counts}
    operations = sum(count * (alone[number] or 0.0) for number, count in counts.items())

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    step()
    found = (_median_s(step, device) - operations) / sum(counts.values())
    return found if found > 0 else default
