"""Dtypes under the names of the safetensors format, and tensors as bytes."""

from __future__ import annotations

from typing import Any, cast

import torch

from shardwise.errors import CheckpointError, ConfigError

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.complex128: "C128",  # in files as pairs of F64: safetensors has no such
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the name of ``dtype``.  Raises: ConfigError naming ``what`` for one that files cannot hold."""
    if dtype not in _NAMES:
        raise ConfigError(f"{what}: tensors of {dtype} cannot be saved; convert it to one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def dtype_of(name: object, what: str) -> torch.dtype:
    """Return the dtype of that name.  Raises: CheckpointError naming ``what``."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"{what}: {name!r} is no dtype of this format")
    return _DTYPES[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, on its own memory."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return cast(Any, flat.numpy()).data
