"""The command, of which ranks are forked: it trains, resumes with the same losses, and ends cleanly when it must."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers.commands import COMMAND, Ended, is_alive, options, wait_for_training
from helpers.forked_commands import run_forked, start_forked
from helpers.forked_ranks import run_script
from helpers.runs import copy_cut_back, metrics_of, write_text

from shardwise.checkpoint.contents import decode
from shardwise.checkpoint.files import Files, read_manifest, verify


def _losses(run: Path) -> list[tuple[object, object, object]]:
    return [(line["kind"], line["step"], line["loss"]) for line in metrics_of(run)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    run = tmp_path_factory.mktemp("runs") / "whole"
    words = [*COMMAND, *options(data=text, out=run, nproc=2, shard="zero3", accumulate=2)]
    return run, run_forked(words)


def test_it_trains_and_leaves_a_complete_run_folder(trained: tuple[Path, Ended]) -> None:
    run, ended = trained
    assert ended.code == 0, ended.err
    assert ended.err == ""
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "config.toml", "metrics.jsonl", "checkpoints", "tensorboard", "text"}
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [f"step-000000{n}" for n in (10, 15, 20)]
    assert list((run / "tensorboard").glob("events.*"))
    config = json.loads((run / "config.json").read_text())
    losses = {kind: [loss for k, _, loss in _losses(run) if k == kind] for kind in ("train", "validation")}
    assert len(losses["train"]) == 20
    assert len(losses["validation"]) == 5
    assert losses["validation"][-1] < 0.8 * config["text"]["unigram_nats"] < losses["validation"][0]
    assert "tokens/s" in ended.out
    assert "optimizer state" in ended.out


def test_the_data_is_an_entry_of_each_checkpoint(trained: tuple[Path, Ended]) -> None:
    for step in (10, 15, 20):
        manifest = read_manifest(Files(), trained[0] / "checkpoints" / f"step-000000{step}")
        assert decode(manifest.values["data"], "data")["step"] == step


def test_the_config_file_of_a_run_repeats_it(trained: tuple[Path, Ended], tmp_path: Path) -> None:
    run = tmp_path / "again"
    ended = run_forked([*COMMAND[:4], "--config", str(trained[0] / "config.toml"), "--out", str(run)])
    assert (ended.code, ended.err) == (0, "")
    assert "on 2 cpu rank(s)" in ended.out
    assert _losses(run) == _losses(trained[0])


def test_sharding_halves_what_a_rank_holds(trained: tuple[Path, Ended]) -> None:
    _, ended = trained
    row = next(line for line in ended.out.splitlines() if "sum" in line)
    assert row.replace("│", " ").split()[-1] in ("49%", "50%"), row


def test_ranks_of_another_launcher_continue_the_run_behind_another_api(
    trained: tuple[Path, Ended], tmp_path: Path
) -> None:
    run, script = copy_cut_back(trained[0], tmp_path / "cut", 15), tmp_path / "rank.py"
    words = [*COMMAND[COMMAND.index("train") :], "--resume", str(run), "--shard", "zero1", "--accumulate", "3"]
    script.write_text(f"import sys\nfrom shardwise.cli.main import main\nsys.exit(main({words!r}))\n")
    ended = run_script(script, 2)
    assert ended.code == 0, ended.err
    assert "resuming after step 15, 180 windows into the text" in ended.out
    for (kind, step, loss), (kind_2, step_2, loss_2) in zip(_losses(run), _losses(trained[0]), strict=True):
        assert (kind, step) == (kind_2, step_2)
        assert loss == pytest.approx(loss_2, rel=1e-4)


def _checkpoints(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run / "checkpoints").glob("step-*/*")}


def test_a_checkpoint_that_cannot_be_written_ends_every_rank_and_spares_the_others(
    trained: tuple[Path, Ended], tmp_path: Path
) -> None:
    run = copy_cut_back(trained[0], tmp_path / "full", 15)
    kept = _checkpoints(run)
    # A limit on the size of files stands for a full disk: OSError from write, on both ranks.
    ended = run_forked([*COMMAND, "--resume", str(run), "--nproc", "2"], largest_file=60_000)
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert ended.err.count("shardwise: error:") == 1
    assert "step 20 was not saved, earlier checkpoints stand: ranks 0, 1: OSError: File too large" in ended.err
    assert _checkpoints(run) == kept


def test_a_run_without_a_whole_checkpoint_says_so(trained: tuple[Path, Ended], tmp_path: Path) -> None:
    run = copy_cut_back(trained[0], tmp_path / "damaged", 15)
    figures = (run / "metrics.jsonl").read_bytes()
    for part in (run / "checkpoints").glob("step-*/part-00001.safetensors"):
        whole = part.read_bytes()
        part.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    ended = run_forked([*COMMAND, "--resume", str(run), "--nproc", "1"])
    assert ended.code == 2, ended.err
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert "no checkpoint of the run is whole" in ended.err
    assert "step-00000010/part-00001.safetensors: block 0" in ended.err
    assert (run / "metrics.jsonl").read_bytes() == figures


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the process tree from /proc")
@pytest.mark.parametrize(
    ("target", "how", "code", "words"),
    [
        ("command", signal.SIGINT, 130, "ended by SIGINT; every rank has ended too"),
        ("command", signal.SIGKILL, -9, ""),
        ("rank", signal.SIGKILL, 1, "was ended by SIGKILL"),
    ],
)
def test_no_rank_outlives_the_others(
    text: Path, tmp_path: Path, target: str, how: signal.Signals, code: int, words: str
) -> None:
    run = tmp_path / "endless"
    command = [*COMMAND, *options(data=text, out=run, nproc=2, steps=1_000_000, eval_every=1_000_000, save_every=5)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with start_forked(command, {"TMPDIR": str(temporary)}) as process:
        ranks = wait_for_training(process, run)
        assert len(ranks) >= 2
        os.kill(process.pid if target == "command" else ranks[-1], how)
        _, err = process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if is_alive(pid)]
    assert process.returncode == code, err
    reason, *more = err.splitlines() or [""]
    assert words in reason
    assert bool(reason) == bool(words), err
    assert more in ([], [f"shardwise: what each rank did last: shardwise diagnose {run}"]), err
    assert bool(list(temporary.glob("shardwise-*"))) == (code == -signal.SIGKILL)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        assert verify(Files(), checkpoint) == []


def test_the_first_signal_saves_and_the_second_ends_every_rank_at_once(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "endless"
    command = [*COMMAND, *options(data=text, out=run, nproc=2, steps=1_000_000, eval_every=1_000_000, save_every=5)]
    with start_forked(command) as process:
        ranks = wait_for_training(process, run)
        for number in range(50):
            for (
                rank
            ) in ranks:  # stopped, they cannot do what the first signal asks for; the command continues them once
                os.kill(rank, signal.SIGSTOP)
            if number == 0:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.startswith("shardwise: ended by SIGTERM")
    assert not [pid for pid in ranks if is_alive(pid)]


def test_figures_are_told_from_the_first_step_on_and_are_of_one_step_each(trained: tuple[Path, Ended]) -> None:
    run, ended = trained
    assert "step 1/20  loss" in ended.out
    lines = [line for line in metrics_of(run) if line["kind"] == "train"]
    assert len(lines) == len({line["time"] for line in lines}) == 20
    # two steps may be equally fast; if all lines had one figure, all would be
    assert len({line["tokens_per_s"] for line in lines}) > 10
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    measured = [line for line in lines if "step_s" in line]
    assert [line["step"] for line in measured] == [1, 4, 5, 8, 10, 12, 15, 16, 20]
    assert all(line["step_s"] > 0 and line["data_s"] > 0 for line in measured)
    assert {line["step"] for line in measured if "exposed_wait_s" in line} == {4, 8, 12, 16, 20}
    assert " ms/step  data " in ended.out


def test_the_table_of_units_has_no_empty_column(trained: tuple[Path, Ended]) -> None:
    heading = next(line for line in trained[1].out.splitlines() if line.startswith("unit "))
    assert heading.split() == ["unit", "modules", "parameters", "bytes", "padding"]


# ---- ``--reproducible``: the same bits at every number of ranks, in a run from its start and in one that is continued.

FIXED: dict[str, object] = {"reproducible": 6, "steps": 6, "eval_every": 3, "save_every": 3, "clip": 0.5}


def _bits_of(run: Path, *words: str) -> list[tuple[object, ...]]:
    ended = run_forked([*COMMAND, *words])
    assert (ended.code, ended.err) == (0, "")
    return [tuple(line.get(key) for key in ("kind", "step", "loss", "grad_norm")) for line in metrics_of(run)]


def test_a_reproducible_run_has_the_same_bits_at_other_numbers_of_ranks(text: Path, tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    expected = _bits_of(alone, *options(data=text, out=alone, nproc=1, **FIXED))
    assert len(expected) == 6 + 3
    assert _bits_of(run, *options(data=text, out=run, nproc=3, **FIXED)) == expected
    cut = copy_cut_back(run, tmp_path / "cut", 3)
    assert _bits_of(cut, "--resume", str(cut), "--nproc", "2") == expected


def test_a_run_beside_another_ends_at_the_first_difference(text: Path, tmp_path: Path) -> None:
    first, same, other = (tmp_path / name for name in ("first", "same", "other"))
    fixed = {**FIXED, "steps": 2, "eval_every": 2}
    assert run_forked([*COMMAND, *options(data=text, out=first, nproc=1, **fixed), "--record-digests"]).code == 0
    beside = ("--compare-with", str(first))
    ended = run_forked([*COMMAND, *options(data=text, out=same, nproc=2, **fixed), *beside])
    assert (ended.code, ended.err) == (0, "")
    lines = [(run / "digests.jsonl").read_text() for run in (first, same)]
    assert lines[0] == lines[1]
    fixed["clip"] = 0.1
    ended = run_forked([*COMMAND, *options(data=text, out=other, nproc=2, **fixed), *beside])
    assert ended.code == 1
    assert "step 1: the first difference from the run in" in ended.err
    assert " is parameter " in ended.err
    ended = run_forked([*COMMAND, *options(data=text, out=other, nproc=2), *beside])
    assert (ended.code, "need --reproducible V" in ended.err) == (2, True)


def test_dropout_of_a_reproducible_run_that_goes_on_with_fewer_ranks_draws_the_same_numbers(
    text: Path, tmp_path: Path
) -> None:
    run, model = tmp_path / "run", ("--model-from", "helpers.own_model:build_with_dropout")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in FIXED.items()]
    expected = _bits_of(
        run, *words, *model, "--batch=12", "--context=16", f"--data={text}", f"--out={run}", "--nproc=2"
    )
    cut = copy_cut_back(run, tmp_path / "cut", 3)
    assert _bits_of(cut, "--resume", str(cut), *model, "--nproc", "1") == expected
