"""Step an optimizer that needs whole matrices: gather each to one owner, step there, scatter the result back.

Each step does two exchanges per set of ranks: parameter and gradient shards to the owners, updated shards back.  Owners
are balanced by cost.  Parameters that are replicated are updated on every rank, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.collectives import owned
from shardwise.collectives.owned import Expected, Ranks, assign_owners, ranks_along, ranks_of_group
from shardwise.consistency.agreement import first_difference
from shardwise.consistency.failure_report import in_short, naming_lost_peers, publish_failure
from shardwise.consistency.process_groups import abort_connections, gather_objects
from shardwise.errors import DesyncError, StateError
from shardwise.formatting import format_ranks
from shardwise.optim.slices import (
    Closure,
    Groups,
    MakeOptimizer,
    Params,
    ParamSlice,
    PerSlice,
    Values,
    Window,
    as_they_are,
    gradient_of,
    is_sharded,
    is_sharded_tensor,
    local_of,
    loss_of,
    step_cost,
)
from shardwise.optim.state_dict import full_value, load_indexed, misfit, states_after_zeros
from shardwise.torch_private import ShardedTensor

# ---- Exchanges of whole matrices whose errors name the missing rank.

_T = TypeVar("_T")
_WHAT = "whole matrices cannot go to their owners or back"


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Do :func:`shardwise.collectives.owned.exchange` with errors that name ranks.

    Raises: TransportError that names the ranks whose processes are gone, or all candidates.  Any other exception (an
    interrupt, a
        MemoryError) also aborts the connections, so that no rank waits for this one until the group's timeout.
    """
    return _together(lambda: owned.exchange(sends, expected, ranks, device), ranks)


def gather_over(value: Any, ranks: Ranks) -> list[Any]:
    """Return the picklable ``value`` of every rank.  Raises: TransportError as :func:`exchange`."""
    group = ranks.group
    return [value] if group is None or ranks.size == 1 else _together(lambda: gather_objects(value, group), ranks)


def _together(act: Callable[[], _T], ranks: Ranks) -> _T:
    try:
        return naming_lost_peers(act, _WHAT, ranks.members, ranks.members[ranks.rank])
    except RuntimeError:  # The backend or shardwise raised it: the other ranks get it too.
        raise
    except BaseException as error:
        publish_failure(f"{type(error).__name__}: {in_short(error)}")
        if ranks.group is not None and torch_private.is_gloo(ranks.group):
            abort_connections(ranks.group)
        raise


# ---- Matrices, their owners, and the sets of ranks that have parts of the same matrices.


@dataclass(slots=True, eq=False)
class Matrix:
    """A parameter that is updated as a whole.

    Attributes:
        slices: this rank's slices of it.
        owner: index of its owner in ``Meeting.ranks``; None if it is replicated.
        leaf: the parameter of the owner's optimizer; it has memory only during a step.  None on the other ranks.
        boxes: on the owner, the boxes of each rank; empty on others.
        has_state: the owner, on whichever rank, has state for it; equal on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: list[ParamSlice]
    owner: int | None = None
    leaf: torch.Tensor | None = None
    boxes: Sequence[list[Window]] = ()
    has_state: bool = False


@dataclass(slots=True, eq=False)
class Meeting:
    """Matrices that are cut over the same ranks and exchanged together."""

    ranks: Ranks
    matrices: list[Matrix]
    loads: list[int]

    def owned_by(self, rank: int) -> list[Matrix]:
        """Return the matrices of ``rank``, in the order of all matrices."""
        return [matrix for matrix in self.matrices if matrix.owner == rank]

    @property
    def mine(self) -> list[Matrix]:
        """The matrices that this rank owns."""
        return self.owned_by(self.ranks.rank)


def without_memory(matrix: Matrix, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of the matrix's shape that takes the memory of one element."""
    place = matrix.leaf.device if matrix.leaf is not None else device
    return torch.zeros((), dtype=matrix.dtype, device=place).expand(matrix.shape)


def leaf_of(matrix: Matrix) -> torch.Tensor:
    """Return the optimizer's parameter for a matrix that this rank updates."""
    assert matrix.leaf is not None
    return matrix.leaf


def all_boxes(matrices: Sequence[Matrix], rank: int) -> Iterator[tuple[Matrix, Window]]:
    """Yield the boxes of ``rank`` in each of ``matrices``, which this rank owns."""
    for matrix in matrices:
        for box in matrix.boxes[rank]:
            yield matrix, box


# ---- State of whole-matrix optimizers: from owners to the shards of all ranks, and back.

State = dict[str, Any]


def send_states(meeting: Meeting, source: Mapping[int, State], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the state of the meeting's matrices by name, sent by their owners.

    ``source``: the state of owned matrices by ``id``.  Values of the matrix's shape arrive as this rank's slices,
    others whole. One exchange of descriptions, one of tensors.
    """
    ranks = meeting.ranks
    told: list[list[tuple[Any, ...]]] = [[] for _ in range(ranks.size)]
    sends: list[list[torch.Tensor]] = [[] for _ in range(ranks.size)]
    for matrix in meeting.mine:
        for key, value in source[id(matrix)].items():
            is_sliced, is_tensor = is_cut(value, matrix), _is_sent(value)
            rest = value.detach().cpu().clone() if type(value) is torch.Tensor and not is_tensor else value
            for rank in range(ranks.size):
                parts = [box.cut(value) for box in matrix.boxes[rank]] if is_sliced else [value] * is_tensor
                sends[rank] += parts
                expected = [Expected(tuple(part.shape), part.dtype) for part in parts]
                told[rank].append((matrix.name, key, is_sliced, expected, None if is_tensor else rest))
    arrived = [each[ranks.rank] for each in gather_over(told, ranks)]
    windows = exchange(sends, [[each for row in rows for each in row[3]] for rows in arrived], ranks, device)
    found: dict[str, dict[str, Any]] = {}
    for rows, tensors in zip(arrived, windows, strict=True):
        rest_of = iter(tensors)
        for name, key, is_sliced, expected, value in rows:
            parts = [next(rest_of).clone() for _ in expected]
            found.setdefault(name, {})[key] = PerSlice(parts) if is_sliced else parts[0] if parts else value
    return found


def check_same(meeting: Meeting, values: Values) -> None:
    """Raise StateError, on all ranks that notice it, if ranks load different entries for the meeting's matrices."""
    mine = {
        m.name: [(key, isinstance(value, DTensor | ShardedTensor)) for key, value in values.get(m.name, {}).items()]
        for m in meeting.matrices
    }
    for rank, theirs in enumerate(gather_over(mine, meeting.ranks)):
        wrong = [name for name in mine if mine[name] != theirs[name]]
        if wrong:
            raise StateError(
                f"{wrong[0]}: this rank loads state {mine[wrong[0]]}, rank {meeting.ranks.members[rank]} loads "
                f"{theirs[wrong[0]]}. Load the same entries on every rank; flattened state dicts of torch cannot be "
                "loaded by whole-matrix optimizers, since only owners know the names of their state"
            )


def whole_state(matrix: Matrix, state: Mapping[str, Any]) -> State:
    """Return the state of ``matrix`` with full tensors on ranks that update it, nothing on others.  May be collective."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, DTensor | ShardedTensor) and tuple(value.shape) != matrix.shape:
            raise misfit(matrix.name, key, value, matrix.shape)
        full = full_value(value, to_cpu=False)
        if matrix.leaf is not None:
            found[key] = full
    return found


def is_cut(value: object, matrix: Matrix) -> bool:
    """Return True for state with a number per element, which is sharded like the matrix."""
    return _is_sent(value) and tuple(value.shape) == matrix.shape


def _is_sent(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for plain tensors; tensor subclasses (quantized state) are sent as objects, and whole."""
    return type(value) is torch.Tensor and value.dim() > 0


_FINE, _FAILED, _PARTIAL = 0, 1, 2


class WholeMatrixStep:
    """Run an optimizer over the whole matrices that this rank owns.

    Args:
        make: creates the optimizer, of class ``optimizer_class``, from param groups.
        groups: the slices of the parameters, and the options, of each param group.
    """

    is_elementwise = False

    def __init__(self, make: MakeOptimizer, optimizer_class: type[Optimizer], groups: Groups) -> None:
        self._make = make
        self._optimizer_class = optimizer_class
        self._check(groups)
        self._device = local_of(groups[0][0][0][0]).device  # of the exchanges
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._matrices: list[Matrix] = []
        leaves = [self._join(params) for params, _ in groups]
        self.optimizer = make(
            [{**options, "params": params} for params, (_, options) in zip(leaves, groups, strict=True)]
        )

    def _check(self, groups: Groups) -> None:
        # Each owner has only its own matrices, but what the class refuses must be refused on every rank.
        if not any(is_sharded(slices[0].param) for params, _ in groups for slices in params):
            return
        stand_ins = [
            [torch.empty(tuple(slices[0].param.shape), dtype=slices[0].param.dtype, device="meta") for slices in params]
            for params, _ in groups
        ]
        self._make([{**options, "params": params} for params, (_, options) in zip(stand_ins, groups, strict=True)])

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group; owners of earlier matrices stay.  Collective over the ranks of its matrices."""
        self._check([(params, options)])
        leaves = self._join(params)
        self.optimizer.add_param_group({**options, "params": leaves})

    # ---- the step ----

    def step(self, closure: Closure | None = None) -> Any:
        """Run ``closure``, then update all parameters from their current gradients.  Collective.

        Raises: StateError on all ranks of a matrix if its owner could not step, or if only some ranks have a gradient;
            no sharded parameter has changed then, but other owners may have advanced their state.
        """
        loss = loss_of(closure)
        try:
            status = max((self._gather(meeting) for meeting in self._ordered()), default=_FINE)
            cause = self._update() if status == _FINE else None
            status = status if cause is None else _FAILED
            found = [self._scatter(meeting, status) for meeting in self._ordered()]
        finally:
            self._release()
        if cause is not None and not self._meetings:
            raise cause
        _raise_if_wrong([status for statuses, _ in found for status in statuses], cause)
        for matrix in self._matrices:
            matrix.has_state |= _flag(matrix, [gradient_of(param_slice) for param_slice in matrix.slices]) != 0
        for _, updates in found:
            for param_slice, value in updates:
                local_of(param_slice).detach().copy_(value)
        return loss

    def mark(self) -> Callable[[], None]:
        """Return a function that restores which matrices have state."""
        return as_they_are(self._matrices, "has_state")

    def _update(self) -> Exception | None:
        """Step the optimizer over the gathered and the replicated matrices; return the exception that it raised."""
        for matrix in self._matrices:
            if matrix.owner is None:
                leaf = leaf_of(matrix)
                leaf.data = local_of(matrix.slices[0]).detach()
                leaf.grad = gradient_of(matrix.slices[0])
        try:
            torch_private.step_inside(self.optimizer)
        except Exception as error:
            return error
        return None

    def _release(self) -> None:
        """Drop gradients, and the memory of gathered matrices."""
        for matrix in self._with_leaf():
            leaf_of(matrix).grad = None
            if matrix.owner is not None:
                leaf_of(matrix).data = without_memory(matrix)

    def _gather(self, meeting: Meeting) -> int:
        ranks = meeting.ranks
        sends: list[list[torch.Tensor]] = []
        for owner in range(ranks.size):
            flags: list[int] = []
            tensors: list[torch.Tensor] = []
            for matrix in meeting.owned_by(owner):
                gradients = [gradient_of(param_slice) for param_slice in matrix.slices]
                flags.append(_flag(matrix, gradients))
                for param_slice, gradient in zip(matrix.slices, gradients, strict=True):
                    local = local_of(param_slice)
                    tensors += [local, torch.zeros_like(local) if gradient is None else gradient]
            sends.append([torch.tensor(flags, dtype=torch.uint8, device="cpu"), *tensors])
        expected = [
            [
                Expected((len(meeting.mine),), torch.uint8),
                *(Expected(box.sizes, matrix.dtype) for matrix, box in all_boxes(meeting.mine, rank) for _ in range(2)),
            ]
            for rank in range(ranks.size)
        ]
        arrived = exchange(sends, expected, ranks, self._device)
        flags_of = torch.stack([items[0].cpu() for items in arrived])
        status = _FINE
        # The rule computes with a matrix and its gradient, each in an allocation of its own: bits depend on alignment.
        on = self._device
        wholes = {id(m): [torch.empty(m.shape, dtype=m.dtype, device=on) for _ in range(2)] for m in meeting.mine}
        for rank, items in enumerate(arrived):
            windows = iter(items[1:])
            for matrix, box in all_boxes(meeting.mine, rank):
                for whole in wholes[id(matrix)]:
                    box.cut(whole).copy_(next(windows))
        for column, matrix in enumerate(meeting.mine):
            assert matrix.leaf is not None
            found = set(flags_of[:, column].tolist()) - {2}
            status = max(status, _PARTIAL if len(found) > 1 else _FINE)
            value, gradient = wholes[id(matrix)]
            matrix.leaf.data = value
            matrix.leaf.grad = gradient if found == {1} else None
        return status

    def _scatter(
        self, meeting: Meeting, status: int
    ) -> tuple[list[tuple[int, int]], list[tuple[ParamSlice, torch.Tensor]]]:
        """Send updated shards; return the status of each owner by its global rank, and the new values of this rank's slices."""
        ranks = meeting.ranks
        sends = [
            [torch.tensor([status], device="cpu"), *(box.cut(leaf_of(m)) for m, box in all_boxes(meeting.mine, rank))]
            for rank in range(ranks.size)
        ]
        wanted = [
            [(m, param_slice) for m in meeting.owned_by(owner) for param_slice in m.slices]
            for owner in range(ranks.size)
        ]
        expected = [
            [Expected((1,), torch.int64), *(Expected(param_slice.box.sizes, m.dtype) for m, param_slice in items)]
            for items in wanted
        ]
        arrived = exchange(sends, expected, ranks, self._device)
        statuses = [(ranks.members[rank], int(items[0].item())) for rank, items in enumerate(arrived)]
        updates = [
            (param_slice, value)
            for pairs, items in zip(wanted, arrived, strict=True)
            for (_, param_slice), value in zip(pairs, items[1:], strict=True)
        ]
        return statuses, updates

    # ---- state ----

    def states(self, blank: bool = False) -> Values:
        """Return the state of each parameter, with values of the parameter's shape as :class:`PerSlice`.

        Collective over the ranks of each meeting.  ``blank``: names, shapes and dtypes are right, values are
        meaningless.
        """
        if blank:
            states = states_after_zeros(self._make, self.optimizer.param_groups)
            source = {id(matrix): state for matrix, state in zip(self._with_leaf(), states, strict=True)}
        else:
            source = {id(m): self.optimizer.state.get(leaf_of(m), {}) for m in self._with_leaf()}
        found: dict[str, dict[str, Any]] = {}
        for matrix in self._matrices:
            if matrix.owner is None and source[id(matrix)]:
                found[matrix.name] = {
                    key: PerSlice([value]) if is_cut(value, matrix) else value
                    for key, value in source[id(matrix)].items()
                }
        for meeting in self._ordered():
            found.update(send_states(meeting, source, self._device))
        return {matrix.name: found[matrix.name] for matrix in self._matrices if matrix.name in found}

    def local_states(self) -> Values:
        """Return the full state on this rank; not collective.

        Names are the same on all ranks (torch uses them to decide whether to create state); entries of other owners are
        empty.
        """
        found: dict[str, dict[str, Any]] = {}
        for matrix in self._matrices:
            state = {} if matrix.leaf is None else self.optimizer.state.get(matrix.leaf, {})
            if state or matrix.has_state:
                found[matrix.name] = dict(state)
        return found

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The parameters of :attr:`optimizer` by name: those that this rank owns, and those that are not sharded."""
        return {matrix.name: leaf_of(matrix) for matrix in self._with_leaf()}

    def load(self, values: Values, options: Sequence[Mapping[str, Any]], adopt: bool = False) -> None:
        """Replace all state and options by ``values``, sharded in any way or full, of which owners keep full copies.

        Collective.  With ``adopt`` it is not: ``values`` are full tensors for :attr:`leaves`, which become the state, and an
        entry, maybe an empty one, for each parameter that has state on any rank.
        """
        for meeting in () if adopt else self._ordered():
            check_same(meeting, values)
        if not adopt:
            values = {m.name: whole_state(m, values[m.name]) for m in self._matrices if m.name in values}
        for matrix in self._matrices:
            matrix.has_state = matrix.name in values
        load_indexed(self.optimizer, [dict(values.get(name, {})) or None for name in self.leaves], options)

    # ---- owners ----

    def _join(self, params: Params) -> list[torch.Tensor]:
        places = [(slices[0].param, list(slices)) for slices in params]
        made = [Matrix(slices[0].name, tuple(param.shape), param.dtype, slices) for param, slices in places]
        fresh: dict[tuple[int, ...], list[Matrix]] = {}
        for matrix in made:
            param = matrix.slices[0].param
            if not is_sharded(param):
                continue
            ranks = self._ranks_of(param)
            self._meetings.setdefault(ranks.members, Meeting(ranks, [], [0] * ranks.size))
            fresh.setdefault(ranks.members, []).append(matrix)
        for members in sorted(fresh):
            self._assign(self._meetings[members], fresh[members])
        for matrix in made:
            if matrix.owner is None:
                matrix.leaf = local_of(matrix.slices[0]).detach()
            elif matrix.boxes:
                matrix.leaf = without_memory(matrix, self._device)
        self._matrices += made
        return [matrix.leaf for matrix in made if matrix.leaf is not None]

    def _ranks_of(self, param: torch.Tensor) -> Ranks:
        if is_sharded_tensor(param):
            return ranks_of_group(torch_private.process_group_of(param))
        assert isinstance(param, DTensor)
        mesh = param.device_mesh
        cut = [a for a, p in enumerate(param.placements) if not isinstance(p, Replicate) and mesh.size(a) > 1]
        return ranks_along(mesh, cut)

    def _assign(self, meeting: Meeting, matrices: list[Matrix]) -> None:
        ranks = meeting.ranks
        costs = [step_cost(self._optimizer_class, matrix.shape) for matrix in matrices]
        owners = assign_owners(costs, ranks.size, meeting.loads)
        for matrix, owner, cost in zip(matrices, owners, costs, strict=True):
            matrix.owner = owner
            meeting.loads[owner] += cost
        mine = [
            [[param_slice.box for param_slice in matrix.slices] for matrix in matrices if matrix.owner == rank]
            for rank in range(ranks.size)
        ]
        facts = [f"{matrix.name} of shape {tuple(matrix.shape)}, {matrix.dtype}" for matrix in matrices]
        gathered = gather_over((facts, mine), ranks)
        if any(theirs != facts for theirs, _ in gathered):
            found = {ranks.members[index]: theirs for index, (theirs, _) in enumerate(gathered)}
            raise DesyncError(
                f"ranks give {self._optimizer_class.__name__} different matrices; {first_difference(found)}. Build the same "
                "model, and give the same parameters in the same groups, on every rank"
            )
        arrived = [boxes[ranks.rank] for _, boxes in gathered]
        for index, matrix in enumerate(matrix for matrix in matrices if matrix.owner == ranks.rank):
            matrix.boxes = [boxes[index] for boxes in arrived]
        meeting.matrices += matrices

    def _ordered(self) -> list[Meeting]:
        return [self._meetings[members] for members in sorted(self._meetings)]

    def _with_leaf(self) -> list[Matrix]:
        return [matrix for matrix in self._matrices if matrix.leaf is not None]


def _flag(matrix: Matrix, gradients: Sequence[torch.Tensor | None]) -> int:
    """Return 1 if there is a gradient, 0 if not, 2 if this rank's part is empty."""
    real = [g for param_slice, g in zip(matrix.slices, gradients, strict=True) if param_slice.box.numel]
    if not real:
        return 2
    return int(all(gradient is not None for gradient in real))


_ADVANCED = (
    "No sharded parameter has changed, but optimizer state and parameters that are not sharded may have, on some ranks "
    "alone: load a checkpoint, or step inside shardwise.transaction, which restores them"
)


def _raise_if_wrong(statuses: Sequence[tuple[int, int]], cause: Exception | None) -> None:
    failed = sorted({rank for rank, status in statuses if status == _FAILED})
    if failed:
        reason = "see there for the cause" if cause is None else f"its error: {cause}"
        raise StateError(f"the optimizer's step raised on {format_ranks(failed)}; {reason}. {_ADVANCED}") from cause
    partial = sorted({rank for rank, status in statuses if status == _PARTIAL})
    if partial:
        raise StateError(
            f"a matrix owned by {format_ranks(partial)} has a gradient on some of its ranks and none on others: run the same "
            f"modules on every rank, or set the missing gradients to zero. {_ADVANCED}"
        )
