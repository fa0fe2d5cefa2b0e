"""Run folders from before: their checkpoints are read, whatever ranks and API go on, and nothing in them is run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import on_ranks
from helpers.runs import metrics_of, write_text
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardwise import ConfigError
from shardwise.recipes import report
from shardwise.recipes import train as loop
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import RunProgress, Start
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import train

BASE = TrainConfig(
    model=ModelShape(layers=1, width=16, heads=2, context=16),
    steps=4, batch=4, warmup=2, lr=1e-2, log_every=4, eval_every=4, eval_windows=4, save_every=2, keep=2, sample_bytes=0,
)  # fmt: skip


class Runs:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


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
def test_an_old_run_goes_on_to_the_same_losses_and_behind_another_api(tmp_path: Path) -> None:
    run = _old_run(tmp_path)
    config = dataclasses.replace(BASE, data=str(tmp_path / "text"))
    for shard in ("optimizer", "full"):
        if dist.get_rank() == 0:
            shutil.copytree(run, tmp_path / shard)
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_unpickler", None)  # nor is what other ranks send
            _train(Start(resume=tmp_path / shard), dataclasses.replace(config, shard=shard))
        assert _losses(tmp_path / shard) == pytest.approx(_losses(tmp_path / "whole"), abs=1e-5)
        assert (tmp_path / shard / "checkpoints" / "step-00000004" / "manifest.json").is_file()
    assert _losses(tmp_path / "full") == _losses(tmp_path / "whole")
    _train(Start(resume=tmp_path / "full"), dataclasses.replace(config, steps=8))
    names = sorted(path.name for path in (tmp_path / "full" / "checkpoints").glob("step-*"))
    assert names[-2:] == ["step-00000006", "step-00000008"]
    assert "step-00000002" not in names, "old ones go when there are newer ones enough"


@on_ranks(1, fresh=True)
def test_an_old_checkpoint_that_would_run_something_is_refused(tmp_path: Path) -> None:
    run, trace = _old_run(tmp_path), tmp_path / "trace"
    config = dataclasses.replace(BASE, data=str(tmp_path / "text"))
    checkpoint = run / "checkpoints" / "step-00000002"
    metadata = (checkpoint / ".metadata").read_bytes()

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Runs(trace)))
    with pytest.raises(ConfigError, match=r"step-00000002 is damaged or of another model: .*names pathlib"):
        _train(Start(resume=run), config)

    found = pickle.loads(metadata)
    found.planner_data = Runs(trace)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ConfigError, match="which DCP's metadata does not"):
        _train(Start(resume=run), config)

    elsewhere = pickle.loads(metadata)
    for place in elsewhere.storage_data.values():
        place.relative_path = f"../step-00000002/{place.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(elsewhere))
    with pytest.raises(ConfigError, match="that is not in the folder"):
        _train(Start(resume=run), config)

    found = pickle.loads(metadata)
    place = found.storage_data[MetadataIndex("optimizer.param_groups.blocks.0.attention.qkv.weight.lr")]
    written = io.BytesIO()
    torch.save(Runs(trace), written)
    place.relative_path, place.offset, place.length = "evil.distcp", 0, len(written.getvalue())
    (checkpoint / "evil.distcp").write_bytes(written.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ConfigError, match="contains more than plain values"):
        _train(Start(resume=run), config)
    assert not trace.exists()

    (checkpoint / ".metadata").write_bytes(metadata)
    _train(Start(resume=run), config)
    assert _losses(run) == _losses(tmp_path / "whole")
