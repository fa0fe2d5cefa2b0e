"""Carry out the text of a case on one rank of a process group, as one contender after another."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import shardwise
import shardwise.fsdp.gradients
import shardwise.layout
from fuzz.case import Contender
from fuzz.checkpoint import read, write
from fuzz.eligible import is_ours
from fuzz.engines import MAKERS, EngineSide, Meshes
from fuzz.faults import faults_at_work, plant
from fuzz.phases import Play, Seat
from fuzz.record import Raised, Tale
from fuzz.sides import Side
from fuzz.zeros import ZeroSide

_meshes: Meshes = {}  # of this process's group, which lives as long as the process


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to say of the contenders it has carried out; it stops after one that raised."""

    tales: tuple[Tale, ...]

    @property
    def is_broken(self) -> bool:
        """True if the process group cannot be trusted any more."""
        return any(tale.raised is not None for tale in self.tales)


def make_side(play: Play, seat: Seat, contender: Contender, device: str) -> Side:
    """Return the ``s`` of a program for ``contender``.  Collective."""
    if contender.api in MAKERS:
        return EngineSide(play, seat, contender, _meshes, device)
    return ZeroSide(play, seat, contender, device)


def run_rank(text: str, contenders: Sequence[Contender], phase: int = 0, folder: str = "", device: str = "cpu") -> Told:
    """Carry out a phase of the text as each of ``contenders``, on this rank; checkpoints between phases go to ``folder``."""
    play = Play.load(text)
    tales: list[Tale] = []
    for contender in contenders:
        tales.append(_run(play, contender, phase, folder, device))
        if tales[-1].raised is not None:
            break
    gc.collect(1)
    return Told(tuple(tales))


def warm_up(fault: str = "", device: str = "cpu") -> None:
    """Import and build what is made on first use; plant ``fault``, for the fuzzer's own test."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    if fault:
        plant(fault)
    torch.backends.cudnn.enabled = device == "cpu"  # its convolutions round even whole numbers
    model = nn.Linear(4, 4, device=device)
    shardwise.fully_shard(model)
    model(torch.ones(1, 4, device=device)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _run(play: Play, contender: Contender, number: int, folder: str, device: str) -> Tale:
    tale = Tale()
    start = time.perf_counter()
    phase = play.phases[number]
    seat = Seat.of(dist.get_rank(), dist.get_world_size(), play.settings.mesh)
    try:
        with _parts_from(play.settings.large_numel), faults_at_work(is_ours(contender)):
            side = make_side(play, seat, phase.contender(contender), device)
            if phase.then is not None:
                read(side.net, side.optimizer, f"{folder}/{number}", phase.then[0])
                tale.records.append(side.record("loaded"))
            for moment in phase.program(side):
                tale.records.append(side.record(moment))
            if number + 1 < len(play.phases):
                following = play.phases[number + 1].then
                assert following is not None
                write(side.net, side.optimizer, f"{folder}/{number + 1}", following[0])
            tale.notes = side.notes()
    except (Exception, CheckpointException) as error:  # which is no Exception
        tale.raised = Raised.of(error)
    tale.seconds = time.perf_counter() - start
    return tale


@contextmanager
def _parts_from(large_numel: int) -> Generator[None, None, None]:
    """Let tensors of ``large_numel`` elements or more take the ways of large ones; 0 changes nothing."""
    places: tuple[tuple[Any, str, Any], ...] = (
        (shardwise.layout, "LARGE_NUMEL", large_numel),
        (shardwise.fsdp.gradients, "LARGE_BYTES", 16 * large_numel),
        (shardwise.fsdp.gradients, "FULL_BYTES_ON_HOST", 64 * large_numel),
    )
    kept = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, value in places:
            if large_numel:
                setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(places, kept, strict=True):
            setattr(module, name, value)
