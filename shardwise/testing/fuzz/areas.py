"""How often what is drawn, per area: a table of weights each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

Table = Mapping[str, float]
USED = ("scalar", "tiny", "wide", "strided")
ODDMENTS = (*USED, "frozen", "unused", "empty")


def table(**weights: float) -> Table:
    """Return weights by name that nobody can change."""
    return MappingProxyType(dict(weights))


@dataclass(frozen=True, slots=True)
class Weights:
    """Probabilities between 0 and 1, and tables of relative weights.

    Attributes, of models:
        kinds: of leaves.  oddments: what odd parameters there are.  depth: of stacks in stacks.  children: of a stack, at most.
        boxed, touched, hooked, gate, peek: that a child is wrapped so.  twice, skipped: how a stack calls a child.
        recompute: of a segment.  tie: of two alike modules.  frozen: of a leaf.  unit: that a module is one.
        merge: that neighbouring units become one.  top_down: that the root is sharded before its blocks.
    Attributes, of programs:
        steps, microbatches: at most.  gap: that something comes between two actions; extras: what.
        hold: that microbatches are not synced; retain, together, watched, clip, closure, keep_grad, grad_to_zero.
    Attributes, of settings:
        reals: that numbers are not whole.  meshes, reshards, policies, optims: relative weights; groups; large.
        offload, columns, bucket_view, sync_buffers; compiled: relative weights of backends.
        hooks: that users have registered hooks on gradients.  overlaps: of each of ZeRO's two overlaps.
        own: of each thing that a unit may have for itself.
        turns: that every forward is followed by its backward and a step, and everything is used, as overlapped steps need it.
    Attributes, of contenders:
        doors: relative weights of contenders' doors.  num_contenders: of ours, per case.
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
    tie: float = 0.05
    frozen: float = 0.05
    unit: float = 0.6
    merge: float = 0.1
    top_down: float = 0.0
    steps: int = 3
    microbatches: int = 1
    gap: float = 0.1
    extras: Table = field(default_factory=lambda: table(eval=2, take=1, change=1))
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
    large: float = 0.4
    offload: float = 0.0
    columns: float = 0.0
    bucket_view: float = 0.3
    turns: float = 0.0
    hooks: float = 0.0
    overlaps: float = 0.0
    own: float = 0.0
    sync_buffers: float = 0.0
    compiled: Table = field(default_factory=table)
    doors: Table = field(
        default_factory=lambda: table(
            fully_shard=6, shard_model=1, replicate=1, replicate_older=1, zero1=0.5, zero2=0.5
        )
    )
    num_contenders: int = 3
    ranks: Table = field(default_factory=lambda: table(one=0.5, two=6, three=1, four=2))

    def in_turns(self) -> Weights:
        """Return the weights for what a step inside of backward can do."""
        return replace(
            self,
            gate=0.0,
            skipped=0.0,
            frozen=0.0,
            peek=0.0,
            recompute=0.0,
            gap=0.1,
            extras=table(rate=3, join=1),
            microbatches=1,
            retain=0.0,
            together=0.0,
            closure=0.0,
            clip=0.0,
            keep_grad=0.0,
            oddments=USED,
        )


_BASE = Weights()
AREAS: Mapping[str, Weights] = MappingProxyType(
    {
        "structure": replace(
            _BASE,
            kinds=table(Mlp=5, Oddments=3, Conv=2, Lookup=2, Tally=1, Follower=2, Quant=1),
            oddments=ODDMENTS,
            depth=3,
            children=4,
            boxed=0.2,
            touched=0.15,
            gate=0.1,
            peek=0.03,
            twice=0.15,
            skipped=0.1,
            recompute=0.1,
            tie=0.4,
            frozen=0.15,
            merge=0.25,
            top_down=0.02,
            gap=0.1,
            extras=table(eval=3, switch=3, freeze=2, blow=1, input_gradient=1),
        ),
        "aliases": replace(
            _BASE,
            gap=0.35,
            extras=table(take=5, copy=3, weigh=1, change=2, change_kept=1, eval=1, convert=1),
            children=2,
            keep_grad=0.1,
        ),
        "accumulation": replace(
            _BASE,
            microbatches=3,
            hold=0.6,
            retain=0.15,
            together=0.15,
            gap=0.25,
            keep_grad=0.15,
            gate=0.1,
            twice=0.1,
            extras=table(set=8, eval=1, switch=1, hook=1),
            meshes=table(flat=3, hybrid=1),
            doors=table(fully_shard=6, shard_model=0.5, replicate=1, replicate_older=1, zero1=0.5, zero2=0.5),
        ),
        "checkpointing": replace(
            _BASE,
            recompute=0.6,
            twice=0.3,
            depth=3,
            gate=0.03,
            boxed=0.15,
            tie=0.6,
            retain=0.05,
            watched=0.6,
            merge=0.2,
            gap=0.1,
            extras=table(eval=2, change=1, freeze=1, input_gradient=1, blow=0.5),
        ),
        "changes": replace(
            _BASE,
            gap=0.4,
            extras=table(change=8, change_kept=2, take=2, eval=3, freeze=1, load=1, save=1, remake=0.5, copy_model=1),
            children=3,
            clip=0.02,
        ),
        "byhand": replace(
            _BASE,
            gap=0.4,
            extras=table(unshard=4, reshard=2, wait=3, prefetch=3, eval=2, change=1, call_unit=0.3, set=1, hook=0.5),
            retain=0.1,
            together=0.1,
            children=4,
            recompute=0.1,
            doors=table(fully_shard=6, replicate=1, replicate_older=0.5),
        ),
        "hooks": replace(
            _BASE,
            hooks=0.6,
            microbatches=2,
            hold=0.4,
            gap=0.3,
            keep_grad=0.3,
            retain=0.1,
            together=0.1,
            frozen=0.1,
            tie=0.2,
            clip=0.1,
            recompute=0.1,
            hooked=0.3,
            extras=table(hook_gradient=4, hook_module=2, ahead=2, eval=2, freeze=0.5, change=0.5, set=2, unshard=0.5),
            meshes=table(flat=3, hybrid=1),
            doors=table(fully_shard=5, shard_model=1, replicate=2, replicate_older=1),
        ),
        "zero": replace(
            _BASE,
            overlaps=0.7,
            microbatches=3,
            hold=0.6,
            gap=0.15,
            clip=0.15,
            groups=0.3,
            keep_grad=0.1,
            recompute=0.0,
            children=4,
            num_contenders=4,
            extras=table(rate=2, eval=3, change=1, take=1, save=1, load=1),
            kinds=table(Mlp=6, Oddments=1, Conv=2, Lookup=1, Tally=1),
            doors=table(zero1=3, zero2=5, zero_alone=1),
        ),
        "doors": replace(
            _BASE,
            num_contenders=6,
            oddments=ODDMENTS,
            kinds=table(Mlp=5, Oddments=3, Conv=3, Lookup=1, Tally=1, Follower=1),
            gap=0.05,
            recompute=0.0,
            frozen=0.1,
            extras=table(rate=2, eval=1, change=1, join=0.5),
            microbatches=2,
            hold=0.3,
            depth=1,
            turns=0.5,
            sync_buffers=0.15,
            doors=table(
                fully_shard=1,
                shard_model=1,
                replicate=1,
                replicate_older=1,
                zero1=3,
                zero2=3,
                zero_alone=1,
                overlap=3,
                interleaved=3,
            ),
        ),
        "optimizers": replace(
            _BASE,
            reals=0.7,
            gap=0.15,
            groups=0.5,
            clip=0.4,
            closure=0.2,
            extras=table(rate=3, save=2, load=2, freeze=1, eval=1, remake=1),
            optims=table(modular=2, momentum=2, sgd=1),
            num_contenders=4,
            real_optims=table(
                adamw=3, adam=1, foreach=1, fused=1, adagrad=1, rmsprop=1, small_sgd=2, adafactor=2, blocks=1
            ),
            doors=table(fully_shard=5, shard_model=1, replicate=1, replicate_older=1, zero1=3, zero2=3),
        ),
        "meshes": replace(
            _BASE,
            columns=0.15,
            meshes=table(hybrid=4, tensor=3),
            reshards=table(none=2, yes=2, no=1, two=1),
            ranks=table(two=1, four=3),
            microbatches=2,
            hold=0.5,
            gap=0.15,
            extras=table(set=3, eval=2, change=1, take=1, save=1, load=1),
            kinds=table(Mlp=8, Oddments=1, Lookup=1),
            doors=table(fully_shard=4, shard_model=1),
        ),
        "mixed": replace(
            _BASE,
            own=0.3,
            optims=table(modular=1),  # whole numbers stay as small as units in bfloat16 need them
            meshes=table(flat=3, hybrid=1),
            columns=0.1,
            microbatches=2,
            hold=0.4,
            gap=0.2,
            unit=0.8,
            depth=3,
            clip=0.1,
            recompute=0.1,
            extras=table(eval=2, change=2, take=1, set=2, unshard=1, freeze=0.5, save=0.5, load=0.5, copy_model=0.3),
            doors=table(fully_shard=4, replicate=2),
        ),
        "precision": replace(
            _BASE,
            policies=table(none=1, half=3, half_reduce=2, half_output=2, mixed=3, float16=1),
            reals=0.2,
            offload=0.3,
            microbatches=2,
            hold=0.3,
            gap=0.15,
            extras=table(set=2, eval=2, change=2, take=1),
            optims=table(modular=1),
            kinds=table(Mlp=6, Oddments=3, Conv=1, Lookup=1, Tally=1),
            real_kinds=table(),
            boxed=0.15,
            doors=table(fully_shard=6, shard_model=1, replicate=1),
        ),
        "compiled": replace(
            _BASE,
            compiled=table(eager=1, aot_eager=1),
            kinds=table(Mlp=1),
            real_kinds=table(),
            depth=1,
            children=2,
            boxed=0.0,
            touched=0.0,
            frozen=0.0,
            recompute=0.0,
            unit=0.9,
            watched=0.0,
            retain=0.0,  # torch's compiled backwards give their buffers away, whatever shards them
            steps=2,
            num_contenders=1,
            extras=table(change=1, eval=1, take=1),
            doors=table(fully_shard=4, replicate=1, replicate_older=1),
        ),
        "resume": replace(
            _BASE,
            gap=0.05,
            extras=table(eval=1, rate=1, change=1),
            reals=0.6,
            groups=0.4,
            num_contenders=2,
            kinds=table(Mlp=6, Oddments=1, Conv=1, Lookup=1, Follower=1),
            real_kinds=table(Lstm=1),
            steps=2,
            doors=table(fully_shard=4, shard_model=1, replicate=1, replicate_older=0.5, zero1=2, zero2=2),
            real_optims=table(adamw=3, adam=1, small_sgd=2, adafactor=1),
        ),
    }
)
