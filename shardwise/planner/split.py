"""Tensor parallelism for a dry run: a copy of the model without memory, split as ``parallelize_module`` splits it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwise import torch_private
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How the blocks of a model are split.

    Attributes:
        ranks: that share one block.
        plan: what ``parallelize_module`` takes for a block: paths in it, and how each module there is split.
    """

    ranks: int
    plan: Mapping[str, ParallelStyle]


@contextmanager
def split_copy(model: nn.Module, blocks: Sequence[str], split: TensorSplit) -> Generator[nn.Module, None, None]:
    """Yield a copy of ``model`` on the meta device whose ``blocks`` are split, as the first of ``split.ranks`` ranks has it.

    Process groups that there are stay as they are.  Raises: ConfigError if the plan does not go with the blocks.
    """
    twins: dict[int, object] = {}
    for each in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        is_param = isinstance(each, nn.Parameter)
        twins[id(each)] = nn.Parameter(empty, requires_grad=each.requires_grad) if is_param else empty
    twin = copy.deepcopy(model, twins)
    with torch_private.fake_world(split.ranks):
        mesh = init_device_mesh("cpu", (split.ranks,), mesh_dim_names=("tp",))
        for path in blocks[1:]:
            block = twin.get_submodule(path)
            missing = [name for name in split.plan if "*" not in name and not _has(block, name)]
            if missing:
                raise ConfigError(
                    f"tensor_plan names {', '.join(missing)}, which {path} ({type(block).__name__}) has not; name its modules, "
                    "such as {'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}"
                )
            parallelize_module(block, mesh, dict(split.plan), src_data_rank=None)
        yield twin


def _has(block: nn.Module, name: str) -> bool:
    return name in dict(block.named_modules())
