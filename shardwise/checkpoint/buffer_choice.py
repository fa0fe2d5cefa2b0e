"""Buffers of modules: ranks compare them before a save, because a checkpoint holds one value for all ranks."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from shardwise.checkpoint.blocks import sum_of
from shardwise.checkpoint.contents import Contents, LocalPart
from shardwise.checkpoint.dtypes import bytes_of
from shardwise.checkpoint.names import join
from shardwise.comm.digest import digest_of
from shardwise.errors import CheckpointError, ConfigError

Buffers = Literal["rank0", "mean", "per_rank"]

_MOST_LISTED = 8


def check_choice(choice: object) -> None:
    """Raise ConfigError unless ``choice`` is one of :data:`Buffers` or None."""
    if choice is not None and choice not in get_args(Buffers):
        raise ConfigError(f"buffers is {choice!r}, expected {', '.join(map(repr, get_args(Buffers)))} or None")


def own_name(rank: int, name: str) -> str:
    """Return the name under which the buffer ``name`` of one rank is saved.

    Example:
        >>> own_name(1, "model/0.running_mean")
        'rank/1/model/0.running_mean'
    """
    return f"{join('rank', str(rank))}/{name}"


class BufferCheck:
    """The buffers of one rank, and what to save if they differ between ranks.

    Attributes:
        mark: equal on ranks whose buffers are equal and that have made the same choice.
    """

    def __init__(self, contents: Contents, choice: Buffers | None, rank: int) -> None:
        self._contents, self._choice = contents, choice
        self._digests: dict[str, str] = {}
        if choice == "per_rank":
            for name in list(contents.buffers):
                contents.add_tensor(own_name(rank, name), contents.parts[name][0].tensor)
        elif choice != "rank0":
            self._digests = {name: f"{digest_of(contents.parts[name][0].tensor):x}" for name in contents.buffers}
        self.mark = sum_of(json.dumps([choice, self._digests]).encode())

    def settle(self, what: str, exchange: Callable[[Callable[[], Any]], list[Any]]) -> bool:
        """Compare buffers with ranks whose marks differ; return True if buffers have been averaged.

        ``exchange``: calls its argument and returns what that returned on every rank.
        ``what`` begins the error.
        Raises: CheckpointError on every rank if buffers differ and ``buffers`` is None, or differs between ranks.
        """
        said = exchange(lambda: [self._choice, self._digests])
        choices = [choice for choice, _ in said]
        if any(choice != choices[0] for choice in choices):
            each = ", ".join(map(repr, choices))
            raise CheckpointError(f"{what}: buffers is {each} on ranks 0 to {len(said) - 1}, expected one for all")
        unlike = _unlike([digests for _, digests in said])
        if unlike and self._choice is None:
            raise CheckpointError(f"{what}: {_refusal(unlike)}")
        if unlike:
            self._average(
                exchange(lambda: {name: self._text(name) for name in unlike if name in self._digests}), unlike
            )
        return bool(unlike)

    def _text(self, name: str) -> str:
        return base64.b64encode(bytes_of(self._contents.parts[name][0].tensor.cpu().contiguous())).decode()

    def _average(self, said: Sequence[Mapping[str, str]], names: Mapping[str, Any]) -> None:
        for name in (name for name in names if name in self._digests):
            (part,) = self._contents.parts[name]
            if not part.tensor.dtype.is_floating_point and not part.tensor.dtype.is_complex:
                continue  # counters and indices have no mean: the lowest rank's are saved
            values = [base64.b64decode(texts[name]) for texts in said if name in texts]
            tensors = [torch.frombuffer(bytearray(value), dtype=part.tensor.dtype) for value in values]
            wide = torch.promote_types(part.tensor.dtype, torch.float64)
            mean = torch.stack([tensor.to(wide) for tensor in tensors]).mean(0).to(part.tensor.dtype)
            self._contents.parts[name] = [LocalPart(part.window, mean.view(part.window.sizes))]


def _unlike(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the buffers that differ, each with two ranks whose values are not the same."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, list[int]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                found.setdefault(name, [other, rank])
    return found


def _refusal(unlike: Mapping[str, list[int]]) -> str:
    names = list(unlike)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    one, other = unlike[names[0]]
    return (
        f"buffers differ between ranks: {', '.join(names[:_MOST_LISTED])}{more}; rank {one} and rank {other} have different "
        "values, and a checkpoint holds one. Call save(..., buffers='rank0') to save those of the lowest rank, 'mean' for the "
        "mean over ranks, or 'per_rank' for those of every rank, which load at the same number of ranks; or keep buffers equal "
        "during training (SyncBatchNorm)"
    )
