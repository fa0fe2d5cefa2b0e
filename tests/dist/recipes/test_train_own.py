"""``shardwise train`` with a model of the user's own: trained, resumed with another API, exported, begun from weights."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.own_model import build
from helpers.runs import metrics_of, write_text
from safetensors.torch import load_file, save_file

from shardwise import CheckpointError, ConfigError, DesyncError
from shardwise.checkpoint.convert import export_model
from shardwise.recipes import train as main_job
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import Start
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import Trainer, build_trainer, train
from shardwise.testing import WorkerPool

CONFIG = TrainConfig(
    model=ModelShape(layers=1, width=8, heads=1, context=16), model_from="helpers.own_model:build",
    steps=4, batch=8, warmup=1, lr=1e-2, log_every=2, eval_every=4, eval_windows=5, save_every=2, sample_bytes=3,
)  # fmt: skip


def _train(start: Start, config: TrainConfig) -> str:
    """Train as this rank; return what was printed, or the error's words."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            train(start, config, RunRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
        except (ConfigError, DesyncError) as error:
            return str(error)
    return out.getvalue()


def _fail_late(*args: Any) -> Trainer:
    """Fail as :func:`build_trainer`, and say so when the first rank has long done what it does about it."""
    try:
        return build_trainer(*args)
    except ConfigError:
        time.sleep(0.5)
        CheckpointError("this goes to the black box, where one is open")
        raise


def _jobs(folder: Path, data: str) -> dict[str, str]:
    config, said = replace(CONFIG, data=data), {}
    said["whole"] = _train(Start(out=folder / "whole"), config)
    said["short"] = _train(Start(out=folder / "short"), replace(config, steps=2))
    said["resumed"] = _train(Start(resume=folder / "short"), replace(config, shard="zero2"))
    said["replicated"] = _train(Start(out=folder / "replicated"), replace(config, shard="ddp", compile=False))
    if dist.get_rank() == 0:
        export_model(folder / "whole" / "checkpoints", folder / "exported")
        tensors = load_file(folder / "exported" / "model.safetensors")
        tensors["other.bias"] = tensors.pop("head.bias")
        tensors["token.weight"] = tensors["token.weight"][:9].clone()
        save_file(tensors, folder / "wrong.safetensors")
    dist.barrier()
    from_weights = replace(config, init=str(folder / "exported"), steps=1, lr=1e-9)
    said["init"] = _train(Start(out=folder / "init"), from_weights)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(main_job, "build_trainer", _fail_late)
        said["wrong"] = _train(Start(out=folder / "wrong"), replace(config, init=str(folder / "wrong.safetensors")))
    dist.barrier()
    different = "helpers.own_model:build_differently_on_every_rank"
    said["different"] = _train(Start(out=folder / "different"), replace(config, model_from=different))
    return said


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    data = write_text(tmp_path_factory.mktemp("text"))
    folder = tmp_path_factory.mktemp("runs")
    return folder, pool.run(_jobs, num_ranks=2, folder=folder, data=str(data))[0]


def _losses(run: Path) -> dict[tuple[object, object], float]:
    return {(line["kind"], line["step"]): line["loss"] for line in metrics_of(run)}


def test_the_users_model_is_trained_in_units_of_its_repeated_blocks(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert "helpers.own_model:build with" in said["whole"]
    assert "layers.0-2" in said["whole"]
    losses = _losses(folder / "whole")
    assert losses["validation", 4] < losses["validation", 0]


def test_the_users_model_goes_on_behind_another_api_with_the_same_losses(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert "resuming after step 2" in said["resumed"]
    whole, resumed, replicated = (_losses(folder / name) for name in ("whole", "short", "replicated"))
    # the learning rate of the short run fell for two steps, that of the whole one for four
    assert resumed["train", 1] == pytest.approx(whole["train", 1], abs=1e-5)
    assert {key for key in resumed if key[0] == "train"} == {key for key in whole if key[0] == "train"}
    for key, loss in whole.items():
        assert replicated[key] == pytest.approx(loss, abs=1e-5), key


def test_exported_weights_load_into_the_plain_model_and_begin_another_run(runs: tuple[Path, dict[str, str]]) -> None:
    folder, _ = runs
    build(256).load_state_dict(load_file(folder / "exported" / "model.safetensors"))
    assert _losses(folder / "init")["validation", 0] == pytest.approx(
        _losses(folder / "whole")["validation", 4], abs=1e-5
    )


def test_weights_of_another_model_are_refused_by_name_and_shape(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    for words in (
        "--init",
        "token.weight is [9, 16] in the checkpoint and [256, 16] in the state",
        "head.bias",
        "other.bias",
    ):
        assert words in said["wrong"], words
    assert not (folder / "wrong").exists(), "nothing was begun"


def test_ranks_that_build_other_weights_train_a_mixture_of_them(runs: tuple[Path, dict[str, str]]) -> None:
    _, said = runs
    assert (
        "different/report.html" in said["different"]
    )  # the warning is tests/dist/consistency/test_ranks_begin_alike.py's
