"""In which dtypes the parameters of a group are gathered, and their gradients reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.units.param import UnitParam
from shardwise.units.precision import MixedPrecisionPolicy, dtype_of_reduction


class Dtypes:
    """What a policy means for each parameter.

    Attributes:
        by_gradient: in which gradients are reduced, by their dtype, of parameters without one of their own.
    """

    def __init__(self, precision: MixedPrecisionPolicy) -> None:
        self.precision = precision
        self.by_gradient: dict[torch.dtype, torch.dtype] = {}

    def of_full(self, param: UnitParam) -> torch.dtype:
        """Return the dtype in which ``param`` is all-gathered and used."""
        return param.dtype_of_full(self.precision)

    def of_reduction(self, param: UnitParam, found: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype in which gradients of ``param`` are reduced and held.

        ``found``: of the gradient that has come; it counts where the parameter takes any.
        """
        full = self.of_full(param)
        if param.grad_dtype is not None and self.precision.reduce_dtype is None:
            return param.grad_dtype.dtype or found or full
        return dtype_of_reduction(self.precision, param.dtype, full)

    def takes_any_gradient(self, param: UnitParam) -> bool:
        """Return True if gradients of ``param`` are reduced in whatever dtype they come."""
        return self.precision.reduce_dtype is None and param.dtype_of_gradient is None

    def look_at(self, params: Iterable[UnitParam]) -> None:
        """Learn :attr:`by_gradient` from ``params`` as they are now."""
        found: dict[torch.dtype, set[torch.dtype]] = {}
        for param in params:
            if param.grad_dtype is None and not param.keeps_dtype:
                found.setdefault(self.of_full(param), set()).add(self.of_reduction(param))
        self.by_gradient = {full: wanted.pop() for full, wanted in found.items() if len(wanted) == 1}
