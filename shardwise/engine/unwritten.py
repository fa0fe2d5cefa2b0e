"""Finds tensors of models from the meta device that have memory by now, but still no values."""

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

# Bytes that new memory is filled with: NaN in floating-point tensors, an implausible number in others.
_FILL_FLOATING, _FILL = 0xFF, 0xA5
_NUM_FIRST = 8  # elements that are compared to detect random numbers of one seed; few, so that uneven shards have them
_SHOWN = 8


def materializing(
    convert: Callable[[torch.Tensor], torch.Tensor], attachment: Attachment | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``convert``, made to mark tensors that it moves from meta to a device as having no values.

    ``attachment``: that of the module whose tensors are converted.
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
    """Return True if ``tensor`` came from meta and nothing has been written to it since, on this rank."""
    local = torch_private.local_of(tensor).detach()
    if local.is_meta or not local.numel() or type(local) not in (torch.Tensor, nn.Parameter):
        return False
    found = local.reshape(-1)
    is_first = bool((found[:1].view(torch.uint8) == _fill_of(local)).all())  # enough for most tensors
    return is_first and bool((found.view(torch.uint8) == _fill_of(local)).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters, unless ``buffers_only``, and buffers of ``module`` without values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_values(
    root: nn.Module, attachments: Sequence[Attachment], bulletin: Bulletin | None, position: Position
) -> None:
    """Check before the first forward that a model from meta has values, and that shards differ between ranks.

    Shards that each rank has initialized with the same seed hold the same random numbers.  Collective, if ``bulletin`` is not
    None.  Raises: StateError on every rank.
    """
    if not any(each.is_materialized for each in attachments):
        return
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
            "load them; build buffers that are computed in __init__ under torch.device('cpu') instead of on meta"
        )
    for each in attachments:
        each.is_materialized = False
    # In the order of the modules: what is drawn first is alike, and shards of other sizes end that for what follows.
    several = [name for name, _ in root.named_parameters() if len(starts[name]) > 1]
    alike = [name for name in several if len(set(starts[name])) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {_shown(alike)} begin with the same values on all ranks: every rank has initialized its "
            "shard with the same seed. Call shardwise.init_parameters(model) instead of to_empty() and reset_parameters(): it "
            "gives parameters the values that one process would. If the values are right (copies of one expert), call forward "
            "again: this is checked only once"
        )


def _start_of(param: UnitParam) -> int | None:
    """Return a digest of the first values of a shard; None if these are all the same number, or it is no shard."""
    local = torch_private.local_of(param.sharded).detach()
    is_plain = type(local) in (torch.Tensor, nn.Parameter)
    if param.shard.is_whole or not local.numel() or local.shape != param.shard_shape or not is_plain:
        return None
    first = local.reshape(-1)[:_NUM_FIRST]
    return None if bool((first == first[0]).all()) else digest_of(first)


def _fill_of(tensor: torch.Tensor) -> int:
    return _FILL_FLOATING if tensor.is_floating_point() or tensor.is_complex() else _FILL


def _shown(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
