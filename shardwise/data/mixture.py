"""Datasets that are read by sample number: several as one, and a digest of what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from shardwise.data.order import whole_weights
from shardwise.errors import ArgumentTypeError, ConfigError
from shardwise.one_host import RandomState, set_seed

_NUM_DIGESTED = 100
_MOST_DEPTH = 16  # of objects within a sample, which may contain each other


class Mixture(ConcatDataset[Any]):
    """Several datasets as one, for :class:`~shardwise.Microbatches`, which takes samples from each by its weight.

    Weights count samples: of 1000 samples of weights 0.7 and 0.3, 700 and 300.  Each dataset has epochs of its own.

    Args:
        sources: by name: a map-style dataset, and its weight.

    Attributes:
        sources: the datasets by name; their samples are numbered one dataset after the other.  weights: whole numbers.

    Raises: ConfigError for weights that are not numbers from 0 on, or all 0; ArgumentTypeError for other datasets.

    Example:
        >>> mixture = Mixture({"web": (range(10), 0.7), "code": (range(5), 0.3)})
        >>> len(mixture), mixture[12]
        (15, 2)
    """

    def __init__(self, sources: Mapping[str, tuple[Any, float]]) -> None:
        self.sources = {name: dataset for name, (dataset, _) in sources.items()}
        self.weights = whole_weights({name: weight for name, (_, weight) in sources.items()}, [*sources])
        for name, dataset in self.sources.items():
            check_map_style(dataset, f"Mixture: {name}")
        super().__init__(self.sources.values())


def check_map_style(dataset: Any, what: str) -> None:
    """Raise ArgumentTypeError unless ``dataset`` is read by sample number, ConfigError if it has no samples."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ArgumentTypeError(
            f"{what} is a {type(dataset).__name__}, expected a dataset with __len__ and __getitem__; for an iterable, give "
            "Microbatches a function that returns the stream of a microbatch: lambda number: ..."
        )
    if not len(dataset):
        raise ConfigError(f"{what} has no samples")


def digest_of_samples(dataset: Any) -> str:
    """Return a digest of a hundred samples of a map-style dataset; random transforms draw the same numbers for it each time."""
    random, digest = RandomState(), hashlib.blake2b(digest_size=8)
    before = random.state_dict()
    try:
        set_seed(0)
        for number in sorted({each * len(dataset) // _NUM_DIGESTED for each in range(_NUM_DIGESTED)}):
            _feed(digest, dataset[number])
    finally:
        random.load_state_dict(before)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, depth: int = 0) -> None:
    """Add ``value`` to ``digest``, by what it holds; of an object that shows nothing of it, or raises, its class."""
    digest.update(f"{type(value).__name__};".encode())
    if depth < _MOST_DEPTH:
        with suppress(Exception):
            _feed_contents(digest, value, depth + 1)


def _feed_contents(digest: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_floating_point() and value.itemsize == 1:  # numpy has no float8
            value = value.view(torch.uint8)
        value = np.asarray(value.float() if value.dtype is torch.bfloat16 else value)
    if isinstance(value, Mapping):
        value = [*cast(Mapping[Any, Any], value).items()]
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, list | tuple):
        for each in cast(Sequence[Any], value):
            _feed(digest, each, depth)
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # arrays and images
        digest.update(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')};".encode() + value.tobytes())
    else:
        _feed(digest, sorted(vars(value).items()) if hasattr(value, "__dict__") else None, depth)
