"""What ``shardwise plan`` says beside what a rank really holds.

Memory is counted where torch allocates tensors, at every operation of the third step, the largest of all ranks: what
``torch.cuda.max_memory_allocated`` says of a GPU.  Buffers inside gloo are not torch's and do not count.

Run: python benchmarks/plan_accuracy.py [--only NAME ...] [--out results.json]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import ActivationPolicy, apply_activations, shard_model, torch_private
from shardwise.collectives import local_peers
from shardwise.containers import tensors_in
from shardwise.planner.advice import step_under
from shardwise.planner.hardware import HARDWARE, ONE_UNIT, SHARED, Profile, Setting, TensorSplit, dry_run
from shardwise.planner.rank_step import KINDS, RankMemory
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.gpt import GPT
from shardwise.recipes.sharding import HEADS, build_optimizer, precision_of, split_heads, syncing, wrap
from shardwise.testing import WorkerPool

WARM_STEPS = 2
EVEN, UNEVEN = ModelShape(4, 384, 6, 256), ModelShape(3, 330, 5, 200)


class _TiedModel(nn.Module):
    """Token model whose embedding weight is its head's weight."""

    def __init__(self, width: int, vocabulary: int, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width)
            )
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def foreign_ranges() -> list[tuple[int, int]]:
    """Return the address ranges where memory of other processes is mapped here, as (first byte, one past the last)."""
    starts = [
        (ctypes.addressof(ctypes.c_char.from_buffer(segment.mapping)), segment.num_bytes)
        for segment in list(local_peers._mapped.values())
    ]
    return [(start, start + num_bytes) for start, num_bytes in starts]


@dataclass(frozen=True)
class Case:
    """One configuration: a model, a batch per rank, and how it is trained."""

    name: str
    setting: Setting
    model: str = "gpt"
    batch: int = 4
    transport: str = "collective"

    @property
    def config(self) -> TrainConfig:
        setting = self.setting
        return TrainConfig(
            model=EVEN if self.model == "gpt" else UNEVEN,
            shard=setting.strategy,
            replicas=setting.replicas,
            dtype=setting.precision,
            recompute=setting.recompute,
            accumulate=setting.accumulate,
            min_unit_bytes=setting.min_unit_bytes,
            transport=self.transport,
            tp=setting.tensor,
        )

    @property
    def ranks(self) -> int:
        return self.setting.ranks * self.setting.tensor

    def build(self) -> nn.Module:
        if self.model == "tied":
            model = _TiedModel(width=320, vocabulary=3000, num_blocks=4)
            # As language models do: with torch's N(0, 1) logits are in the hundreds, and what softmax makes of them is
            # denormal, too; no plan knows values.
            nn.init.normal_(model.embed.weight, std=0.02)
            return model
        model = GPT(self.config.model)
        if self.setting.recompute:
            apply_activations(model, ActivationPolicy("recompute"))
        return model

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.model == "tied":
            chosen = torch.randint(3000, (2, self.batch * 64), generator=torch.Generator().manual_seed(0))
            return chosen[0], chosen[1]
        shape = (self.batch, self.config.model.context)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


FULL = Setting(strategy="zero3", ranks=2)
CASES = (
    Case("full", FULL),
    Case("full, one unit", replace(FULL, min_unit_bytes=ONE_UNIT)),
    Case("full, merged units", replace(FULL, min_unit_bytes=10 << 20)),
    Case("full, recompute", replace(FULL, recompute=True)),
    Case("full, bf16", replace(FULL, precision="bf16")),
    Case("full, bf16, recompute", replace(FULL, precision="bf16", recompute=True)),
    Case("full, 2 microbatches", replace(FULL, accumulate=2)),
    Case("full, 3 microbatches, bf16", replace(FULL, accumulate=3, precision="bf16")),
    Case("full, uneven", FULL, model="uneven"),
    Case("full, tied", FULL, model="tied"),
    Case("full, 4 ranks", replace(FULL, ranks=4), batch=2),
    Case("hybrid 2x2", Setting(strategy="hsdp", ranks=4, replicas=2), batch=2),
    Case("full, shared memory", replace(FULL, transport=SHARED), transport="auto"),
    Case("full, shared memory, bf16", replace(FULL, transport=SHARED, precision="bf16"), transport="auto"),
    Case("full 2, tp 2", replace(FULL, tensor=2), batch=2),
    Case("replicate", Setting(strategy="ddp", ranks=2)),
    Case("replicate, bf16", Setting(strategy="ddp", ranks=2, precision="bf16")),
    Case("ZeRO-2", Setting(strategy="zero2", ranks=2)),
    Case("ZeRO-1 under DDP", Setting(strategy="zero1", ranks=2)),
    Case("DDP, bf16, recompute", Setting(strategy="none", ranks=2, precision="bf16", recompute=True)),
)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def shard_tied(case: Case, model: nn.Module, mesh: Any) -> nn.Module:
    sharded: Any = shard_model(model, min_unit_bytes=case.setting.min_unit_bytes, mesh=mesh)
    sharded.set_transport(case.transport)
    return sharded


class Job:
    """Model and optimizer with the API of a case."""

    def __init__(self, case: Case) -> None:
        setting = case.setting
        sizes = (setting.replicas, setting.num_shards) if setting.strategy == "hsdp" else (setting.ranks,)
        names = ("replicate", "shard") if setting.strategy == "hsdp" else ("dp",)
        mesh = init_device_mesh("cpu", (*sizes, setting.tensor), mesh_dim_names=(*names, "tp"))
        split, mesh = mesh["tp"], mesh[names if len(names) > 1 else names[0]]
        self.config, self.accumulate = case.config, setting.accumulate
        torch.manual_seed(0)  # ranks must begin with the same values
        plain = case.build()
        if setting.tensor > 1:
            split_heads(plain, split)
        self.model = shard_tied(case, plain, mesh) if case.model == "tied" else wrap(plain, self.config, mesh)
        self.optimizer = build_optimizer(self.model, self.config)
        # Nothing is learned: from one batch again and again a model makes denormals within some steps, with which products
        # take up to ten times as long.
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for microbatch in range(self.accumulate):
            with syncing(self.model, microbatch == self.accumulate - 1):
                with precision_of(self.config, torch.device("cpu")):
                    loss = loss_of(self.model, inputs, targets)
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class LiveBytes:
    """Counts the storages that operations allocate or use.

    Memory that neither Python nor an operation has used does not count, nor memory that other ranks share with this one.

    Attributes:
        live: current bytes.
        peak: most bytes since :meth:`restart`.  at: the operation with it.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.at = ""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}

    def restart(self) -> None:
        """Forget the peak except the current bytes."""
        self.peak, self.at = self.live, ""

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Count inside the context; tensors that Python knows at its begin count from the start."""
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu":
                self._follow(each.untyped_storage())
        self.restart()
        with torch_private.watching(self._after, is_seen=False):
            yield

    def _after(self, func: Any, given: object, out: object) -> None:
        for each in tensors_in((given, out)):
            local = torch_private.local_of(each)
            if type(local) in (torch.Tensor, nn.Parameter):
                self._follow(local.untyped_storage())
        if self.live > self.peak:
            self.peak, self.at = self.live, str(func)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # a storage keeps its Python object alive as long as it lives
        if key in self._storages:
            return
        size = storage.nbytes()
        start = storage.data_ptr() if size else 0  # torch refuses the address of a storage without memory
        # a copy: storages that are collected meanwhile, or on another thread, change it
        is_part = any(low <= start and start + size <= high for low, high in [*self._ranges.values()])
        if is_part or any(low <= start < high for low, high in foreign_ranges()):
            size = 0  # it is counted already, or elsewhere

        def forget(_: object) -> None:
            self.live -= size
            self._storages.pop(key, None)
            self._ranges.pop(key, None)

        self._storages[key] = weakref.ref(storage, forget)
        if size:
            self._ranges[key] = (start, start + size)
        self.live += size


def held_on_rank(case: Case) -> dict[str, Any]:
    """Return the peak of the third step on this rank."""
    meter = LiveBytes()
    with meter.watching():
        job = Job(case)
        inputs = case.inputs()
        for _ in range(WARM_STEPS):
            job.step(*inputs)
        meter.restart()
        job.step(*inputs)
        return {"peak": meter.peak, "at": meter.at, "between": meter.live}


def profile_of(case: Case) -> Profile:
    with torch.device("meta"):
        model = case.build()
    split = TensorSplit(case.setting.tensor, HEADS) if case.setting.tensor > 1 else None
    return dry_run(model, case.inputs(), loss_of, precision=case.setting.computes_in, split=split)


def predict(case: Case, profile: Profile) -> RankMemory:
    return step_under(profile, case.setting, HARDWARE["cpu"])[0]


def compare_memory(case: Case, pool: WorkerPool) -> dict[str, Any]:
    found = pool.run(held_on_rank, num_ranks=case.ranks, timeout_s=300, case=case)
    measured = max(found, key=lambda each: each["peak"])
    peak = predict(case, profile_of(case)).peak
    planned = peak.total - peak.held[KINDS.index("other ranks")]
    return {
        "name": case.name,
        "measured": measured["peak"],
        "planned": planned,
        "error": planned / measured["peak"] - 1,
        "at": measured["at"],
        "between": measured["between"],
        "place": peak.place,
        "held": dict(zip(KINDS, peak.held, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    rows: list[dict[str, Any]] = []
    with WorkerPool(max_ranks=4) as pool:
        for case in chosen:
            rows.append(compare_memory(case, pool))
            row = rows[-1]
            print(
                f"{row['name']:30} measured {row['measured'] / 1e6:8.2f} MB  planned {row['planned'] / 1e6:8.2f} MB  "
                f"{100 * row['error']:+.2f} %  ({row['at']} | {row['place']})",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
