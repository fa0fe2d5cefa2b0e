"""Reports of compression (errors, bytes saved), and the residuals of error feedback for checkpoints.

A rank's residual is what compression has left out of the gradients that it sent.  To save each rank's own would tie a
checkpoint to the number of ranks.  Source of error feedback: 1-bit SGD (Seide et al., 2014).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.compressed import Compression, Meter, own_part, sum_at_owners
from shardwise.collectives.owned import sum_of
from shardwise.errors import StateError
from shardwise.fsdp.attachment import units_in
from shardwise.fsdp.flat_buffer import as_gradient
from shardwise.fsdp.mesh import cut_shard
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit


@dataclass(frozen=True, slots=True)
class CodedTraffic:
    """The errors and bytes of a unit's compressed collectives of one kind, on this rank.

    Attributes:
        num_calls: compressed collectives so far.
        last_error, worst_error: relative error, in the 2-norm, of the tensors that this rank sent: of the last collective, and
            the largest so far.  NaN if it was not finite.
        sent_bytes: bytes that this rank has sent to other ranks.
        plain_bytes: bytes that it would have sent without compression.
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
        gathers: the traffic of parameters.
        reductions: the traffic of gradients.
    """

    name: str
    gathers: CodedTraffic
    reductions: CodedTraffic


# The path of a unit's first module or the name of one of its parameters, and a unit with compression.
_Coded = tuple[str, Unit, Compression]


def report_of(model: nn.Module) -> tuple[UnitCompression, ...]:
    """Return the report of each unit of ``model`` with compression, on this rank; it synchronizes with an accelerator."""
    rows = [(path, _traffic(c.gathers, unit), _traffic(c.reductions, unit)) for path, unit, c in _compressed(model)]
    return tuple(UnitCompression(*row) for row in rows)


def _traffic(meter: Meter, unit: Unit) -> CodedTraffic:
    meter.warn(unit.params)
    last, worst = (0.0 if each is None else float(each.item()) for each in (meter.last, meter.worst))
    return CodedTraffic(meter.num_calls, last, worst, meter.sent_bytes, meter.plain_bytes)


def _compressed(model: nn.Module) -> Iterator[_Coded]:
    for unit, (path, *_) in units_in(model).items():
        if (compression := unit.settings.compression) is not None:
            yield path, unit, compression


class CompressionState:
    """The residuals of a model's compressed gradients, as an object with a state dict.

    Only the sum over ranks of a parameter's residuals matters, so that is saved: a float32 tensor of the parameter's shape and
    placements, under the parameter's name.  It loads at any number of ranks.

    Example:
        >>> state = {"model": model, "compression": model.compression_state()}  # doctest: +SKIP
        >>> shardwise.checkpoint.save(folder, state)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals, summed over ranks.  Collective: every rank calls it, between steps.

        The sums replace the ranks' own residuals at once, so that a continued run and a resumed one are bit-identical.
        """
        found: dict[str, torch.Tensor] = {}
        for param, (name, unit, compression) in self._with_feedback():
            rows, axes = _rows(unit, compression, param), unit.settings.axes
            is_summed = axes.num_replicas > 1  # replicas have a residual each, other ranks one for each rank's section
            of = axes.mesh.get_group(axes.replicate_mesh_dim if is_summed else axes.shard_mesh_dim)
            total = sum_of(rows[0].clone(), of, is_max=False) if is_summed else sum_at_owners(rows, of)
            _place(unit, compression, param, total)
            found[name] = as_gradient(param, total[: param.local.numel()].view(param.local.shape).clone())
        return found

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load residuals, sharded like the parameters or as full tensors; names of uncompressed parameters are skipped.

        Raises: StateError if the residual of a compressed parameter is missing or has another shape.
        """
        for param, (name, unit, compression) in self._with_feedback():
            value = state_dict.get(name)
            if value is None:
                raise StateError(f"compression state: no residual of {name}; load this model's, or none (zeros)")
            local, shape = torch_private.local_of(value).detach(), tuple(param.local.shape)
            if tuple(local.shape) == param.shard.shape != shape:
                local = cut_shard(local, param.shard, unit.settings.axes.shard_rank)
            if tuple(local.shape) != shape:
                raise StateError(
                    f"compression state: the residual of {name} has shape {tuple(local.shape)} on this rank, expected "
                    f"{shape}, or the whole {param.shard.shape}"
                )
            total = local.reshape(-1).to(unit.settings.storage.device, torch.float32)
            total = nn.functional.pad(total, (0, param.shard.section_numel - local.numel()))
            _place(unit, compression, param, total)

    def _with_feedback(self) -> Iterator[tuple[ShardedParam, _Coded]]:
        """Yield the parameters whose gradients are compressed with feedback, with their names in the model."""
        paths = {id(torch_private.parameters_of(module)): where for where, module in self._model.named_modules()}
        for path, unit, compression in _compressed(self._model):
            if compression.policy.error_feedback and unit.reduce_coding is not None:
                for param in filter(unit.is_coded, unit.params):
                    at = param.registrations[0]
                    name = f"{paths.get(id(at.parameters), path)}.{at.name}".lstrip(".")
                    yield param, (name, unit, compression)


def _rows(unit: Unit, compression: Compression, param: ShardedParam) -> torch.Tensor:
    axes, device = unit.settings.axes, unit.settings.storage.device
    shape = 1 if axes.num_replicas > 1 else axes.num_shards, param.shard.section_numel
    return compression.residuals.get(param, torch.zeros(shape, dtype=torch.float32, device=device))


def _place(unit: Unit, compression: Compression, param: ShardedParam, total: torch.Tensor) -> None:
    """Set this rank's residuals so that their sum over ranks is ``total``, the residual of this rank's section."""
    axes, rows = unit.settings.axes, torch.zeros_like(_rows(unit, compression, param))
    if axes.num_replicas > 1:
        assert axes.replicate_mesh_dim is not None
        rows[0] = own_part(total, axes.mesh.get_local_rank(axes.replicate_mesh_dim), axes.num_replicas)
    else:
        rows[axes.shard_rank] = total
    compression.residuals[param] = rows
