"""Parameters on the meta device, and tensors that were moved from it and have no values yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.attachment import Attachment
from shardwise.fsdp.precision import CPUOffloadPolicy

# ---- Tensors that were moved from the meta device but have no values yet.

# Fill bytes of new memory: NaN in floating-point tensors, an implausible number in others.
_FILL_FLOATING, _FILL = 0xFF, 0xA5


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return the values of this rank, None if they cannot be read, and their fill byte."""
    local = torch_private.local_of(tensor).detach()
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta and local.numel()
    fill = _FILL_FLOATING if local.is_floating_point() or local.is_complex() else _FILL
    return local if is_plain else None, fill


def materializing(
    convert: Callable[[torch.Tensor], torch.Tensor], attachment: Attachment | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``convert`` with a mark: tensors that it moves from meta to a device are filled with bytes that mean "no values".

    ``attachment``: the attachment of the module whose tensors are converted.
    """

    def convert_and_fill(tensor: torch.Tensor) -> torch.Tensor:
        result = convert(tensor)
        if tensor.is_meta and not result.is_meta:
            if attachment is not None:
                attachment.is_materialized = True
            local, fill = bytes_of(result)
            if local is not None:
                torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage()).fill_(fill)
        return result

    return convert_and_fill


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` was moved from meta and was not written to since, on this rank."""
    local, fill = bytes_of(tensor)
    if local is None:
        return False
    found = local.reshape(-1)
    is_first = bool((found[:1].view(torch.uint8) == fill).all())  # one element decides for most tensors
    return is_first and bool((found.view(torch.uint8) == fill).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters (unless ``buffers_only``) and buffers of ``module`` that have no values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_materialized(attachments: Sequence[Attachment]) -> None:
    """Adopt what is registered before the first forward.  Raises: StateError for parameters on meta, or on another device."""
    groups = [group for each in attachments for group in each.unit.groups]
    params = [param for group in groups for param in group.params]
    for group in groups:
        group.adopt_registered()
    on_meta = [param.fqn for param in params if param.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "Call shardwise.init_parameters(model), which allocates and initializes parameters, or to_empty() and load a "
            "checkpoint. FSDP parameters should be materialized from meta device before training, but the following were still "
            f"on meta device: {on_meta}"
        )
    offloaded = [group for group in groups if isinstance(group.place.offload, CPUOffloadPolicy)]
    on_device = [(p.fqn, p.local.device) for group in offloaded for p in group.params if p.local.device.type != "cpu"]
    if on_device:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {on_device}\n"
        )
