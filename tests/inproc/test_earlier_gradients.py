"""Gradients of plain parameters are out of sight while a backward adds new ones, and so are hooks that follow them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from shardwise.fsdp.local_gradients import EarlierGradients
from shardwise.fsdp.param import ShardedParam


class Plain:
    """What a unit knows of a plain parameter, as far as its gradients go."""

    fqn, hook_id = "weight", -1

    def __init__(self, parameter: nn.Parameter) -> None:
        self.sharded = self.registered = parameter

    def adopt_registered(self) -> None:
        self.sharded = self.registered


def test_hooks_come_back_to_the_parameter_that_had_them() -> None:
    old, new, seen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), list[Any]()
    old.register_post_accumulate_grad_hook(seen.append)
    param, earlier = Plain(old), EarlierGradients()
    earlier.stash([cast(ShardedParam, param)])
    old.sum().backward()
    assert not seen, "they follow when the sum is done"
    param.sharded = new
    earlier.unstash([cast(ShardedParam, param)])
    new.sum().backward()
    assert not seen
    old.sum().backward()
    assert len(seen) == 1
    assert seen[0] is old
