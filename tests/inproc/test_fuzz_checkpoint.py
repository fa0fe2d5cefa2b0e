"""What the fuzzer's checkpoints, and its reference, take care of where torch alone would change numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from fuzz import actions as do
from fuzz.case import Case, Model, Node, Optim, Segment, Settings
from fuzz.checkpoint import read, write
from fuzz.phases import Play
from fuzz.reference import run_reference
from fuzz.render import render
from helpers.one_process import alone
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardwise import ShardedOptimizer


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {float(entry["step"]) for entry in optimizer.state.values()}


def test_torch_counts_a_step_that_was_none_when_it_saves_an_optimizer() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    get_state_dict(net, optimizer)
    assert stepped(net, optimizer) == {2.0}


def test_optimizers_that_have_not_stepped_come_out_of_checkpoints_so(tmp_path: Path) -> None:
    with alone():
        for how in ("full", "dcp"):
            for saves_sharded in (False, True):
                for loads_sharded in (False, True):
                    net = nn.Linear(2, 2)
                    folder = str(tmp_path / f"{how}{saves_sharded}{loads_sharded}")
                    write(net, _optimizer(net, saves_sharded), folder, how)
                    loaded = _optimizer(net, loads_sharded)
                    read(net, loaded, folder, how)
                    assert stepped(net, loaded) == {1.0}, folder


def _optimizer(net: nn.Module, is_sharded: bool) -> torch.optim.Optimizer:
    if is_sharded:
        return ShardedOptimizer(net.named_parameters(), torch.optim.AdamW)
    return torch.optim.AdamW(net.parameters())


def test_gradients_of_the_reference_lie_in_memory_as_their_parameters() -> None:
    """torch's fused optimizers update by memory alone, whatever the strides of a gradient are."""
    root = Node("Stack", children=(Node("Conv", size=2),), segments=(Segment((0,)),))

    def values(name: str) -> dict[str, list[float]]:
        settings = Settings("reals", "float64", optim=Optim(name))
        case = Case(1, "doors", 1, Model(root), settings, (do.Forward(), do.Backward(), do.Step()))
        ((tale,),) = run_reference(Play.load(render(case)))
        found = {key: part for key, part in tale.records[-1].shared.items() if key.startswith("param:")}
        return {key: part.values.round(7).tolist() for key, part in found.items() if part is not None}

    assert values("fused") == values("foreach")
