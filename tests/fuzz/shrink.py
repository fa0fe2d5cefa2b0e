"""Make a failing case smaller while it goes on failing.  Pure: whether it fails is for the caller to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar, cast

from fuzz.actions import Action
from fuzz.case import Case, Contender, Model, Node, Segment, node_at
from fuzz.eligible import peer_of, suits
from fuzz.nodes import Place, places

C = TypeVar("C")


def smallest(case: C, fails: Callable[[C], bool], candidates: Callable[[C], Iterable[C]], max_tries: int) -> C:
    """Return the smallest case that was found to fail, by greedy steps; ``fails`` is asked at most ``max_tries`` times."""
    tries, progress = 0, True
    while progress:
        progress = False
        for candidate in candidates(case):
            if tries >= max_tries:
                return case
            tries += 1
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def fewer(values: tuple[C, ...]) -> Iterator[tuple[C, ...]]:
    """Yield ``values`` without some in a row, many of them first."""
    size = (len(values) + 1) // 2
    while size:
        for start in range(0, len(values) - size + 1, size):
            yield (*values[:start], *values[start + size :])
        size //= 2


def put(values: tuple[C, ...], number: int, *new: C) -> tuple[C, ...]:
    """Return ``values`` with ``new``, or nothing, in the place of the one at ``number``."""
    return (*values[:number], *new, *values[number + 1 :])


def plainer(value: C) -> Iterator[C]:
    """Yield the dataclass ``value`` with one field as by default."""
    for field in fields(cast(Any, value)):
        if field.default is not MISSING and getattr(value, field.name) != field.default:
            yield cast(C, replace(cast(Any, value), **{field.name: field.default}))


def shrink(case: Case, fails: Callable[[Case], bool], max_tries: int = 200) -> Case:
    """Return the smallest case that was found to fail; ``fails`` is asked at most ``max_tries`` times."""
    return smallest(case, fails, lambda found: filter(None, map(_valid, candidates(found))), max_tries)


def only(case: Case, contender: Contender) -> Case:
    """Return ``case`` for one contender and torch's own class beside it."""
    peer = peer_of(contender)
    return replace(case, contenders=(contender, peer) if peer in case.contenders else (contender,))


def candidates(case: Case) -> Iterator[Case]:
    """Yield smaller cases, the much smaller ones first."""
    for actions in fewer(case.actions):
        yield replace(case, actions=actions)
    for model in _smaller_models(case.model):
        yield replace(case, model=_with_fitting_ties(model))
    for settings in plainer(case.settings):
        if settings.arithmetic == case.settings.arithmetic:
            yield replace(case, settings=settings)
    for num_ranks in (1, 2):
        if num_ranks < case.num_ranks and (case.settings.mesh == "flat" or num_ranks == 2):
            yield replace(case, num_ranks=num_ranks)
    for number, action in enumerate(case.actions):
        for simpler in _simpler(action):
            yield replace(case, actions=put(case.actions, number, simpler))


def _valid(case: Case) -> Case | None:
    """Return ``case`` for those of its contenders that it suits; None if the first, which fails, is not among them."""
    able = tuple(each for each in case.contenders if suits(case, each))
    return replace(case, contenders=able) if able[:1] == case.contenders[:1] else None


def _simpler(action: Action) -> Iterator[Action]:
    """Yield ``action`` with one field as by default, or a number nearer to 0."""
    yield from plainer(action)
    for field in fields(action):
        found = getattr(action, field.name)
        is_count = isinstance(found, int) and not isinstance(found, bool) and found > 1
        if is_count and field.name in ("index", "param", "unit", "alias", "gate"):
            for smaller in (0, 1, found // 2):
                if smaller not in (found, field.default):
                    yield replace(action, **{field.name: smaller})


# ---- models ----


def _smaller_models(model: Model) -> Iterator[Model]:
    for number in range(len(model.units) - 1):
        yield replace(model, units=put(model.units, number))
    for number in range(len(model.ties)):
        yield replace(model, ties=put(model.ties, number))
    for number, group in enumerate(model.units):
        for place in group if len(group) > 1 else ():
            rest = tuple(each for each in group if each != place)
            yield replace(model, units=put(model.units, number, rest))
    for place, node in reversed(list(places(model.root))):
        if place:
            yield from _without(model, place)
        if len(node.children) == 1:
            yield from _without_wrapper(model, place, node)
        is_peeked = bool(place) and node_at(model.root, place[:-1]).kind == "Peek"
        for simpler in _simpler_nodes(node) if not is_peeked else ():
            yield replace(model, root=_put(model.root, place, simpler))


def _with_fitting_ties(model: Model) -> Model:
    """Return ``model`` without ties between modules that are not alike any more."""

    def fits(first: Place, second: Place) -> bool:
        left, right = node_at(model.root, first), node_at(model.root, second)
        return (left.kind, left.size) == (right.kind, right.size)

    return replace(model, ties=tuple(tie for tie in model.ties if fits(*tie)))


def _simpler_nodes(node: Node) -> Iterator[Node]:
    if node.kind == "Stack":
        for number, segment in enumerate(node.segments):
            if len(node.segments) > 1:
                yield replace(node, segments=put(node.segments, number))
            if segment.recompute:
                yield replace(node, segments=put(node.segments, number, Segment(segment.children)))
            for at in range(len(segment.children) if len(segment.children) > 1 else 0):
                rest = replace(segment, children=put(segment.children, at))
                yield replace(node, segments=put(node.segments, number, rest))
        return
    if node.frozen:
        yield replace(node, frozen=False)
    if node.kind == "Oddments":
        parts = node.form.split()
        for part in parts if len(parts) > 1 else ():
            yield replace(node, form=" ".join(each for each in parts if each != part))
    elif not node.children:
        if node.kind != "Mlp":
            yield Node("Mlp", 1, frozen=node.frozen)
        if node.size > 1:
            yield replace(node, size=1)


def _put(root: Node, place: Place, node: Node) -> Node:
    if not place:
        return node
    first, rest = place[0], place[1:]
    return replace(root, children=put(root.children, first, _put(root.children[first], rest, node)))


def _without(model: Model, place: Place) -> Iterator[Model]:
    """Yield ``model`` without the child at ``place`` of a stack that has others."""
    parent, number = place[:-1], place[-1]
    node = node_at(model.root, parent)
    if node.kind != "Stack" or len(node.children) < 2:
        return
    segments = [
        replace(segment, children=tuple(each - (each > number) for each in segment.children if each != number))
        for segment in node.segments
    ]
    children = put(node.children, number)
    smaller = replace(node, children=children, segments=tuple(each for each in segments if each.children))

    def moved(old: Place) -> Place | None:
        if old[: len(parent)] != parent or len(old) <= len(parent) or old[len(parent)] < number:
            return old
        if old[len(parent)] == number:
            return None
        return (*parent, old[len(parent)] - 1, *old[len(parent) + 1 :])

    yield _moved(model, _put(model.root, parent, smaller), moved)


def _without_wrapper(model: Model, place: Place, node: Node) -> Iterator[Model]:
    """Yield ``model`` with the only child of ``node`` in its place; the child's units become the wrapper's."""

    def moved(old: Place) -> Place | None:
        inner = (*place, 0)
        return (*place, *old[len(inner) :]) if old[: len(inner)] == inner else old

    if place or node.children[0].kind == "Stack":
        yield _moved(model, _put(model.root, place, node.children[0]), moved)


def _moved(model: Model, root: Node, moved: Callable[[Place], Place | None]) -> Model:
    seen: set[Place] = set()
    units: list[tuple[Place, ...]] = []
    for group in model.units:
        found = [new for old in group if (new := moved(old)) is not None and new not in seen]
        seen.update(found)
        if found:
            units.append(tuple(dict.fromkeys(found)))
    pairs = [(moved(first), moved(second)) for first, second in model.ties]
    ties = [(first, second) for first, second in pairs if first is not None and second is not None and first != second]
    return Model(root, tuple(units), tuple(ties))
