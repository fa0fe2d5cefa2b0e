"""``notebook_launch`` in a real Jupyter kernel, with functions and classes that only the notebook knows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.commands import is_alive
from nbclient import NotebookClient

pytestmark = pytest.mark.clients

CELLS = (
    """
from dataclasses import dataclass
import os, signal, threading, time
import torch, torch.distributed as dist, shardwise
from torch import nn

@dataclass
class Options:
    width: int

def train(options):
    torch.manual_seed(0)
    model = shardwise.fully_shard(nn.Linear(options.width, 1))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} trains")
    loss = model(torch.ones(1, options.width)).sum()
    loss.backward()
    total = model.weight.grad.full_tensor().sum().item()
    dist.destroy_process_group()
    return Options(int(total))

shardwise.notebook_launch(train, 2, Options(7)).width
""",
    """
def fails():
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
    time.sleep(600)

shardwise.notebook_launch(fails, 2)
""",
    """
from pathlib import Path

def waits(folder):
    (Path(folder) / f"rank-{os.getpid()}").touch()
    time.sleep(600)

def interrupt():
    while len(list(Path(FOLDER).glob("rank-*"))) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
shardwise.notebook_launch(waits, 2, FOLDER)
""",
)


def test_a_notebook_trains_on_ranks_raises_what_they_raised_and_ends_them_when_it_is_interrupted(
    tmp_path: Path,
) -> None:
    cells = [nbformat.v4.new_code_cell(text.replace("FOLDER", repr(str(tmp_path)))) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=200, allow_errors=True, kernel_name="python3").execute()
    trains, fails, waits = (list(cell["outputs"]) for cell in notebook.cells)
    printed = "".join(output["text"] for output in trains if output["output_type"] == "stream")
    assert {"rank 0 of 2 trains", "rank 1 of 2 trains"} <= set(printed.splitlines()), trains
    assert trains[-1]["data"]["text/plain"] == "7", trains
    assert _error(fails)["ename"] == "KeyError"
    assert "rank 1 raised; its traceback" in "".join(_error(fails)["traceback"])
    assert _error(waits)["ename"] == "KeyboardInterrupt"
    pids = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def _error(outputs: list[Any]) -> Any:
    found = [output for output in outputs if output["output_type"] == "error"]
    assert found, outputs
    return found[0]
