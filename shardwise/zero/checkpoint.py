"""A rank's share of a ZeroRedundancyOptimizer's state as ``torch.distributed.checkpoint`` (DCP) reads and writes it.

Pieces are stored as rectangular boxes of the parameter's shape, so a checkpoint does not depend on the number of ranks
or the partition, and a plain optimizer's ``state_dict()`` loads it and is loaded from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import ConfigError, StateError
from shardwise.layout.even import Box, boxes
from shardwise.layout.owners import OwnedSlice
from shardwise.optim.checkpointed import Checkpoint, only_saved
from shardwise.optim.forms import in_form, is_flat, options_of, unflattened
from shardwise.optim.trial import states_after_zeros
from shardwise.zero.consolidate import StateOfParam, load_share
from shardwise.zero.local import LocalOptimizer
from shardwise.zero.local_pieces import LocalPiece, elements_of, memory_order


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
    """A rank's share of the state as a DCP ``Stateful``; made by ``zero.sharded()``.

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
        local: LocalOptimizer,
        loaded: Callable[[], None],
        names: Mapping[str, torch.Tensor] | None = None,
        loading: bool | Checkpoint = False,
        flat: bool = False,
    ) -> None:
        if flat and names is None:
            raise ConfigError("flat keys are made of names: pass names=dict(model.named_parameters())")
        self._local = local
        self._loaded = loaded  # called after a load
        self._loading = loading
        self._flat = flat
        by_id = {id(param): name for name, param in names.items()} if names is not None else None
        self._keys: list[int | str] = []
        for index, param in enumerate(local.share.params):
            if by_id is not None and id(param) not in by_id:
                raise ConfigError(f"names lacks parameter {index} of shape {tuple(param.shape)}")
            self._keys.append(index if by_id is None else by_id[id(param)])

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {key: {name: tensor or slice}}, "param_groups": [...]} of this rank's pieces, or it flat."""
        state: dict[int | str, StateOfParam] = {}
        made = {} if self._loading is False else _blank_state(self._local)
        for own in self._local.share.local_pieces:
            values = self._local.state_of(own) or made.get(own.piece)
            if values:
                state[self._keys[own.piece.tensor]] = {k: _outward(v, own) for k, v in values.items()}
        if not isinstance(self._loading, bool):
            state = only_saved(state, self._loading, self._keys)
        keys = iter(self._keys)
        groups = [{**options_of(g), "params": [next(keys) for _ in g["params"]]} for g in self._local.groups]
        return in_form("flat" if self._flat else "named", state, groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adopt what DCP has filled in; options come from the checkpoint."""
        if is_flat(state_dict):
            keys = iter(map(str, self._keys))
            state_dict = unflattened(
                state_dict, [[next(keys) for _ in group["params"]] for group in self._local.groups]
            )
        load_share(self._local, state_dict, self._keys, _inward)
        self._loaded()


def _outward(value: Any, local: LocalPiece) -> Any:
    if local.is_param or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return StateSlice.make(value, local.param, local.piece.start)


def _inward(local: LocalPiece, _name: str, value: Any) -> Any:
    if isinstance(value, StateSlice):
        return value.local
    if isinstance(value, torch.Tensor) and value.dim() > 0 and not local.is_param:
        return elements_of(local.piece, local.param, value).clone()
    return value


def _blank_state(local: LocalOptimizer) -> dict[OwnedSlice, StateOfParam]:
    """Return state of the right names, shapes and dtypes for trainable pieces without any."""
    local.push_options()
    lacking = {
        id(own.tensor): own for own in local.share.local_pieces if own.param.requires_grad and not local.state_of(own)
    }
    groups = [
        {**group, "params": [tensor for tensor in group["params"] if id(tensor) in lacking]}
        for group in local.optim.param_groups
    ]
    states = states_after_zeros(local.make, groups)
    return {own.piece: state for own, state in zip(lacking.values(), states, strict=True)}
