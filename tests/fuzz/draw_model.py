"""Draw models.  Pure: the same numbers from the generator give the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TypeVar

from fuzz.case import Model, Node, Segment
from fuzz.nodes import Place, places
from fuzz.weights import Table, Weights

T = TypeVar("T")
FORMS = ("view", "slice", "list", "dict", "pair", "box", "tuple")
MODULE_HOOKS = ("pre", "pre with kwargs", "forward", "forward first", "backward", "backward pre")
TOUCHES = ("add", "view", "fill", "none")
SIZES = (1, 2, 3, 4, 5, 7)
FORMATS = ("", "0123", "3210", "1230")  # orders of the dims of convolutions' weights in memory
SIZED = ("Mlp", "Conv", "Lookup", "Follower", "Lstm")


def pick(random: Random, weights: Table) -> str:
    """Return a name of ``weights``, drawn by weight."""
    names = list(weights)
    return random.choices(names, [weights[name] for name in names])[0]


def draw_model(random: Random, weights: Weights, reals: bool, sizes: Sequence[int] = SIZES) -> Model:
    """Return a model with its units and ties; ``sizes`` of hidden layers."""
    root = _draw_stack(random, weights, reals, weights.depth, sizes)
    units = _draw_units(random, weights, root)
    return Model(root, units, _draw_ties(random, weights, root))


def _draw_stack(random: Random, weights: Weights, reals: bool, depth: int, sizes: Sequence[int]) -> Node:
    children: list[Node] = []
    for _ in range(random.randint(2, max(2, weights.children))):
        if depth > 1 and random.random() < 0.3:
            children.append(_draw_stack(random, weights, reals, depth - 1, sizes))
        else:
            children.append(_draw_leaf(random, weights, reals, sizes))
            if children[-1].kind in SIZED and random.random() < weights.tie / 2:  # of which ties need a second
                children.append(Node(children[-1].kind, size=children[-1].size))
    return Node("Stack", children=tuple(children), segments=_draw_segments(random, weights, len(children)))


def _draw_leaf(random: Random, weights: Weights, reals: bool, sizes: Sequence[int]) -> Node:
    kind = pick(random, {**weights.kinds, **(weights.real_kinds if reals else {})})
    node = Node(kind, size=random.choice(sizes))
    if kind == "Oddments":
        share = random.choice((0.15, 0.5))
        parts = [part for part in weights.oddments if random.random() < share]
        if random.random() < 0.25:  # units of a single odd parameter: of none that has elements, above all
            parts = [random.choice((*weights.oddments, *[part for part in weights.oddments if part == "empty"] * 3))]
        node = Node(kind, form=" ".join(parts or ["tiny"]))
    if kind == "Conv" and weights.formats:
        node = replace(node, form=random.choice(FORMATS))
    if kind == "Lookup" and random.random() < weights.peek:
        node = Node("Peek", children=(node,))
    if random.random() < weights.frozen:
        node = replace(node, frozen=True)
    if weights.hooked and random.random() < weights.hooked:
        node = Node("Hooked", form=random.choice(MODULE_HOOKS), children=(node,))
    if random.random() < weights.boxed:
        node = Node("Boxed", form=random.choice(FORMS), children=(node,))
    if random.random() < weights.touched:
        node = Node("Touched", form=random.choice(TOUCHES), children=(node,))
    if random.random() < weights.gate:
        node = Node("Gate", children=(node,))
    return node


def _draw_segments(random: Random, weights: Weights, count: int) -> tuple[Segment, ...]:
    calls: list[int] = []
    for number in range(count):
        if random.random() < weights.skipped:
            continue
        calls.append(number)
        if random.random() < weights.twice:
            calls.append(random.randrange(number + 1))
    segments: list[Segment] = []
    while calls:
        length = random.choice((1, 1, 2, 3))
        recompute = random.choice(("reentrant", "saved")) if random.random() < weights.recompute else ""
        segments.append(Segment(tuple(calls[:length]), recompute))
        calls = calls[length:]
    return tuple(segments)


def _draw_units(random: Random, weights: Weights, root: Node) -> tuple[tuple[Place, ...], ...]:
    chosen = [place for place, _ in places(root) if place and random.random() < weights.unit]
    units: list[tuple[Place, ...]] = []
    for place in chosen:
        last = units[-1] if units else ()
        is_neighbour = bool(last) and last[-1][:-1] == place[:-1]
        if is_neighbour and random.random() < weights.merge:
            units[-1] = (*last, place)
        else:
            units.append((place,))
    if random.random() < weights.top_down:
        return ((),), *units  # type: ignore[return-value]
    return (*units, ((),))


def _draw_ties(random: Random, weights: Weights, root: Node) -> tuple[tuple[Place, Place], ...]:
    alike: dict[tuple[str, int], list[Place]] = {}
    for place, node in places(root):
        if node.kind in SIZED:
            alike.setdefault((node.kind, node.size), []).append(place)
    ties: list[tuple[Place, Place]] = []
    for found in alike.values():
        for first, second in pairwise(found):
            if random.random() < weights.tie:
                ties.append((first, second))
    return tuple(ties)
