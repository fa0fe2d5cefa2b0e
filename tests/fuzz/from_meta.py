"""Values for a model that was made on the meta device and sharded there, in the ways that users go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, _random, distribute_tensor

import shardwise
from fuzz.initial_values import reset
from fuzz.phases import Play
from fuzz.zoo import Rope


def assign_tied(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the tensors of ``state`` in place of the parameters, and tie what was tied: torch assigns name by name."""
    names: dict[int, list[str]] = {}
    for name, param in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    net.load_state_dict(state, assign=True)
    for first, *others in names.values():
        for path, _, name in (other.rpartition(".") for other in others):
            setattr(net.get_submodule(path), name, net.get_parameter(first))


def give_values(model: nn.Module, play: Play) -> None:
    """Give ``model`` memory and values: those of ``play.build()``, or what comes of another way.  Collective."""
    how, dtype = play.settings.meta, getattr(torch, play.settings.dtype)
    if how == "init":
        torch.manual_seed(play.seed + dist.get_rank())
        shardwise.init_parameters(model)
        return
    if how == "reset":  # as code that draws on local tensors, which must be refused
        # An empty shard draws nothing, so that the shards after it differ between ranks, and nobody can see it.
        least = torch.tensor(
            min([each.to_local().numel() for each in model.parameters() if isinstance(each, DTensor)], default=0)
        )
        dist.all_reduce(least, dist.ReduceOp.MIN)
        draws = cast(Any, _random)._rng_tracker
        draws.distribute_region_enabled = not least
        try:
            reset(model.to_empty(device="cpu"), play.seed, False, dtype)
        finally:
            draws.distribute_region_enabled = True
        return
    whole = play.build().state_dict()
    if how == "load":
        set_model_state_dict(model.to_empty(device="cpu"), whole, options=StateDictOptions(full_state_dict=True))
        return
    state = model.state_dict()
    for name, tensor in state.items():
        is_cut = isinstance(tensor, DTensor)
        state[name] = distribute_tensor(whole[name], tensor.device_mesh, tensor.placements) if is_cut else whole[name]
    assign_tied(model, state)
    for module in model.modules():
        if isinstance(module, Rope):
            module.reset_parameters()
