"""Step an element-wise optimizer over local slices, with as few updates as their memory allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private
from shardwise.collectives.owned import sum_of
from shardwise.collectives.streams import are_neighbours, join_from, suballocate
from shardwise.errors import ConfigError, StateError
from shardwise.optim.slices import (
    Closure,
    Groups,
    MakeOptimizer,
    Params,
    ParamSlice,
    PerSlice,
    Values,
    gradient_of,
    is_sharded_tensor,
    local_of,
    loss_of,
    state_of_slice,
)
from shardwise.optim.state_dict import (
    SumsOverRanks,
    load_indexed,
    per_element_of,
    states_after_zeros,
    unwrap,
    why_not_elementwise,
)

# ---- Runs: slices that are contiguous in memory, with contiguous gradients, updated as one 1-D tensor.
# Runs are found by address only, independent of FSDP units: shards and gradients in flat memory get one update per run,
# others one per slice.

State = dict[str, Any]


class LiveSlice(NamedTuple):
    """A slice in this step (a NamedTuple, because every step creates one per slice)."""

    param_slice: ParamSlice
    local: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class FlatRun:
    """Slices that the optimizer updates as one tensor.

    Attributes:
        tensor: the optimizer's parameter, which shares the slices' memory: of the slice's shape for one slice, else
            1-D.
        shapes: of the slices.
        address: of the first element.
    """

    tensor: torch.Tensor
    slices: tuple[ParamSlice, ...]
    shapes: tuple[torch.Size, ...]
    address: int


def in_memory_order(found: Sequence[LiveSlice]) -> list[int]:
    """Return the indices sorted by address; empty tensors, which have none, come last."""
    return sorted(range(len(found)), key=lambda i: (not found[i].local.numel(), found[i].local.data_ptr()))


def find_joins(found: Sequence[LiveSlice], blocked: frozenset[int], max_numel: int) -> list[bool]:
    """Return for each item whether it continues the one before: contiguous memory of one dtype, gradients too.

    A gap ends a run even if it is padding: its contents are unknown.  An empty slice joins any run that has gradients.
    ``blocked`` indices never join; no run grows beyond ``max_numel`` elements by a join.
    """
    joins: list[bool] = []
    next_local = next_gradient = -1
    dtype: torch.dtype | None = None
    numel = 0
    for index, item in enumerate(found):
        local, gradient = item.local, item.gradient
        if gradient is None or not local.dim() or gradient.layout != torch.strided:
            joins.append(False)
            dtype = None
            continue
        size = local.numel()
        if size == 0:
            joined = dtype is local.dtype and index not in blocked
            joins.append(joined)
            if not joined:
                next_local, dtype = -1, local.dtype
            continue
        address, from_gradient = local.data_ptr(), gradient.data_ptr()
        joined = (
            address == next_local
            and from_gradient == next_gradient
            and dtype is local.dtype
            and numel + size <= max_numel
            and index not in blocked
        )
        is_dense = local.is_contiguous() and gradient.is_contiguous() and gradient.dtype is local.dtype
        joined = joined and is_dense
        joins.append(joined)
        numel = numel + size if joined else size
        num_bytes = size * local.element_size()
        dtype = local.dtype if is_dense else None
        next_local, next_gradient = address + num_bytes, from_gradient + num_bytes
    return joins


def make_run(found: Sequence[LiveSlice]) -> FlatRun:
    """Return the run of ``found``, whose items :func:`find_joins` has joined."""
    slices = tuple(item.param_slice for item in found)
    shapes = tuple(item.local.shape for item in found)
    first = found[0].local
    tensor = _tensor_alone(found[0]) if len(found) == 1 else flat_over([item.local for item in found])
    return FlatRun(tensor, slices, shapes, first.data_ptr())


def _tensor_alone(item: LiveSlice) -> torch.Tensor:
    """Return the parameter for an optimizer over one slice; no alias if possible: the engine counts those of its memory."""
    # of a DTensor, nothing else references the local tensor as a leaf with a gradient
    is_internal = isinstance(item.param_slice.param, DTensor) and not item.local.requires_grad
    return item.local if is_internal else item.local.detach()


def flat_over(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one 1-D tensor over neighbours in memory, some of which may be empty."""
    first, last, numel = tensors[0], tensors[-1], 0
    for tensor in tensors:
        size = tensor.numel()
        if size:
            last = tensor
            if not numel:
                first = tensor
            numel += size
    storage = first.untyped_storage()
    if storage.data_ptr() == last.untyped_storage().data_ptr():  # views of one tensor: half the cost of joining
        return first.detach().as_strided((numel,), (1,), first.storage_offset())
    return join_from(first, numel, tensors)


def numbers_of(state: State, shape: torch.Size) -> list[tuple[str, object]]:
    """Return what slices need alike to share one state: names, dtypes of values per element, and everything else itself."""
    return [
        (key, value.dtype)
        if is_per_element(value, shape)
        else (key, (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value)
        for key, value in state.items()
    ]


def breaks(found: Sequence[LiveSlice], states: Mapping[ParamSlice, State]) -> frozenset[int]:
    """Return the indices of slices whose state does not continue that of the slice before: other numbers, or elsewhere.

    State does not move, because user code may reference it.
    """
    wrong: set[int] = set()
    last: list[tuple[str, object]] = []
    ends: dict[str, int] = {}
    for index, item in enumerate(found):
        state, shape = states.get(item.param_slice, {}), item.local.shape
        numbers, values = numbers_of(state, shape), {k: v for k, v in state.items() if is_per_element(v, shape)}
        full = {key: value for key, value in values.items() if value.numel()}
        follows = all(v.is_contiguous() and ends.get(k, v.data_ptr()) == v.data_ptr() for k, v in full.items())
        if numbers != last or not follows:
            wrong.add(index)
            ends = {}
        last = numbers
        ends |= {key: value.data_ptr() + value.numel() * value.element_size() for key, value in full.items()}
    return frozenset(wrong)


def merged(states: Sequence[State], shapes: Sequence[torch.Size]) -> State:
    """Return one state for slices that :func:`breaks` lets join: values per element stay where they are."""
    return {
        key: flat_over([state[key] for state in states])
        if is_per_element(value, shapes[0])
        else value.clone()
        if isinstance(value, torch.Tensor)
        else value
        for key, value in states[0].items()
    }


def is_per_element(value: object, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` has a plain number for each element of a parameter of ``shape`` (with one dim or more)."""
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == shape


def packed(states: Mapping[ParamSlice, State], found: Sequence[LiveSlice]) -> dict[ParamSlice, State]:
    """Return ``states`` with values per element packed in the order in which slices will be joined; joins need no copy."""
    copies = {param_slice: dict(state) for param_slice, state in states.items()}
    rows: dict[tuple[str, torch.dtype, torch.device], list[tuple[State, torch.Tensor]]] = {}
    for index in in_memory_order(found):
        item = found[index]
        for key, value in copies.get(item.param_slice, {}).items():
            if is_per_element(value, item.local.shape) and value.dtype == item.local.dtype:
                rows.setdefault((key, value.dtype, value.device), []).append((copies[item.param_slice], value))
    for (key, _, _), members in rows.items():
        if are_neighbours([value for _, value in members]) and all(value.is_contiguous() for _, value in members):
            continue
        memory, start = torch.cat([value.reshape(-1) for _, value in members]), 0
        for state, value in members:
            state[key] = suballocate(memory, start, value.shape).detach()
            start += value.numel()
    return copies


def empty_states(dtypes: Mapping[ParamSlice, Mapping[str, torch.dtype]]) -> dict[ParamSlice, dict[str, torch.Tensor]]:
    """Return new memory for each slice and key of ``dtypes``, laid out as :func:`packed` does.

    One allocation per key, dtype and device; values whose dtype differs from the slice's get their own.
    """
    found = [LiveSlice(param_slice, local_of(param_slice), None) for param_slice in dtypes]
    targets: dict[ParamSlice, dict[str, torch.Tensor]] = {param_slice: {} for param_slice in dtypes}
    rows: dict[tuple[str, torch.dtype, torch.device], list[LiveSlice]] = {}
    for index in in_memory_order(found):
        item = found[index]
        for key, dtype in dtypes[item.param_slice].items():
            if dtype == item.local.dtype:
                rows.setdefault((key, dtype, item.local.device), []).append(item)
            else:
                targets[item.param_slice][key] = torch.empty(item.local.shape, dtype=dtype, device=item.local.device)
    for (key, dtype, device), items in rows.items():
        memory = torch.empty(sum(item.local.numel() for item in items), dtype=dtype, device=device)
        start = 0
        for item in items:
            targets[item.param_slice][key] = suballocate(memory, start, item.local.shape).detach()
            start += item.local.numel()
    return targets


# Unfused CPU updates read and write memory about ten times: longer runs of large parameters no longer fit the caches
# (benchmarks/optimizer_step.py, few_large: 97 ms joined without a limit, 79 ms not joined).
CACHED_NUMEL = 1 << 16
UNLIMITED_NUMEL = 1 << 62
CHECK_EVERY = 16  # steps; also in the first ones, since an optimizer may start with plain state
MANY_LAYOUTS = 16  # an allocator may put gradients of separate tensors side by side in some steps only


class _Group:
    """The slices of one param group and their current runs."""

    def __init__(self, slices: Sequence[ParamSlice], runs: list[FlatRun]) -> None:
        self.slices = list(slices)
        self.order = list(range(len(slices)))
        self.joins = [False] * len(slices)
        self.runs = runs
        self.blocked: frozenset[int] = frozenset()  # indices in ``order`` whose state does not continue the one before
        self.num_steps = self.num_layouts = 0
        self.is_checked = False  # the state of the runs is known to be per element

    @property
    def is_unsteady(self) -> bool:
        """True if runs change so often that finding them costs more than they save."""
        return self.num_layouts >= MANY_LAYOUTS and self.num_layouts * MANY_LAYOUTS >= self.num_steps

    def find(self) -> list[LiveSlice]:
        """Return the slices with their current tensors and gradients, in ``order``."""
        slices = self.slices
        return [LiveSlice(slices[i], local_of(slices[i]), gradient_of(slices[i])) for i in self.order]


class ElementwiseStep:
    """Run an element-wise optimizer over plain tensors that share memory with the slices.

    The inner optimizer keeps state for the tensors of runs.  If gradients are in other memory or missing for some
    slices, runs are split (state stays in place) or joined (if their state is contiguous), so that a
    step equals that of a plain optimizer over the slices.

    :meth:`states` returns tensors with storages of their own on the live memory.  A run has numbers such as a step count
    once; of its slices :meth:`states` returns copies, and what is written to them until the next step counts in it.

    Args:
        make: creates the optimizer from param groups.
        groups: the slices of the parameters, and the options, of each param group.
        is_flat: join slices into runs.  is_known: the class is known to be element-wise; otherwise its state is
            checked.

    Raises: ConfigError for options that need the parameters themselves.
    """

    is_elementwise = True

    def __init__(self, make: MakeOptimizer, groups: Groups, is_flat: bool, is_known: bool = True) -> None:
        self._make = make
        self._is_flat = is_flat
        self._is_known = is_known
        self._params = [list(param) for params, _ in groups for param in params]
        self._groups = [_make_group(params) for params, _ in groups]
        # The numbers of slices that states() has returned since the last step, and those of their run.
        self._copies: dict[ParamSlice, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        self.optimizer = make(
            [
                {**options, "params": [run.tensor for run in group.runs]}
                for group, (_, options) in zip(self._groups, groups, strict=True)
            ]
        )
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            raise ConfigError("differentiable=True needs the parameters themselves; it cannot be used with shards")

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of their groups."""
        return [slices[0].name for slices in self._params]

    def over(self, groups: Groups) -> ElementwiseStep:
        """Return another such step over ``groups``, with an optimizer of its own."""
        return ElementwiseStep(self._make, groups, self._is_flat, self._is_known)

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group to the optimizer."""
        group = _make_group(params)
        self.optimizer.add_param_group({**options, "params": [run.tensor for run in group.runs]})
        self._groups.append(group)
        self._params += [list(param) for param in params]

    def step(self, closure: Closure | None = None) -> Any:
        """Run ``closure``, then update the slices from their current gradients.

        Raises: StateError if the optimizer turns out to have state that is not per element.
        """
        loss = loss_of(closure)
        try:
            for index, group in enumerate(self._groups):
                self._prepare(index, group)
            self._update()
        finally:
            for group in self._groups:
                for run in group.runs:
                    run.tensor.grad = None
        self._copies = {}
        for group in () if self._is_known else self._groups:
            if not group.is_checked or group.num_steps % CHECK_EVERY == 0 or group.num_steps <= CHECK_EVERY:
                self._check_state(group)
        return loss

    def _update(self) -> None:
        torch_private.step_inside(self.optimizer)

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the current runs; the caller restores the optimizer's state and groups."""
        copies = {param_slice: dict(of) for param_slice, of in self._copies.items()}
        numbers = [(copy, copy.clone()) for of in copies.values() for copy, _ in of.values()]
        # shallow copies suffice: a new layout replaces these lists
        groups = [(group, dict(vars(group))) for group in self._groups]

        def restore() -> None:
            self._copies = copies
            for copy, value in numbers:
                copy.copy_(value)
            for group, was in groups:
                vars(group).update(was)

        return restore

    def states(self, blank: bool = False) -> Values:
        """Return the state of every parameter that has state; its tensors are aliases of the live state."""
        by_slice = self._blank_states() if blank else self._live_states()
        found: dict[str, dict[str, Any]] = {}
        for slices in self._params:
            states = [by_slice[param_slice] for param_slice in slices if param_slice in by_slice]
            if len(states) == len(slices):
                found[slices[0].name] = _joined(states, slices)
        return found

    def local_states(self) -> Values:
        """Return :meth:`states`: all of it is local."""
        return self.states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]], adopt: bool = False) -> None:
        """Replace all state and options through the optimizer's own ``load_state_dict``; ``adopt``: see :func:`unwrap`."""
        states: Mapping[ParamSlice, State] = {}
        for slices in self._params:
            name = slices[0].name
            found = {key: unwrap(name, key, value, slices, adopt) for key, value in values.get(name, {}).items()}
            if name in values:
                states |= {param_slice: state_of_slice(found, index) for index, param_slice in enumerate(slices)}
        groups = [_Group(group.slices, _alone(group.slices)) for group in self._groups]
        if self._is_flat:
            states = packed(states, [item for group in groups for item in group.find()])
        before = [group["params"] for group in self.optimizer.param_groups]
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own["params"] = [run.tensor for run in group.runs]
        try:
            found = [states.get(param_slice) for group in groups for param_slice in group.slices]
            load_indexed(self.optimizer, found, options)
        except BaseException:  # no memory: what there was stays
            for own, params in zip(self.optimizer.param_groups, before, strict=True):
                own["params"] = params
            raise
        self._groups, self._copies = groups, {}

    def _live_states(self) -> dict[ParamSlice, State]:
        found: dict[ParamSlice, State] = {}
        for group in self._groups:
            for param_slice, state in self._states_of(group).items():
                found[param_slice] = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        return found

    def _blank_states(self) -> dict[ParamSlice, State]:
        slices = [param_slice for group in self._groups for param_slice in group.slices]
        groups = [
            {**options, "params": [local_of(param_slice) for param_slice in group.slices]}
            for options, group in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        states = states_after_zeros(self._make, groups)
        return {param_slice: state for param_slice, state in zip(slices, states, strict=True) if state}

    def _prepare(self, index: int, group: _Group) -> None:
        found = group.find()
        group.num_steps += 1
        joins = self._joins(index, group, found)
        is_laid_out = joins == group.joins and _is_current(group.runs, found)
        written = (not torch.equal(*pair) for of in self._copies.values() for pair in of.values())
        if not is_laid_out or any(written):
            found = self._lay_out(index, group)
        start = 0
        for run in group.runs:
            stop = start + len(run.slices)
            first = found[start].gradient
            if stop - start > 1:
                run.tensor.grad = flat_over([item.gradient for item in found[start:stop] if item.gradient is not None])
            elif first is not None:
                run.tensor.grad = first.detach() if first.requires_grad else first
            start = stop

    def _joins(self, index: int, group: _Group, found: Sequence[LiveSlice]) -> list[bool]:
        if not self._is_flat or group.is_unsteady:
            return [False] * len(found)
        return find_joins(found, group.blocked, self._max_numel(index))

    def _lay_out(self, index: int, group: _Group) -> list[LiveSlice]:
        group.num_layouts += 1
        states = self._states_of(group)
        for run in group.runs:
            self.optimizer.state.pop(run.tensor, None)
        group.order = list(range(len(group.slices)))
        found = group.find()
        if self._is_flat:
            group.order = [group.order[i] for i in in_memory_order(found)]
            found = group.find()
        group.blocked = breaks(found, states)
        group.joins = self._joins(index, group, found)
        group.runs, group.is_checked = [], False
        for start, stop in _ranges(group.joins):
            run = make_run(found[start:stop])
            group.runs.append(run)
            parts = [states.get(param_slice, {}) for param_slice in run.slices]
            state = merged(parts, run.shapes) if len(parts) > 1 else parts[0]
            if state:
                self.optimizer.state[run.tensor] = state
        self.optimizer.param_groups[index]["params"] = [run.tensor for run in group.runs]
        return found

    def _state_of(self, run: FlatRun) -> State:
        return self.optimizer.state.get(run.tensor, {})

    def _states_of(self, group: _Group) -> dict[ParamSlice, State]:
        """Return the state of each slice: views of the memory of its run, and copies of its numbers."""
        found: dict[ParamSlice, State] = {}
        for run in group.runs:
            state, start = self._state_of(run), 0
            if len(run.slices) == 1 and state:
                found[run.slices[0]] = state
                continue
            for param_slice, shape in zip(run.slices if state else (), run.shapes, strict=False):
                copies = self._copies.setdefault(param_slice, {})
                own = found[param_slice] = dict(state)
                for key, value in state.items():
                    if is_per_element(value, run.tensor.shape):
                        own[key] = suballocate(value, start, shape).detach()
                    elif isinstance(value, torch.Tensor):
                        own[key] = copies.setdefault(key, (value.clone(), value))[0]
                start += shape.numel()
        return found

    def _check_state(self, group: _Group) -> None:
        states = [self._state_of(run) for run in group.runs]
        for run, state in zip(group.runs, states, strict=True):
            reason = why_not_elementwise(state, run.tensor.shape)
            if reason is not None:
                raise StateError(
                    f"{run.slices[0].name}: {type(self.optimizer).__name__} {reason}. It does not treat every element "
                    "separately, so this step differs from the plain optimizer's. Restart from the last checkpoint and pass "
                    "update='whole_matrix'"
                )
        group.is_checked = all(states)

    def _max_numel(self, index: int) -> int:
        group = self.optimizer.param_groups[index]
        is_cached = not group.get("fused") and all(tensor.device.type == "cpu" for tensor in group["params"][:1])
        return CACHED_NUMEL if is_cached else UNLIMITED_NUMEL


def _alone(slices: Sequence[ParamSlice]) -> list[FlatRun]:
    return [make_run([LiveSlice(param_slice, local_of(param_slice), None)]) for param_slice in slices]


def _make_group(params: Params) -> _Group:
    slices = [param_slice for param in params for param_slice in param]
    return _Group(slices, _alone(slices))


def _joined(states: Sequence[State], slices: Sequence[ParamSlice]) -> State:
    """Return the state of a parameter, exposed the states of its ``slices``."""
    shape = local_of(slices[0]).shape
    return {
        key: PerSlice(state[key] for state in states)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
        else value
        for key, value in states[0].items()
    }


def _is_current(runs: Sequence[FlatRun], found: Sequence[LiveSlice]) -> bool:
    start = 0
    for run in runs:
        if run.tensor.numel() and found[start].local.data_ptr() != run.address:
            return False
        if len(run.slices) == 1:
            local = found[start].local
            if local.shape != run.tensor.shape or local.stride() != run.tensor.stride():
                return False
        start += len(run.slices)
    return True


def _ranges(joins: Sequence[bool]) -> list[tuple[int, int]]:
    starts = [index for index, joined in enumerate(joins) if not joined]
    return list(zip(starts, [*starts[1:], len(joins)], strict=True))


# ---- Optimizers that are element-wise except for sums over all elements of all parameters.


class SummedStep(ElementwiseStep):
    """Run such an optimizer slice by slice; each of its sums becomes an all-reduce of one number.

    Raises: ConfigError if the parameters are not all sharded over the same ranks.
    """

    def __init__(self, make: MakeOptimizer, groups: Groups) -> None:
        # No joins: a rank whose memory lies differently would have other runs, and so other sums.
        super().__init__(make, groups, is_flat=False, is_known=False)
        self._places = _places_of([params for params, _ in groups], type(self.optimizer).__name__)

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group to the optimizer."""
        if _places_of([params], type(self.optimizer).__name__) != self._places:
            raise _not_alike(type(self.optimizer).__name__)
        super().add_group(params, options)

    def _update(self) -> None:
        with torch_private.watching(SumsOverRanks(per_element_of(self.optimizer), self._add_up).after):
            torch_private.step_inside(self.optimizer)

    def _add_up(self, value: torch.Tensor) -> torch.Tensor:
        for group in self._places:
            value = sum_of(value, group, is_max=False)
        return value


def _places_of(groups: Sequence[Params], name: str) -> list[dist.ProcessGroup]:
    """Return the process groups whose all-reduces, in turn, sum over the shards of all the parameters."""
    found = [_place_of(param[0].param) for params in groups for param in params]
    if any(place != found[0] for place in found):
        raise _not_alike(name)
    return found[0]


def _place_of(param: torch.Tensor) -> list[dist.ProcessGroup]:
    if is_sharded_tensor(param):
        return [torch_private.process_group_of(param)]
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    return [mesh.get_group(axis) for axis, placed in enumerate(param.placements) if not isinstance(placed, Replicate)]


def _not_alike(name: str) -> ConfigError:
    return ConfigError(
        f"{name} sums over all elements of all parameters, so all must be sharded over the same ranks; "
        "put the others into a separate optimizer"
    )
