"""Tensors of models compared with those of a model that one process holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import StateError

EXACT = {"rtol": 0.0, "atol": 0.0}
# Sums of a few float32 terms in another order: some units in the last place (1e-7) of the largest term, cancelled down.
REORDERED = {"rtol": 1e-5, "atol": 1e-6}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums over other batches, over many steps


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of ``tensor``, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return what this rank holds of the whole ``tensor`` if it is placed as ``like`` is."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for placement, size, index in zip(like.placements, like.device_mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = tensor.chunk(size, placement.dim)
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def comparable(mine: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two as far as this rank holds them: nothing is sent, so every rank has to compare."""
    if not isinstance(mine, DTensor):
        return mine, full(expected)
    if any(type(each) not in (Shard, Replicate) for each in mine.placements):
        return full(mine), full(expected)
    if not isinstance(expected, DTensor):
        assert mine.shape == expected.shape, f"shape {mine.shape}, expected {expected.shape}"
        return mine.to_local(), own_part(expected, mine)
    if expected.placements == mine.placements and torch.equal(expected.device_mesh.mesh, mine.device_mesh.mesh):
        assert mine.shape == expected.shape, f"shape {mine.shape}, expected {expected.shape}"
        return mine.to_local(), expected.to_local()
    return full(mine), full(expected)


def from_rank(source: int, value: Any) -> Any:
    """Return what ``source`` calls this with, on every rank."""
    found = [value]
    dist.broadcast_object_list(found, source)
    return found[0]


def average_gradients(model: nn.Module) -> None:
    """Average what each rank's backward gave a plain model; DTensors have been reduced before."""
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    average([gradient for gradient in gradients if not isinstance(gradient, DTensor)])


def average(tensors: list[torch.Tensor]) -> None:
    """Average over ranks in place, by one message for each dtype: the switches between processes take most of the time."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype is dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for tensor, mean in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def assert_same(model: nn.Module, reference: nn.Module, tolerance: dict[str, float] = CLOSE, where: str = "") -> None:
    """Compare parameters and gradients, names and their order included."""
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in ours.items():
        other = theirs[name]
        assert (param.grad is None) == (other.grad is None), f"{where} gradient of {name}: {param.grad}, {other.grad}"
        for what, mine, expected in (("value", param, other), ("gradient", param.grad, other.grad)):
            if mine is not None:
                place = f"{where} {what} of {name}: "
                torch.testing.assert_close(
                    *comparable(mine, expected), **tolerance, msg=lambda text, place=place: place + text
                )


def assert_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Compare gradients: what one model has none of, the other has none of."""
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), f"gradient of {name}: {param.grad}, {other.grad}"
        if param.grad is not None and other.grad is not None:
            pair = comparable(param.grad, other.grad)
            torch.testing.assert_close(*pair, **tolerance, msg=lambda text, name=name: f"gradient of {name}: {text}")


def assert_averaged(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Compare gradients with the mean over ranks of a plain reference's, which it leaves as they are."""
    kept = [param.grad for param in reference.parameters()]
    for param, gradient in zip(reference.parameters(), kept, strict=True):
        param.grad = None if gradient is None else gradient.clone()
    average_gradients(reference)
    assert_gradients(model, reference, **tolerance)
    for param, gradient in zip(reference.parameters(), kept, strict=True):
        param.grad = gradient


def assert_equal(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], what: object = "") -> None:
    """Compare to the bit, one by one."""
    pairs = enumerate(zip(found, expected, strict=True))
    wrong = [(index, tuple(mine.shape)) for index, (mine, other) in pairs if not torch.equal(mine, other)]
    assert wrong == [], f"{what}: tensors {wrong} (index, shape) differ"


def is_incomplete(param: torch.Tensor) -> bool:
    """Return True if ``param`` has no gradient that user code could use: none, or one that waits for a later backward."""
    try:
        return param.grad is None or param.grad.norm() is None
    except StateError as error:
        return "wait for a backward with sync" in str(error)


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of ``param``; while gradients wait for a later backward, the reduced one that was there before."""
    return getattr(param.grad, "before", param.grad)
