"""Modules of any door as carriers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.buffer_choice import own_name
from shardwise.checkpoint.carriers import Apply
from shardwise.checkpoint.contents import Contents, device_of, like, parts_of
from shardwise.checkpoint.names import join, plain
from shardwise.checkpoint.order import LoadRequests
from shardwise.checkpoint.values import encode
from shardwise.engine.attachment import SHARES_BUFFERS
from shardwise.engine.unwritten import unwritten_in
from shardwise.errors import ConfigError


def _shares_buffers(module: nn.Module) -> bool:
    """Return True if every forward of ``module`` broadcasts the buffers of one rank, which are the ones to save."""
    is_ddp = isinstance(module, DistributedDataParallel) and module.broadcast_buffers
    return is_ddp or SHARES_BUFFERS in module.__dict__


class ModuleCarrier:
    """Parameters and buffers of a module, under the names that they have in the model without wrappers.

    Attributes:
        names: of each parameter, by ``id``: what optimizers call them.
    """

    def __init__(self, prefix: str, module: nn.Module, rank: int, size: int) -> None:
        self.prefix, self._rank, self._size = prefix, rank, size
        self._given = module
        self._module = module.module if isinstance(module, DistributedDataParallel) else module
        # With the live tensors: two names of one tensor are one tensor.  Sharded modules are resharded by asking.
        self._state: dict[str, Any] = self._module.state_dict(keep_vars=True)
        self._keys: dict[str, str] = {}
        for key in self._state:
            if self._keys.setdefault(plain(key), key) != key:
                raise ConfigError(f"{prefix}: {key!r} and {self._keys[plain(key)]!r} have one name without wrappers")
        self.names: dict[int, str] = {}
        for name, key in self._keys.items():
            if isinstance(self._state[key], torch.Tensor):
                self.names.setdefault(id(self._state[key]), name)

    def put(self, contents: Contents) -> None:
        """See :class:`Carrier`."""
        shared = {id(each) for module in self._given.modules() if _shares_buffers(module) for each in module.buffers()}
        buffers = {id(each) for each in self._module.buffers()}
        for name, key in self._keys.items():
            value, full = self._state[key], join(self.prefix, name)
            if not isinstance(value, torch.Tensor):
                contents.add_value(full, encode(value, full, contents.add_tensor))
            elif self.names[id(value)] != name:
                contents.ties[full] = join(self.prefix, self.names[id(value)])
            else:
                is_buffer = id(value) in buffers and type(value) is torch.Tensor
                contents.add_tensor(full, value, is_lowest=is_buffer)
                if is_buffer and id(value) not in shared:
                    contents.buffers.append(full)

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`Carrier`."""
        live = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        others: dict[str, Any] = {}
        placed: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
        same_as: dict[int, list[str]] = {}
        for name, key in self._keys.items():
            same_as.setdefault(id(self._state[key]), []).append(name)
        for name, key in self._keys.items():
            value, full = self._state[key], join(self.prefix, name)
            if not isinstance(value, torch.Tensor):
                if order.has_value(full):
                    others[key] = order.value(full)
                else:
                    order.missing.append(full)
                continue
            if self.names[id(value)] != name:
                order.use(full)
                continue
            ties = [join(self.prefix, other) for other in same_as[id(value)]]
            found = next((tie for tie in ties if order.manifest.record_of(tie) is not None), full)
            found = self._own(found, order)
            parts = parts_of(full, value)
            staged = order.windows(found, value.shape, [part.window for part in parts])
            if staged is None:
                continue
            if id(value) in live:
                copies += [(part.tensor, new) for part, new in zip(parts, staged, strict=True)]
            else:
                placed.append((key, value, staged))

        for name in unwritten_in(self._module, buffers_only=True):
            if name not in self._state:
                order.missing.append(
                    f"{join(self.prefix, plain(name))} (a non-persistent buffer without values since to_empty(): call "
                    "shardwise.init_parameters(model, init_fn) instead of to_empty(), or compute the buffer)"
                )

        def apply() -> None:
            for key, value, staged in placed:  # not before they are read: on a GPU this copies
                others[key] = like(value, [each.to(device_of(value)) for each in staged], staged[0].dtype)
            self._apply(copies, others)

        return apply

    def _own(self, name: str, order: LoadRequests) -> str:
        """Return the name of this rank's own copy of buffer ``name`` if each rank has saved its own; else ``name``."""
        own = own_name(self._rank, name)
        if order.manifest.num_ranks != self._size or order.manifest.record_of(own) is None:
            return name
        order.use(name)
        return own

    @torch.no_grad()
    def _apply(self, copies: list[tuple[torch.Tensor, torch.Tensor]], others: dict[str, Any]) -> None:
        for target, source in copies:
            target.copy_(source)
        if others:
            self._module.load_state_dict(others, strict=False)
