"""Phase 1, on every rank: all contenders built in one process and stepped in turns."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from bench_contenders import (
    CONTENDERS,
    BenchConfig,
    Contender,
    Setup,
    Trained,
    adamw,
    build_trained,
    load_torchs_own,
    make_setup,
)
from bench_figures import HostLoad, MeasuredMemory, find_wrong_losses
from torch import Tensor, nn

from shardwise.one_host import read_proc
from shardwise.recipes.gpt import next_byte_loss
from shardwise.recipes.sharding import RunRanks, peak_bytes

# ---- Figures of the kernel and the C library about this process: memory, page faults, bytes on the loopback device.
# None stands for what this host does not tell (Linux with glibc tells everything).

SAMPLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Resident:
    """This process's current resident bytes, and the maximum since :func:`reset_peak`."""

    total: int
    peak: int
    anonymous: int
    shared: int


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: bytes, over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def malloc_live_bytes() -> int | None:
    """Return the bytes that malloc has in use: in its arenas and mapped separately."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    found = ask()
    return found.uordblks + found.hblkhd


def resident() -> Resident | None:
    """Return the resident set, from /proc/self/status."""
    fields = dict(line.split(":", 1) for line in read_proc("self/status").splitlines() if ":" in line)
    wanted = ("VmRSS", "VmHWM", "RssAnon", "RssShmem")
    if not all(name in fields for name in wanted):
        return None
    return Resident(*(1024 * int(fields[name].split()[0]) for name in wanted))


def others_part_of_shared() -> int:
    """Return the bytes of resident shared memory that count for other processes: each page is divided equally among its users.

    0 if the kernel does not tell.
    """
    lines = read_proc("self/smaps_rollup").splitlines()
    own = next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:")), None)
    now = resident()
    return max(now.shared - own, 0) if own is not None and now is not None else 0


def reset_peak() -> bool:
    """Restart the count of ``Resident.peak``; return False if the kernel does not allow it: then it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Return the largest resident set: since :func:`reset_peak` if that works, else since the process started."""
    now = resident()
    return peak_bytes(torch.device("cpu")) if now is None else now.peak


def available_bytes() -> int | None:
    """Return the memory of this host that processes can still have without swapping."""
    lines = read_proc("meminfo").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def minor_faults() -> int:
    """Return how many page faults without input or output this process, all threads, has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def loopback_bytes() -> int | None:
    """Return the bytes that this host's loopback device has sent, of all processes, headers counted."""
    for line in read_proc("net/dev").splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    return None


def host_load() -> HostLoad:
    """Return what the processors have done since the host and this process were started; zeros if the kernel does not say."""
    lines = [line.split() for line in read_proc("stat").splitlines() if line.startswith("cpu")]
    if not lines:
        return HostLoad()
    ticks = [int(each) / os.sysconf("SC_CLK_TCK") for each in lines[0][1:9]]
    idle, waits, stolen = ticks[3], ticks[4], ticks[7]
    busy = sum(ticks) - idle - waits - stolen
    return HostLoad(time.monotonic(), busy, stolen, time.process_time(), len(lines) - 1)


class PeakSampler:
    """Sample memory every millisecond on a thread of its own, and keep the maxima.

    Attributes: ``live`` and ``shared``: most bytes live (malloc'ed and shared) and most shared at one moment, since the
    start or :meth:`forget_live`; ``largest``: the sample with the largest resident set.
    """

    def __init__(self) -> None:
        self.live: int | None = None
        self.shared: int | None = None
        self.largest: Resident | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="sample-memory", daemon=True)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        """Take one sample."""
        with self._lock:  # samples from before forget_live() must not count after it
            live, now = malloc_live_bytes(), resident()
            if now is not None:
                self.shared = max(self.shared or 0, now.shared)
                if self.largest is None or now.total > self.largest.total:
                    self.largest = now
                if live is not None:
                    self.live = max(self.live or 0, live + now.shared)

    def forget_live(self) -> None:
        """Restart ``live`` and ``shared``."""
        with self._lock:
            self.live = self.shared = None

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.sample()


WARM_UP = 4  # steps of each contender before the first that counts; the loss of the last of them is checked


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The measurements of one rank.

    ``seconds``: of each round, by contender; empty if ``wrong`` names contenders with wrong losses.  ``host``: the processors
    over all rounds.  ``losses``: means
    over ranks after WARM_UP - 1 updates, the same on all ranks.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    wrong: tuple[str, ...]
    num_threads: int
    host: HostLoad = field(default_factory=HostLoad)


def time_steps(config: BenchConfig, contenders: Mapping[str, Contender] = CONTENDERS) -> RankTimes:
    """Build ``config.names`` of ``contenders``, check their losses, then time rounds of one step each.

    The order within a round is drawn from the seed, so that ranks agree.  A time is measured between two barriers.
    Collective.
    """
    setup = make_setup(config)
    ranks = RunRanks(dist.get_rank(), config.ranks, setup.device)
    alone, averaged = ranks.mean([_reference_loss(setup, average) for average in (False, True)])
    trained = {name: build_trained(contenders[name], setup.build_model(), setup) for name in config.names}
    losses: dict[str, float] = {}
    for _ in range(WARM_UP):
        last = [take_step(trained[name], setup) for name in config.names]
        losses = dict(zip(config.names, ranks.mean(last), strict=True))
    expected = {name: alone if contenders[name].family == "local" else averaged for name in config.names}
    wrong = find_wrong_losses(losses, expected, {name: contenders[name].dtype for name in config.names})
    before = host_load()
    seconds = {} if wrong else _time_rounds(config, trained, setup)
    return RankTimes(seconds, losses, wrong, torch.get_num_threads(), host_load().since(before))


def take_step(trained: Trained, setup: Setup) -> Tensor:
    """Train on this rank's batch once; return the loss before the update.  Shape of the result: ().  Collective."""
    loss = next_byte_loss(trained.model, setup.tokens[:, :-1], setup.tokens[:, 1:])
    loss.backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    return loss.detach()


def wait_for_all(setup: Setup) -> None:
    """Return once every rank has called this and the devices have finished."""
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
    dist.barrier()


def _time_rounds(config: BenchConfig, trained: Mapping[str, Trained], setup: Setup) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in config.names}
    order = random.Random(config.seed)
    for _ in range(config.rounds):
        for name in order.sample(config.names, len(config.names)):
            wait_for_all(setup)
            start = time.perf_counter()
            take_step(trained[name], setup)
            wait_for_all(setup)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _reference_loss(setup: Setup, average: bool) -> Tensor:
    """Train without any API of shardwise, averaging gradients one by one if asked; return the expected loss."""
    model = setup.build_model()
    optimizer = adamw(model)
    loss = torch.zeros(())
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        loss = next_byte_loss(model, setup.tokens[:, :-1], setup.tokens[:, 1:])
        loss.backward()
        for param in model.parameters() if average else ():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return loss.detach()


# ---- Phase 2, on every rank of fresh processes: the memory, page faults and bytes sent of one contender alone.

NUM_COLD, NUM_WARM = 2, 3  # steps that allocate state and settle; steps that are measured, sampled and again unsampled


@dataclass(frozen=True, slots=True)
class _Base:
    """Memory of this process before there was a contender."""

    live: int | None
    resident: Resident | None
    cuda: int


def measure_memory(config: BenchConfig, name: str) -> MeasuredMemory:
    """Train contender ``name`` for a few steps in this process, which must be a fresh one.  Collective."""
    setup = make_setup(config)
    load_torchs_own()
    _step_something_tiny(setup)
    base = _look(setup)
    reset_peak()
    with PeakSampler() as sampler:
        trained = build_trained(CONTENDERS[name], setup.build_model(), setup)
        for _ in range(NUM_COLD):
            take_step(trained, setup)
        wait_for_all(setup)
        sampler.forget_live()
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)
        for _ in range(NUM_WARM):
            take_step(trained, setup)
        wait_for_all(setup)
        sampler.sample()
    faults, wire = _count_faults_and_bytes(trained, setup)
    return _describe(base, sampler, setup, faults, wire)


def _step_something_tiny(setup: Setup) -> None:
    """Make torch load its lazily loaded parts: autograd, optimizers, the collectives."""
    model = nn.Linear(4, 4, device=setup.device)
    optimizer = adamw(model)
    model(torch.ones(1, 4, device=setup.device)).sum().backward()
    optimizer.step()
    wait_for_all(setup)


def _look(setup: Setup) -> _Base:
    gc.collect()
    cuda = torch.cuda.memory_allocated(setup.device) if setup.device.type == "cuda" else 0
    return _Base(malloc_live_bytes(), resident(), cuda)


def _count_faults_and_bytes(trained: Trained, setup: Setup) -> tuple[int, int | None]:
    """Return page faults of this rank and bytes of all ranks on loopback, per step.

    Other processes of the host can only add bytes, so the least of several steps counts.
    """
    faults: list[int] = []
    sent: list[int] = []
    for _ in range(NUM_WARM):
        wait_for_all(setup)
        bytes_before = loopback_bytes()
        wait_for_all(setup)  # no rank may send before every rank has read
        faults_before = minor_faults()
        take_step(trained, setup)
        faults.append(minor_faults() - faults_before)
        wait_for_all(setup)
        bytes_after = loopback_bytes()
        if bytes_before is not None and bytes_after is not None:
            sent.append(bytes_after - bytes_before)
    is_on_loopback = sent and setup.device.type == "cpu"
    return int(statistics.median(faults)), min(sent) if is_on_loopback else None


def _describe(base: _Base, sampler: PeakSampler, setup: Setup, faults: int, wire: int | None) -> MeasuredMemory:
    largest, before = sampler.largest, base.resident
    rss = anonymous = shared = live = peak_shared = None
    if largest is not None and before is not None:
        rss = max(peak_resident_bytes(), largest.total) - before.total  # either can miss a little
        anonymous = largest.anonymous - before.anonymous
        shared = largest.shared - before.shared
        if sampler.shared is not None:
            peak_shared = sampler.shared - before.shared
        if sampler.live is not None and base.live is not None:
            live = sampler.live - base.live - before.shared - others_part_of_shared()
    if setup.device.type == "cuda":
        live = torch.cuda.max_memory_allocated(setup.device) - base.cuda
    return MeasuredMemory(live, peak_shared, rss, anonymous, shared, faults, wire)
