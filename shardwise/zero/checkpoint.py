"""A rank's share of a ZeroRedundancyOptimizer's state as ``torch.distributed.checkpoint`` (DCP) reads and writes it.

Pieces are stored as rectangular boxes of the parameter's shape, so a checkpoint does not depend on the number of ranks
or the partition, and a plain optimizer's ``state_dict()`` loads it and is loaded from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import ConfigError, StateError
from shardwise.layout.even import Box, boxes
from shardwise.optim.checkpointed import Checkpoint, only_saved
from shardwise.optim.forms import in_form, is_flat, options_of, unflattened
from shardwise.zero.pieces import LocalPiece, flat_like, memory_order
from shardwise.zero.state import StateOfParam, check_groups, load_into

if TYPE_CHECKING:
    from shardwise.api.zero import ZeroRedundancyOptimizer


class StateSlice(torch.Tensor):
    """Elements ``start:stop`` of a state tensor: has the size of the whole, the memory of the slice.

    DCP asks for the parts it can store through the dunder methods (its ``_Checkpointable`` protocol).  Do not compute
    with it: only ``local`` holds values.
    """

    local: torch.Tensor
    parts: tuple[Box, ...]  # in memory order: dim ``i`` of a box is dim ``order[i]`` of the tensor
    order: tuple[int, ...]
    start: int

    @staticmethod
    def make(local: torch.Tensor, param: torch.Tensor, start: int) -> StateSlice:
        """Return the slice of a tensor that lies as ``param`` does and holds ``local`` (1-D) from ``start`` on."""
        slice_ = torch.empty(1, dtype=local.dtype, device=local.device).expand(param.shape).as_subclass(StateSlice)
        order = range(param.dim()) if param.is_contiguous() else memory_order(param)
        slice_.local, slice_.start, slice_.order = local, start, tuple(order)
        slice_.parts = boxes([param.size(dim) for dim in order], start, start + local.numel())
        return slice_

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSlice:
        found = self.as_subclass(StateSlice)
        found.local, found.parts, found.order, found.start = self.local.clone(), self.parts, self.order, self.start
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
        for box in self.parts:
            if index.offset == self._by_dim(box.offsets):
                begin = box.start - self.start
                dims = self._by_dim(range(len(self.order)))  # where each dim of the tensor is among those of the box
                return self.local[begin : begin + box.numel].view(box.sizes).permute(dims)
        raise StateError(f"{index.fqn}: no part of this rank's slice starts at {index.offset}")


class ShardedState:
    """The share of ``zero`` as a DCP ``Stateful``; made by ``zero.sharded()``.

    Keys are those of a plain optimizer's state dict, or with ``names`` (e.g. ``dict(model.named_parameters())``) the
    names of the parameters, or with ``flat`` too those of torch's ``flatten_optimizer_state_dict``. To load into an
    optimizer that has not stepped pass ``loading=path``, the checkpoint's folder or ``StorageReader``: DCP fills tensors
    that exist, so the optimizer is tried out on zeros to learn what its state looks like. ``loading=True`` does it for
    all parameters; DCP raises "Missing key" then if some had no state, since no loss had used them.

    Example:
        >>> dcp.save({"optimizer": zero.sharded()}, checkpoint_id=path)  # doctest: +SKIP
        >>> dcp.load({"optimizer": zero.sharded(loading=path)}, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        names: Mapping[str, torch.Tensor] | None = None,
        loading: bool | Checkpoint = False,
        flat: bool = False,
    ) -> None:
        if flat and names is None:
            raise ConfigError("flat keys are made of names: pass names=dict(model.named_parameters())")
        self._zero = zero
        self._loading = loading
        self._flat = flat
        by_id = {id(param): name for name, param in names.items()} if names is not None else None
        self._keys: list[int | str] = []
        for index, param in enumerate(zero.all_params):
            if by_id is not None and id(param) not in by_id:
                raise ConfigError(f"names lacks parameter {index} of shape {tuple(param.shape)}")
            self._keys.append(index if by_id is None else by_id[id(param)])

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {key: {name: tensor or slice}}, "param_groups": [...]} of this rank's pieces, or it flat."""
        state: dict[int | str, StateOfParam] = {}
        made = {} if self._loading is False else _blank_state(self._zero)
        for local in self._zero.local_pieces:
            values = self._zero.optim.state.get(local.tensor) or made.get(id(local.tensor))
            if values:
                state[self._keys[local.piece.tensor]] = {k: _outward(v, local) for k, v in values.items()}
        if not isinstance(self._loading, bool):
            state = only_saved(state, self._loading, self._keys)
        keys = iter(self._keys)
        groups = [{**options_of(g), "params": [next(keys) for _ in g["params"]]} for g in self._zero.param_groups]
        return in_form("flat" if self._flat else "named", state, groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adopt what DCP has filled in; options come from the checkpoint."""
        zero = self._zero
        if is_flat(state_dict):
            keys = iter(map(str, self._keys))
            state_dict = unflattened(state_dict, [[next(keys) for _ in group["params"]] for group in zero.param_groups])
        groups = state_dict["param_groups"]
        check_groups([len(group["params"]) for group in groups], zero)
        by_tensor = {id(local.tensor): local for local in zero.local_pieces}
        found: dict[int, StateOfParam] = {}
        order = [tensor for group in zero.optim.param_groups for tensor in group["params"]]
        for index, tensor in enumerate(order):
            local = by_tensor[id(tensor)]
            values = state_dict["state"].get(self._keys[local.piece.tensor])
            if values:
                found[index] = {name: _inward(value, local) for name, value in values.items()}
        load_into(zero, found, groups)
        zero.adopt_options()


def _outward(value: Any, local: LocalPiece) -> Any:
    if local.is_param or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return StateSlice.make(value, local.param, local.piece.start)


def _inward(value: Any, local: LocalPiece) -> Any:
    if isinstance(value, StateSlice):
        return value.local
    if isinstance(value, torch.Tensor) and value.dim() > 0 and not local.is_param:
        return flat_like(value, local.param)[local.piece.start : local.piece.stop].clone()
    return value


def _blank_state(zero: ZeroRedundancyOptimizer) -> dict[int, StateOfParam]:
    """Return state of the right names, shapes and dtypes for trainable pieces without any, by their tensors' ids."""
    lacking = [
        local for local in zero.local_pieces if local.param.requires_grad and not zero.optim.state.get(local.tensor)
    ]
    stand_ins = {id(local.tensor): torch.zeros_like(local.tensor, requires_grad=False) for local in lacking}
    groups = [
        {**group, "params": [stand_ins[id(tensor)] for tensor in group["params"] if id(tensor) in stand_ins]}
        for group in zero.optim.param_groups
    ]
    scratch = type(zero.optim)(groups, **zero.optimizer_defaults)
    for tensor in stand_ins.values():
        tensor.grad = torch.zeros_like(tensor)
    scratch.step()
    return {key: dict(scratch.state.get(tensor, {})) for key, tensor in stand_ins.items()}
