"""A rank's partition of a ZeroRedundancyOptimizer's state as ``torch.distributed.checkpoint`` (DCP) reads and writes it.

Slices are stored as rectangular boxes of the parameter's shape.  So a checkpoint depends neither on the number of ranks
nor on the partition, and it is exchangeable with a plain optimizer's ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.collectives.owned import OwnedSlice, boxes, broadcast_tensor, gather_objects_of
from shardwise.consistency.agreement import GroupAgreement
from shardwise.errors import ConfigError, LayoutError, StateError
from shardwise.optim.slices import Window, copied
from shardwise.optim.state_dict import load_indexed, options_of
from shardwise.optim.sums import states_after_zeros, why_other_class
from shardwise.zero.partition import (
    LocalOptimizer,
    LocalSlice,
    elements_of,
    flat_view,
    is_dense,
    memory_order,
)

# ---- The state of a ZeroRedundancyOptimizer as one plain dict: streamed to one rank, and loaded from one.

StateOfParam = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The state of the last consolidation to rank ``to``; ``state`` is None on the other ranks."""

    to: int
    state: dict[int, StateOfParam] | None


def consolidate(local: LocalOptimizer, agreement: GroupAgreement, to: int) -> Consolidated:
    """Send all state to group rank ``to``.  Collective, in the order of the slices on every rank.

    Tensors are sent and received in place by broadcasts: further ranks need memory for the largest one.
    """
    what, rank_partition = f"consolidate_state_dict(to={to})", local.rank_partition
    is_even = rank_partition.partition == "even"
    mine = {own.owned_slice: _dense_values(local.state_of(own)) for own in rank_partition.local_slices}
    described = {at: {n: _described(v, at, is_even) for n, v in values.items()} for at, values in mine.items()}
    for each in gather_objects_of(agreement, described, what):
        described |= each
    whole: dict[int, StateOfParam] = {}
    for at in rank_partition.slices:
        param = rank_partition.params[at.tensor]
        for name, value in described[at].items():
            values = whole.setdefault(at.tensor, {})
            if not (isinstance(value, torch.Tensor) and value.is_meta):
                values.setdefault(name, value)
                continue
            own = flat_view(mine[at][name].detach()) if at in mine else None
            if agreement.rank == to:
                if name not in values:
                    values[name] = torch.empty_like(param if is_even else value, dtype=value.dtype, device=param.device)
                target = flat_view(values[name])[at.start : at.stop] if is_even else flat_view(values[name])
                if own is not None:
                    target.copy_(own)
            else:
                target = torch.empty(value.numel(), dtype=value.dtype, device=param.device) if own is None else own
            if at.owner != to:
                broadcast_tensor(target, at.owner, agreement, what)
            del target  # before there is memory for the next one
    return Consolidated(to, whole if agreement.rank == to else None)


def _dense_values(state: Mapping[str, Any]) -> StateOfParam:
    return {k: v.contiguous() if type(v) is torch.Tensor and not is_dense(v) else v for k, v in state.items()}


def _described(value: Any, at: OwnedSlice, is_even: bool) -> Any:
    """Return a meta tensor like a tensor that is sent by itself, or a copy of anything else."""
    if type(value) is torch.Tensor and value.dim() and (not is_even or tuple(value.shape) == (at.numel,)):
        return torch.empty_like(value, device="meta")
    return copied(value.cpu() if type(value) is torch.Tensor else value)


def whole_state_dict(state: Mapping[int, StateOfParam], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return consolidated ``state`` as the plain optimizer's state dict."""
    indices = iter(range(sum(len(group["params"]) for group in groups)))
    numbered = [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]
    return {"state": {index: dict(values) for index, values in state.items()}, "param_groups": numbered}


def load_whole(local: LocalOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the local partition of a full ``state_dict`` into the local optimizer, as copies; options come from the dict.

    Raises: ConfigError if the groups do not match, LayoutError if a state tensor does not fit its parameter.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    load_rank_partition(local, state_dict, keys, _partition_of)


def load_rank_partition(
    local: LocalOptimizer,
    state_dict: Mapping[str, Any],
    keys: Sequence[Any],
    take: Callable[[LocalSlice, str, Any], Any],
) -> None:
    """Load state and options of ``state_dict`` into the local optimizer.

    ``keys``: of each parameter in its "state".  ``take``: returns a slice's part of a value, given its name. Raises:
    ConfigError if the groups do not match.
    """
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    _check_groups(groups, local.groups)
    _check_class(local, state_dict["state"], groups, keys)
    states: list[StateOfParam | None] = []
    for own in local.rank_partition.local_slices:
        values = state_dict["state"].get(keys[own.owned_slice.tensor])
        states.append({name: take(own, name, value) for name, value in values.items()} if values else None)
    load_indexed(local.optim, states, groups)
    local.pull_options()


def _check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    found, expected = ([len(group["params"]) for group in each] for each in (saved, groups))
    if found != expected:
        raise ConfigError(
            "loaded state dict has a different number of parameter groups, or contains a parameter group that doesn't match "
            f"the size of optimizer's group: found {found} parameters, expected {expected}"
        )


def _check_class(
    local: LocalOptimizer, states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], keys: Sequence[Any]
) -> None:
    params = iter(zip(keys, local.rank_partition.params, strict=True))
    for number, (own, saved) in enumerate(zip(local.groups, groups, strict=True)):
        members = [next(params) for _ in own["params"]]
        found = [(param.dim(), states.get(key) or ()) for key, param in members]
        reason = why_other_class(local.optim, options_of(own), options_of(saved), found)
        if reason is not None:
            raise ConfigError(f"param group {number} of the loaded state dict: {reason}")


def _partition_of(local: LocalSlice, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if local.is_param or value.dim() == 0:
        return copied(value)
    if value.shape != local.param.shape:
        raise LayoutError(
            f"state {name!r} of parameter {local.owned_slice.tensor} has shape {tuple(value.shape)}, expected "
            f"{tuple(local.param.shape)}: partition='even' needs element-wise state; use partition='whole'"
        )
    return elements_of(local.owned_slice, local.param, value.detach()).clone()


class StateSlice(torch.Tensor):
    """Elements ``start:stop`` of a state tensor, with the size of the full tensor and the memory of the slice.

    DCP gets the boxes to store through the dunder methods (its ``_Checkpointable`` protocol).  Do not compute with it:
    only ``local`` has values.
    """

    local: torch.Tensor
    parts: list[Window]  # in memory order: dim ``i`` of a box is dim ``order[i]`` of the tensor
    order: tuple[int, ...]

    @staticmethod
    def make(local: torch.Tensor, param: torch.Tensor, start: int) -> StateSlice:
        """Return the slice of a tensor with the strides of ``param`` whose elements from ``start`` on are ``local`` (1-D)."""
        slice_ = torch.empty(1, dtype=local.dtype, device=local.device).expand(param.shape).as_subclass(StateSlice)
        order = range(param.dim()) if param.is_contiguous() else memory_order(param)
        slice_.local, slice_.order = local, tuple(order)
        cut = boxes([param.size(dim) for dim in order], start, start + local.numel())
        slice_.parts = [Window(*box) for box in cut]
        return slice_

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSlice:
        found = self.as_subclass(StateSlice)
        found.local, found.parts, found.order = self.local.clone(), self.parts, self.order
        memo[id(self)] = found
        return found

    def _by_dim(self, values: Sequence[int]) -> torch.Size:
        found = [0] * len(values)
        for dim, value in zip(self.order, values, strict=True):
            found[dim] = value
        return torch.Size(found)

    def __create_write_items__(self, fqn: str, _tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self._by_dim(box.offsets), self._by_dim(box.sizes)) for box in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, begin in zip(self.parts, accumulate((box.numel for box in self.parts), initial=0), strict=False):
            if index.offset == self._by_dim(box.offsets):
                # for each dim of the tensor, its index among those of the box
                dims = self._by_dim(range(len(self.order)))
                return self.local[begin : begin + box.numel].view(box.sizes).permute(dims)
        raise StateError(f"{index.fqn}: no part of this rank's slice starts at {index.offset}")


class ShardedState:
    """A rank's partition of the state as a DCP ``Stateful``; made by ``zero.sharded()``.

    Keys are those of a plain optimizer's state dict, or with ``names`` (e.g. ``dict(model.named_parameters())``) the
    names of the parameters.  To load into an optimizer that has not stepped, pass ``loading=True``: DCP fills existing
    tensors, so a probe steps on zeros to find the entries of the state.  DCP raises "Missing key" if the checkpoint lacks
    state for some parameters, because no loss had used them: :func:`shardwise.checkpoint.load` reads its own checkpoints
    without.

    Example:
        >>> dcp.save({"optimizer": zero.sharded()}, checkpoint_id=path)  # doctest: +SKIP
        >>> dcp.load({"optimizer": zero.sharded(loading=True)}, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(
        self,
        local: LocalOptimizer,
        loaded: Callable[[], None],
        names: Mapping[str, torch.Tensor] | None = None,
        loading: bool = False,
    ) -> None:
        self._local = local
        self._loaded = loaded  # called after a load
        self._loading = loading
        by_id = {id(param): name for name, param in names.items()} if names is not None else None
        self._keys: list[int | str] = []
        for index, param in enumerate(local.rank_partition.params):
            if by_id is not None and id(param) not in by_id:
                raise ConfigError(f"names lacks parameter {index} of shape {tuple(param.shape)}")
            self._keys.append(index if by_id is None else by_id[id(param)])

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {key: {name: tensor or slice}}, "param_groups": [...]} of this rank's slices."""
        state: dict[int | str, StateOfParam] = {}
        made = _blank_state(self._local) if self._loading else {}
        for own in self._local.rank_partition.local_slices:
            values = self._local.state_of(own) or made.get(own.owned_slice)
            if values:
                state[self._keys[own.owned_slice.tensor]] = {k: _outward(v, own) for k, v in values.items()}
        keys = iter(self._keys)
        groups = [{**options_of(g), "params": [next(keys) for _ in g["params"]]} for g in self._local.groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what DCP has filled in; options come from the checkpoint."""
        load_rank_partition(self._local, state_dict, self._keys, _inward)
        self._loaded()


def _outward(value: Any, local: LocalSlice) -> Any:
    if local.is_param or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return StateSlice.make(value, local.param, local.owned_slice.start)


def _inward(local: LocalSlice, _name: str, value: Any) -> Any:
    if isinstance(value, StateSlice):
        return value.local
    if isinstance(value, torch.Tensor) and value.dim() > 0 and not local.is_param:
        return elements_of(local.owned_slice, local.param, value).clone()
    return value


def _blank_state(local: LocalOptimizer) -> dict[OwnedSlice, StateOfParam]:
    """Return state with the right names, shapes and dtypes for trainable slices without state."""
    local.push_options()
    lacking = {
        id(own.tensor): own
        for own in local.rank_partition.local_slices
        if own.param.requires_grad and not local.state_of(own)
    }
    groups = [
        {**group, "params": [tensor for tensor in group["params"] if id(tensor) in lacking]}
        for group in local.optim.param_groups
    ]
    states = states_after_zeros(local.make, groups)
    return {own.owned_slice: state for own, state in zip(lacking.values(), states, strict=True)}
