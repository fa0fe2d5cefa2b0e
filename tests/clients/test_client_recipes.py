"""Recipes with other packages: an interrupted run goes on as one that was not."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.elastic_program import read_outcome
from helpers.of_clients import say_as_torchrun, sharding_on_cpu
from helpers.ranks import on_ranks
from helpers.snippets import ROOT, main_of_example

from shardwise.testing import WorkerPool

pytestmark = pytest.mark.clients


@on_ranks(2)
def test_a_loader_of_torchdata_goes_on_within_an_epoch_and_over_its_end(tmp_path: Path) -> None:
    main = main_of_example("stateful_loader")
    whole = main(str(tmp_path / "whole"), steps=24, width=16)
    parts = [main(str(tmp_path / "parts"), steps=steps, width=16) for steps in (7, 3, 14)]  # an epoch has ten batches
    assert [*chain(*parts)] == whole


@on_ranks(2)
def test_a_callback_of_lightning_saves_and_goes_on(tmp_path: Path) -> None:
    say_as_torchrun()
    main = main_of_example("with_lightning")
    whole = main(steps=6, width=16, folder=str(tmp_path / "whole"))
    parts = [main(steps=3, width=16, folder=str(tmp_path / "parts")) for _ in range(2)]
    assert [*chain(*parts)] == whole


@on_ranks(2)
def test_a_callback_of_the_trainer_of_transformers_saves_and_goes_on(tmp_path: Path) -> None:
    say_as_torchrun()
    main = main_of_example("with_trainer")
    with sharding_on_cpu():
        whole = main(steps=4, width=16, folder=str(tmp_path / "whole"), use_cpu=True)
        parts = [main(steps=2, width=16, folder=str(tmp_path / "parts"), use_cpu=True) for _ in range(2)]
    assert len(whole) == 4
    assert [*chain(*parts)] == whole
    assert whole[-1] < whole[0]


def without_ray(folder: str) -> tuple[int, float]:
    import ray.train.torch

    train = runpy.run_path(str(ROOT / "examples" / "with_ray.py"))["train"]
    device = mock.patch.object(ray.train.torch, "get_device", return_value=torch.device("cpu"))
    with device, mock.patch.object(ray.train, "report"):
        return train({"folder": folder, "steps": 20})


def test_two_workers_of_ray_train_go_on_where_one_process_ended(pool: WorkerPool, tmp_path: Path) -> None:
    folders = [str(tmp_path / "whole"), str(tmp_path / "whole"), str(tmp_path / "ray")]
    _, expected, _ = (pool.run(without_ray, num_ranks=1, folder=folder)[0] for folder in folders)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "examples/with_ray.py", "2", folders[-1]]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=250)
    found = re.search(r"2 worker\(s\), step (\d+): loss (\S+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert (int(found[1]), float(found[2])) == (40, pytest.approx(expected[1], rel=1e-3))


def test_ranks_that_ray_train_starts_again_go_on_from_memory(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    settings = {"folder": str(tmp_path), "kills": [[3, 0, "rank"]]}
    command = [sys.executable, "tests/helpers/elastic_ray.py", json.dumps(settings)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (tmp_path / "out").exists(), done.stdout + done.stderr
    read_outcome(tmp_path / "out")
    begun = re.findall(r" begins (\d+)", (tmp_path / "notes").read_text())
    assert begun == ["0", "3"], "from the step that was lost"
