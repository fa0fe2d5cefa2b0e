"""Folders of training runs, and text to train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

NUM_FILES = 12


def write_text(folder: Path) -> Path:
    """Fill ``folder`` with a corpus that is learned in a few steps."""
    for index in range(NUM_FILES):
        words = f"the cat number {index} sat on the mat, and the dog sat by the api. "
        (folder / f"{index}.txt").write_text(words * 60)
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def restarts_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "restarts.jsonl").read_text().splitlines()]


def copy_cut_back(run: Path, to: Path, step: int) -> Path:
    """Copy a run as if it had been killed while it wrote the checkpoint after that of ``step``."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("tensorboard"))
    for checkpoint in (to / "checkpoints").glob("step-*"):
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)
    pending = to / "checkpoints" / f".saving-{0:032x}"
    pending.mkdir()
    (pending / "part-00000.safetensors").write_bytes(b"half")
    return to
