"""The partition of parameters and of their state over ranks, where both lie in memory, and the broadcasts that follow."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.arguments import Extent, find_shared
from shardwise.collectives.owned import (
    Broadcast,
    Owned,
    OwnedSlice,
    add_loads,
    boxes,
    broadcast_tensor,
    even_slices,
    gather_objects_of,
    plan_broadcasts,
    runs_of,
    whole_slices,
)
from shardwise.consistency.agreement import GroupAgreement
from shardwise.errors import ConfigError, LayoutError, StateError
from shardwise.optim.slices import MakeOptimizer, Members, Window, copied, is_sharded, is_sharded_tensor
from shardwise.optim.state_dict import (
    Probe,
    copy_options,
    load_indexed,
    options_of,
    states_after_zeros,
    step_in_sync,
    why_other_class,
)

# ---- Checks of what ZeroRedundancyOptimizer gets beyond those of torch.optim, with the errors of torch's class of that name.

Partition = Literal["whole", "even"]
FUNCTIONAL_MODULES = "torch.distributed.optim.functional_"


def flatten_groups(groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return all tensors of param groups, in order."""
    return [tensor for group in groups for tensor in group["params"]]


def check_dense(tensors: Sequence[torch.Tensor], mixed_dtypes: bool) -> None:
    """Check that tensors are plain and dense, and of one dense type unless ``mixed_dtypes``.

    Raises: ConfigError if they are not.
    """
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) or is_sharded_tensor(tensor):
            raise ConfigError(_not_plain_text(index, tensor))
        if tensor.layout != torch.strided:
            raise ConfigError(
                "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
                f"{torch.typename(tensor)} (layout {tensor.layout})"
            )
    names = list(dict.fromkeys(f"{torch.typename(tensor)}" for tensor in tensors))
    if len(names) > 1 and not mixed_dtypes:
        raise ConfigError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got both "
            f"{names[0]} and {names[1]}; pass mixed_dtypes=True to shard them together"
        )
    known = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)])}
    places = [
        (index, memory)
        for index in sorted(known.values())
        if (memory := Extent.of(tensors[index], tensors[index].requires_grad))
    ]
    shared = find_shared([memory for _, memory in places], len(places))
    if shared is not None:
        first, second = (places[index][0] for index in shared)
        raise ConfigError(
            f"parameters {first} and {second} share memory but are two tensors: the values that their owners send would "
            "overwrite each other. Tie them before the optimizer is built (head.weight = embedding.weight), so that there is "
            "one parameter, or give one of them memory of its own (clone())"
        )


def _not_plain_text(index: int, tensor: torch.Tensor) -> str:
    kind = f"a DTensor with placements {tensor.placements}" if isinstance(tensor, DTensor) else "a ShardedTensor"
    cause = (
        "the optimizer state is sharded already, like the parameters that it belongs to"
        if is_sharded(tensor)
        else "every rank holds it whole, but as a DTensor (replicate() makes them), and owners take plain tensors"
    )
    return (
        f"parameter {index} of shape {tuple(tensor.shape)} is {kind}: {cause}. Use the plain optimizer on it, or "
        "shardwise.ShardedOptimizer(dict(model.named_parameters()), ...); ZeroRedundancyOptimizer is for models whose "
        "parameters are plain tensors, under DistributedDataParallel"
    )


def checked_optimizer_class(optimizer_class: type[Any], overlap_with_ddp: bool) -> type[Optimizer]:
    """Return the optimizer class to build; torch's functional optimizers (only with overlap) are replaced by the plain class.

    Raises: ConfigError for a functional optimizer without overlap, or without a plain class.
    """
    if not optimizer_class.__module__.startswith(FUNCTIONAL_MODULES):
        return optimizer_class
    if not overlap_with_ddp:
        raise ConfigError(f"Passing in a functional optimizer {optimizer_class} when `overlap_with_ddp=False`")
    plain = getattr(torch.optim, optimizer_class.__name__.removeprefix("_Functional"), None)
    if plain is None:
        raise ConfigError(f"{optimizer_class} has no plain twin in torch.optim; pass a torch.optim class")
    return plain


def check_partition(
    partition: object, optimizer_class: type[Optimizer], groups: Sequence[Mapping[str, Any]], num_ranks: int
) -> None:
    """Check ``partition``; for "even", step small tensors, in one part and in two, which must give the same result.

    ``groups``: the param groups, with their defaults; the options of the first one are used.
    Raises: ConfigError if the results differ, if the optimizer refuses slices, for LBFGS, or for an unknown partition.
    """
    if partition not in ("whole", "even"):
        raise ConfigError(f"partition is {partition!r}, expected 'whole' or 'even'")
    if issubclass(optimizer_class, torch.optim.LBFGS) and num_ranks > 1:
        raise ConfigError(
            "LBFGS cannot be divided between ranks: its line search and history take inner products over all parameters, so "
            "each rank would take another step. Use the plain optimizer"
        )
    if partition == "whole":
        return
    name, options = optimizer_class.__name__, options_of(groups[0])
    advice = f"{name} does not treat every element alone; use partition='whole'"
    try:
        device = flatten_groups(groups)[0].device
        reason = Probe(lambda tensors: optimizer_class(tensors, **options), {}, device).why_not_alone()
    except Exception as error:
        raise ConfigError(f"partition='even' cannot be used: {advice} ({error})") from error
    if reason is not None:
        raise ConfigError(f"partition='even' would change the result: {name} {reason}; {advice}")


def agree_on(agreement: GroupAgreement, what: str, facts: Callable[[], list[str]]) -> None:
    """Return once ``facts`` has returned the same on every rank; it may have side effects.  Collective.

    Raises: what ``facts`` raises on this rank; DesyncError if it raised or returned something else on another rank.
    """
    found: list[str] = []
    error: Exception | None = None
    try:
        found = facts()
    except Exception as raised:
        error = raised
    try:
        agreement.agree(what, found, error)
    finally:
        del error  # an error and its frame reference each other and would keep the group alive


def describe_params(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the facts about parameter groups that must be equal on all ranks, one line each."""
    total = sum(len(group["params"]) for group in groups)
    lines = [f"{len(groups)} parameter group(s) with {total} parameters"]
    for index, group in enumerate(groups):
        for place, tensor in enumerate(group["params"]):
            frozen = "" if tensor.requires_grad else ", frozen"
            lines.append(f"group {index} parameter {place} of shape {tuple(tensor.shape)}, {tensor.dtype}{frozen}")
    return lines


# ---- Slices that a rank updates: views of parameters in memory order, their gradients, and flat buffers under them.


@dataclass(frozen=True, slots=True, eq=False)
class LocalSlice:
    """A slice that this rank updates.

    ``tensor`` is the local optimizer's parameter: the parameter itself if the slice covers it and the partition is
    "whole", else a 1-D leaf view of its memory (0-D for a 0-D parameter).
    """

    owned_slice: OwnedSlice
    param: torch.Tensor
    tensor: torch.Tensor

    @property
    def is_param(self) -> bool:
        """True if the local optimizer has the parameter itself."""
        return self.tensor is self.param


def partition_groups(
    groups: Sequence[Mapping[str, Any]], kind: Partition, num_ranks: int
) -> tuple[tuple[OwnedSlice, ...], ...]:
    """Return the slices of each group; ``OwnedSlice.tensor`` counts over all groups.

    Groups are assigned in turn, balanced with the loads of earlier groups, so that a group added later moves nothing.
    An even partition cuts each run evenly: all ranks own a part of every run, so that all of them can send at once.
    """
    loads: tuple[int, ...] = (0,) * num_ranks
    offset = 0
    found: list[tuple[OwnedSlice, ...]] = []
    for group in groups:
        numels = [tensor.numel() for tensor in group["params"]]
        of_group: list[OwnedSlice] = []
        for run in [range(len(numels))] if kind == "whole" else runs_of(numels, num_ranks):
            own = [numels[index] for index in run]
            slices = (whole_slices if kind == "whole" else even_slices)(own, num_ranks, loads)
            loads = add_loads(loads, slices)
            first = offset + run.start
            of_group += [OwnedSlice(p.tensor + first, p.owner, p.start, p.stop) for p in slices]
        found.append(tuple(of_group))
        offset += len(numels)
    return tuple(found)


def make_local(owned_slice: OwnedSlice, param: torch.Tensor, kind: Partition) -> LocalSlice:
    """Return the slice with the tensor that the local optimizer updates."""
    if kind == "whole":
        return LocalSlice(owned_slice, param, param)
    view = view_of(owned_slice, param)
    torch_private.give_attributes(torch_private.attributes_of(param), view)
    return LocalSlice(owned_slice, param, view)


def view_of(owned_slice: OwnedSlice, param: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``owned_slice`` as a tensor on ``param``'s memory, 1-D (0-D for a 0-D parameter)."""
    if param.dim() == 0:
        return param.detach()
    # detach drops the base, which a view would keep alive
    return flat_view(param.detach())[owned_slice.start : owned_slice.stop].detach()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a 1-D view in memory order (channels-last and transposed included).

    Raises: LayoutError if it has gaps or overlaps in memory.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    ordered = tensor.permute(memory_order(tensor))
    if not ordered.is_contiguous():
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which leave gaps or overlap; "
            "pass parameters made with .contiguous()"
        )
    return ordered.view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` has neither gaps nor overlaps in memory, in any order of its elements."""
    return tensor.is_contiguous() or tensor.permute(memory_order(tensor)).is_contiguous()


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (shape of ``param``) as 1-D in the memory order of ``param``; a copy only if strides differ."""
    if param.is_contiguous():
        return tensor.reshape(-1)
    return tensor.permute(memory_order(param)).reshape(-1)


def elements_of(owned_slice: OwnedSlice, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` (shape of ``param``) in ``owned_slice``, 1-D in the memory order of ``param``."""
    return flat_like(tensor, param)[owned_slice.start : owned_slice.stop]


def gradient_for(local: LocalSlice, gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of the parameter's ``gradient`` in the slice, shaped like the slice's tensor."""
    if local.is_param or local.param.dim() == 0:
        return gradient
    return elements_of(local.owned_slice, local.param, gradient)


@contextmanager
def with_gradients(gradients: Iterable[tuple[LocalSlice, torch.Tensor | None]]) -> Generator[None, None, None]:
    """Let the tensors of these slices have these gradients inside the context."""
    before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    try:
        for local, gradient in gradients:
            before.append((local.tensor, local.tensor.grad))
            local.tensor.grad = gradient
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def owned_views(slices: Iterable[OwnedSlice], params: Sequence[torch.Tensor], moving: Sequence[bool]) -> list[Owned]:
    """Return 1-D views of the moving slices with their owners, sorted by owner, dtype and device."""
    found = [
        (owned_slice.owner, view_of(owned_slice, params[owned_slice.tensor]).view(-1))
        for owned_slice in slices
        if moving[owned_slice.tensor]
    ]
    return sorted(found, key=lambda item: (item[0], str(item[1].dtype), str(item[1].device)))


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of ``tensor`` by decreasing stride."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


@dataclass(frozen=True, eq=False)
class RankPartition:
    """The slices of all parameters on all ranks, and this rank's slices.

    Attributes:
        params: in group order; ``OwnedSlice.tensor`` is an index into them.
    """

    params: tuple[torch.Tensor, ...]
    partition: Partition
    num_ranks: int
    rank: int
    slices_of_groups: tuple[tuple[OwnedSlice, ...], ...]
    local_slices: tuple[LocalSlice, ...]

    @cached_property
    def slices(self) -> list[OwnedSlice]:
        """All ranks' slices, in group order."""
        return [owned_slice for slices in self.slices_of_groups for owned_slice in slices]

    @cached_property
    def by_param(self) -> list[list[OwnedSlice]]:
        """The slices of each parameter."""
        found: list[list[OwnedSlice]] = [[] for _ in self.params]
        for owned_slice in self.slices:
            found[owned_slice.tensor].append(owned_slice)
        return found

    @cached_property
    def local_by_param(self) -> list[list[LocalSlice]]:
        """This rank's slices of each parameter."""
        found: list[list[LocalSlice]] = [[] for _ in self.params]
        for local in self.local_slices:
            found[local.owned_slice.tensor].append(local)
        return found

    def tensors_of_group(self, number: int) -> list[torch.Tensor]:
        """Return the local optimizer's tensors of a group, in the order of :attr:`local_slices`."""
        members = set(self.slices_of_groups[number])
        return [local.tensor for local in self.local_slices if local.owned_slice in members]


def make_rank_partition(
    groups: Sequence[Mapping[str, Any]],
    partition: Partition,
    num_ranks: int,
    rank: int,
    former: RankPartition | None = None,
) -> RankPartition:
    """Return the partition of ``rank``; slices that ``former`` has too keep their tensors, which have state."""
    params = tuple(flatten_groups(groups))
    slices_of_groups = partition_groups(groups, partition, num_ranks)
    known = {local.owned_slice: local for local in former.local_slices} if former is not None else {}
    mine = [owned_slice for slices in slices_of_groups for owned_slice in slices if owned_slice.owner == rank]
    local = tuple(known.get(each) or make_local(each, params[each.tensor], partition) for each in mine)
    return RankPartition(params, partition, num_ranks, rank, slices_of_groups, local)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the parameters of a partition lie, and which of them are sent; valid until a parameter changes.

    Attributes:
        trainable: which parameters require gradients.
        moving: which ones a step may change: trainable ones, and frozen ones that still have a gradient.
        broadcasts: of all parameters; the same calls on every rank, wherever a rank's parameters lie.
    """

    rank_partition: RankPartition
    trainable: tuple[bool, ...]
    moving: tuple[bool, ...]
    addresses: tuple[int, ...]
    broadcasts: tuple[Broadcast, ...]
    by_indices: dict[tuple[int, ...], tuple[Broadcast, ...]] = field(default_factory=dict)

    def broadcasts_of(self, indices: Sequence[int]) -> tuple[Broadcast, ...]:
        """Return the broadcasts of these parameters; they are planned once."""
        key = tuple(indices)
        if key not in self.by_indices:
            slices = [owned_slice for index in sorted(key) for owned_slice in self.rank_partition.by_param[index]]
            self.by_indices[key] = plan_broadcasts(owned_views(slices, self.rank_partition.params, self.moving))
        return self.by_indices[key]


def trainable_of(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return which parameters require gradients."""
    return tuple(param.requires_grad for param in params)


def moving_of(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return which parameters a step may change: a plain optimizer also updates frozen ones that have a gradient."""
    return tuple(param.requires_grad or param.grad is not None for param in params)


def addresses_of(params: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return the addresses of the parameters' memory."""
    return tuple(param.data_ptr() for param in params)


def make_layout(rank_partition: RankPartition) -> Layout:
    """Plan the broadcasts for the current parameters, and point the slices' views at their memory."""
    params = rank_partition.params
    moving = moving_of(params)
    for local in rank_partition.local_slices:
        if not local.is_param:
            local.tensor.data = view_of(local.owned_slice, local.param)
    owned = owned_views(rank_partition.slices, params, moving) if rank_partition.num_ranks > 1 else []
    return Layout(rank_partition, trainable_of(params), moving, addresses_of(params), plan_broadcasts(owned))


# ---- The optimizer that a rank runs over its partition, and the param groups that users see.


@dataclass(frozen=True, slots=True, eq=False)
class LocalOptimizer:
    """A rank's partition of the parameters and the optimizer that updates it.

    Attributes:
        optim: runs over the tensors of ``rank_partition.local_slices``, in their order.
        groups: the param groups that users see, of full parameters: the live list.
        members: the parameters in them.
        make: creates another optimizer like ``optim``, for probes.
    """

    rank_partition: RankPartition
    optim: Optimizer
    groups: list[dict[str, Any]]
    members: Members
    make: MakeOptimizer

    def with_last_group(self) -> LocalOptimizer:
        """Return a copy with the last group of ``groups`` added; existing state stays."""
        copy_options(self.groups[:-1], self.optim.param_groups)
        rank_partition = self.rank_partition
        rank_partition = make_rank_partition(
            self.groups, rank_partition.partition, rank_partition.num_ranks, rank_partition.rank, rank_partition
        )
        self.optim.add_param_group(_local_group(rank_partition, self.groups, len(self.groups) - 1))
        self.pull_options()
        return replace(self, rank_partition=rank_partition, members=Members(self.groups))

    def push_options(self) -> None:
        """Copy the options that users have set to the optimizer.

        Raises: StateError if users have changed which parameters are in the groups.
        """
        self.members.check(self.groups)
        copy_options(self.groups, self.optim.param_groups)

    def pull_options(self) -> None:
        """Copy the options of the inner optimizer, after it was built or loaded, to the groups that users see."""
        copy_options(self.optim.param_groups, self.groups)

    def step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step the optimizer with the options that users have set, also in ``closure``."""
        return step_in_sync(partial(self.optim.step, **kwargs), closure, self.groups, self.optim.param_groups)

    def state_of(self, local: LocalSlice) -> Mapping[str, Any]:
        """Return the state of a slice; empty if it has none."""
        return self.optim.state.get(local.tensor, {})

    def states(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Return this rank's state of each parameter; empty for parameters of other owners."""
        return {
            param: self.state_of(local[0]) if local else {}
            for param, local in zip(self.rank_partition.params, self.rank_partition.local_by_param, strict=True)
        }

    def step_slices(self, gradients: Sequence[tuple[LocalSlice, torch.Tensor]]) -> None:
        """Update only these slices, with these gradients."""
        chosen = {id(local.tensor) for local, _ in gradients}
        with with_gradients(gradients), _narrowed(self.optim.param_groups, chosen):
            self.step(None, {})


def make_local_optimizer(
    rank_partition: RankPartition, groups: list[dict[str, Any]], make: MakeOptimizer
) -> LocalOptimizer:
    """Return the optimizer of ``rank_partition``, with the options of ``groups``."""
    optim = make([_local_group(rank_partition, groups, i) for i in range(len(groups))])
    local = LocalOptimizer(rank_partition, optim, groups, Members(groups), make)
    local.pull_options()
    return local


def _local_group(rank_partition: RankPartition, groups: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    return {**options_of(groups[number]), "params": rank_partition.tensors_of_group(number)}


@contextmanager
def _narrowed(groups: Sequence[dict[str, Any]], chosen: set[int]) -> Generator[None, None, None]:
    """Leave only the tensors with these ids in ``groups`` inside the context; the dicts stay the same objects."""
    full = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) in chosen]
        yield
    finally:
        for group, tensors in zip(groups, full, strict=True):
            group["params"] = tensors


# A rank's state is stored as rectangular boxes of the parameter's shape, so that a checkpoint depends neither on the number
# of ranks nor on the partition, and is exchangeable with a plain optimizer's ``state_dict()``.

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


def load_rank_partition(
    local: LocalOptimizer, state_dict: Mapping[str, Any], keys: Sequence[Any] | None = None
) -> None:
    """Load state and options of ``state_dict``, of which this rank takes its slices, into the local optimizer.

    ``keys``: of each parameter in its "state", whose tensors become the optimizer's own where they are placed like it.
    None: those of its param groups, whose tensors are copied.
    Raises: ConfigError if the groups do not match, LayoutError if a state tensor does not fit its parameter.
    """
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    _check_groups(groups, local.groups)
    adopt = keys is not None
    keys = keys or [key for group in groups for key in group["params"]]
    _check_class(local, state_dict["state"], groups, keys)
    states: list[StateOfParam | None] = []
    for own in local.rank_partition.local_slices:
        values = state_dict["state"].get(keys[own.owned_slice.tensor])
        states.append({name: _part_of(own, name, value, adopt) for name, value in values.items()} if values else None)
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


def _part_of(local: LocalSlice, name: str, value: Any, adopt: bool) -> Any:
    """Return this rank's part of a state value; ``adopt``: itself, if it is placed like the slice, else a copy."""
    if isinstance(value, StateSlice):
        return value.local
    if not isinstance(value, torch.Tensor) or local.is_param or value.dim() == 0:
        return value if adopt else copied(value)
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
        load_rank_partition(self._local, state_dict, self._keys)
        self._loaded()


def _outward(value: Any, local: LocalSlice) -> Any:
    if local.is_param or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return StateSlice.make(value, local.param, local.owned_slice.start)


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
