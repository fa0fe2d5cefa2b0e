"""Runs of shardwise 0.1, whose checkpoints were DCP folders: they are refused by name, and go on once these are converted."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import on_ranks
from helpers.runs import metrics_of, write_text
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardwise import ConfigError
from shardwise.cli.main import main
from shardwise.recipes import report
from shardwise.recipes import train as loop
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import RunProgress, Start, check_start
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import train

BASE = TrainConfig(
    model=ModelShape(layers=1, width=16, heads=2, context=16),
    steps=4, batch=4, warmup=2, lr=1e-2, log_every=4, eval_every=4, eval_windows=4, save_every=2, keep=2, sample_bytes=0,
)  # fmt: skip


def _save_in_the_old_form(trainer: loop.Trainer, done: int) -> None:
    """Write what ``shardwise train`` wrote when its checkpoints were DCP folders."""
    folder = trainer.run.checkpoints / f"step-{done:08d}"
    model, optimizer = get_state_dict(
        trainer.model, trainer.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    state = {"model": model, "optimizer": optimizer, "random": {"cpu": torch.get_rng_state()}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    progress = RunProgress(done, done * trainer.config.batch, trainer.config.model, trainer.num_parameters)
    if dist.get_rank() == 0:
        (folder / "state.json").write_text(json.dumps({"format": 1, **dataclasses.asdict(progress)}))


def _train(start: Start, config: TrainConfig, *, is_old: bool = False) -> None:
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_report", lambda *_: None)
        if is_old:
            patch.setattr(loop, "save", _save_in_the_old_form)
        train(start, config, RunRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))


def _old_run(folder: Path) -> Path:
    """Return a run of four steps in the old form, of which the last checkpoint is gone."""
    if dist.get_rank() == 0:
        (folder / "text").mkdir()
        write_text(folder / "text")
    dist.barrier()
    run = folder / "run"
    _train(Start(out=run), dataclasses.replace(BASE, data=str(folder / "text")), is_old=True)
    if dist.get_rank() == 0:
        shutil.copytree(run, folder / "whole")
        shutil.rmtree(run / "checkpoints" / "step-00000004")
    dist.barrier()
    return run


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run)]


@on_ranks(2, fresh=True)
def test_an_old_run_is_refused_and_goes_on_to_the_same_losses_once_its_checkpoint_is_converted(tmp_path: Path) -> None:
    run = _old_run(tmp_path)
    config = dataclasses.replace(BASE, data=str(tmp_path / "text"))
    checkpoints = run / "checkpoints"
    with pytest.raises(ConfigError, match=r"step-00000002 was written by shardwise 0\.1\. .* checkpoint convert"):
        check_start(Start(resume=run), config)
    dist.barrier()
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["checkpoint", "convert", str(checkpoints / "step-00000002"), f"{checkpoints}-new"]) == 0
        shutil.rmtree(checkpoints)
        Path(f"{checkpoints}-new").rename(checkpoints)
    dist.barrier()
    _train(Start(resume=run), dataclasses.replace(config, shard="zero3"))
    assert _losses(run) == _losses(tmp_path / "whole")
