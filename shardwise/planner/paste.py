"""The code of a setting, to paste into a training script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.plan.naming import compress_paths
from shardwise.planner.profile import Profile
from shardwise.planner.setting import ONE_UNIT, UNIT_DOORS, Setting


def code_of(setting: Setting, profile: Profile, device: str, tensor_plan: Mapping[str, ParallelStyle]) -> str:
    """Return Python that makes ``model`` train as ``setting`` says, under ``torchrun``, on all of its ranks."""
    return "\n".join([*_imports(setting, tensor_plan), "", *_body(setting, profile, device, tensor_plan)]) + "\n"


def _imports(setting: Setting, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    if setting.recompute:
        yield "import functools"
        yield ""
    yield "import torch"
    if setting.door in UNIT_DOORS:
        yield "from torch.distributed.device_mesh import init_device_mesh"
    elif setting.door != "gradients":
        yield "from torch.nn.parallel import DistributedDataParallel"
    if setting.tensor > 1:
        if any(_style(each) != f"{type(each).__name__}()" for each in tensor_plan.values()):
            yield "from torch.distributed.tensor import Replicate, Shard"
        kinds = sorted({type(each).__name__ for each in tensor_plan.values()})
        yield f"from torch.distributed.tensor.parallel import {', '.join([*kinds, 'parallelize_module'])}"
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
    if setting.matrices:
        wanted.add("ShardedOptimizer")
    if setting.compression is not None:
        wanted.add("CompressionPolicy")
    if setting.accumulate > 1 and setting.door in UNIT_DOORS:
        wanted.add("policy")
    if wanted:
        yield ""
        yield f"from shardwise import {', '.join(sorted(wanted))}"


def _body(setting: Setting, profile: Profile, device: str, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    if setting.recompute:
        blocks = compress_paths(profile.blocks[1:]) or "no repeated blocks"
        parents = list(dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]))
        yield f"# {blocks}: keep the inputs alone, compute again in backward"
        for parent in parents:
            yield f'for block in model.get_submodule("{parent}").children():'
            yield "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    if setting.door in UNIT_DOORS:
        yield from _mesh(setting, device)
        if setting.tensor > 1:
            yield from _split(profile, tensor_plan)
        yield from _shard(setting, profile)
        if setting.matrices:
            yield "named = dict(model.named_parameters())"
            yield "matrices = {name: param for name, param in named.items() if param.ndim == 2}"
            yield "optimizer = ShardedOptimizer(matrices, torch.optim.Muon, lr=3e-4)"
            yield "rest = torch.optim.AdamW([param for param in named.values() if param.ndim != 2], lr=3e-4, fused=True)"
        elif setting.tensor > 1:
            yield "groups = {}  # a fused update takes tensors of one mesh"
            yield "for param in model.parameters():"
            yield "    groups.setdefault(param.device_mesh, []).append(param)"
            groups = '[{"params": params} for params in groups.values()]'
            yield f"optimizer = torch.optim.AdamW({groups}, lr=3e-4, fused=True)"
        else:
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
    axes = {"replicate": setting.replicas, "shard": setting.num_shards} if setting.door == "hybrid" else {}
    axes = axes or {"shard" if setting.door == "full" else "replicate": setting.ranks}
    axes |= {"tp": setting.tensor} if setting.tensor > 1 else {}
    yield f'mesh = init_device_mesh("{device}", {tuple(axes.values())}, mesh_dim_names={_quoted(axes)})'


def _quoted(names: Iterable[str]) -> str:
    words = [f'"{name}"' for name in names]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _split(profile: Profile, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    yield "for block in (  # the ranks of one tp group take the same batches"
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]):
        yield f'    *model.get_submodule("{parent}").children(),'
    yield "):"
    yield '    parallelize_module(block, mesh["tp"], {'
    yield from (f'        "{name}": {_style(style)},' for name, style in tensor_plan.items())
    yield "    })"


def _style(style: ParallelStyle) -> str:
    plain = type(style)
    try:
        return f"{plain.__name__}()" if repr(plain()) == repr(style) else repr(style)
    except TypeError:  # a style that cannot be made without arguments
        return repr(style)


def _shard(setting: Setting, profile: Profile) -> Iterator[str]:
    data = (
        '"replicate", "shard"' if setting.door == "hybrid" else '"shard"' if setting.door == "full" else '"replicate"'
    )
    options = [f"mesh=mesh[{data}]" if setting.tensor > 1 else "mesh=mesh"]
    if setting.precision == "bf16":
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    if setting.offload:
        options.append("offload_policy=CPUOffloadPolicy()")
    if setting.compression is not None:
        options.append(f"compression={setting.compression!r}")
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
