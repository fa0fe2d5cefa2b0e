"""How a run ends before its last step, and what is left of it: on request, without numbers, before its first checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.runs import metrics_of, write_text

from shardwise import ConfigError
from shardwise.cli.train import stop_on_signals
from shardwise.recipes import run_folder
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import Start
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import DivergedError, Listening, listen_to_nobody, train

BASE = TrainConfig(
    model=ModelShape(layers=1, width=16, heads=2, context=16),
    steps=8, batch=4, warmup=2, lr=1e-2, log_every=4, eval_every=4, eval_windows=4, save_every=2, keep=2, sample_bytes=0,
)  # fmt: skip


def _train(start: Start, config: TrainConfig, listening: Listening = listen_to_nobody) -> tuple[int, str]:
    """Return what training returned, and what was printed on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        number = train(start, config, RunRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")), listening)
    return number, out.getvalue()


def _config(folder: Path, **changes: object) -> TrainConfig:
    if dist.get_rank() == 0 and not folder.joinpath("text").exists():
        folder.joinpath("text").mkdir()
        write_text(folder / "text")
    dist.barrier()
    return dataclasses.replace(BASE, data=str(folder / "text"), **changes)


def _figures(run: Path) -> list[tuple[object, object, object]]:
    return [(line["kind"], line["step"], line["loss"]) for line in metrics_of(run)]


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))


def _contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run / "checkpoints").glob("step-*/*")}


def _asks_at(step: int) -> Listening:
    """Ask this rank to stop once it has done ``step`` steps."""
    calls = 0

    def asked() -> int:
        nonlocal calls
        calls += 1
        return signal.SIGTERM if calls >= step else 0

    @contextlib.contextmanager
    def listening() -> Generator[Callable[[], int], None, None]:
        yield asked

    return listening


@on_ranks(2)
def test_ranks_stop_after_the_same_step_whichever_is_asked_and_go_on_to_the_same_losses(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert _train(Start(out=tmp_path / "whole"), config)[0] == 0
    run = tmp_path / "stopped"
    number, said = _train(Start(out=run), config, _asks_at(5) if dist.get_rank() == 1 else listen_to_nobody)
    assert number == signal.SIGTERM
    if dist.get_rank() == 0:
        assert "stopped and saved after step 5; go on with: shardwise train --resume" in said
        assert _names(run) == ["step-00000004", "step-00000005"]
        assert max(line["step"] for line in metrics_of(run)) == 5
    assert _train(Start(resume=run), config)[0] == 0
    assert [each for each in _figures(run) if each[:2] != ("validation", 5)] == _figures(tmp_path / "whole")


@on_ranks(2)
def test_a_loss_that_is_no_number_ends_the_run_and_spares_its_checkpoints(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=4)
    run = tmp_path / "run"
    _train(Start(out=run), config)
    before = _contents(run)
    assert len(_names(run)) == 2
    if dist.get_rank() == 0:  # as if it had had this rate from the beginning
        written = (run / "config.json").read_text()
        (run / "config.json").write_text(written.replace('"lr": 0.01', '"lr": 1e20'))
    dist.barrier()
    with pytest.raises(DivergedError, match=r"step (6|7): the loss is .*nan.* diverged.*lower --lr \(it is 1e\+20\)"):
        _train(Start(resume=run), dataclasses.replace(config, steps=40, lr=1e20, save_every=40))
    assert _contents(run) == before
    assert all(line["step"] < 7 for line in metrics_of(run))


@on_ranks(2)
def test_a_parameter_that_is_no_number_is_not_saved(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with pytest.raises(DivergedError, match="step 1: parameters are not finite"):
        _train(
            Start(out=tmp_path / "run"), dataclasses.replace(config, lr=1e38, weight_decay=1e38, warmup=0, save_every=1)
        )
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@on_ranks(2)
def test_a_resume_goes_back_to_the_newest_checkpoint_that_is_whole_and_says_so(tmp_path: Path) -> None:
    config = _config(tmp_path, keep=9)
    run = tmp_path / "run"
    _train(Start(out=run), config)
    before = _figures(run)
    if dist.get_rank() == 0:
        shutil.rmtree(run / "checkpoints" / "step-00000008")
        damaged = run / "checkpoints" / "step-00000006" / "part-00001.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (run / "checkpoints" / "step-00000004" / "manifest.json").write_bytes(b"{}")
    dist.barrier()
    said = _train(Start(resume=run), config)[1]
    if dist.get_rank() == 0:
        assert "resuming after step 2" in said
        assert f"DAMAGED: {run / 'checkpoints' / 'step-00000006'}" in said
        assert f"DAMAGED: {run / 'checkpoints' / 'step-00000004'}" in said
    assert _figures(run) == before


@on_ranks(2)
def test_a_checkpoint_of_a_version_that_saved_no_data_goes_on_and_says_so(tmp_path: Path) -> None:
    def without_data(*given: Any) -> dict[str, Any]:
        return {name: entry for name, entry in run_folder.entries_of(*given).items() if name != "data"}

    config = _config(tmp_path, keep=9)
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr("shardwise.recipes.train.entries_of", without_data)
        _train(Start(out=run), config)
    before = _figures(run)
    for newest, is_old in ((4, True), (6, False)):
        if dist.get_rank() == 0:
            for checkpoint in (run / "checkpoints").glob("step-*"):
                if checkpoint.name > f"step-{newest:08d}":
                    shutil.rmtree(checkpoint)
        dist.barrier()
        said = _train(Start(resume=run), config)[1]
        if dist.get_rank() == 0:
            assert f"resuming after step {newest}" in said
            assert said.count("step-00000004 is of a version that saved no data. The run goes on at its step") == is_old
        assert _figures(run) == before
    if dist.get_rank() == 0:  # what was saved since then is damaged
        for newer in (6, 8):
            (run / "checkpoints" / f"step-{newer:08d}" / "manifest.json").write_bytes(b"{}")
    dist.barrier()
    said = _train(Start(resume=run), config)[1]
    if dist.get_rank() == 0:
        assert said.count("DAMAGED: ") == 2
        assert f"{run / 'checkpoints' / 'step-00000004'} is of a version that saved no data" in said
    assert _figures(run) == before


@on_ranks(2)
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _train(Start(out=tmp_path / "whole"), config)
    run = tmp_path / "short"
    if dist.get_rank() == 0:
        run.mkdir()
        kept = json.loads((tmp_path / "whole" / "config.json").read_text())["config"]
        (run / "config.json").write_text(json.dumps({"config": kept}))  # as it is before the text is read
        (run / "metrics.jsonl").write_text('{"kind": "validation", "step": 0, "loss": 1.0}\n')
    dist.barrier()
    said = _train(Start(resume=run), config)[1]
    if dist.get_rank() == 0:
        assert "ended before its first checkpoint: it begins again" in said
    assert _figures(run) == _figures(tmp_path / "whole")


@on_ranks(1)
def test_text_that_was_changed_is_made_again_or_named(tmp_path: Path) -> None:
    config = _config(tmp_path, steps=2)
    run = tmp_path / "run"
    _train(Start(out=run), config)
    cached = run / "text" / "train.bin"
    whole = cached.read_bytes()
    cached.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    _train(Start(resume=run), dataclasses.replace(config, steps=3))
    assert cached.read_bytes() == whole
    cached.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    write_text(tmp_path / "text").joinpath("0.txt").write_text("another text " * 300)
    with pytest.raises(ConfigError, match="its cached text is gone or was changed, and .* has changed since"):
        _train(Start(resume=run), dataclasses.replace(config, steps=4))


@on_ranks(1)
def test_the_first_signal_is_noted_and_the_second_left_to_the_system_where_no_launcher_is() -> None:
    for second_ends, expected in ((True, signal.SIG_DFL), (False, None)):
        before = signal.getsignal(signal.SIGTERM)
        with stop_on_signals(second_ends) as asked:
            assert asked() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked() == signal.SIGTERM
            found = signal.getsignal(signal.SIGINT)
            assert found == expected if second_ends else callable(found)
        assert signal.getsignal(signal.SIGTERM) == before
