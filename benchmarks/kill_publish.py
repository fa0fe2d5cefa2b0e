"""Kill writers and readers of published weights with SIGKILL at random moments; no reader may ever have another version's bits.

``python benchmarks/kill_publish.py --kills 200`` writes results/kill_publish.json.  Two ranks publish one version after the
other, and two readers advance as fast as they can, in memory that outlives them.  What an element is in a version follows from
both numbers, so that each reader knows after each advance what it must have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import WeightPublisher, WeightReader, fully_shard
from shardwise.checkpoint.files import Files, list_checkpoints
from shardwise.errors import ShardwiseError
from shardwise.one_host import stay_on_loopback

PRELOAD = ["torch", "shardwise"]
SHAPES = {"a.weight": (300, 200), "b.weight": (50, 301)}
PERIOD, NUM_RANKS, NUM_READERS = 32, 2, 2  # one of PERIOD elements changes in each version
PATIENCE_S, MOST_LIFE_S = 300.0, 0.6


@dataclass(frozen=True)
class Report:
    """How often what was killed, and what readers have checked meanwhile."""

    seed: int
    seconds: float
    kills: dict[str, int]
    versions: int
    checked: int
    named: dict[str, int]


def value_of(version: int, name: str) -> torch.Tensor:
    """Return what a tensor is in ``version``: each element the last version that has changed it."""
    place = torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name])
    last = version - (version - place) % PERIOD
    return (last.clamp(min=0) % 251).float()  # whole numbers that bf16 has


def newest(folder: Path) -> int:
    return max((each.step for each in list_checkpoints(Files(), folder)), default=0)


def write(rank: int, store: str, folder: str) -> None:
    """Publish for ever, as one of the ranks."""
    _begin()
    group: dict[str, Any] = {"rank": rank, "world_size": NUM_RANKS, "timeout": timedelta(seconds=PATIENCE_S)}
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_RANKS), **group)
    layers = {"a": nn.Linear(200, 300, bias=False), "b": nn.Linear(301, 50, bias=False)}
    model = fully_shard(nn.Sequential(OrderedDict(layers)))
    publisher = WeightPublisher(model, folder, dtype=torch.bfloat16, anchor_every=8)
    number = newest(Path(folder)) + 1
    while True:
        known = [number]
        dist.broadcast_object_list(known)
        with torch.no_grad():
            for name, param in model.named_parameters():
                rows = value_of(known[0], name).chunk(NUM_RANKS)[rank]
                param.to_local().copy_(rows)
        number = publisher.publish(wait=known[0] % 3 != 0)
        assert number == known[0], f"version {number}, expected {known[0]}"
        number += 1


def read(number: int, folder: str) -> None:
    """Advance for ever; leave what was checked, and errors that were named, in files."""
    _begin()
    place = Path(folder)
    weights = {
        name: torch.from_file(
            str(place.with_name(f"memory-{number}-{name}")),
            shared=True,
            size=torch.Size(shape).numel(),
            dtype=torch.bfloat16,
        ).view(shape)
        for name, shape in SHAPES.items()
    }
    reader = WeightReader(folder)
    with place.with_name(f"log-{number}").open("a", buffering=1) as log:
        while True:
            try:
                changed = reader.advance(weights)
            except ShardwiseError as error:
                log.write(f"named {type(error).__name__}: {error}\n")
                continue
            if not changed:
                time.sleep(0.001)
                continue
            assert reader.version is not None
            for name, tensor in weights.items():
                if not torch.equal(tensor, value_of(reader.version, name).bfloat16()):
                    log.write(f"mixed {name} in version {reader.version}\n")
            log.write(f"checked {reader.version}\n")


def _begin() -> None:
    def end_with_parent() -> None:
        parent = mp.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    stay_on_loopback(os.environ)
    torch.set_num_threads(1)


class Lives:
    """The processes of the campaign, of which writers live and die together."""

    def __init__(self, folder: Path) -> None:
        self._context: Any = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._folder, self._life = folder, 0
        self.writers: list[Any] = []
        self.readers: list[Any] = [None] * NUM_READERS

    def begin(self) -> None:
        """Start what does not live."""
        if not all(each.is_alive() for each in self.writers) or not self.writers:
            self._kill(self.writers)
            self._life += 1
            store = str(self._folder.with_name(f"store-{self._life}"))
            self.writers = [self._start(write, rank, store, str(self._folder)) for rank in range(NUM_RANKS)]
        for number, each in enumerate(self.readers):
            if each is None or not each.is_alive():
                self.readers[number] = self._start(read, number, str(self._folder))

    def end(self) -> None:
        self._kill([*self.writers, *(each for each in self.readers if each is not None)])

    def _start(self, do: Any, *arguments: Any) -> Any:
        process = self._context.Process(target=do, args=arguments)
        process.start()
        return process

    @staticmethod
    def _kill(processes: list[Any]) -> None:
        for each in processes:
            each.kill()
        for each in processes:
            each.join()


def campaign(place: Path, num_kills: int, seed: int) -> Report:
    """Kill as often; return the report.  Raises: RuntimeError for a reader with wrong bits, or if nothing goes on."""
    folder, chance, begin = place / "publish", random.Random(seed), time.monotonic()
    folder.mkdir(parents=True)
    kills, lives = Counter[str](), Lives(folder)
    try:
        for _ in range(num_kills):
            lives.begin()
            before, end = newest(folder), time.monotonic() + PATIENCE_S
            if chance.random() < 0.7:
                while newest(folder) <= before:  # it has begun again
                    if time.monotonic() > end:
                        raise RuntimeError(f"no version follows {before}")
                    time.sleep(0.002)
            time.sleep(chance.uniform(0, MOST_LIFE_S) ** 2)
            victim = chance.choice(["rank 0", "rank 1", "all ranks", "reader 0", "reader 1"])
            kills[victim] += 1
            number = int(victim[-1]) if victim[-1].isdigit() else -1
            chosen = lives.writers if number < 0 else [(lives.readers if "reader" in victim else lives.writers)[number]]
            for each in chosen:
                os.kill(each.pid, signal.SIGKILL)
            for each in chosen:
                each.join()
        lives.begin()
        last = newest(folder) + 2
        end = time.monotonic() + PATIENCE_S
        while min(_newest_checked(place, number) for number in range(NUM_READERS)) < last:
            lives.begin()
            if time.monotonic() > end:
                raise RuntimeError(f"readers did not reach version {last}")
            time.sleep(0.01)
    finally:
        lives.end()
    lines = [line for number in range(NUM_READERS) for line in (place / f"log-{number}").read_text().splitlines()]
    if mixed := [line for line in lines if line.startswith("mixed")]:
        raise RuntimeError(f"{len(mixed)} times: {mixed[0]}")
    named = Counter(line.split(":")[0].removeprefix("named ") for line in lines if line.startswith("named"))
    checked = sum(line.startswith("checked") for line in lines)
    seconds = round(time.monotonic() - begin, 1)
    return Report(seed, seconds, dict(kills), newest(folder), checked, dict(named))


def _newest_checked(place: Path, number: int) -> int:
    log = place / f"log-{number}"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith("checked")), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kill_publish.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        report = campaign(Path(place), options.kills, options.seed)
    print(report)
    options.out.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
