"""Training between hosts: every API of ours beside torch's, over a cable of a known rate.

``python benchmarks/cable.py [--hosts 2] [--ranks-per-host 1] [--rate 1gbit] [--shape wide] [--rounds 7] [--out FILE]``
makes a network namespace per host, joins them by virtual cables and a switch whose every end passes ``--rate`` (``tbf``),
and steps all contenders in turns.  It needs ``ip`` and ``tc`` (Debian: iproute2) and a kernel that lets this user make
namespaces; where it does not, it says so and stops.  Hosts share the machine's cores: compare with "local", which has the
same number of processes and sends nothing.

Started by a launcher that sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, it measures
real hosts; on each of them:
``torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks/cable.py``.

What is printed and written, per contender: milliseconds of a step (medians of the slowest rank, between barriers), the
milliseconds of it in which the training thread was not on a core (mean over ranks: waiting for bytes, for other ranks, or
for a core), and the MiB that a host sends and receives in a step, from the counters of its interfaces, headers included.
A turn is one step that does not count and ``--steps`` that do, one after the other without a barrier: what a step leaves to
the next one (parameters on their way) is paid for by the next one, and what the last one leaves ends before others step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from bench_contenders import (
    CONTENDERS,
    LR,
    SHAPES,
    BenchConfig,
    Contender,
    Setup,
    Trained,
    build_trained,
    make_setup,
)
from bench_figures import describe_machine, find_wrong_losses
from bench_timing import WARM_UP, take_step, wait_for_all
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from shardwise import CompressionPolicy, ZeroRedundancyOptimizer, hook_with_zero_step, replicate, shard_model
from shardwise.consistency import process_groups
from shardwise.recipes.gpt import GPT

# In its own network the first address is free, whatever the machine's networks are.
_ADDRESS, _PORT = "10.98.0.1", 29400
_INT8 = CompressionPolicy(gather="int8", reduce="int8")
_INT8_REDUCED = CompressionPolicy(reduce="int8")
_MIB = 1 << 20
_FLAT = "shardwise recommended (gloo)"  # messages alone: another way than the default where hosts have several ranks

_MAKE_HOSTS = """
set -e
hosts=$1 rate=$2 burst=$3
ip link set lo up
ip link add name hub type bridge
ip link set hub up
pids=
trap 'kill $pids' EXIT
for host in $(seq $hosts); do
    unshare --net sleep 7200 & pid=$!
    pids="$pids $pid"
    for _ in $(seq 100); do [ "$(readlink /proc/$pid/ns/net)" = "$(readlink /proc/self/ns/net)" ] && sleep 0.05 || break; done
    ip link add name port$host type veth peer name cable$host
    ip link set port$host master hub up
    ip link set cable$host netns $pid
    tc qdisc add dev port$host root tbf rate $rate burst $burst latency 50ms
    nsenter --target $pid --net sh -e -c "
        ip link set lo up
        tc qdisc add dev cable$host root tbf rate $rate burst $burst latency 50ms
        ip address add 10.98.0.$host/24 dev cable$host
        ip link set cable$host up"
done
echo $pids
read end || true
"""


def _int8_recommended(model: GPT, setup: Setup) -> nn.Module:
    return shard_model(model, mesh=setup.mesh, compression=_INT8)


def _gathered_ahead(num_bytes: int) -> Callable[[GPT, Setup], nn.Module]:
    def wrap(model: GPT, setup: Setup) -> nn.Module:
        sharded = shard_model(model, mesh=setup.mesh)
        sharded.set_gather_ahead_bytes(num_bytes)
        return sharded

    return wrap


def _zero_in_backward(model: nn.Module) -> Optimizer:
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, partition="even", overlap_with_ddp=True, lr=LR)
    assert isinstance(model, DDP)
    model.register_comm_hook(None, hook_with_zero_step(None, model, zero))
    return zero


def _int8_replicated(model: GPT, setup: Setup) -> nn.Module:
    for block in model.blocks:
        replicate(block, mesh=setup.mesh, compression=_INT8_REDUCED)
    replicate(model, mesh=setup.mesh, compression=_INT8_REDUCED)
    return model


def _contenders() -> dict[str, Contender]:
    chosen = (
        "local", "DDP + bucket view", "FSDP2", "FSDP2 bf16", "torch ZeRO + bucket view", "shardwise full",
        "shardwise recommended", "shardwise recommended bf16", "shardwise replicate", "shardwise replicate whole",
        "shardwise ZeRO-1", "shardwise ZeRO-2",
    )  # fmt: skip
    found = {name: CONTENDERS[name] for name in chosen}
    recommended, replicated = found["shardwise recommended"], found["shardwise replicate"]
    zero_1 = found["shardwise ZeRO-1"]
    for each in (
        replace(zero_1, name="shardwise ZeRO-1 in backward", build_optimizer=_zero_in_backward),
        replace(recommended, name="shardwise recommended ahead", wrap=_gathered_ahead(0)),
        replace(recommended, name="shardwise recommended far ahead", wrap=_gathered_ahead(1 << 40)),
        replace(recommended, name=_FLAT, transport="gloo"),
        replace(recommended, name="shardwise recommended int8", wrap=_int8_recommended, dtype="bf16"),
        replace(replicated, name="shardwise replicate int8", wrap=_int8_replicated, dtype="bf16"),
    ):
        found[each.name] = each
    return found


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes over all interfaces of this network but the loopback device, headers counted, since it is there."""

    sent: int
    received: int


def read_counters(table: str) -> Counters:
    """Return what ``table``, the text of /proc/net/dev, says.

    Example:
        >>> read_counters("head\\nhead\\n lo: 7 0 0 0 0 0 0 0 7 0\\n eth0: 50 1 0 0 0 0 0 0 60 1\\n")
        Counters(sent=60, received=50)
    """
    rows = [line.partition(":") for line in table.splitlines()[2:]]
    counts = [fields.split() for name, _, fields in rows if name.strip() != "lo"]
    return Counters(sum(int(row[8]) for row in counts), sum(int(row[0]) for row in counts))


def _counters() -> Counters:
    return read_counters(Path("/proc/self/net/dev").read_text())


# ---- one rank ----


def measure(options: argparse.Namespace) -> None:
    """Step all contenders in turns as one rank of a job; rank 0 prints and writes.  Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    ranks = dist.get_world_size()
    contenders = _contenders()
    asked = options.only or [name for name in contenders if name != _FLAT or os.environ["LOCAL_WORLD_SIZE"] != "1"]
    names = tuple(name for name in contenders if name == "local" or name in asked)
    setup = make_setup(BenchConfig(options.shape, ranks, options.batch, options.rounds, "gloo", 0, names))
    trained = {name: build_trained(contenders[name], setup.build_model(), setup) for name in names}
    losses = _warm_up(trained, setup)
    figures = _step_in_turns(trained, setup, options)
    every = [torch.empty_like(figures) for _ in range(ranks)]
    dist.all_gather(every, figures)
    if dist.get_rank() == 0:
        _report(options, contenders, losses, torch.stack(every))
    dist.barrier()
    dist.destroy_process_group()


def _warm_up(trained: dict[str, Trained], setup: Setup) -> dict[str, float]:
    """Step everyone a few times; return the means over ranks of the last losses.

    Raises: RuntimeError if an API that trains in float32 ends elsewhere than the first one beside "local".
    """
    losses = torch.zeros(len(trained))
    for _ in range(WARM_UP):
        losses = torch.stack([_first_steps(each, setup) for each in trained.values()])
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    found = dict(zip(trained, losses.tolist(), strict=True))
    shared = {name: loss for name, loss in found.items() if name != "local"}
    expected = dict.fromkeys(shared, next(iter(shared.values()), 0.0))
    wrong = find_wrong_losses(shared, expected, {name: trained[name].contender.dtype for name in shared})
    if wrong:
        raise RuntimeError(f"what trains otherwise than the rest is not measured: {'; '.join(wrong)}")
    return found


def _first_steps(trained: Trained, setup: Setup) -> Tensor:
    loss = take_step(trained, setup)
    _end(trained)
    return loss


def _end(trained: Trained) -> None:
    """Let nothing of a step be on its way any longer."""
    for param in trained.model.parameters():
        param.detach()


def _step_in_turns(trained: dict[str, Trained], setup: Setup, options: argparse.Namespace) -> Tensor:
    """Return seconds, seconds off the cores, bytes sent and received by this host, per step: (contenders, rounds, 4)."""
    rounds, steps = options.rounds, options.steps
    figures = torch.zeros(len(trained), rounds, 4, dtype=torch.float64)
    order, numbers = random.Random(0), range(len(trained))
    everyone = list(trained.values())
    for turn in range(rounds):
        for number in order.sample(numbers, len(numbers)):
            wait_for_all(setup)
            take_step(everyone[number], setup)
            begin, on_core, before = time.perf_counter(), time.thread_time(), _counters()
            for _ in range(steps):
                take_step(everyone[number], setup)
            seconds, after = time.perf_counter() - begin, _counters()
            off_core = seconds - (time.thread_time() - on_core)
            row = [seconds, off_core, after.sent - before.sent, after.received - before.received]
            figures[number, turn] = torch.tensor(row, dtype=torch.float64) / steps
            _end(everyone[number])
    return figures


def _report(
    options: argparse.Namespace, contenders: dict[str, Contender], losses: dict[str, float], figures: Tensor
) -> None:
    """``figures``: of every rank, (ranks, contenders, rounds, 4)."""
    seconds = figures[..., 0].amax(dim=0)
    off_core, sent, received = figures[..., 1].mean(dim=0), figures[..., 2].amax(dim=0), figures[..., 3].amax(dim=0)
    local = statistics.median(seconds[0].tolist())
    rows: list[dict[str, object]] = []
    print(f"{'contender':32} {'ms':>8} {'x local':>8} {'waits ms':>9} {'MiB out':>8} {'MiB in':>8}")
    for number, name in enumerate(losses):
        median, waits, out, back = (
            statistics.median(each[number].tolist()) for each in (seconds, off_core, sent, received)
        )
        row: dict[str, object] = {
            "name": name,
            "dtype": contenders[name].dtype,
            "median_ms": 1e3 * median,
            "x_local": median / local,
            "off_core_ms": 1e3 * waits,
            "sent_mib_per_host": out / _MIB,
            "received_mib_per_host": back / _MIB,
            "loss": losses[name],
        }
        rows.append(row)
        print(
            f"{name:32} {1e3 * median:8.0f} {median / local:8.2f} {1e3 * waits:9.0f} {out / _MIB:8.1f} {back / _MIB:8.1f}"
        )
    if options.out is not None:
        asked = {
            key: getattr(options, key)
            for key in ("hosts", "ranks_per_host", "rate", "shape", "batch", "rounds", "steps")
        }
        content = {"asked": asked, "machine": describe_machine(torch.get_num_threads()), "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


# ---- hosts of this machine ----


@contextlib.contextmanager
def hosts(number: int, rate: str) -> Generator[list[int], None, None]:
    """Give processes that hold the networks of ``number`` hosts, whose cables pass ``rate`` (as ``tc`` writes it).

    Raises: SystemExit where this user or this kernel does not allow it.
    """
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", _MAKE_HOSTS, "sh", str(number), rate]
    try:
        holder = subprocess.Popen(
            [*words, _burst(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError as error:
        raise SystemExit(f"cable.py: {error.filename} is not installed (Debian: util-linux)") from error
    with holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        if len(pids) < number:
            reason = holder.communicate("\n")[1].strip()
            raise SystemExit(
                f"cable.py: this machine does not let this user make hosts of network namespaces: {reason}. Install "
                "iproute2, run where `unshare --user --net` works, or start this script with torchrun on real hosts."
            )
        try:
            yield pids
        finally:
            holder.communicate("\n")


def _burst(rate: str) -> str:
    """Return how many bytes may pass at once: what passes in 2 ms, at least the largest packet four times."""
    units = {"gbit": 1e9, "mbit": 1e6}
    per_s = next((float(rate.removesuffix(unit)) * size for unit, size in units.items() if rate.endswith(unit)), 0.0)
    if not per_s:
        raise SystemExit(f"cable.py: --rate {rate!r}: expected a number of mbit or gbit, such as 1gbit")
    return str(max(int(per_s / 8 * 0.002), 1 << 18))


def run_hosts(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Start a rank's process for each place on hosts of this machine; return the first exit code that is not 0."""
    size = options.hosts * options.ranks_per_host
    with hosts(options.hosts, options.rate) as pids, contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            host, local_rank = divmod(rank, options.ranks_per_host)
            own = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(options.ranks_per_host),
                "LOCAL_RANK": str(local_rank), "MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": f"cable{host + 1}", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            enter = ["nsenter", "--target", str(pids[host]), "--user", "--preserve-credentials", "--net"]
            command = [*enter, sys.executable, __file__, *words, "--declared-host", str(host)]
            process = subprocess.Popen(command, env={**os.environ, **own})
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of each cable, each way: a number of mbit or gbit")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="wide", help="'small' to see that all of it works")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="that count in a turn")
    parser.add_argument("--only", nargs="+", choices=tuple(_contenders()), metavar="NAME", help="beside local")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--declared-host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return run_hosts(options, sys.argv[1:])
    if options.declared_host is not None:  # several hosts on one machine
        cast(Any, process_groups).BOOT_ID = SimpleNamespace(read_text=lambda: options.declared_host)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
