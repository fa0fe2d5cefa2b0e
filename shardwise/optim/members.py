"""Which parameters are in which param group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import StateError


class Members:
    """The parameters of param groups when an optimizer laid out its state for them.

    Who changes the lists in ``optimizer.param_groups`` later changes what a plain optimizer updates; here it would change
    nothing.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._ids = _ids_in(groups)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateError if ``groups`` hold other parameters."""
        found = _ids_in(groups)
        if found == self._ids:
            return
        counts = [len(ids) for ids in found]
        raise StateError(
            f"optimizer.param_groups hold other parameters than those that the optimizer shards: groups of {counts}, "
            f"where it has groups of {[len(ids) for ids in self._ids]}. Add parameters with add_param_group(); to update "
            "fewer, freeze them (requires_grad_(False)) or build a new optimizer"
        )


def _ids_in(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]
