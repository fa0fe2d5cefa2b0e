"""A program whose launcher starts all ranks again: ``elastic_restarted.py SETTINGS``, a JSON object.

``folder``: for its result and its notes.  ``kills``: ``[step, rank, what]``, each once: this rank, the ``workers`` of its host,
its ``agent``, or ``leaves``: an exception.  ``slow_ms``: of a step.  ``V``: microbatches of a step.  ``checkpoints``: a folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from helpers.elastic_program import NUM_MICROBATCHES, NUM_STEPS, batch_of, make_model, make_optimizer, shard
from shardwise.checkpoint import save
from shardwise.elastic.run import ElasticRun


def end(what: str) -> None:
    """Kill what ``kills`` says."""
    agent = os.getppid()
    if what == "leaves":
        raise ValueError("no such column")
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for pid in {"rank": [os.getpid()], "workers": [int(each) for each in children], "agent": [agent]}[what]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)  # the kernel ends this process


def train(settings: dict[str, Any]) -> None:
    """Train as ``settings`` say."""
    folder = Path(settings["folder"])
    begin_s, worlds = time.monotonic(), list[int]()

    def note(text: str) -> None:
        with (folder / "notes").open("a") as file:
            file.write(f"{time.monotonic():.3f} {text}\n")

    def build() -> dict[str, Any]:
        model = make_model()
        shard(model, "fully_shard")
        return {"model": model, "optimizer": make_optimizer(model.parameters(), ""), "user": {"seen": 0}}

    def step(run: ElasticRun, **state: Any) -> int:
        rank, size = dist.get_rank(), dist.get_world_size()
        if not worlds and not rank:
            recovery = run.recoveries[-1] if run.recoveries else None
            spent_s = {} if recovery is None else {name: round(each, 3) for name, each in recovery.seconds.items()}
            note(f"begins {run.number} on {size} after {time.monotonic() - begin_s:.3f} {json.dumps(spent_s)}")
        worlds.append(size)
        time.sleep(settings.get("slow_ms", 0) / 1000)
        loss = state["model"](batch_of(run.number).chunk(size)[rank])
        (loss * size / 4).backward()
        for number, other, what in settings.get("kills", ()):
            mark = folder / f"killed-{number}-{other}-{what}"
            if (number, other) == (run.number, rank) and not mark.exists():
                mark.touch()
                note(f"kills {what} {number}")
                end(what)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["user"]["seen"] += 1
        return run.number

    def on_commit(run: ElasticRun, result: int) -> None:
        assert result == run.number - 1
        if "checkpoints" in settings:
            save(settings["checkpoints"], run.state, step=run.number)
        if not dist.get_rank():
            note(f"commits {run.number}")

    def after(run: ElasticRun) -> None:
        found = shardwise.full_state_dict(run.state["model"])
        if not dist.get_rank():
            torch.save([found, {"seen": run.state["user"]["seen"], "worlds": worlds}], folder / "out")

    shardwise.elastic(
        build,
        step,
        num_steps=settings.get("num_steps", NUM_STEPS),
        num_microbatches=settings.get("V", NUM_MICROBATCHES),
        on_commit=on_commit,
        after=after,
        folder=settings.get("checkpoints"),
    )


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
    dist.destroy_process_group()
