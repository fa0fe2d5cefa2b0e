"""Phase 2, on every rank of fresh processes: what one contender alone holds, faults and sends."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.recipes.bench import torchs_own as peers
from shardwise.recipes.bench.contenders import CONTENDERS, Trained, build_trained
from shardwise.recipes.bench.figures import MeasuredMemory
from shardwise.recipes.bench.probe import (
    PeakSampler,
    Resident,
    loopback_bytes,
    malloc_live_bytes,
    minor_faults,
    others_part_of_shared,
    peak_resident_bytes,
    reset_peak,
    resident,
)
from shardwise.recipes.bench.request import BenchConfig
from shardwise.recipes.bench.setup import Setup, adamw, make_setup
from shardwise.recipes.bench.timing import take_step, wait_for_all

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
    peers.load()
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
    """Make torch load what it loads on first use: autograd, optimizers, the collectives."""
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
