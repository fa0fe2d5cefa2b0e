"""The optimizer that a rank runs over its share, and the param groups that users see of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.optim.forms import copy_options, step_in_sync
from shardwise.optim.members import Members
from shardwise.optim.protocol import MakeOptimizer
from shardwise.zero.local_pieces import LocalPiece
from shardwise.zero.share import Share, make_share


@dataclass(frozen=True, slots=True, eq=False)
class LocalOptimizer:
    """A rank's share of the parameters and the optimizer that updates it.

    Attributes:
        optim: over the tensors of ``share.local_pieces``, in their order.
        groups: the param groups that users see, of whole parameters: the live list.
        members: what is in them.
        make: builds another optimizer like ``optim``, to be tried out.
    """

    share: Share
    optim: Optimizer
    groups: list[dict[str, Any]]
    members: Members
    make: MakeOptimizer

    def with_last_group(self) -> LocalOptimizer:
        """Return the same with the group that was added to ``groups``; what has state keeps it."""
        copy_options(self.groups[:-1], self.optim.param_groups)
        share = self.share
        share = make_share(self.groups, share.partition, share.num_ranks, share.rank, share)
        self.optim.add_param_group(_local_group(share, self.groups, len(self.groups) - 1))
        self.pull_options()
        return replace(self, share=share, members=Members(self.groups))

    def push_options(self) -> None:
        """Let the optimizer follow the options that users have set.

        Raises: StateError if they have changed which parameters are in the groups.
        """
        self.members.check(self.groups)
        copy_options(self.groups, self.optim.param_groups)

    def pull_options(self) -> None:
        """Copy the options of the inner optimizer, after it was built or loaded, to the groups that users see."""
        copy_options(self.optim.param_groups, self.groups)

    def step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step the optimizer with the options that users have set, also within ``closure``."""
        return step_in_sync(partial(self.optim.step, **kwargs), closure, self.groups, self.optim.param_groups)

    def state_of(self, local: LocalPiece) -> Mapping[str, Any]:
        """Return the state of a piece; empty if it has none."""
        return self.optim.state.get(local.tensor, {})

    def states(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Return the state that this rank holds of each parameter; empty where others own it."""
        return {
            param: self.state_of(local[0]) if local else {}
            for param, local in zip(self.share.params, self.share.local_by_param, strict=True)
        }

    def step_pieces(self, gradients: Sequence[tuple[LocalPiece, torch.Tensor]]) -> None:
        """Update these pieces only, with these gradients."""
        chosen = {id(local.tensor) for local, _ in gradients}
        before = [(local.tensor, local.tensor.grad) for local, _ in gradients]
        try:
            for local, gradient in gradients:
                local.tensor.grad = gradient
            with _narrowed(self.optim.param_groups, chosen):
                self.step(None, {})
        finally:
            for tensor, gradient in before:
                tensor.grad = gradient


def make_local_optimizer(share: Share, groups: list[dict[str, Any]], make: MakeOptimizer) -> LocalOptimizer:
    """Return the optimizer of ``share``, with the options of ``groups``."""
    optim = make([_local_group(share, groups, i) for i in range(len(groups))])
    local = LocalOptimizer(share, optim, groups, Members(groups), make)
    local.pull_options()
    return local


def _local_group(share: Share, groups: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    return {**groups[number], "params": share.tensors_of_group(number)}


@contextmanager
def _narrowed(groups: Sequence[dict[str, Any]], chosen: set[int]) -> Generator[None, None, None]:
    """Leave only the tensors with these ids in ``groups`` for a while; the dicts stay the same objects."""
    full = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) in chosen]
        yield
    finally:
        for group, tensors in zip(groups, full, strict=True):
            group["params"] = tensors
