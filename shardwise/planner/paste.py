"""The code of a setting, to paste into a training script."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan.naming import compress_paths
from shardwise.planner.profile import Profile
from shardwise.planner.setting import ONE_UNIT, UNIT_DOORS, Setting


def code_of(setting: Setting, profile: Profile, device: str) -> str:
    """Return Python that makes ``model`` train as ``setting`` says, under ``torchrun``, on ``setting.ranks`` ranks."""
    return "\n".join([*_imports(setting), "", *_body(setting, profile, device)]) + "\n"


def _imports(setting: Setting) -> Iterator[str]:
    if setting.recompute:
        yield "import functools"
        yield ""
    yield "import torch"
    if setting.door in UNIT_DOORS:
        yield "from torch.distributed.device_mesh import init_device_mesh"
    elif setting.door != "gradients":
        yield "from torch.nn.parallel import DistributedDataParallel"
    if setting.recompute:
        yield "from torch.utils.checkpoint import checkpoint"
    names = {"full": "shard_model", "hybrid": "shard_model", "replicate": "replicate"}
    wanted = {names.get(setting.door, "ZeroRedundancyOptimizer" if setting.door != "none" else "")} - {""}
    if setting.door == "full" and setting.min_unit_bytes >= ONE_UNIT:
        wanted = {"fully_shard"}
    if setting.door in UNIT_DOORS and setting.precision == "bf16":
        wanted.add("MixedPrecisionPolicy")
    if setting.door in UNIT_DOORS and setting.offload:
        wanted.add("CPUOffloadPolicy")
    if setting.accumulate > 1 and setting.door in UNIT_DOORS:
        wanted.add("policy")
    if wanted:
        yield ""
        yield f"from shardwise import {', '.join(sorted(wanted))}"


def _body(setting: Setting, profile: Profile, device: str) -> Iterator[str]:
    if setting.recompute:
        blocks = compress_paths(profile.blocks[1:]) or "no repeated blocks"
        parents = list(dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]))
        yield f"# {blocks}: keep the inputs alone, compute again in backward"
        for parent in parents:
            yield f'for block in model.get_submodule("{parent}").children():'
            yield "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    if setting.door in UNIT_DOORS:
        yield from _mesh(setting, device)
        yield from _shard(setting, profile)
        yield "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)"
    elif setting.door == "gradients":
        yield 'optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition="even", lr=3e-4)'
        yield "# after the last backward of a step: optimizer.reduce_gradients(), then optimizer.step()"
    else:
        yield "ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        if setting.door == "none":
            yield "optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)"
        else:
            yield 'optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition="even", lr=3e-4)'
    if setting.precision == "bf16" and setting.door not in UNIT_DOORS:
        yield f'# around forward and loss: with torch.autocast("{device}", torch.bfloat16)'
    if setting.accumulate > 1 and setting.door in UNIT_DOORS:
        yield f"# {setting.accumulate} microbatches: around all but the last: with policy(model, sync=False)"


def _mesh(setting: Setting, device: str) -> Iterator[str]:
    if setting.door == "hybrid":
        sizes, names = f"({setting.replicas}, {setting.num_shards})", '("replicate", "shard")'
    else:
        sizes, names = f"({setting.ranks},)", '("shard",)' if setting.door == "full" else '("replicate",)'
    yield f'mesh = init_device_mesh("{device}", {sizes}, mesh_dim_names={names})'


def _shard(setting: Setting, profile: Profile) -> Iterator[str]:
    options = ["mesh=mesh"]
    if setting.precision == "bf16":
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    if setting.offload:
        options.append("offload_policy=CPUOffloadPolicy()")
    if setting.door == "replicate":
        yield f"options = dict({', '.join(options)})"
        for parent in dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]):
            yield f'for block in model.get_submodule("{parent}").children():'
            yield "    replicate(block, **options)"
        yield "replicate(model, **options)"
    elif setting.min_unit_bytes >= ONE_UNIT:
        yield f"fully_shard(model, {', '.join(options)})"
    else:
        yield f"shard_model(model, min_unit_bytes={setting.min_unit_bytes}, {', '.join(options)})"
