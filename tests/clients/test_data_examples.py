"""Data that resumes exactly, in loops and with streams of other packages."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch.distributed as dist
from helpers.of_clients import say_as_torchrun
from helpers.snippets import main_of_example
from torchdata.stateful_dataloader import StatefulDataLoader

from shardwise import Microbatches
from shardwise.testing import WorkerPool

pytestmark = pytest.mark.clients


def losses_of(name: str, folder: str, steps: int) -> list[float]:
    from accelerate.state import AcceleratorState

    say_as_torchrun()
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    AcceleratorState._reset_state(reset_partial_state=True)
    return main_of_example(name)(folder, steps=steps, width=16)


@pytest.mark.parametrize("name", ["data_with_accelerate", "data_with_trainer", "data_with_lightning"])
def test_a_run_goes_on_within_an_epoch_at_another_number_of_ranks(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(losses_of, num_ranks=1, name=name, folder=str(tmp_path / "whole"), steps=9)[0]
    parts: list[list[float]] = []
    for num_ranks, steps in ((2, 2), (4, 1), (1, 3), (2, 3)):  # an epoch has five steps and ten samples
        found = pool.run(losses_of, num_ranks=num_ranks, name=name, folder=str(tmp_path / "parts"), steps=steps)
        parts.append(found[0])
    assert [*chain(*parts)] == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_datasets_goes_on_where_it_was(num_workers: int) -> None:
    rows = datasets.Dataset.from_dict({"x": [*range(600)]}).to_iterable_dataset(num_shards=6)

    def make() -> Microbatches:
        def stream(number: int) -> Any:
            return rows.shard(num_shards=3, index=number).map(lambda row: {"x": row["x"] + 1}).repeat(None)

        return Microbatches(stream, num_microbatches=3, microbatch_size=7, num_workers=num_workers)

    def read(data: Microbatches, steps: range) -> list[Any]:
        return [batch["x"].tolist() for step in steps for batch in data.of_step(step)]

    data = make()
    whole = read(data, range(40))  # of 200 rows, 280 are read
    again, later = make(), make()
    assert [*map(len, whole)] == [7] * 120
    read(again, range(31))
    later.load_state_dict(again.state_dict())
    assert read(later, range(31, 40)) == whole[3 * 31 :]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdata_keeps_its_position_over_our_samples() -> None:
    data = Microbatches([*range(50)], num_microbatches=4, microbatch_size=3)

    def loader() -> Any:
        return StatefulDataLoader([*range(50)], batch_sampler=data.batch_sampler(range(5, 12), rank=1, num_ranks=2))

    whole = [batch.tolist() for batch in loader()]
    first, second = loader(), loader()
    begun = iter(first)
    assert [next(begun).tolist() for _ in range(5)] == whole[:5]
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == whole[5:]
