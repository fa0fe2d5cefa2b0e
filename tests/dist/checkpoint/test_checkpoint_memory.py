"""What a load holds beyond what was there, one copy of what the rank holds, and when it may copy that."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import APIS, NUM_SAVED, NUM_STEPS, differences, expected, made, state_of, train
from helpers.live_bytes import LiveBytes
from helpers.ranks import on_ranks
from torch import nn

from shardwise.checkpoint import load, save
from shardwise.checkpoint.state import contents_of

MATRIX_BYTES = 4 * 128 * 128


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(12))


def _held_bytes(state: dict[str, Any]) -> int:
    parts = contents_of(state, 0, 1).parts
    return sum(part.tensor.numel() * part.tensor.element_size() for each in parts.values() for part in each)


@on_ranks(2)
def test_a_load_takes_one_copy_of_what_a_rank_holds_behind_every_api(tmp_path: Path) -> None:
    more: dict[str, int] = {}
    for api in APIS:
        model = APIS[api].wrap(Wide())
        optimizer = APIS[api].make(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        state = state_of(model, optimizer)
        save(tmp_path / api, state, step=0)
        gc.collect()
        with LiveBytes() as live:
            load(tmp_path / api, state)
        more[api] = live.peak - _held_bytes(state)
    # Of fifteen matrices, an owner has the whole state of one half more than it has shards of.
    limits = dict.fromkeys(APIS, 4096) | {"whole matrix": 2 * MATRIX_BYTES}
    wrong = {api: num_bytes for api, num_bytes in more.items() if num_bytes > limits[api]}
    assert wrong == {}, wrong


@on_ranks(2)
def test_nothing_is_moved_to_its_device_before_it_is_read(tmp_path: Path) -> None:
    class Keeps:
        """An object whose state is sharded like a parameter."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.kept = {"kept": tensor}

        def state_dict(self) -> dict[str, Any]:
            return self.kept

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.kept = state

    to = torch.Tensor.to
    for api in APIS:
        model, optimizer = made(api)
        train(model, optimizer, range(NUM_SAVED))
        for group in optimizer.param_groups:
            group["lr"] = 0.07
        keeps = Keeps(next(model.parameters()).detach().clone())
        save(tmp_path / api, state_of(model, optimizer) | {"keeps": keeps}, step=0)
        model, optimizer = made(api, seed=1)
        kept, keeps.kept = keeps.kept["kept"], {"kept": torch.zeros_like(keeps.kept["kept"])}
        with pytest.MonkeyPatch.context() as patch:  # as on a GPU, where the host's memory is not the device's
            patch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: to(self, *args, **kwargs).clone())
            load(tmp_path / api, state_of(model, optimizer) | {"keeps": keeps})
        assert bool((keeps.kept["kept"] == kept).all()), api
        train(model, optimizer, range(NUM_SAVED, NUM_STEPS))
        assert differences(model, expected()) == [], api
