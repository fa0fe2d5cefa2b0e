"""The partition of parameters over ranks, where parameters lie in memory, and the broadcasts that follow from both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.arguments import Extent, find_shared
from shardwise.collectives.owned import (
    Broadcast,
    Owned,
    OwnedSlice,
    add_loads,
    even_slices,
    plan_broadcasts,
    runs_of,
    whole_slices,
)
from shardwise.consistency.agreement import GroupAgreement
from shardwise.errors import ArgumentTypeError, ConfigError, LayoutError
from shardwise.optim.slices import MakeOptimizer, Members, is_sharded, is_sharded_tensor
from shardwise.optim.state_dict import copy_options, options_of, step_in_sync
from shardwise.optim.sums import why_not_alone

# ---- Checks of ZeroRedundancyOptimizer's arguments, with the errors of torch's class of that name.

Partition = Literal["whole", "even"]
FUNCTIONAL_MODULES = "torch.distributed.optim.functional_"


def checked_params(params: object) -> list[torch.Tensor] | list[dict[str, Any]]:
    """Return ``params`` as a list.

    Raises: ArgumentTypeError for a tensor, something not iterable or mixed element types; ConfigError for no
    parameters or a group without "params".
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ArgumentTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        )
    found = list(params)
    if not found:
        raise ConfigError("ZeroRedundancyOptimizer got an empty parameter list")
    if _all_tensors(found):
        return found
    if _all_dicts(found):
        for group in found:
            if "params" not in group:
                raise ConfigError(
                    "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters "
                    f"in the group; found the keys {sorted(group)}"
                )
        return [{**group, "params": _as_tensors(group["params"])} for group in found]
    kinds = sorted({torch.typename(item) for item in found})
    raise ArgumentTypeError(
        f"`params` argument should be an iterable of Tensors or dicts, but got {' and '.join(kinds)}"
    )


def flatten_groups(params: Sequence[torch.Tensor] | Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return all tensors in the result of :func:`checked_params`, in order."""
    return [each for item in params for each in ([item] if isinstance(item, torch.Tensor) else item["params"])]


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
    partition: object,
    optimizer_class: type[Optimizer],
    params: Sequence[torch.Tensor] | Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Check ``partition``; for "even", step small tensors, in one part and in two, which must give the same result.

    ``params``: from :func:`checked_params`; the options of the first group are used.
    Raises: ConfigError if the results differ, if the optimizer refuses slices, or for an unknown partition.
    """
    if partition not in ("whole", "even"):
        raise ConfigError(f"partition is {partition!r}, expected 'whole' or 'even'")
    if partition == "whole":
        return
    options = {**defaults, **(options_of(params[0]) if isinstance(params[0], Mapping) else {})}
    name = optimizer_class.__name__
    advice = f"{name} does not treat every element alone; use partition='whole'"
    try:
        device = flatten_groups(params)[0].device
        reason = why_not_alone(lambda groups: optimizer_class(groups, **options), {}, device)
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


def _all_tensors(items: list[Any]) -> TypeGuard[list[torch.Tensor]]:
    return all(isinstance(item, torch.Tensor) for item in items)


def _all_dicts(items: list[Any]) -> TypeGuard[list[dict[str, Any]]]:
    return all(isinstance(item, dict) for item in items)


def _as_tensors(params: object) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, Iterable) and not isinstance(params, set | frozenset):
        found = list(params)
        if _all_tensors(found):
            return found
    raise ArgumentTypeError(
        f"'params' of a group should be a Tensor or an ordered iterable of them, but got {type(params)}"
    )


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
    """Return 1-D views of the moving slices, sorted by owner, dtype and device."""
    found = [
        Owned(owned_slice.owner, view_of(owned_slice, params[owned_slice.tensor]).view(-1))
        for owned_slice in slices
        if moving[owned_slice.tensor]
    ]
    return sorted(found, key=lambda item: (item.owner, str(item.tensor.dtype), str(item.tensor.device)))


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of ``tensor`` by decreasing stride."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


@dataclass(frozen=True, slots=True, eq=False)
class RankPartition:
    """The slices of all parameters on all ranks, and this rank's slices.

    Attributes:
        params: in group order; ``OwnedSlice.tensor`` is an index into them.
        by_param: the slices of each parameter.
    """

    params: tuple[torch.Tensor, ...]
    partition: Partition
    num_ranks: int
    rank: int
    slices_of_groups: tuple[tuple[OwnedSlice, ...], ...]
    local_slices: tuple[LocalSlice, ...]
    by_param: tuple[tuple[OwnedSlice, ...], ...]
    local_by_param: tuple[tuple[LocalSlice, ...], ...]

    @property
    def slices(self) -> list[OwnedSlice]:
        """All ranks' slices, in group order."""
        return [owned_slice for slices in self.slices_of_groups for owned_slice in slices]

    def slices_of(self, indices: Iterable[int]) -> list[OwnedSlice]:
        """Return all ranks' slices of these parameters, in the order of :attr:`params`."""
        return [owned_slice for index in sorted(indices) for owned_slice in self.by_param[index]]

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
    params = flatten_groups(groups)
    slices_of_groups = partition_groups(groups, partition, num_ranks)
    known = {local.owned_slice: local for local in former.local_slices} if former is not None else {}
    by_param: list[list[OwnedSlice]] = [[] for _ in params]
    local_by_param: list[list[LocalSlice]] = [[] for _ in params]
    local_slices: list[LocalSlice] = []
    for owned_slice in (owned_slice for slices in slices_of_groups for owned_slice in slices):
        by_param[owned_slice.tensor].append(owned_slice)
        if owned_slice.owner == rank:
            local = known.get(owned_slice) or make_local(owned_slice, params[owned_slice.tensor], partition)
            local_slices.append(local)
            local_by_param[owned_slice.tensor].append(local)
    return RankPartition(
        tuple(params),
        partition,
        num_ranks,
        rank,
        slices_of_groups,
        tuple(local_slices),
        tuple(map(tuple, by_param)),
        tuple(map(tuple, local_by_param)),
    )


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
            slices = self.rank_partition.slices_of(key)
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
    return {**groups[number], "params": rank_partition.tensors_of_group(number)}


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
