"""Memory for reduced gradients: side by side, each with a storage of its own, as users may keep them."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.comm.carve import carve_all
from shardwise.units.param import UnitParam
from shardwise.units.place import ParamStorage

# Small sections are used again in the next step when nobody has kept a gradient: making tensors costs more than their
# arithmetic.  Large ones come from the allocator, so that the memory of dropped gradients serves the next forward.
KEPT_BYTES = 1 << 20
_MAX_KEPT = 2
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class GradientPlaces:
    """Where the gradients of some parameters lie in a section of ``numel`` elements: offsets and shapes of the shards.

    ``num_spare``: elements behind the section, for a mark.
    """

    params: tuple[UnitParam, ...]
    places: tuple[tuple[int, tuple[int, ...]], ...]
    numel: int
    num_spare: int = 0

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a section with undefined values, in memory that has the spare elements behind it."""
        return torch.empty(self.numel + self.num_spare, dtype=dtype, device=device).narrow(0, 0, self.numel)


class GradientSection:
    """A section and the gradients carved out of it.

    Attributes:
        flat: 1-D, the whole section.
        windows: the gradient of each parameter, a plain tensor.
        gradients: the same as users see them, DTensors like their parameters.
    """

    def __init__(self, places: GradientPlaces, flat: torch.Tensor) -> None:
        self.flat = flat
        self._params = places.params
        self.windows = carve_all(flat, places.places)
        self.gradients = [as_gradient(param, window) for param, window in zip(places.params, self.windows, strict=True)]
        self._storages = [window.untyped_storage() for window in self.windows]
        self._addresses = [window.data_ptr() for window in self.windows]
        self._specs = torch_private.specs_of([param.sharded for param in places.params])
        self._is_taken = True
        self._unheld = self._holders()

    def give_back(self) -> None:
        """Let the section be used again as soon as nobody else holds a gradient."""
        self._is_taken = False

    def take(self) -> bool:
        """Return True, once, if nobody else holds a gradient and none has been changed by others."""
        if self._is_taken or self._holders() != self._unheld or not self._is_as_made():
            return False
        self._is_taken = True
        return True

    def _holders(self) -> list[int]:
        tensors = self.gradients + self.windows
        return [
            *map(sys.getrefcount, tensors),
            *map(sys.getrefcount, self._storages),
            *torch_private.use_counts(tensors, self._storages),
        ]

    def _is_as_made(self) -> bool:
        return (
            all(map(operator.is_, torch_private.locals_of(self.gradients), self.windows))
            and [*map(torch.Tensor.data_ptr, self.windows)] == self._addresses
            and all(map(operator.is_, torch_private.specs_of([param.sharded for param in self._params]), self._specs))
            and not any(map(_REQUIRES_GRAD, self.gradients))
        )


class GradientMemory:
    """Sections for the gradients of the same parameters, step after step; up to ``kept_bytes`` they are used again."""

    def __init__(self, places: GradientPlaces, kept_bytes: int) -> None:
        self._places = places
        self._kept_bytes = kept_bytes
        self._kept: list[GradientSection] = []

    def take(self, dtype: torch.dtype, place: ParamStorage) -> GradientSection:
        """Return a section where the shards of ``place`` live that nobody else uses, with undefined values."""
        for section in self._kept:
            if section.flat.dtype is dtype and section.flat.device == place.storage_device and section.take():
                return section
        if place.is_offloaded:
            flat = place.on.host_memory(self._places.numel, dtype, place.pins)
        else:
            flat = self._places.empty(dtype, place.device)
        section = GradientSection(self._places, flat)
        if flat.numel() * flat.element_size() <= self._kept_bytes:
            self._kept = [*self._kept, section][-_MAX_KEPT:]
        return section


def as_gradient(param: UnitParam, window: torch.Tensor) -> torch.Tensor:
    """Return ``window`` as users see the gradient of ``param``: a DTensor if the parameter is one."""
    if not isinstance(param.sharded, DTensor):
        return window
    spec = torch_private.spec_in(torch_private.spec_of(param.sharded), window.dtype)
    return torch_private.dtensor_from_local(window, spec)
