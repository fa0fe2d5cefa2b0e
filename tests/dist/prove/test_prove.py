"""``shardwise prove``: wrong programs are named, right ones pass, and what cannot be proven is told with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, Ended
from helpers.folders import folder_of_all
from helpers.forked_commands import run_forked
from helpers.prove_programs import PRELUDE, RIGHT, TORCH, WRONG
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.prove.compare import ProveOptions
from shardwise.prove.run import compare_folders
from shardwise.prove.sketch import sketches_of

PROVE = [*COMMAND[: COMMAND.index("train")], "prove"]
QUICK = ("rate_by_rank", "divided_by_hand", "shard_model")


def prove(folder: Path, text: str, ranks: int, options: Sequence[str] = ()) -> Ended:
    script = folder / "program.py"
    script.write_text(text)
    return run_forked([*PROVE, "-n", str(ranks), *options, str(script)], TMPDIR=str(folder))


def marked(names: Sequence[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", marked([*WRONG]))
def test_a_wrong_program_is_named(name: str, tmp_path: Path) -> None:
    program = WRONG[name]
    found = prove(tmp_path, program.text, program.ranks, program.options)
    assert found.code == 1, found.out + found.err
    assert re.search(program.expected, found.out), found.out


@pytest.mark.parametrize("name", marked([*RIGHT]))
def test_a_right_program_passes(name: str, tmp_path: Path) -> None:
    program = RIGHT[name]
    found = prove(tmp_path, program.text, program.ranks, program.options)
    assert found.code == 0, found.out + found.err
    assert found.out.rstrip().splitlines()[-1].startswith("right: "), found.out
    notes = [line for line in found.out.splitlines() if line.startswith("note: ")]
    assert all("clipping" in note or "random numbers" in note for note in notes), found.out


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no such column')", r"the script fails \(rank \d failed with exit code 1\) as it is"),
        ("Net()(batch()[0])", "no optimizer made a step"),
        pytest.param(
            "dist.barrier() if rank else __import__('time').sleep(99)",
            "has not made its steps within 9 s",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["fails", "never steps", "hangs"],
)
def test_what_cannot_be_proven_is_told(body: str, reason: str, tmp_path: Path) -> None:
    found = prove(tmp_path, PRELUDE + body, 2, ("--limit-s", "9"))
    assert found.code == 2
    assert re.search(f"cannot be proven: .*{reason}", found.err), found.err


LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    step(model, optimizer)
"""


def test_one_part_alone_is_compared_and_recordings_are_kept(tmp_path: Path) -> None:
    program, kept = WRONG["reduction_divides_again"], tmp_path / "kept"
    found = prove(tmp_path, program.text, 2, ("--json", "--steps", "1", "--only", "head.*", "--keep", str(kept)))
    told = json.loads(found.out)
    assert (found.code, told["code"], told["findings"], told["notes"]) == (0, 0, [], [])
    assert told["equal"] == {"gradient": [2, 2], "step gradient": [2, 2], "parameter": [2, 2]}
    assert {path.name for path in kept.iterdir()} == {"tested", "plain", "moved"}
    again = run_forked([*PROVE, "--compare", "--json", str(kept / "tested"), str(kept / "plain")])
    first = json.loads(again.out)["findings"][0]
    assert (again.code, first["what"]) == (1, "microbatch 1  gradient of blocks.1.down.bias")
    assert first["factor"] == pytest.approx(0.5)


@pytest.mark.parametrize("options", [("--init",), pytest.param((), marks=pytest.mark.exhaustive)])
def test_initial_values_are_compared_where_that_is_asked(options: Sequence[str], tmp_path: Path) -> None:
    body = "model = shard(Net(), fully_shard)\nif isinstance(model.head.weight, DTensor):\n"
    body += "    model.head.weight.to_local().detach().mul_(3)\n"
    found = prove(tmp_path, PRELUDE + TORCH + body + LOOP, 2, ("--steps", "1", *options))
    assert found.code == bool(options), found.out
    assert found.out.startswith("initial value of head.weight: 3.000 x the reference" if options else "right: ")


@pytest.mark.parametrize("options", [("--exact",), pytest.param((), marks=pytest.mark.exhaustive)])
def test_bits_are_compared_where_that_is_asked(options: Sequence[str], tmp_path: Path) -> None:
    body = "model = DDP(Net())\nif type(model).__name__ == 'DistributedDataParallel':\n"
    body += "    model.module.head.bias.register_hook(lambda g: g * (1 + 2**-22))\n"
    found = prove(tmp_path, PRELUDE + body + LOOP, 2, ("--steps", "1", *options))
    assert found.code == bool(options), found.out
    expected = "step 1  microbatch 1  gradient of head.bias: differs by 2" if options else "right: "
    assert found.out.startswith(expected), found.out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(data).tanh())


def train(model: nn.Module, rate: float, factor: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    data = torch.randn(3, dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(0))
    for batch in data[:, dist.get_rank()]:
        (model(batch).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_recordings_of_other_wrappers_compare() -> None:
    with folder_of_all() as folder:
        for name, factor in (("ours", 1.0), ("wrong", 3.0)):
            torch.manual_seed(0)
            with shardwise.recorded(folder / name):
                train(shardwise.shard_model(Net(), min_unit_bytes=0), 0.01, factor)
        torch.manual_seed(0)
        with shardwise.recorded(folder / "ddp"):
            train(DistributedDataParallel(Net()), 0.01, 1.0)
        dist.barrier()
        right, wrong = (compare_folders(folder / name, folder / "ddp", ProveOptions()) for name in ("ours", "wrong"))
        assert right.code == 0, right.lines()
        assert right.lines()[-1].startswith("right: 3 of 3 outputs equal")
        assert wrong.code == 1
        assert str(wrong.findings[0]).startswith("step 1  microbatch 1  the loss: 3.000 x the reference")
        lines = (folder / "ours" / "rank-0.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [-1, 0, 1, 2]
        num_keys = sum(len(json.loads(line)["values"]) for line in lines)
        assert sum(map(len, lines)) / num_keys < 400  # bytes per tensor and step


@on_ranks(4)
def test_sketches_of_shards_and_replicas_are_that_of_the_whole() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    full = torch.randn(7, 90)
    for placements in (
        (Replicate(), Shard(0)),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Replicate(), Replicate()),
    ):
        tensor = distribute_tensor(full, mesh, placements)
        assert isinstance(tensor, DTensor)
        parts, ranks = sketches_of({"w": tensor})["w"]
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, parts)
        whole: Any = sum(told[rank] for rank in ranks) if ranks else parts
        assert torch.allclose(whole, sketches_of({"w": full})["w"][0], rtol=1e-5, atol=1e-4)
        assert dist.get_rank() in ranks or not ranks
