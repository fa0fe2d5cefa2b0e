"""Step an optimizer that is element-wise but for sums over all elements of all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private
from shardwise.comm.matrices import sum_of
from shardwise.errors import ConfigError
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.pieces import is_sharded_tensor
from shardwise.optim.protocol import MakeOptimizer, Params
from shardwise.optim.sums import SumsOverRanks, per_element_of


class SummedStep(ElementwiseStep):
    """Runs such an optimizer piece by piece; each of its sums is one all-reduce of one number.

    Raises: ConfigError for parameters that are not all sharded over the same ranks.
    """

    def __init__(self, make: MakeOptimizer, groups: Sequence[tuple[Params, Mapping[str, Any]]]) -> None:
        # Joined pieces would be other sums on ranks whose memory lies otherwise.
        super().__init__(make, groups, is_flat=False, is_known=False)
        self._places = _places_of([params for params, _ in groups], type(self.optimizer).__name__)

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group to the optimizer."""
        if _places_of([params], type(self.optimizer).__name__) != self._places:
            raise _not_alike(type(self.optimizer).__name__)
        super().add_group(params, options)

    def _update(self) -> None:
        with SumsOverRanks(per_element_of(self.optimizer), self._add_up):
            torch_private.step_inside(self.optimizer)

    def _add_up(self, value: torch.Tensor) -> torch.Tensor:
        for group in self._places:
            value = sum_of(value, group, is_max=False)
        return value


def _places_of(groups: Sequence[Params], name: str) -> list[dist.ProcessGroup]:
    """Return the groups whose all-reduces, one after another, sum over the shards of the parameters."""
    found = [_place_of(param[0].param) for params in groups for param in params]
    if any(place != found[0] for place in found):
        raise _not_alike(name)
    return found[0]


def _place_of(param: torch.Tensor) -> list[dist.ProcessGroup]:
    if is_sharded_tensor(param):
        return [torch_private.process_group_of(param)]
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    return [mesh.get_group(axis) for axis, placed in enumerate(param.placements) if not isinstance(placed, Replicate)]


def _not_alike(name: str) -> ConfigError:
    return ConfigError(
        f"{name} takes sums over all elements of all parameters, which need parameters that are sharded over the same ranks; "
        "put those that are not into an optimizer of their own"
    )
