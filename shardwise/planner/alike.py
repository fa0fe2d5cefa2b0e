"""Blocks that are alike: a dry run runs a few of them and writes down the others as it has seen those.

Nothing is computed from a formula: of a run of alike blocks the first three and the last one run.  The second and the
third must have done the same, to the byte and to the operation, beside what they found; then the others would do it again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from shardwise import torch_private
from shardwise.plan.visits import Edge
from shardwise.planner.profile import StepMark, Stretch

_FIRST = 3  # of a run, that run: the second and the third have alike neighbours
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class AlikeRun:
    """Alike blocks one after another, by number: ``kept`` run, first and last; ``skipped`` lie before the last."""

    kept: tuple[int, int, int, int]
    skipped: tuple[int, ...]


def alike_runs(model: nn.Module, blocks: Sequence[str]) -> tuple[AlikeRun, ...]:
    """Return the runs of five and more neighbours among ``blocks`` (paths, the root's first) that are alike.

    Alike: of one class, structure and settings, in all of their parts; and no parameter is anybody else's.
    """
    users: dict[int, set[int]] = {}
    modules = [model.get_submodule(path) for path in blocks]
    for number, module in enumerate(modules[1:], 1):
        for param in module.parameters():
            users.setdefault(id(param), set()).add(number)
    inside = {id(part) for module in modules[1:] for part in module.modules()}
    for part in model.modules():
        if id(part) not in inside:
            for param in part.parameters(recurse=False):
                users.setdefault(id(param), set()).add(0)
    found: list[list[int]] = []
    for number, module in enumerate(modules[1:], 1):
        is_own = all(len(users[id(param)]) == 1 for param in module.parameters()) and "forward" not in vars(module)
        last = found[-1] if found else []
        is_next = bool(last) and blocks[last[0]].rpartition(".")[0] == blocks[number].rpartition(".")[0]
        if is_own and is_next and are_alike(modules[last[0]], module):
            last.append(number)
        else:
            found.append([number] if is_own else [])
    return tuple(
        AlikeRun((run[0], run[1], run[2], run[-1]), tuple(run[_FIRST:-1])) for run in found if len(run) > _FIRST + 1
    )


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if nothing that a module holds tells ``one`` from ``other``, but for the values of tensors."""
    if type(one) is not type(other) or _ties(one) != _ties(other):
        return False
    pairs = list(zip(one.modules(), other.modules(), strict=False))
    return all(_held_alike(left, right) for left, right in pairs)


def _ties(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the names of parts and parameters, each with the place at which it came first."""
    places: dict[int, int] = {}
    named = [*module.named_modules(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    return tuple((name, places.setdefault(id(each), len(places))) for name, each in named)


def _held_alike(one: nn.Module, other: nn.Module) -> bool:
    if one is other:
        return True
    mine, theirs = vars(one), vars(other)
    if type(one) is not type(other) or mine.keys() != theirs.keys():
        return False
    tensors = (torch_private.parameters_of, torch_private.buffers_of)
    return all(_are_same(dict(held(one)), dict(held(other))) for held in tensors) and all(
        _are_same(value, theirs[name]) for name, value in mine.items() if name not in _HELD
    )


def _are_same(one: object, other: object) -> bool:
    """Return True if code cannot tell the values apart; False where that is not known."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return spec_of(one) == spec_of(cast(torch.Tensor, other))
    if isinstance(one, (bool, int, float, complex, str, bytes, frozenset, set, torch.dtype, torch.device)):
        return one == other
    if isinstance(one, (list, tuple)):
        values, others = cast("Sequence[object]", one), cast("Sequence[object]", other)
        return len(values) == len(others) and all(map(_are_same, values, others))
    if isinstance(one, Mapping):
        left, right = cast("Mapping[object, object]", one), cast("Mapping[object, object]", other)
        return list(left) == list(right) and all(_are_same(left[key], right[key]) for key in left)
    if isinstance(one, functools.partial):
        same = cast("functools.partial[object]", other)
        return one.func is same.func and _are_same((one.args, one.keywords), (same.args, same.keywords))
    return False


def spec_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what tells tensors without values apart."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type, tensor.requires_grad


class Unlike(Exception):
    """A block was not called as those before it: the dry run has to run all blocks."""


class StandIn:
    """Passes on the input of a block that is skipped: what it would return has the form of what it is given.

    One for each run: told of the calls of blocks that run, asked for those that do not.
    """

    def __init__(self) -> None:
        self._given: object = None
        self._output: object = None

    def entered(self, args: object, kwargs: object) -> None:
        """Note what a block that runs is called with."""
        self._given = torch_private.map_tensors(_Spec, (args, kwargs))

    def left(self, output: object) -> None:
        """Note what it has returned."""
        self._output = torch_private.map_tensors(_Spec, output)

    def pass_on(self, args: object, kwargs: object) -> object:
        """Return what the block would, with another view of its first tensor.  Raises: Unlike."""
        given = (args, kwargs)
        tensors = [each for each in torch_private.leaves_of(given) if isinstance(each, torch.Tensor)]
        made = [each for each in torch_private.leaves_of(self._output) if isinstance(each, _Spec)]
        if torch_private.map_tensors(_Spec, given) != self._given or not tensors or made != [_Spec(tensors[0])]:
            raise Unlike
        return torch_private.map_of_kind(_Spec, lambda _: tensors[0].view_as(tensors[0]), self._output)


class _Spec:
    """A tensor in a tree of arguments."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.spec = spec_of(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self.spec == other.spec

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def with_skipped(
    stretches: Sequence[Stretch], run: AlikeRun, params: Sequence[Sequence[int]]
) -> tuple[Stretch, ...] | None:
    """Return the stretches with those of the skipped blocks of ``run``; None if blocks that ran did not do the same.

    Args:
        stretches: of a dry run without the skipped blocks.
        params: for each block, the numbers of its parameters.
    """
    without = _without(stretches, frozenset(run.skipped))
    if without is None:
        return None
    return _with_copies(without, run, params)


def _without(stretches: Sequence[Stretch], skipped: frozenset[int]) -> list[Stretch] | None:
    """Return the stretches but those of ``skipped`` blocks; None if anything happened in these, before or after them."""
    kept: list[Stretch] = []
    for each in stretches:
        if each.mark.block not in skipped:
            kept.append(each)
        elif each.work.num_ops or {each.peak_bytes, each.left_bytes} != {kept[-1].left_bytes}:
            return None
    return kept


def _with_copies(
    stretches: Sequence[Stretch], run: AlikeRun, params: Sequence[Sequence[int]]
) -> tuple[Stretch, ...] | None:
    places = [{param: place for place, param in enumerate(params[block])} for block in run.kept]
    forward = _neighbours(stretches, Edge.ENTER_FORWARD, list(zip(run.kept[1:], places[1:], strict=True)))
    if forward is None or stretches[forward.end].work != stretches[forward.second].work:
        return None
    backward = _neighbours(stretches, Edge.ENTER_BACKWARD, list(zip(run.kept[2::-1], places[2::-1], strict=True)))
    grown = forward.growth
    if backward is None:
        has_backward = any(
            StepMark(Edge.ENTER_BACKWARD, block) in [each.mark for each in stretches] for block in run.kept
        )
        if has_backward or grown:
            return None
        again = stretches[forward.second : forward.end]
        copies = [each for block in run.skipped for each in _copied(again, block, params[block], places[2], 0)]
        return (*stretches[: forward.end], *copies, *stretches[forward.end :])
    if backward.growth != -grown or backward.first < forward.end:
        return None
    numbered = list(enumerate(run.skipped, 1))
    again = stretches[forward.second : forward.end]
    there = [e for place, b in numbered for e in _copied(again, b, params[b], places[2], place * grown)]
    again = stretches[backward.first : backward.second]
    back = [e for place, b in reversed(numbered) for e in _copied(again, b, params[b], places[2], place * grown)]
    between = [_shifted(each, len(run.skipped) * grown) for each in stretches[forward.end : backward.first]]
    return (*stretches[: forward.end], *there, *between, *back, *stretches[backward.first :])


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Where two blocks begin that did the same, one after the other, and where what follows begins.

    ``growth``: of the bytes that stay, from one to the next.
    """

    first: int
    second: int
    end: int
    growth: int


def _neighbours(
    stretches: Sequence[Stretch], edge: Edge, blocks: Sequence[tuple[int, Mapping[int, int]]]
) -> _Neighbours | None:
    """Return where three blocks pass ``edge``, if the first two do the same from there to the next.

    ``blocks``: their numbers, and the place of each of their parameters among its block's.
    """
    found = [[n for n, each in enumerate(stretches) if each.mark == StepMark(edge, block)] for block, _ in blocks]
    if any(len(each) != 1 for each in found):
        return None
    first, second, end = (each[0] for each in found)
    if not 0 < first < second < end:
        return None
    before, between = stretches[first - 1].left_bytes, stretches[second - 1].left_bytes
    one = _beside(stretches[first:second], before, *blocks[0])
    if one is None or one != _beside(stretches[second:end], between, *blocks[1]):
        return None
    return _Neighbours(first, second, end, stretches[end - 1].left_bytes - between)


def _beside(stretches: Sequence[Stretch], base: int, block: int, places: Mapping[int, int]) -> list[object] | None:
    """Return what ``block`` did beside the ``base`` bytes that were there; None if another passed a mark meanwhile."""
    if any(
        each.mark.block != block or (each.mark.edge is None and each.mark.param not in places) for each in stretches
    ):
        return None
    return [
        (each.mark.edge, places.get(each.mark.param), each.peak_bytes - base, each.left_bytes - base, each.work)
        for each in stretches
    ]


def _copied(
    stretches: Sequence[Stretch], block: int, params: Sequence[int], places: Mapping[int, int], num_bytes: int
) -> list[Stretch]:
    """Return ``stretches`` as those of ``block``, whose parameters are ``params``, with ``num_bytes`` more alive."""
    return [
        replace(
            _shifted(each, num_bytes),
            mark=StepMark(each.mark.edge, block, -1 if each.mark.edge is not None else params[places[each.mark.param]]),
        )
        for each in stretches
    ]


def _shifted(stretch: Stretch, num_bytes: int) -> Stretch:
    peak, left = stretch.peak_bytes + num_bytes, stretch.left_bytes + num_bytes
    return replace(stretch, peak_bytes=peak, left_bytes=left)
