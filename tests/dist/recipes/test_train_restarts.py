"""``shardwise train --max-restarts``: runs that go on by themselves, and those that do not."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import clean_environment, options
from helpers.commands import run as run_command
from helpers.forked_ranks import ForkedRank, alive, fork_ranks
from helpers.runs import metrics_of, restarts_of, write_text

from shardwise.checkpoint.convert import CheckpointSource, compare_tensors
from shardwise.checkpoint.files import Files, list_checkpoints
from shardwise.cli.main import main
from shardwise.loop import launch

FAST = {"steps": 12, "eval_every": 12, "log_every": 4, "save_every": 2, "sample_bytes": 0, "keep": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


def _words(text: Path, run: Path, nproc: int, *more: str, **changes: object) -> list[str]:
    return ["train", "--device", "cpu", *options(data=text, out=run, nproc=nproc, **(FAST | changes)), *more]


def _newest(run: Path) -> int:
    return max((each.step for each in list_checkpoints(Files(), run / "checkpoints")), default=0)


def _figures(run: Path) -> list[tuple[object, object, object]]:
    return [(line["kind"], line["step"], line["loss"]) for line in metrics_of(run)]


def _differing(run: Path, other: Path) -> list[str]:
    """Return the names of the tensors of the last checkpoints that are not the same to the bit."""
    places = [list_checkpoints(Files(), each / "checkpoints")[-1].path for each in (run, other)]
    first, second = map(CheckpointSource.open, places)
    assert first.names == second.names
    assert first.manifest.step == second.manifest.step
    return [each.name for each in compare_tensors(first, second)]


class Killer(threading.Thread):
    """Sends a signal to a rank whenever a condition is met, once for each of ``when``."""

    def __init__(self, *when: Callable[[], bool], ranks: list[int], how: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(daemon=True)
        self._when, self._ranks, self._how = when, ranks, how

    def run(self) -> None:
        for number, (condition, rank) in enumerate(zip(self._when, self._ranks, strict=True)):
            while (
                not condition() or len(starts := [each for each in ForkedRank.started if each.rank == rank]) <= number
            ):
                time.sleep(0.002)
            os.kill(starts[number].pid, self._how)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_run_whose_ranks_are_killed_ends_with_the_parameters_of_an_undisturbed_one(
    text: Path,
    tmp_path: Path,
    forked: None,
    num_ranks: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, whole, chance = tmp_path / "run", tmp_path / "whole", random.Random(num_ranks)
    monkeypatch.setattr(launch, "GRACE_S", 20.0)  # the others write down what they did, however busy the machine is
    assert main(_words(text, whole, num_ranks)) == 0
    steps = [chance.randrange(2, 5), chance.randrange(7, 10)][: 3 - num_ranks // 2]  # one kill of four ranks
    victims = [chance.randrange(num_ranks) for _ in steps]
    ForkedRank.started.clear()
    killer = Killer(*[lambda step=step: _newest(run) >= step for step in steps], ranks=victims)
    killer.start()
    assert main(_words(text, run, num_ranks, "--max-restarts", "3")) == 0
    assert not alive()
    assert _differing(run, whole) == []
    assert _figures(run) == _figures(whole)
    restarts = restarts_of(run)
    assert [each["number"] for each in restarts] == list(range(1, len(steps) + 1))
    assert [each["ranks"] for each in restarts] == [num_ranks] * len(steps)
    assert all(
        f"rank {rank} was ended by SIGKILL" in str(each["cause"]) for rank, each in zip(victims, restarts, strict=True)
    )
    assert all(float(each["step"]) >= step for step, each in zip(steps, restarts, strict=True))
    said = capfd.readouterr().err
    assert f"shardwise: restart {len(steps)} of 3, on {num_ranks} rank(s)" in said
    assert "Traceback" not in said
    assert f"what each rank did last: shardwise diagnose {run}" in said
    assert main(["diagnose", str(run)]) == 0
    told = capfd.readouterr().out
    assert told.startswith("nothing has failed since the last start; this is what ended the start before\n")
    assert f"rank {victims[-1]} " in told
    assert not [path for path in (run / "checkpoints").iterdir() if not path.name.startswith(("step-", ".verified"))]


def test_a_run_goes_on_with_the_ranks_that_are_left(
    text: Path, tmp_path: Path, forked: None, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    Killer(lambda: _newest(run) >= 3, ranks=[1]).start()
    assert main(_words(text, run, 3, "--max-restarts", "1", "--min-nproc", "2", batch=6)) == 0
    assert [(each["ranks"], each["number"]) for each in restarts_of(run)] == [(2, 1)]
    assert [line["step"] for line in metrics_of(run) if line["kind"] == "train"] == list(range(1, 13))
    assert "restart 1 of 1, on 2 rank(s)" in capfd.readouterr().err
    assert not alive()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 1e20}, ["not started again: a restart would end alike"]),
        ({}, ["ended by SIGINT; every rank has ended too"]),
    ],
    ids=["diverged", "interrupted"],
)
def test_what_a_restart_cannot_mend_is_not_started_again(
    text: Path,
    tmp_path: Path,
    forked: None,
    capfd: pytest.CaptureFixture[str],
    change: dict[str, float],
    words: list[str],
) -> None:
    run = tmp_path / "run"
    if not change:
        threading.Thread(target=_interrupt, args=(lambda: _newest(run) >= 3,), daemon=True).start()
    code = main(_words(text, run, 2, "--max-restarts", "3", **({"steps": 100_000} if not change else {}), **change))
    said = capfd.readouterr().err
    assert code == (1 if change else 130), said
    assert len(ForkedRank.started) == 2
    assert all(text in said for text in words), said
    assert not alive()


def _interrupt(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.chaos
def test_torchruns_restarts_resume_the_run_that_they_have_begun(text: Path, tmp_path: Path) -> None:
    run, marker, script = tmp_path / "run", tmp_path / "killed", tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, signal, sys, threading, time, types\n"
        # TensorBoard takes longer to import than the run lasts.
        "writer = type('Writer', (), {'__init__': lambda *_, **__: None, '__enter__': lambda self: self,\n"
        "    '__exit__': lambda *_: None, 'add_scalar': lambda *_: None, 'flush': lambda _: None})\n"
        "sys.modules['torch.utils.tensorboard'] = types.SimpleNamespace(SummaryWriter=writer)\n"
        "from shardwise.cli.main import main\n"
        f"run, marker = pathlib.Path({str(run)!r}), pathlib.Path({str(marker)!r})\n"
        "def kill():\n"
        "    while not list(run.glob('checkpoints/step-*')):\n"
        "        time.sleep(0.01)\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['RANK'] == '1' and not marker.exists():\n"
        "    threading.Thread(target=kill, daemon=True).start()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words = ["train", "--device", "cpu", *options(data=text, out=run, **FAST)]
    ended = run_command([sys.executable, *torchrun, "--monitor-interval", "0.1", str(script), *words])
    assert ended.code == 0, ended.err
    assert marker.exists()
    assert [each["number"] for each in restarts_of(run)] == [1], ended.err
    assert "restart 1: torchrun has started all ranks again; going on after step" in ended.out
    assert [line["step"] for line in metrics_of(run) if line["kind"] == "train"] == list(range(1, 13))
