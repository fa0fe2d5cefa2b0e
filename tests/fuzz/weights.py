"""How often what is drawn: tables of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

Table = Mapping[str, float]
USED = ("scalar", "tiny", "wide", "strided")
ODDMENTS = (*USED, "frozen", "unused", "empty")
# Every step has one forward, one backward and no gradients of others.
PLAIN_STEPS = MappingProxyType(dict.fromkeys(("retain", "together", "closure", "clip", "keep_grad"), 0.0))


def table(**weights: float) -> Table:
    """Return weights by name that nobody can change."""
    return MappingProxyType(dict(weights))


@dataclass(frozen=True, slots=True)
class Weights:
    """Probabilities between 0 and 1, and tables of relative weights.

    Attributes, of models:
        kinds: of leaves.  oddments: what odd parameters there are.  depth: of stacks in stacks.  children: of a stack, at most.
        boxed, touched, hooked, gate, peek: that a child is wrapped so.  twice, skipped: how a stack calls a child.
        formats: convolutions lie in memory in all orders of dims.  recompute: of a segment.  tie: of two alike modules.
        frozen: of a leaf.  unit: that a module is one.  merge: that neighbouring units become one.
        top_down: that the root is sharded before its blocks.
    Attributes, of programs:
        steps, microbatches: at most.  gap: that something comes between two actions; extras: what.
        saves: that a checkpoint is saved and loaded.  losses: what kinds there are.
        joins: that a loop in ``Join`` is in place of a step.
        hold: that microbatches are not synced; retain, together, watched, clip, closure, keep_grad, grad_to_zero.
    Attributes, of settings:
        reals: that numbers are not whole.  meshes, reshards, policies, optims: relative weights; groups; large.
        marked: that groups are made of attributes.  later: that some parameters come in a later group.
        ignored: that parameters are ignored.  meta: relative weights of ways from the meta device.
        bounded: that units are counted.  apart: relative weights of what is done about ranks that begin with other values.
        offload, offloads_optimizer, columns, bucket_view, sync_buffers; compiled: relative weights of backends.
        hooks: that users have registered hooks on gradients.
        own: of each thing that a unit may have for itself.
        turns: that every forward is followed by its backward and a step, and everything is used, as overlapped steps need it.
    Attributes, of contenders:
        APIs: relative weights of contenders' APIs.  num_contenders: of ours, per case.
        ranks: relative weights of world sizes.
    """

    kinds: Table = field(default_factory=lambda: table(Mlp=8, Oddments=0.6, Conv=0.2, Lookup=1, Tally=1, Follower=0.5))
    real_kinds: Table = field(default_factory=lambda: table(Norm=1, Lstm=1))
    oddments: tuple[str, ...] = ("tiny", "frozen", "unused")
    depth: int = 2
    children: int = 3
    boxed: float = 0.1
    touched: float = 0.05
    hooked: float = 0.0
    gate: float = 0.0
    peek: float = 0.0
    twice: float = 0.05
    skipped: float = 0.02
    recompute: float = 0.05
    formats: bool = False
    tie: float = 0.05
    frozen: float = 0.05
    unit: float = 0.6
    merge: float = 0.1
    top_down: float = 0.0
    steps: int = 3
    microbatches: int = 1
    gap: float = 0.1
    extras: Table = field(default_factory=lambda: table(eval=2, take=1, change=1))
    joins: float = 0.0
    losses: tuple[str, ...] = ()
    saves: float = 0.0
    hold: float = 0.0
    retain: float = 0.02
    together: float = 0.02
    watched: float = 0.3
    clip: float = 0.05
    closure: float = 0.02
    keep_grad: float = 0.02
    grad_to_zero: float = 0.1
    reals: float = 0.3
    meshes: Table = field(default_factory=lambda: table(flat=1))
    reshards: Table = field(default_factory=lambda: table(none=4, yes=2, no=2))
    policies: Table = field(default_factory=lambda: table(none=1))
    optims: Table = field(default_factory=lambda: table(modular=3, sgd=1, momentum=1))
    real_optims: Table = field(default_factory=lambda: table(adamw=2, small_sgd=1))
    groups: float = 0.2
    marked: float = 0.0
    later: float = 0.0
    ignored: float = 0.0
    bounded: bool = False
    meta: Table = field(default_factory=table)
    apart: Table = field(default_factory=table)
    large: float = 0.4
    offload: float = 0.0
    offloads_optimizer: bool = False
    columns: float = 0.0
    bucket_view: float = 0.3
    turns: float = 0.0
    hooks: float = 0.0
    own: float = 0.0
    sync_buffers: float = 0.0
    compiled: Table = field(default_factory=table)
    apis: Table = field(
        default_factory=lambda: table(fully_shard=6, shard_model=1, replicate=1, replicate_older=1, zero1=1)
    )
    num_contenders: int = 3
    ranks: Table = field(default_factory=lambda: table(one=0.5, two=6, three=1, four=2))

    def in_turns(self) -> Weights:
        """Return the weights for what a step inside of backward can do."""
        beside = {"gate": 0.0, "skipped": 0.0, "frozen": 0.0, "peek": 0.0, "oddments": USED}
        return replace(
            self, gap=0.1, extras=table(rate=3, join=1), microbatches=1, recompute=0.0, **PLAIN_STEPS, **beside
        )
