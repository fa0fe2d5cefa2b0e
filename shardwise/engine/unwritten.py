"""Models that were made on the meta device: which of their tensors nobody has given values since these got memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from shardwise import torch_private
from shardwise.comm.bulletin import Bulletin, Position
from shardwise.comm.digest import digest_of
from shardwise.engine.attachment import Attachment
from shardwise.errors import StateError
from shardwise.units.param import UnitParam

# What new memory is filled with, byte by byte: as a floating-point number NaN, else nothing that anybody would count with.
_FILL_FLOATING, _FILL = 0xFF, 0xA5
_NUM_FIRST = 8  # elements that tell random numbers of one seed: shards of other sizes have as many, too
_SHOWN = 8


def materializing(
    convert: Callable[[torch.Tensor], torch.Tensor], attachment: Attachment | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``convert``, so that what it takes from meta to a device is known to have no values there.

    ``attachment``: of the module whose tensors are converted.
    """

    def convert_and_fill(tensor: torch.Tensor) -> torch.Tensor:
        result = convert(tensor)
        if tensor.is_meta and not result.is_meta:
            if attachment is not None:
                attachment.is_materialized = True
            local = torch_private.local_of(result)
            if type(local) in (torch.Tensor, nn.Parameter):
                memory = torch.empty(0, dtype=torch.uint8, device=local.device)
                memory.set_(local.untyped_storage()).fill_(_fill_of(local))
        return result

    return convert_and_fill


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return True if the memory that ``tensor`` got in place of meta holds what it was filled with, on this rank."""
    local = torch_private.local_of(tensor).detach()
    if local.is_meta or not local.numel() or type(local) not in (torch.Tensor, nn.Parameter):
        return False
    found = local.reshape(-1)
    is_first = bool((found[:1].view(torch.uint8) == _fill_of(local)).all())  # most tensors end here
    return is_first and bool((found.view(torch.uint8) == _fill_of(local)).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters, unless ``buffers_only``, and buffers of ``module`` without values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_values(
    root: nn.Module, attachments: Sequence[Attachment], bulletin: Bulletin | None, position: Position
) -> None:
    """Before the first forward of a model that was materialized: have its tensors values, and other ones on every rank?

    Random numbers of one seed, drawn for shards, are the same on all ranks.  Collective, where ``bulletin`` is not None.
    Raises: StateError on every rank.
    """
    if not any(each.is_materialized for each in attachments):
        return
    for each in attachments:
        each.is_materialized = False
    told = [json.dumps(["", name]) for name in unwritten_in(root)]
    for group in (group for each in attachments for group in each.unit.groups):
        starts_here = [(param.fqn, _start_of(param)) for param in group.params]
        told += [json.dumps([name, start, group.axes.shard_rank]) for name, start in starts_here if start is not None]
    found = map(json.loads, sorted(told if bulletin is None else bulletin.union("values", told, position)))
    unwritten: list[str] = []
    starts: dict[str, list[int]] = defaultdict(list)
    for name, value, *_ in found:
        unwritten += [] if name else [value]
        if name:
            starts[name].append(value)
    if unwritten:
        raise StateError(
            f"{_shown(unwritten)} have no values: nothing has written to them since to_empty() gave them memory. Call "
            "shardwise.init_parameters(model, init_fn) with a function that gives values to all parameters and buffers, or "
            "load them; buffers that are computed in __init__ can be made on a device, inside with torch.device('cpu')"
        )
    # In the order of the modules: what is drawn first is alike, and shards of other sizes end that for what follows.
    several = [name for name, _ in root.named_parameters() if len(starts[name]) > 1]
    alike = [name for name in several if len(set(starts[name])) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {_shown(alike)} begin with the same values on all ranks: their initialization has drawn the "
            "shards, with one seed on every rank. Call shardwise.init_parameters(model) in place of to_empty() and "
            "reset_parameters(): it gives the values that one process draws"
        )


def _start_of(param: UnitParam) -> int | None:
    """Return a digest of the first values of a shard; None where these are all one number."""
    local = torch_private.local_of(param.sharded).detach()
    if param.shard.is_whole or not local.numel() or type(local) not in (torch.Tensor, nn.Parameter):
        return None
    first = local.reshape(-1)[:_NUM_FIRST]
    return None if bool((first == first[0]).all()) else digest_of(first)


def _fill_of(tensor: torch.Tensor) -> int:
    return _FILL_FLOATING if tensor.is_floating_point() or tensor.is_complex() else _FILL


def _shown(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
