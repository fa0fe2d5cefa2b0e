"""Optimizers tried out on tensors of their own: what state they make, and whether they treat every element alone.

A list of names could not cover users' classes, and a wrong guess would train another optimizer without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise import torch_private
from shardwise.optim.forms import options_of
from shardwise.optim.protocol import Closure, MakeOptimizer
from shardwise.optim.sums import SumsOverRanks, per_element_of, stepped_by_halves

# Few elements show factors and norms.  Many, in a number that any block size divides, show state that is kept per block:
# such optimizers keep plain state for tensors that are small or no multiple of a block.
_SHAPES = ((6, 8), (256, 256))
_SCALES = (1.0, 1e-3)


def why_not_cut(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> str | None:
    """Return why the optimizer may not be given parts of tensors; None if nothing speaks against it.

    ``options``: of the param group that is tried.  Cost: four steps on 65,536 elements; if it takes sums, four more.
    Raises: what the optimizer raises.
    """
    for shape, scale in zip(_SHAPES, _SCALES, strict=True):
        noise = torch.Generator("cpu").manual_seed(0)
        start, *gradients = (scale * torch.randn(shape, generator=noise, device="cpu") for _ in range(3))
        numel = start.numel()
        sizes = [numel * 20 // 48 // 2 * 2, numel - numel * 20 // 48 // 2 * 2]
        whole, states = _stepped(make, options, device, [start], [[gradient] for gradient in gradients])
        for state in states:
            reason = why_not_elementwise(state, start.shape)
            if reason is not None:
                return reason
        cut = [list(gradient.flatten().split(sizes)) for gradient in gradients]
        parts, _ = _stepped(make, options, device, list(start.flatten().split(sizes)), cut)
        change = whole[0].cpu().flatten() - start.flatten()
        error = (whole[0].cpu().flatten() - torch.cat([part.cpu() for part in parts])).abs().max()
        if not error <= 1e-4 * change.abs().max() + 1e-6 * scale:
            return "updates a tensor that is cut in two in another way than the whole"
        if takes_sums(make, options, device):
            there = [part.to(device) for part in start.flatten().split(sizes)]
            brought = [[part.to(device) for part in parts] for parts in cut]
            halves = stepped_by_halves(partial(_made, make), options, there, brought)
            error = (whole[0].cpu().flatten() - torch.cat([part.cpu() for part in halves])).abs().max()
            if not error <= 1e-4 * change.abs().max() + 1e-6 * scale:
                return "takes sums over all elements of a tensor, and more than those"
    return None


def takes_sums(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return True if steps take sums over elements, which over shards would be those of one rank.  Cost: two small steps.

    Raises: what the optimizer raises; ConfigError for a number that cannot be had from those of shards.
    """
    tensor = torch.ones(_SHAPES[0], device=device)
    optimizer = _made(make, [{**options, "params": [tensor]}])
    num_sums = 0
    for _ in range(2):
        tensor.grad = torch.ones_like(tensor)
        with SumsOverRanks(per_element_of(optimizer), lambda number: number) as sums:
            optimizer.step()
        num_sums += sums.num_sums
    return num_sums > 0


def states_after_zeros(
    make: MakeOptimizer, groups: Sequence[Mapping[str, Any]], closure: Closure | None = None
) -> list[dict[str, Any]]:
    """Return the state that a step makes of each tensor of ``groups``, in order, without touching tensor or optimizer.

    Names, shapes and dtypes are right, values mean nothing: another optimizer steps on zeros.  ``closure``: for
    optimizers that cannot step without one.
    """
    stand_ins = [[torch.zeros_like(tensor, requires_grad=False) for tensor in group["params"]] for group in groups]
    for tensor in (tensor for tensors in stand_ins for tensor in tensors):
        tensor.grad = torch.zeros_like(tensor)
    trial = make([{**options_of(g), "params": tensors} for g, tensors in zip(groups, stand_ins, strict=True)])
    _begin_training(trial)
    if closure is None:
        torch_private.step_inside(trial)
    else:
        trial.step(closure)
    return [dict(trial.state.get(tensor, {})) for tensors in stand_ins for tensor in tensors]


def _made(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer that may step."""
    optimizer = make(groups)
    _begin_training(optimizer)
    return optimizer


def _begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Call ``train()`` of optimizers that refuse to step before it, as schedule-free ones do."""
    train: object = getattr(optimizer, "train", None)
    if callable(train):
        train()


def why_not_elementwise(state: Mapping[str, Any], shape: torch.Size) -> str | None:
    """Return what in the state of a tensor of ``shape`` is neither plain numbers per element nor a single number."""
    for key, value in state.items():
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() == 0
            or (type(value) is torch.Tensor and value.numel() <= 1)
        ):
            continue
        if type(value) is not torch.Tensor:
            return f"keeps state {key!r} as {type(value).__name__}, in a form of its own"
        if value.shape != shape:
            return f"keeps state {key!r} of shape {tuple(value.shape)} for a tensor of shape {tuple(shape)}"
    return None


def _stepped(
    make: MakeOptimizer,
    options: Mapping[str, Any],
    device: torch.device,
    start: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[Mapping[str, Any]]]:
    tensors = [tensor.to(device, copy=True) for tensor in start]
    optimizer = _made(make, [{**options, "params": tensors}])
    for row in gradients:
        for tensor, gradient in zip(tensors, row, strict=True):
            tensor.grad = gradient.to(device, copy=True)
        optimizer.step()
    return tensors, [optimizer.state.get(tensor, {}) for tensor in tensors]
