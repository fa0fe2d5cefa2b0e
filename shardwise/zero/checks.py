"""What ZeroRedundancyOptimizer accepts: checks of its arguments, with the errors of torch's class of that name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.comm.board import Board
from shardwise.errors import ArgumentTypeError, ConfigError
from shardwise.optim.forms import options_of
from shardwise.optim.pieces import is_sharded, is_sharded_tensor
from shardwise.optim.trial import why_not_cut

Partition = Literal["whole", "even"]
FUNCTIONAL_MODULES = "torch.distributed.optim.functional_"


def checked_params(params: object) -> list[torch.Tensor] | list[dict[str, Any]]:
    """Return ``params`` as a list that can be read twice.

    Raises: TypeError for a tensor, something not iterable or mixed element types; ConfigError (a ValueError) for no
    parameters or a group without "params".
    """
    if isinstance(params, torch.Tensor):
        raise ArgumentTypeError(f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}")
    if not isinstance(params, Iterable):
        raise ArgumentTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        )
    found = list(params)
    if not found:
        raise ConfigError("ZeroRedundancyOptimizer got an empty parameter list")
    if _all_tensors(found):
        return found
    if _all_dicts(found):
        for group in found:
            if "params" not in group:
                raise ConfigError(
                    "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters "
                    f"in the group; found the keys {sorted(group)}"
                )
        return [{**group, "params": _as_tensors(group["params"])} for group in found]
    kinds = sorted({torch.typename(item) for item in found})
    raise ArgumentTypeError(
        f"`params` argument should be an iterable of Tensors or dicts, but got {' and '.join(kinds)}"
    )


def flatten_groups(params: Sequence[torch.Tensor] | Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return all tensors of :func:`checked_params`'s result in order."""
    found: list[torch.Tensor] = []
    for item in params:
        if isinstance(item, torch.Tensor):
            found.append(item)
        else:
            found.extend(item["params"])
    return found


def check_dense(tensors: Sequence[torch.Tensor], mixed_dtypes: bool) -> None:
    """Raises: ConfigError for sharded and sparse tensors, and for several dense types unless ``mixed_dtypes``."""
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) or is_sharded_tensor(tensor):
            raise ConfigError(_not_plain(index, tensor))
        if tensor.layout != torch.strided:
            raise ConfigError(
                "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
                f"{torch.typename(tensor)} (layout {tensor.layout})"
            )
    names = list(dict.fromkeys(f"{torch.typename(tensor)}" for tensor in tensors))
    if len(names) > 1 and not mixed_dtypes:
        raise ConfigError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got both "
            f"{names[0]} and {names[1]}; pass mixed_dtypes=True to shard them together"
        )


def check_overlap(overlap_with_ddp: bool, overlap_grad_reduce: bool) -> None:
    """Raises: ConfigError where two would reduce the same gradients."""
    if overlap_with_ddp and overlap_grad_reduce:
        raise ConfigError(
            "overlap_grad_reduce=True is for loops without DDP, and with overlap_with_ddp=True DDP's buckets reduce the "
            "gradients: pass one of them. hook_with_zero_step(..., reduce='owner') sends gradients to their owners in DDP"
        )


def _not_plain(index: int, tensor: torch.Tensor) -> str:
    kind = f"a DTensor with placements {tensor.placements}" if isinstance(tensor, DTensor) else "a ShardedTensor"
    cause = (
        "the optimizer state is sharded already, like the parameters that it belongs to"
        if is_sharded(tensor)
        else "every rank holds it whole, but as a DTensor (replicate() makes them), and owners take plain tensors"
    )
    return (
        f"parameter {index} of shape {tuple(tensor.shape)} is {kind}: {cause}. Use the plain optimizer on it, or "
        "shardwise.ShardedOptimizer(dict(model.named_parameters()), ...); ZeroRedundancyOptimizer is for models whose "
        "parameters are plain tensors, under DistributedDataParallel or with reduce_gradients()"
    )


def checked_optimizer_class(optimizer_class: type[Any], overlap_with_ddp: bool) -> type[Optimizer]:
    """Return the optimizer class to build; torch's functional twins (only with overlap) become the class they mirror.

    Raises: ConfigError for a functional optimizer without overlap or one without a plain twin.
    """
    if not optimizer_class.__module__.startswith(FUNCTIONAL_MODULES):
        return optimizer_class
    if not overlap_with_ddp:
        raise ConfigError(f"Passing in a functional optimizer {optimizer_class} when `overlap_with_ddp=False`")
    plain = getattr(torch.optim, optimizer_class.__name__.removeprefix("_Functional"), None)
    if plain is None:
        raise ConfigError(f"{optimizer_class} has no plain twin in torch.optim; pass a torch.optim class")
    return plain


def check_partition(
    partition: object,
    optimizer_class: type[Optimizer],
    params: Sequence[torch.Tensor] | Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Try the optimizer on small tensors, whole and cut in two: ``partition="even"`` needs the same result.

    ``params``: those of :func:`checked_params`; the options of the first group are tried.
    Raises: ConfigError if the results differ, the optimizer refuses pieces, or there is no such partition.
    """
    if partition not in ("whole", "even"):
        raise ConfigError(f"partition is {partition!r}, expected 'whole' or 'even'")
    if partition == "whole":
        return
    options = {**defaults, **(options_of(params[0]) if isinstance(params[0], Mapping) else {})}
    name = optimizer_class.__name__
    advice = f"{name} does not treat every element alone; use partition='whole'"
    try:
        device = flatten_groups(params)[0].device
        reason = why_not_cut(lambda groups: optimizer_class(groups, **options), {}, device)
    except Exception as error:
        raise ConfigError(f"partition='even' cannot be used: {advice} ({error})") from error
    if reason is not None:
        raise ConfigError(f"partition='even' would change the result: {name} {reason}; {advice}")


def agree_on(board: Board, what: str, facts: Callable[[], list[str]]) -> None:
    """Return once ``facts``, which may do more, has returned the same on every rank.  Collective.

    Raises: what ``facts`` raises on this rank; DesyncError if it raised or returned something else on another.
    """
    found: list[str] = []
    error: Exception | None = None
    try:
        found = facts()
    except Exception as raised:
        error = raised
    try:
        board.agree(what, found, error)
    finally:
        del error  # an error and the frame it was raised in would keep each other, and the group, alive


def describe_params(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the facts about parameter groups that must be equal on all ranks, one line each."""
    total = sum(len(group["params"]) for group in groups)
    lines = [f"{len(groups)} parameter group(s) with {total} parameters"]
    for index, group in enumerate(groups):
        for place, tensor in enumerate(group["params"]):
            frozen = "" if tensor.requires_grad else ", frozen"
            lines.append(f"group {index} parameter {place} of shape {tuple(tensor.shape)}, {tensor.dtype}{frozen}")
    return lines


def _all_tensors(items: list[Any]) -> TypeGuard[list[torch.Tensor]]:
    return all(isinstance(item, torch.Tensor) for item in items)


def _all_dicts(items: list[Any]) -> TypeGuard[list[dict[str, Any]]]:
    return all(isinstance(item, dict) for item in items)


def _as_tensors(params: object) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, Iterable) and not isinstance(params, set | frozenset):
        found = list(params)
        if _all_tensors(found):
            return found
    raise ArgumentTypeError(
        f"'params' of a group should be a Tensor or an ordered iterable of them, but got {type(params)}"
    )
