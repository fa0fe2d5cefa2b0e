"""What compression did to a model: how far off it was, what it has saved, and the residuals that belong into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.compressed import Compression, Meter, own_part, sum_at_owners, sum_everywhere
from shardwise.errors import StateError
from shardwise.fsdp.flat_buffer import as_gradient
from shardwise.fsdp.mesh import cut_shard
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.roots import attachment_of


@dataclass(frozen=True, slots=True)
class CodedTraffic:
    """How far off the coding of a unit was, in one direction.

    Attributes:
        num_calls: coded collectives so far.
        last_error, worst_error: relative error of the last one and the largest so far: what coding has lost of what this rank
            sent, in the 2-norm.  nan if that was not finite.
        sent_bytes: that this rank has sent to others.  plain_bytes: that it would have sent uncoded.
    """

    num_calls: int
    last_error: float
    worst_error: float
    sent_bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class UnitCompression:
    """One unit's part of a compression report.

    Attributes:
        name: path of its first module in the model; "" is the model itself.
        gathers, reductions: of parameters, of gradients.
    """

    name: str
    gathers: CodedTraffic
    reductions: CodedTraffic


class _Coded(NamedTuple):
    """A group with a policy, and the path of its unit's first module."""

    path: str
    group: ParamGroup
    compression: Compression


def report_of(model: nn.Module) -> tuple[UnitCompression, ...]:
    """Return what compression did in each unit of ``model`` that has any, on this rank; on an accelerator it waits for it."""
    found: list[UnitCompression] = []
    for path, group, compression in _compressed(model):
        for meter in (compression.gathers, compression.reductions):
            meter.warn(group.params)
        found.append(UnitCompression(path, _traffic(compression.gathers), _traffic(compression.reductions)))
    return tuple(found)


def _traffic(meter: Meter) -> CodedTraffic:
    last, worst = (0.0 if each is None else float(each.item()) for each in (meter.last, meter.worst))
    return CodedTraffic(meter.num_calls, last, worst, meter.sent_bytes, meter.plain_bytes)


def _compressed(model: nn.Module) -> Iterator[_Coded]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        attachment = attachment_of(module)
        if attachment is None or id(attachment.unit) in seen:
            continue
        seen.add(id(attachment.unit))
        for group in attachment.unit.groups:
            if group.compression is not None:
                yield _Coded(path, group, group.compression)


class CompressionState:
    """The residuals of a model's compressed gradients as something with a state dict, sharded as the parameters are.

    What ranks have lost of a gradient counts as a sum, so that is what is saved: a float32 tensor of the parameter's shape and
    placements under the parameter's name.  It loads at any number of ranks.

    Example:
        >>> state = {"model": model, "compression": model.compression_state()}  # doctest: +SKIP
        >>> shardwise.checkpoint.save(folder, state)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals, summed over ranks.  Collective: every rank calls it, between steps.

        From then on the sums stand for what each rank had: to go on and to resume are the same, to the bit.
        """
        found: dict[str, torch.Tensor] = {}
        for path, group, compression in self._with_feedback():
            for name, param in _named(self._model, path, group):
                rows = _rows(group, compression, param)
                if group.axes.num_replicas > 1:
                    total = sum_everywhere(rows[0], _group_of(group))
                else:
                    total = sum_at_owners(rows, _group_of(group))
                _place(group, compression, param, total)
                found[name] = as_gradient(param, total[: param.local.numel()].view(param.local.shape).clone())
        return found

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take residuals: sharded as the parameters, or whole tensors.  Names that are not compressed here are left out.

        Raises: StateError if one of this model's is missing or has another shape.
        """
        for path, group, compression in self._with_feedback():
            for name, param in _named(self._model, path, group):
                value = state_dict.get(name)
                if value is None:
                    raise StateError(
                        f"compression state: no residual of {name}; load what compression_state() of this model saved, or "
                        "begin without: residuals start at zero"
                    )
                local = torch_private.local_of(value).detach()
                if tuple(local.shape) == param.shard.shape and tuple(local.shape) != tuple(param.local.shape):
                    local = cut_shard(local, param.shard, group.axes.shard_rank)
                if tuple(local.shape) != tuple(param.local.shape):
                    raise StateError(
                        f"compression state: the residual of {name} has shape {tuple(local.shape)} on this rank, expected "
                        f"{tuple(param.local.shape)}, or the whole {param.shard.shape}"
                    )
                total = torch.zeros(param.shard.section_numel, dtype=torch.float32, device=group.device)
                total[: local.numel()].copy_(local.reshape(-1))
                _place(group, compression, param, total)

    def _with_feedback(self) -> Iterator[_Coded]:
        for found in _compressed(self._model):
            if found.compression.policy.error_feedback and found.group.reduce_coding is not None:
                yield found


def _named(model: nn.Module, path: str, group: ParamGroup) -> Iterator[tuple[str, ShardedParam]]:
    """Yield the coded parameters of ``group`` under their names in ``model``."""
    paths = {id(torch_private.parameters_of(module)): where for where, module in model.named_modules()}
    for param in group.params:
        registration = param.registrations[0]
        where = paths.get(id(registration.parameters), path)
        if group.is_coded(param):
            yield f"{where}.{registration.name}" if where else registration.name, param


def _group_of(group: ParamGroup) -> torch.distributed.ProcessGroup:
    axes = group.axes
    dim = axes.replicate_mesh_dim if axes.num_replicas > 1 else axes.shard_mesh_dim
    assert dim is not None
    return axes.mesh.get_group(dim)


def _rows(group: ParamGroup, compression: Compression, param: ShardedParam) -> torch.Tensor:
    residual = compression.residuals.get(param)
    num_rows = 1 if group.axes.num_replicas > 1 else group.axes.num_shards
    if residual is not None:
        return residual
    return torch.zeros(num_rows, param.shard.section_numel, dtype=torch.float32, device=group.device)


def _place(group: ParamGroup, compression: Compression, param: ShardedParam, total: torch.Tensor) -> None:
    """Let this rank bring its part of ``total``, which is that of its section, and no rank anything else."""
    axes = group.axes
    rows = torch.zeros_like(_rows(group, compression, param))
    if axes.num_replicas > 1:
        assert axes.replicate_mesh_dim is not None
        rows[0] = own_part(total, axes.mesh.get_local_rank(axes.replicate_mesh_dim), axes.num_replicas)
    else:
        rows[axes.shard_rank] = total
    compression.residuals[param] = rows
