"""How often what is drawn, per area."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fuzz.losses import LOSSES
from fuzz.weights import ODDMENTS, PLAIN_STEPS, Weights, table

_BASE = Weights()
AREAS: Mapping[str, Weights] = MappingProxyType(
    {
        "structure": replace(
            _BASE, kinds=table(Mlp=5, Oddments=3, Conv=2, Lookup=2, Tally=1, Follower=2, Quant=1), oddments=ODDMENTS,
            depth=3, children=4, boxed=0.2, touched=0.15, gate=0.1, peek=0.03, twice=0.15, skipped=0.1, recompute=0.1,
            tie=0.4, frozen=0.15, merge=0.25, top_down=0.02, gap=0.1,
            extras=table(eval=3, switch=3, freeze=2, blow=1, input_gradient=1),
        ),
        "aliases": replace(
            _BASE, gap=0.35, extras=table(take=5, copy=3, weigh=1, change=2, change_kept=1, eval=1, convert=1),
            children=2, keep_grad=0.1,
        ),
        "accumulation": replace(
            _BASE, microbatches=3, hold=0.6, retain=0.15, together=0.15, gap=0.25, keep_grad=0.15, gate=0.1, twice=0.1,
            extras=table(set=8, eval=1, switch=1, hook=1), meshes=table(flat=3, hybrid=1),
            apis=table(fully_shard=6, shard_model=0.5, replicate=1, replicate_older=1, zero1=1),
        ),
        "checkpointing": replace(
            _BASE, recompute=0.6, twice=0.3, depth=3, gate=0.03, boxed=0.15, tie=0.6, retain=0.05, watched=0.6,
            merge=0.2, gap=0.1, extras=table(eval=2, change=1, freeze=1, input_gradient=1, blow=0.5),
        ),
        "changes": replace(
            _BASE, gap=0.4,
            extras=table(change=8, change_kept=2, take=2, eval=3, freeze=1, load=1, save=1, remake=0.5, copy_model=1),
            children=3, clip=0.02,
        ),
        "byhand": replace(
            _BASE, gap=0.4,
            extras=table(unshard=4, reshard=2, wait=3, prefetch=3, eval=2, change=1, call_unit=0.3, set=1, hook=0.5),
            retain=0.1, together=0.1, children=4, recompute=0.1,
            apis=table(fully_shard=6, replicate=1, replicate_older=0.5),
        ),
        "hooks": replace(
            _BASE, hooks=0.6, microbatches=2, hold=0.4, gap=0.3, keep_grad=0.3, retain=0.1, together=0.1, frozen=0.1,
            tie=0.2, clip=0.1, recompute=0.1, hooked=0.3,
            extras=table(hook_gradient=4, hook_module=2, ahead=2, eval=2, freeze=0.5, change=0.5, set=2, unshard=0.5),
            meshes=table(flat=3, hybrid=1), apis=table(fully_shard=5, shard_model=1, replicate=2, replicate_older=1),
        ),
        "zero": replace(
            _BASE, microbatches=3, hold=0.6, gap=0.15, clip=0.15, groups=0.3, keep_grad=0.1, recompute=0.0, children=4,
            num_contenders=4, extras=table(rate=2, eval=3, change=1, take=1, save=1, load=1),
            kinds=table(Mlp=6, Oddments=1, Conv=2, Lookup=1, Tally=1), apis=table(zero1=8, zero_alone=1),
        ),
        "doors": replace(
            _BASE, num_contenders=6, oddments=ODDMENTS,
            kinds=table(Mlp=5, Oddments=3, Conv=3, Lookup=1, Tally=1, Follower=1), gap=0.05, recompute=0.0, frozen=0.1,
            extras=table(rate=2, eval=1, change=1, join=0.5), microbatches=2, hold=0.3, depth=1, turns=0.5,
            sync_buffers=0.15,
            apis=table(
                fully_shard=1,
                shard_model=1,
                replicate=1,
                replicate_older=1,
                zero1=3,
                zero_alone=1,
                overlap=3,
                interleaved=3,
            ),
        ),
        "optimizers": replace(
            _BASE, reals=0.7, gap=0.15, groups=0.5, clip=0.4, closure=0.2,
            extras=table(rate=3, save=2, load=2, freeze=1, eval=1, remake=1),
            optims=table(modular=2, momentum=2, sgd=1), num_contenders=4,
            real_optims=table(
                adamw=3, adam=1, foreach=1, fused=1, adagrad=1, rmsprop=1, small_sgd=2, adafactor=2, blocks=1
            ),
            apis=table(fully_shard=5, shard_model=1, replicate=1, replicate_older=1, zero1=6),
        ),
        "offload": replace(
            _BASE, reals=0.7, gap=0.15, groups=0.5, clip=0.5, closure=0.2, microbatches=2, hold=0.3,
            extras=table(rate=3, save=2, load=2, freeze=1, eval=1, remake=1, change=2),
            optims=table(modular=2, momentum=2, sgd=1), num_contenders=3,
            real_optims=table(adamw=3, adam=1, foreach=1, fused=1, adagrad=1, rmsprop=1, small_sgd=2),
            apis=table(fully_shard=5, shard_model=2, replicate=2), offloads_optimizer=True,
        ),
        "meshes": replace(
            _BASE, columns=0.15, meshes=table(hybrid=4, tensor=3), reshards=table(none=2, yes=2, no=1, two=1),
            ranks=table(two=1, four=3), microbatches=2, hold=0.5, gap=0.15,
            extras=table(set=3, eval=2, change=1, take=1, save=1, load=1), kinds=table(Mlp=8, Oddments=1, Lookup=1),
            apis=table(fully_shard=4, shard_model=1),
        ),
        "mixed": replace(
            _BASE, own=0.3,
            optims=table(modular=1),  # whole numbers stay as small as units in bfloat16 need them
            meshes=table(flat=3, hybrid=1), columns=0.1, microbatches=2, hold=0.4, gap=0.2, unit=0.8, depth=3, clip=0.1,
            recompute=0.1,
            extras=table(eval=2, change=2, take=1, set=2, unshard=1, freeze=0.5, save=0.5, load=0.5, copy_model=0.3),
            apis=table(fully_shard=4, replicate=2),
        ),
        "precision": replace(
            _BASE, policies=table(none=1, half=3, half_reduce=2, half_output=2, mixed=3, float16=1), reals=0.2,
            offload=0.3, microbatches=2, hold=0.3, gap=0.15, extras=table(set=2, eval=2, change=2, take=1),
            optims=table(modular=1), kinds=table(Mlp=6, Oddments=3, Conv=1, Lookup=1, Tally=1), real_kinds=table(),
            boxed=0.15, apis=table(fully_shard=6, shard_model=1, replicate=1),
        ),
        "compiled": replace(
            _BASE, compiled=table(eager=1, aot_eager=1), kinds=table(Mlp=1), real_kinds=table(), depth=1, children=2,
            boxed=0.0, touched=0.0, frozen=0.0, recompute=0.0, unit=0.9, watched=0.0,
            retain=0.0,  # torch's compiled backwards give their buffers away, whatever shards them
            steps=2, num_contenders=1, extras=table(change=1, eval=1, take=1),
            apis=table(fully_shard=4, replicate=1, replicate_older=1),
        ),
        "groups": replace(
            _BASE, reals=1.0, groups=0.6,
            clip=0.0,  # of a part of the parameters, ShardedOptimizer clips that part
            marked=0.5, later=0.7, gap=0.35, children=2, depth=1, steps=4, num_contenders=4, keep_grad=0.1,
            extras=table(add_group=3, option=4, rate=2, eval=0.5, take=0.5), real_kinds=table(),
            real_optims=table(small_sgd=3, adamw=2, rmsprop=1, fused_sgd=1, foreach=1),
            apis=table(fully_shard=4, shard_model=1, replicate=1, replicate_older=1, zero1=6),
        ),
        "joins": replace(
            _BASE, reals=0.9, joins=0.5, gap=0.05, formats=True, recompute=0.0, **PLAIN_STEPS,
            kinds=table(Conv=5, Mlp=1, Oddments=0.5), real_kinds=table(), depth=1, groups=0.3, num_contenders=4,
            extras=table(rate=1), real_optims=table(fused=3, fused_sgd=2, foreach=1, adamw=1),
            apis=table(zero1=4, overlap=1, interleaved=1),
        ),
        "copies": replace(
            _BASE, ignored=0.8, tie=0.0, gap=0.25, clip=0.0,
            extras=table(copy_model=4, eval=2, take=1, change=1, remake=0.5), optims=table(modular=1, sgd=1),
            real_kinds=table(), real_optims=table(small_sgd=1, adamw=1),
            apis=table(fully_shard=4, shard_model=2, replicate=2),
        ),
        "meta": replace(
            _BASE, meta=table(init=3, reset=1, load=2, assign=2), reals=1.0,
            kinds=table(Mlp=4, Conv=1, Lookup=1, Rope=2), formats=True, boxed=0.0, steps=2, tie=0.2,
            extras=table(eval=2, take=1, copy_model=0.5), apis=table(fully_shard=4, shard_model=2, replicate=2),
        ),
        "losses": replace(
            _BASE, losses=LOSSES, recompute=0.0, boxed=0.0, reals=1.0, tie=0.0, kinds=table(Mlp=4, Oddments=1, Conv=1),
            real_kinds=table(), extras=table(loss_of=4, eval=1, set=0.5), gap=0.3, steps=4,
            apis=table(fully_shard=4, shard_model=2, replicate=1),
        ),
        "saves": replace(
            _BASE, gap=0.1, kinds=table(Mlp=4, Tally=1, Conv=1), real_kinds=table(Norm=1), saves=0.5,
            extras=table(eval=1, change=1), apis=table(fully_shard=3, shard_model=1, replicate=1, replicate_older=1),
        ),
        "sizes": replace(
            _BASE, bounded=True, reshards=table(yes=1), recompute=1.0, kinds=table(Mlp=1), real_kinds=table(), depth=1,
            children=12, boxed=0.0, touched=0.0, twice=0.0, unit=0.95, merge=0.0, tie=0.0,
            watched=1.0,  # as reentrant checkpoints need it
            steps=4, gap=0.3, extras=table(grow=1), **PLAIN_STEPS, apis=table(fully_shard=1),
        ),
        "beside": replace(
            _BASE, apart=table(named=1, synced=1), steps=2, extras=table(eval=1),
            apis=table(fully_shard=3, shard_model=1, zero1=1),
        ),
        "around": replace(
            _BASE, depth=2, recompute=0.0, frozen=0.0, tie=0.0, gap=0.05, unit=0.4, merge=0.0, num_contenders=1,
            extras=table(rate=1, remake=1), **PLAIN_STEPS, apis=table(within_replicate=1),
        ),
        "resume": replace(
            _BASE, gap=0.05, extras=table(eval=1, rate=1, change=1), reals=0.6, groups=0.4, num_contenders=2,
            kinds=table(Mlp=6, Oddments=1, Conv=1, Lookup=1, Follower=1), real_kinds=table(Lstm=1), steps=2,
            apis=table(fully_shard=4, shard_model=1, replicate=1, replicate_older=0.5, zero1=4),
            real_optims=table(adamw=3, adam=1, small_sgd=2, adafactor=1),
        ),
    }
)  # fmt: skip
