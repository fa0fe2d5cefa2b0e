"""What a user wants to be sent in fewer bits."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.errors import ConfigError

Coding = Literal["int8", "bf16"]
_MIN_BLOCK = 8


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """In how many bits the parameters and gradients of a unit travel; masters and optimizer states stay as they are.

    Matrices travel coded; tensors of one dimension or none (norms, biases), small ones, those that ``exact`` names, and float64
    stay exact.  All ranks must be given the same policy.

    Attributes:
        gather: coding of all-gathers of parameters: "int8", "bf16", None for none.  Ranks compute with the decoded
            parameters, each with its own shard decoded as well, so that all have the same bits.  Only for parameters that are
            sharded and not replicated.
        reduce: coding of the reduction of gradients: the reduce-scatter, or, on a mesh with replicas, what goes between
            these alone.  Ranks sum in float32, in rank order, after decoding.
        block: elements that share one scale of int8, 8 or more.
        error_feedback: add what coding has lost of a gradient to the next one.  Costs 4 bytes on every rank for each coded
            element that it sends a gradient of: of the whole unit where parameters are sharded, of the shard between replicas.
        min_bytes: tensors whose whole is smaller stay exact.
        exact: shell patterns of names of parameters that stay exact, from the root or from any module below it:
            ``("*embed*", "head.weight")``.
        warn_above: warn when coding has changed a unit's parameters or gradients by more than this, relative, in the 2-norm.

    Raises: ConfigError for other values.
    Source: ZeRO++, arXiv 2306.10209 (blocks, reduction through an all-to-all); error feedback: arXiv 1809.07599.

    Example:
        >>> CompressionPolicy(gather="int8", reduce="int8").block
        256
    """

    gather: Coding | None = None
    reduce: Coding | None = None
    block: int = 256
    error_feedback: bool = True
    min_bytes: int = 16_384
    exact: tuple[str, ...] = ()
    warn_above: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("gather", self.gather), ("reduce", self.reduce)):
            if value is not None and value not in get_args(Coding):
                raise ConfigError(f"CompressionPolicy: {name} is {value!r}, expected 'int8', 'bf16' or None")
        for name, value, least in (("block", self.block, _MIN_BLOCK), ("min_bytes", self.min_bytes, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"CompressionPolicy: {name} is {value!r}, expected a whole number, {least} or more")
        if isinstance(self.exact, str) or not all(isinstance(each, str) for each in self.exact):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"CompressionPolicy: exact is {self.exact!r}, expected a tuple of patterns of names")
        if not self.warn_above > 0:
            raise ConfigError(f"CompressionPolicy: warn_above is {self.warn_above!r}, expected a number above 0")


def takes(policy: CompressionPolicy, name: str, shape: tuple[int, ...], itemsize: int) -> bool:
    """Return True if the tensor ``name`` of ``shape`` (whole), of ``itemsize`` bytes an element, is to be coded."""
    num_bytes = itemsize
    for extent in shape:
        num_bytes *= extent
    is_large = len(shape) >= 2 and num_bytes >= max(policy.min_bytes, 1) and itemsize <= 4
    return is_large and not any(_names(pattern, name) for pattern in policy.exact)


def _names(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` fits ``name`` from any of its dots on.

    Before the first forward names begin at the unit, then at the root: what stays exact must not change with that.
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))
