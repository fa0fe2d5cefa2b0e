"""``RunDigests``: two runs at different numbers of ranks, and the name of the first tensor that differs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import Reproducible, RunDigests, StateError, shard_model

NUM = 4


class Net(nn.Module):
    """Odd widths: shards are uneven, and one rank of four has none of ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.2)) for _ in range(2)))
        self.head = nn.Linear(5, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(data)).tanh())


def run(
    ranks: int,
    folder: Path,
    against: Path | None = None,
    *,
    fault: str = "",
    strategy: str = "zero3",
    steps: int = 3,
    broken: int = 0,
) -> None:
    """Train on the first ``ranks`` ranks; ``fault``: what one element of is changed in step 2, on rank ``broken``."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    if strategy in ("hsdp", "hfsdp"):
        mesh = DeviceMesh("cpu", torch.arange(ranks).view(2, -1), mesh_dim_names=("replicate", "shard"))
    if dist.get_rank() >= ranks:
        return
    torch.manual_seed(0)
    model = Net()
    shard_model(model, strategy=strategy, mesh=mesh, min_unit_bytes=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fixed = Reproducible(model, optimizer, num_microbatches=NUM)
    data = torch.randn(NUM, 2, 5, generator=torch.Generator().manual_seed(0))

    def change(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed[0] += 1e-3
        return changed

    with RunDigests(fixed, folder, against=against):
        for step in range(steps):
            is_broken = step == 2 and dist.get_rank() == broken
            if is_broken and fault == "parameter":
                local_of(model.head.bias).data[0] += 1e-3
            for number in fixed.microbatches():
                hook: Any = nullcontext()
                if step == 2 and fault == "output" and number == 3:
                    hook = model.blocks[1].register_forward_pre_hook(lambda module, args: change(args[0]))
                if step == 2 and fault == "draw" and number == fixed.place.own[0]:
                    iter(torch.utils.data.DataLoader([0]))  # draws a seed  # pyright: ignore[reportArgumentType]
                with hook:
                    hidden = model(data[number])
                if step == 2 and fault == "gradient" and number == 1:
                    hidden.register_hook(change)
                (hidden.square().mean() / NUM).backward()
            fixed.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            if is_broken and fault == "update":
                local_of(model.first.weight).data[0, 0] += 1e-3


def local_of(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def shared_folder(tmp_path: Path) -> Path:
    """Return one folder for all ranks."""
    found: list[Any] = [tmp_path]
    dist.broadcast_object_list(found)
    return found[0]


@on_ranks(4)
def test_runs_at_any_number_of_ranks_have_the_same_digests(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    run(1, folder / "1")
    dist.barrier()
    for strategy in ("zero2", "ddp"):
        run(2, folder / strategy, folder / "1", strategy=strategy)
    run(4, folder / "4", folder / "1")
    for strategy in ("hsdp", "hfsdp"):
        run(4, folder / strategy, folder / "1", strategy=strategy)
    dist.barrier()
    lines = [json.loads(line) for line in (folder / "4" / "digests.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [0, 1, 2, 3]
    assert [*lines[0]["numbers"]] == ["num_microbatches", "num_threads"]
    names = [name.split("|")[::3] + name.split("|")[1:2] for name in lines[0]["values"]]
    assert names[0] == ["parameter", "first.weight", "0"]
    assert names[-1] == ["step gradient", "first.weight", "0"]
    assert names.index(["output", "blocks.1", "0"]) < names.index(["output", "the model", "0"])
    assert len(names) == len({sums for _, sums in lines[0]["values"].values()})
    assert len({(folder / name / "digests.jsonl").read_text() for name in ("1", "4")}) == 1


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("parameter", r"step 2: the first difference .* is parameter of head.bias\."),
        ("draw", r"step 2: the first difference .* is microbatch 1  random state of torch\."),
        ("output", r"step 2: the first difference .* is microbatch 4  output of blocks.1\."),
        ("gradient", r"step 2: the first difference .* is gradient of head.bias\."),
        ("update", r"step 3: the first difference .* is parameter of first.weight\."),
    ],
)
@on_ranks(2)
def test_the_first_difference_is_named_on_every_rank(fault: str, expected: str, tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    run(1, folder / "1")
    dist.barrier()
    with pytest.raises(StateError, match=expected):
        run(2, folder / "2", folder / "1", fault=fault)


@pytest.mark.parametrize(("strategy", "broken"), [("ddp", 1), ("hsdp", 3)])
@on_ranks(4)
def test_a_parameter_that_differs_in_one_copy_is_named(strategy: str, broken: int, tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    run(1, folder / "1")
    dist.barrier()
    with pytest.raises(StateError, match=r"step 3: the first difference .* is parameter of first.weight\."):
        run(4, folder / "4", folder / "1", fault="update", strategy=strategy, broken=broken)


class Again(Net):
    """Computes its blocks again in backward."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        data = self.first(data)
        for block in self.blocks:
            data = checkpoint(block, data, use_reentrant=True)  # the other kind stops before hooks of outputs
        return data


@on_ranks(2)
def test_outputs_are_in_the_order_of_the_forward(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = shard_model(Again(), min_unit_bytes=0)
    fixed = Reproducible(model, num_microbatches=2)
    with RunDigests(fixed, folder):
        for _ in fixed.microbatches():
            model(torch.ones(2, 5)).sum().backward()
    names = json.loads((folder / "digests.jsonl").read_text().splitlines()[0])["values"]
    found = [name.split("|")[-1] for name in names if name.startswith("output|1|")]
    assert found == ["blocks.0", "blocks.1", "the model"]


@on_ranks(2)
def test_a_resumed_run_keeps_the_lines_of_earlier_steps_alone(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = shard_model(Net())
    for first in (0, 1):
        fixed = Reproducible(model, num_microbatches=NUM)
        fixed.load_state_dict(fixed.state_dict() | {"step": first})
        with RunDigests(fixed, folder):
            for _ in range(2 - first):
                for _ in fixed.microbatches():
                    model(torch.ones(2, 5)).sum().backward()
    lines = (folder / "digests.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


@on_ranks(2)
def test_a_run_that_has_fewer_steps_or_no_digests_is_named_on_every_rank(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    run(1, folder / "1", steps=1)
    dist.barrier()
    with pytest.raises(
        StateError, match="step 1: the run in .* has no digest of microbatch 1  random state of torch; it ended before"
    ):
        run(2, folder / "2", folder / "1")
    with pytest.raises(StateError, match=r"RunDigests cannot use digests.jsonl: .* No such file"):
        run(2, folder / "2", folder / "none")
