"""State dicts of sharded models: shards as they lie, on any unit's state, in and out of torch's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import local
from helpers.ranks import on_ranks
from helpers.sharded import batch, build_sharded, loss_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

WEIGHT = "0.up.weight"


def cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


@on_ranks(2)
def test_a_state_dict_is_the_shards_themselves_and_moves_nothing() -> None:
    model = build_sharded()
    with CommDebugMode() as counts:
        state = model.state_dict()
    assert counts.get_total_counts() == 0
    assert all(isinstance(value, DTensor) for value in state.values())
    storages = [each[WEIGHT].to_local().untyped_storage() for each in (state, dict(model.named_parameters()))]
    assert storages[0].data_ptr() == storages[1].data_ptr()


@on_ranks(2)
def test_a_state_dict_holds_shards_while_parameters_are_full() -> None:
    model = build_sharded()
    model.unshard()
    assert isinstance(model.state_dict()[WEIGHT], DTensor)
    model.reshard()
    with torch.no_grad():
        model(batch())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@on_ranks(2)
def test_loading_reshards_what_stayed_full() -> None:
    model = build_sharded()
    model.set_reshard_after_forward(False)
    model(batch())
    assert not isinstance(model[0].up.weight, DTensor)
    model.load_state_dict(cloned(model.state_dict()))
    assert isinstance(model[0].up.weight, DTensor)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_model_computes_with_what_it_was_given(assign: bool) -> None:
    model, other = build_sharded(seed=1), build_sharded(seed=3)
    for stage in ("before the first step", "after it"):
        other.load_state_dict(cloned(model.state_dict()), assign=assign)
        with torch.no_grad():
            assert torch.equal(other(batch()), model(batch())), stage
        loss_of(other).backward()


@on_ranks(2)
def test_a_missing_key_is_refused() -> None:
    model = build_sharded()
    state = {name: value for name, value in model.state_dict().items() if name != WEIGHT}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


@on_ranks(2)
def test_full_state_goes_to_rank_0_and_comes_back_from_it() -> None:
    model, other = build_sharded(seed=1), build_sharded(seed=2)
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    for each, optim in zip((model, other), optims, strict=True):
        loss_of(each).backward()
        optim.step()
    to_0: Any = {"options": StateDictOptions(full_state_dict=True, cpu_offload=True)}
    full_model = get_model_state_dict(model, **to_0)
    full_optim = get_optimizer_state_dict(model, optims[0], **to_0)
    assert bool(full_model) == (dist.get_rank() == 0)
    from_0: Any = {"options": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)}
    set_model_state_dict(other, full_model, **from_0)
    set_optimizer_state_dict(other, optims[1], full_optim, **from_0)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(local(optims[0].state[left][key]), local(optims[1].state[right][key])), key
