"""An optimizer whose call raised is as it was before the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ConfigError, ShardedOptimizer


def _stepped(flat: bool) -> tuple[nn.Linear, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.1, flat=flat)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True])
def test_a_load_without_memory_leaves_the_state(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    model, optimizer = _stepped(flat)
    other, untouched = _stepped(flat)
    state = optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "load_state_dict", fails)
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(state)
    for each, own in ((model, optimizer), (other, untouched)):
        each(torch.ones(1, 3)).sum().backward()
        own.step()
    assert torch.equal(model.weight, other.weight)
    assert float(optimizer.state_dict()["state"]["weight"]["step"]) == 4


def test_a_group_of_results_is_refused_and_steps_go_on() -> None:
    model, optimizer = _stepped(flat=True)
    with pytest.raises(ConfigError, match=r"\['scaled'\] are results of operations"):
        optimizer.add_param_group({"params": {"scaled": model.weight * 2}})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups) == 1
