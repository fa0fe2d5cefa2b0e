"""A tensor subclass as quantized weights are: what it allows, and what it does not, is what a sharding library meets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Codes(torch.Tensor):
    """A weight that is kept as small whole numbers: :meth:`dequantize` gives its values, in float32.

    Like NF4 it can be split, viewed, made with ``new_zeros`` and written with ``copy_``; it refuses to be sliced, and its
    ``clone`` quantizes again, which loses odd numbers.
    """

    codes: Tensor

    @staticmethod
    def __new__(cls: type[Codes], codes: Tensor) -> Codes:
        """Return a weight of the shape of ``codes`` (int8)."""
        found = torch.Tensor._make_wrapper_subclass(cls, codes.shape, strides=codes.stride(), dtype=torch.float32)  # pyright: ignore
        found.codes = codes
        return found

    def __init__(self, codes: Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Codes({self.codes.tolist()})"

    def dequantize(self) -> Tensor:
        """Return the values."""
        return self.codes.to(torch.float32)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(f"Codes does not support {func}")
        return handler(*args, **(kwargs or {}))

    # ---- sharding: what torch's FSDP2 asks of such tensors ----

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what is gathered: codes, padded so that every rank has as many rows."""
        rows = -(-outer_size[0] // mesh.size())
        padded = self.codes.new_zeros((rows, *outer_size[1:]))
        padded[: len(self.codes)] = self.codes
        return (padded,), outer_size

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], outer_size: torch.Size, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, with padding at its end."""
        (codes,) = outputs
        if out is not None:
            return None
        return Codes(codes), (codes,)


def _split(tensor: Codes, size: int | list[int], dim: int = 0) -> list[Codes]:
    return [Codes(part) for part in tensor.codes.split(size, dim)]


def _slice(tensor: Codes, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Codes:
    if (start or 0) != 0 or (end is not None and end < tensor.shape[dim]) or step != 1:
        raise NotImplementedError(f"Codes of shape {tuple(tensor.shape)} cannot be sliced to {start}:{end} along {dim}")
    return Codes(tensor.codes)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    del non_blocking
    if isinstance(target, Codes):
        target.codes.copy_(source.codes if isinstance(source, Codes) else source.round().clamp(-8, 7))
    elif isinstance(source, Codes):
        target.copy_(source.dequantize())
    return target


def _same(tensor: Codes, *_: Any, **__: Any) -> Codes:
    return Codes(tensor.codes)


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten._to_copy.default: _same,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy,
    aten.clone.default: lambda tensor, **_: Codes(tensor.codes // 2 * 2),
    aten.new_zeros.default: lambda tensor, size, **_: Codes(tensor.codes.new_zeros(size)),
    aten.as_strided.default: lambda tensor, size, stride, offset=0: Codes(
        tensor.codes.as_strided(size, stride, offset)
    ),
    aten.view.default: lambda tensor, size: Codes(tensor.codes.view(size)),
}
