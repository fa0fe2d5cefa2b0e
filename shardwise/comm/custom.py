"""What users put in the place of a backend's collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class AllGatherFunction(Protocol):
    """A user's all-gather, as torch's ``set_custom_all_gather`` takes it."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for a result."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""
        ...


class ReduceScatterFunction(Protocol):
    """A user's reduce-scatter, as torch's ``set_custom_reduce_scatter`` takes it."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer."""
        ...

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over ranks and leave this rank's section in ``output_tensor``."""
        ...


@dataclass(slots=True)
class CustomCollectives:
    """What a user wants of the collectives of some parameters.

    Attributes:
        all_gather, reduce_scatter: what to call in place of the backend's.
        allocates_from_group: staging buffers come from the process group's own allocator, where its backend has one.
        reduce_group: where reduce-scatters run, beside all-gathers.
    """

    all_gather: AllGatherFunction | None = None
    reduce_scatter: ReduceScatterFunction | None = None
    allocates_from_group: bool = False
    reduce_group: dist.ProcessGroup | None = None
