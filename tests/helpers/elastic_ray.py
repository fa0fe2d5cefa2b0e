"""Ray Train starts the ranks of an elastic run, again and again: ``elastic_ray.py SETTINGS``, of ``elastic_restarted``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer

from helpers.elastic_restarted import train

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    ray.init(num_cpus=3, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=4)
        ),
    ).fit()
