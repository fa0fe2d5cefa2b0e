"""What the operations of a dry run make, free and compute, seen where torch dispatches them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwise import torch_private
from shardwise.planner.profile import StepMark, Stretch, Work

# Collectives of DTensor: rings that each takes over the bytes of its result, or of its input if that is larger.
_RINGS = {
    "all_reduce": 2,
    "all_reduce_": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What stands for a tensor in the arguments of an operation that is to be repeated."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operation and its arguments, tensors as :class:`TensorSpec`."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class OpWatch:
    """Follows the bytes that operations have made and that are still there, and counts work, from mark to mark.

    Attributes:
        stretches: those that have ended.
        live_bytes: now.
        calls: distinct operations by name and shapes, numbered in this order.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        """``given``: tensors whose memory does not count."""
        self.stretches: list[Stretch] = []
        self.live_bytes = 0
        self.calls: dict[str, OpCall] = {}
        self._numbers: dict[str, int] = {}
        self._mark: StepMark | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._follow(tensor.untyped_storage(), 0)
        self._restart()

    def mark(self, mark: StepMark) -> None:
        """End the stretch that runs and begin that of ``mark``."""
        self.end()
        self._mark = mark
        self._restart()

    def end(self) -> None:
        """End the stretch that runs."""
        if self._mark is not None:
            ops = tuple(sorted(self._ops.items()))
            num_ops = sum(count for _, count in ops) + self._rings
            work = Work(self._flops, self._traffic, num_ops, ops, self._ring_bytes, self._rings)
            self.stretches.append(Stretch(self._mark, self._peak, self.live_bytes, work))
            self._mark = None

    def _restart(self) -> None:
        self._peak = self.live_bytes
        self._flops = self._traffic = self._ring_bytes = 0.0
        self._rings = 0
        self._ops: dict[int, int] = {}

    def after(self, func: Any, given: tuple[Any, Any], out: object) -> None:
        """Take note of an operation that has just run."""
        if func.namespace == "prim":
            return
        inputs = [each for each in torch_private.leaves_of(given) if isinstance(each, torch.Tensor)]
        outputs = [each for each in torch_private.leaves_of(out) if isinstance(each, torch.Tensor)]
        made = 0
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                self._follow(storage, storage.nbytes())
                made += 1
        self._peak = max(self._peak, self.live_bytes)
        if func.namespace == "_c10d_functional":
            rings = _RINGS.get(func._overloadpacket.__name__, 0)
            self._rings += rings
            self._ring_bytes += rings * max(t.numel() * t.element_size() for t in [*inputs, *outputs])
        elif made or torch_private.is_mutating(func):
            self._count(func, given, [*inputs, *outputs], out)

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)  # a storage keeps its Python object for as long as it lives

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes

    def _count(self, func: Any, given: tuple[Any, Any], tensors: Sequence[torch.Tensor], out: object) -> None:
        args, kwargs = given
        name = f"{func}({', '.join([_shape_of(each) for each in torch_private.leaves_of(given)])})"
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            specs = torch_private.map_tensors(_spec_of, given)
            self.calls[name] = OpCall(func, specs[0], specs[1])
        self._ops[number] = self._ops.get(number, 0) + 1
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self._flops += flops
        else:
            self._traffic += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _shape_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        dense = "" if value.is_contiguous() else str(list(value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{dense}"
    return str(value)


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> float:
    """Return the floating-point operations of matrix products and attention; 0 for anything else."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name == _ATTENTION:
        is_causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
        return _half_if(is_causal) * sdpa_flop_count(*_with_all_heads(args[:3]))
    if name == f"{_ATTENTION}_backward":
        is_causal = bool(args[7]) if len(args) > 7 else bool(kwargs.get("is_causal", False))
        return _half_if(is_causal) * sdpa_backward_flop_count(tuple(args[0].shape), *_with_all_heads(args[1:4]))
    return 0.0


def _with_all_heads(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of query, key and value of attention as if no heads shared a key: torch 2.11 counts no others."""
    query, *others = [tuple(each.shape) for each in tensors]
    return [query, *[(shape[0], query[1], *shape[2:]) for shape in others]]


def _half_if(is_causal: bool) -> float:
    return 0.5 if is_causal else 1.0


def numel_of(spec: TensorSpec) -> int:
    """Return the elements that memory under ``spec`` must have."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))


def num_bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of the elements of ``spec``."""
    return math.prod(spec.shape) * spec.dtype.itemsize
