"""A rank that waits says for whom, and where each stands: after a while on standard error, at the end in its error."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.commands import Ended
from helpers.forked_ranks import run_script
from helpers.ranks import on_ranks
from torch import nn

import shardwise
from shardwise import CheckpointError, fully_shard
from shardwise.checkpoint import save
from shardwise.observe import explain_end

BEGIN = """
import datetime, sys, torch, torch.distributed as dist, shardwise
from torch import nn
shardwise.set_wait_report(1.0)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
rank = dist.get_rank()
torch.manual_seed(0)
model = shardwise.shard_model(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)]))
"""
# Rank 0 evaluates alone; rank 1 has one batch more.
EVALUATES = (
    "model(torch.ones(2, 8)).sum().backward()\nif rank == 0:\n    with torch.no_grad(): model(torch.ones(2, 8))\n"
)
UNEQUAL = "for _ in range(3 + rank):\n    model(torch.ones(2, 8)).sum().backward()\n"


def ended(program: str, folder: Path) -> tuple[Ended, str]:
    script = folder / "program.py"
    script.write_text(BEGIN + program + "dist.barrier()\n")
    return run_script(script, 2, TMPDIR=str(folder)), str(script)


@pytest.mark.parametrize(
    ("program", "ahead", "lines", "counts"),
    [(EVALUATES, 0, (11, 12), ("2nd", "1st")), (UNEQUAL, 1, (10, 11), ("4th", "3rd"))],
    ids=["one evaluates", "batches"],
)
def test_ranks_that_run_different_numbers_of_forwards_are_told_so_while_they_wait_and_at_the_end(
    program: str, ahead: int, lines: tuple[int, int], counts: tuple[str, str], tmp_path: Path
) -> None:
    found, script = ended(program, tmp_path)
    at = rf"\({re.escape(script)}:"
    forward = rf"rank {ahead} is in its {counts[0]} forward {at}{lines[0]}, waits for rank {1 - ahead}, for \d s\)"
    barrier = (
        rf"rank {1 - ahead} is in torch.distributed.barrier\(\) after its {counts[1]} forward {at}{lines[1]}, waits for"
    )
    (notice,) = [line for line in found.err.splitlines() if line.startswith("shardwise: rank")]
    differ = r"they ran different numbers of forwards, which `with Join\(\[model\]\):` allows"
    for part in (forward, barrier, differ):
        assert re.search(part, notice), (part, notice)
    end = rf"rank {ahead} (is|raised DesyncError) in its {counts[0]} forward {at}{lines[0]}.*{differ}"
    assert re.search(rf"\[rank{ahead}\]: .*{end}", found.err), found.err
    assert re.search(
        rf"\[rank{1 - ahead}\]: .*barrier\(\) after its {counts[1]} forward {at}{lines[1]}.*{differ}", found.err
    )


ALONE = """
import datetime, sys, torch, torch.distributed as dist, shardwise
from torch import nn
from torch.distributed.algorithms.join import Join
shardwise.set_wait_report(300.0, deadlock_s=1.0)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank = dist.get_rank()
torch.manual_seed(0)
model = shardwise.shard_model(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)]))
def step(): model(torch.ones(2, 8)).sum().backward()
step()
"""


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        ("if rank == 0: shardwise.checkpoint.save({folder!r}, {{'model': model}}, step=1)\nstep()\n",
         (r"save\(\) after", "its 2nd forward")),
        ("if rank == 0: next(model.parameters()).full_tensor()\ndist.barrier()\n",
         (r"torch.distributed.full_tensor\(\)", r"torch.distributed.barrier\(\)")),
        ("if rank == 0: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\ndist.barrier()\n",
         (r"clip_grad_norm_\(\)", r"torch.distributed.barrier\(\)")),
        ("meter = shardwise.StepMeter(model, every=1)\nwith Join([model]):\n    for _ in range(2 + rank):\n"
         "        with meter.step(): step()\n        meter.log()\n", ("Join's exit", r"log\(\)")),
    ],
    ids=["save", "full_tensor", "clip", "log in a Join"],
)  # fmt: skip
def test_ranks_that_wait_for_each_other_raise_the_report_on_every_rank(
    program: str, calls: tuple[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(ALONE + program.format(folder=str(tmp_path / "saved")))
    found = run_script(script, 2, TMPDIR=str(tmp_path))
    where = (
        rf"ranks 0, 1 wait for each other, so that none can go on: rank 0 is in {calls[0]}.*; rank 1 is in {calls[1]}"
    )
    assert found.code == 1
    for rank in range(2):
        assert re.search(rf"\[rank{rank}\]: .*DesyncError: {where}", found.err), found.err
    assert len(re.findall(rf"^shardwise: {where}", found.err, re.MULTILINE)) == 1


@contextlib.contextmanager
def reports_after(seconds: float) -> Iterator[io.StringIO]:
    shardwise.set_wait_report(seconds)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        shardwise.set_wait_report(30.0)


def stepped() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    return model


_kept: list[nn.Module] = []  # of an earlier job of the same processes


@on_ranks(2)
def test_a_model_of_an_earlier_job_stays() -> None:
    _kept.append(stepped())
    _kept[0](torch.ones(2, 8)).sum().backward()


@on_ranks(2, group_timeout_s=2.0)
def test_save_on_one_rank_says_that_it_is_collective(tmp_path: Path) -> None:
    """And counts the forwards of this job's model, though one of the job before is still there."""
    with reports_after(0.6) as said:
        model = stepped()
        if dist.get_rank() == 0:
            with pytest.raises(
                CheckpointError, match=r"save and load are collective.*rank 0 is in save\(\) after its 1st"
            ) as caught:
                save(tmp_path, {"model": model}, step=1)
            assert re.search(r"rank 1 is in your code after its 1st forward \(.*test_wait_watch.py", str(caught.value))
            assert re.search(r"^shardwise: rank 0 is in save\(\).*; rank 1 is in your code", said.getvalue())
        else:
            for _ in range(55):
                time.sleep(0.1)
            assert said.getvalue() == ""


@on_ranks(2)
def test_nothing_is_said_of_ranks_that_go_on_and_only_once_of_those_that_wait() -> None:
    with reports_after(0.5) as said:
        model = stepped()
        for wait_s in (0.0, 1.6):
            for _ in range(8):
                if dist.get_rank() == 1:
                    time.sleep(0.1)
                model(torch.ones(2, 8)).sum().backward()
            assert said.getvalue() == ""
            if wait_s and dist.get_rank() == 1:
                time.sleep(wait_s)
        model(torch.ones(2, 8)).sum().backward()
        num_lines = said.getvalue().count("shardwise: rank 0 is in its 18th forward")
        assert num_lines == len(said.getvalue().splitlines()) == (dist.get_rank() == 0)
        assert "different numbers" not in said.getvalue(), "rank 1 is late, not elsewhere"


@on_ranks(2)
def test_a_rank_that_computes_or_writes_while_the_others_wait_is_waited_for(tmp_path: Path) -> None:
    shardwise.set_wait_report(0.4, deadlock_s=0.2)
    try:
        model = stepped()
        for _ in range(2):
            if dist.get_rank() == 0:
                for number in range(4):
                    time.sleep(0.3)
                    (tmp_path / str(number)).write_text("a long file")
            dist.barrier()
            model(torch.ones(2, 8)).sum().backward()
            save(tmp_path / "saved", {"model": model}, step=1)
    finally:
        shardwise.set_wait_report(30.0)


@on_ranks(2, fresh=True)
def test_an_error_of_the_program_itself_is_not_said_to_be_of_other_ranks() -> None:
    stepped()
    with pytest.raises(RuntimeError, match="shapes") as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert explain_end(caught.value) == ""
    assert not getattr(caught.value, "__notes__", [])


@on_ranks(2)
def test_zero_seconds_say_and_write_nothing() -> None:
    with reports_after(0) as said:
        model = stepped()
        if dist.get_rank() == 1:
            time.sleep(1.0)
        model(torch.ones(2, 8)).sum().backward()
        assert said.getvalue() == ""
        assert shardwise.consistency.recorder.place_of_records() is None


def test_a_wait_report_takes_a_number_of_seconds() -> None:
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(shardwise.ConfigError, match="seconds must be 0"):
            shardwise.set_wait_report(wrong)
        with pytest.raises(shardwise.ConfigError, match="deadlock_s must be 0"):
            shardwise.set_wait_report(30.0, deadlock_s=wrong)
