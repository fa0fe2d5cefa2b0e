"""What the modules of a case are, read off its tree.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.case import Node

Place = tuple[int, ...]


def places(node: Node, here: Place = ()) -> Iterator[tuple[Place, Node]]:
    """Yield all nodes with their places, children before their parents."""
    for number, child in enumerate(node.children):
        yield from places(child, (*here, number))
    yield here, node


def uses_all(node: Node) -> bool:
    """True if a forward uses every parameter and all are trainable."""
    if node.frozen or node.kind == "Gate" or any(part in node.form for part in ("unused", "frozen", "empty")):
        return False
    used = {number for segment in node.segments for number in segment.children}
    if node.kind == "Stack" and used != set(range(len(node.children))):
        return False
    return all(uses_all(child) for child in node.children)


def rows_of_codes(node: Node) -> list[int]:
    """Return the rows of parameters of a tensor subclass, which DDP and ZeRO would have to send whole."""
    own = [node.size] if node.kind == "Quant" else []
    return own + [rows for child in node.children for rows in rows_of_codes(child)]


def has_matrices(node: Node) -> bool:
    """True if gradients of some parameters depend on more than a few numbers of a batch."""
    if node.children:
        return not node.frozen and any(has_matrices(child) for child in node.children)
    return trains(node) and node.kind not in ("Oddments", "Stack")


def trains(node: Node) -> bool:
    """True if a parameter of the tree takes a gradient."""
    if node.frozen or node.kind == "Quant":
        return False
    if node.children:
        return any(trains(child) for child in node.children)
    return node.kind not in ("Oddments", "Stack") or any(part != "frozen" for part in node.form.split())


def calls_twice(node: Node) -> bool:
    """True if a stack calls one of its children twice in one segment, or in two."""
    called = [child for segment in node.segments for child in segment.children]
    return len(set(called)) < len(called) or any(calls_twice(child) for child in node.children)


def has_kind(node: Node, kind: str) -> bool:
    """True if ``kind`` is in the tree."""
    return node.kind == kind or any(has_kind(child, kind) for child in node.children)


def recomputes(node: Node) -> bool:
    """True if a part of the tree is recomputed in backward."""
    return any(segment.recompute for segment in node.segments) or any(recomputes(child) for child in node.children)
