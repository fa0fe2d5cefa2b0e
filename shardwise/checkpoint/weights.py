"""Full tensors of a live model, unit by unit: for an inference engine, an adapter file, a state dict on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from shardwise import torch_private
from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import check_plain
from shardwise.checkpoint.format import plain
from shardwise.checkpoint.state import ModuleCarrier
from shardwise.collectives.owned import as_sent, ranks_along
from shardwise.consistency.agreement import GroupAgreement, open_agreement
from shardwise.errors import ArgumentTypeError, ConfigError, TransportError
from shardwise.fsdp.attachment import attachment_of

NamedTensors = dict[str, torch.Tensor]
_CALL = "full_tensors"


@explains_arguments
def full_tensors(
    model: nn.Module, *, dtype: torch.dtype | None = None, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the full tensor of every parameter and persistent buffer, one unit unsharded at a time.

    Collective: every rank calls it and consumes it to the end, or stops at the same tensor as all others.  A rank that stops
    earlier is named in a DesyncError on the ranks that go on.

    Args:
        model: of any API, or plain; it may be trained further at any time after.
        dtype: of floating-point tensors, which are converted before they are gathered.  None: their own.
        only: returns True for the names that are wanted; the same on every rank.  None: all.

    Names are those of the plain model.  Tied parameters come under each of their names, one after the other, gathered once.
    Tensors are on the device of the mesh, share no memory with the model, and belong to the caller: memory is bounded by one
    unit (one tensor outside of units) plus what the caller keeps.
    Raises: ConfigError for parameters on meta or in a form of their own (quantized); DesyncError.

    Example:
        >>> for name, tensor in full_tensors(model, dtype=torch.bfloat16):  # doctest: +SKIP
        ...     engine.load_weight(name, tensor)
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ArgumentTypeError(f"full_tensors takes a module, found {type(model).__name__}")
    tensors = ModuleCarrier(_CALL, model, 0, 1, only).named_tensors()
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    mesh = max((tensor.device_mesh for tensor in sharded.values()), key=DeviceMesh.size, default=None)
    agreement = None if mesh is None else open_agreement(ranks_along(mesh, range(mesh.ndim)).group, _CALL)
    error = _refusal(tensors)
    if agreement is not None:
        facts = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in sharded.items()]
        agreement.agree(_CALL, [*facts, f"dtype={dtype}"], error)
    elif error is not None:
        raise error
    found = _gathered(_by_unit(model, tensors), dtype, agreement)
    next(found)
    return found


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, only: Callable[[str], bool] | None = None, rank: int = 0
) -> NamedTensors:
    """Return the state dict of the plain model on global rank ``rank``, in host memory; an empty dict on all others.

    Collective; arguments and errors are those of :func:`full_tensors`.  No device and no other rank holds more than one unit.

    Example:
        >>> weights = full_state_dict(model)  # doctest: +SKIP
        >>> if dist.get_rank() == 0:  # doctest: +SKIP
        ...     torch.save(weights, "model.pt")
    """
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if rank not in range(size):
        raise ConfigError(f"full_state_dict: rank is {rank}, expected one of 0 to {size - 1}")
    is_target = not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
    found: NamedTensors = {}
    full = copy = torch.empty(0, device="cpu")
    for name, tensor in full_tensors(model, dtype=dtype, only=only):
        if is_target:
            if tensor is not full:  # tied names follow each other
                full, copy = tensor, tensor.cpu()
            found[name] = copy
    return found


def _refusal(tensors: Mapping[str, torch.Tensor]) -> ConfigError | None:
    try:
        for name, tensor in tensors.items():
            check_plain(name, torch_private.wait_tensor(torch_private.local_of(tensor)))
    except ConfigError as error:
        return error
    return None


def _by_unit(model: nn.Module, tensors: NamedTensors) -> list[list[tuple[list[str], torch.Tensor]]]:
    """Return for each unit its tensors with their names; a tensor outside of units is alone."""
    units = {
        plain(path): attachment.unit
        for path, module in model.named_modules(remove_duplicate=False)
        if (attachment := attachment_of(module)) is not None
    }
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[object, list[tuple[list[str], torch.Tensor]]] = {}
    for same in names.values():
        path = same[0]
        while path and path not in units:
            path = path.rpartition(".")[0]
        found.setdefault(units.get(path, same[0]), []).append((same, tensors[same[0]]))
    return list(found.values())


def _gathered(
    units: list[list[tuple[list[str], torch.Tensor]]], dtype: torch.dtype | None, agreement: GroupAgreement | None
) -> Iterator[tuple[str, torch.Tensor]]:
    total, num_done, name = sum(len(unit) for unit in units), 0, ""
    try:
        # For full_tensors(), which takes it: an iterator that never began would not report that it is dropped.
        yield "", torch.empty(0, device="cpu")
        for unit in units:
            what = f"{_CALL} at {unit[0][0][0]}"
            if agreement is not None:
                # Before the collective: one that some ranks leave out would be paired with another.
                agreement.agree(what)
            try:
                fulls = _gather([tensor for _, tensor in unit], dtype)
            except RuntimeError as error:
                raise error if agreement is None else agreement.explain(what, error) from error
            for names, _ in unit:
                full = fulls.pop(0)
                num_done += 1
                for name in names:
                    yield name, full
                del full
    except GeneratorExit:
        if agreement is not None:
            where = f"at {name!r}, tensor {num_done} of {total}" if num_done else f"before the first of {total} tensors"
            with suppress(TransportError):  # the job may have ended
                agreement.report_failure(
                    f"rank {agreement.name} stopped full_tensors() {where}; "
                    "every rank must consume it to the end, or stop at the same tensor"
                )
        raise


@torch.inference_mode(False)  # the caller may be in it, and collectives count versions
@torch.no_grad()
def _gather(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the full tensors of one unit, gathered one after the other: each input outlives its collective."""
    launched: list[tuple[torch.Tensor, torch.dtype]] = []
    for tensor in tensors:
        wanted = tensor.detach().to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        if isinstance(wanted, DTensor):
            mesh = wanted.device_mesh
            on_mesh = cast(DTensor, as_sent(wanted.to(mesh.device_type)))  # shards of CPUOffloadPolicy live on the host
            found = torch_private.local_of(on_mesh.redistribute(placements=[Replicate()] * mesh.ndim))
            launched.append((found, wanted.dtype))
        else:
            launched.append((wanted, wanted.dtype))
    fulls: list[torch.Tensor] = []
    for tensor, (found, kind) in zip(tensors, launched, strict=True):
        full = torch_private.wait_tensor(found).detach().view(kind)
        own = torch_private.wait_tensor(torch_private.local_of(tensor))
        is_own = full.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        fulls.append(full.clone() if is_own else full)
    return fulls
