"""What differs between two checkpoints is said by name, with how much."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint import finish, save
from shardwise.checkpoint.compare import Difference, differences


def test_what_differs_is_said_by_name_and_by_how_much(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("old", torch.tensor([float("nan"), 1.0]))
    with torch.no_grad():
        model.bias.zero_()
    save(tmp_path, {"model": model, "loop": {"epoch": 1}}, step=1)
    with torch.no_grad():
        model.bias[1] = 0.25
    model.register_buffer("new", torch.zeros(1))
    save(tmp_path, {"model": model, "loop": {"epoch": 2}}, step=2)
    finish(tmp_path)
    assert list(differences(tmp_path / "step-00000001", tmp_path / "step-00000002")) == [
        Difference("loop", "{'epoch': 1} in the first, {'epoch': 2} in the second"),
        Difference("model/bias", "1 of 2 elements, by up to 0.25", 1, 0.25),
        Difference("model/new", "in the second alone"),
    ]
    assert list(differences(tmp_path, tmp_path / "step-00000002")) == []
