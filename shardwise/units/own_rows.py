"""A rank's own rows of a full parameter, beside what a gather makes of its shard: to see and bring back what was written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.comm.coding_state import Compression
from shardwise.units.param import UnitParam


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of one rank.

    Attributes:
        rank: its place along the axis that parameters are cut over.
        compression: in which gathers carry parameters; None: as they are.
    """

    rank: int
    compression: Compression | None

    def of(self, param: UnitParam, full: torch.Tensor) -> torch.Tensor:
        """Return the window of ``full`` that this rank holds."""
        cut, whole = param.shard, torch_private.data_of(torch_private.local_of(full))
        rows = cut.rows(self.rank)
        return whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))

    def are_as_gathered(self, param: UnitParam, full: torch.Tensor) -> bool:
        """Return True if nobody has written to them since they came."""
        rows = self.of(param, full)
        gathered = self._as_gathered(param, rows)
        return torch.equal(rows, gathered) or bool(
            ((rows == gathered) | ((rows != rows) & (gathered != gathered))).all()
        )

    def bring_back(self, param: UnitParam, full: torch.Tensor) -> None:
        """Copy them to the shard, where they are not what was gathered."""
        local = param.local.detach()
        with torch.no_grad():
            rows = self.of(param, full)
            if rows.dtype is not local.dtype or rows.device != local.device or self.compression is not None:
                old = local.to(rows.device)
                rows = torch.where(rows != self._as_gathered(param, rows), rows.to(local.dtype), old)
            local.copy_(rows)

    def _as_gathered(self, param: UnitParam, rows: torch.Tensor) -> torch.Tensor:
        """Return the shard as a gather makes ``rows`` of it: in their dtype, and coded and decoded."""
        local = param.local.detach().to(rows.device)
        if self.compression is None:
            return local.to(rows.dtype)
        return self.compression.round_trip(local, param.fqn, param.shard.shape, rows.dtype)
