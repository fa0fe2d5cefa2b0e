"""Real models and tensor types: transformers, LoRA in mixed dtypes, all-gather extensions, compiled parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise import MixedPrecisionPolicy, fully_shard


@on_ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_train_as_with_ddp(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model: Any = transformers.LlamaForCausalLM(config)
        blocks = list(model.model.layers)
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model = transformers.GPT2LMHeadModel(config)
        assert model.lm_head.weight is model.transformer.wte.weight
        blocks = list(model.transformer.h)
    reference = DistributedDataParallel(copy.deepcopy(model))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optims = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    for step in range(4):
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses = []
        for each, optim in zip((reference, model), optims, strict=True):
            out = each(input_ids=tokens, labels=tokens)
            out.loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(out.loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    assert sorted(model.state_dict()) == sorted(reference.module.state_dict())


class LoRALinear(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


@on_ranks(2)
def test_frozen_bf16_base_with_fp32_adapters_in_one_unit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(LoRALinear(9, 3) for _ in range(3)))
    reference = DistributedDataParallel(copy.deepcopy(model))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optims = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2) for each in (reference, model)
    ]
    for step in range(5):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses = [each(x).square().mean() for each in (reference, model)]
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()
        torch.testing.assert_close(losses[0], losses[1])
    assert model[0].base.weight.dtype == torch.bfloat16


def pre_all_gather(
    self: torch.Tensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], Any]:
    assert isinstance(mesh, DeviceMesh)
    assert mesh.ndim == 1
    assert isinstance(module, nn.Linear)
    assert len(outer_size) == len(outer_stride) == 2
    return (self.to(mp_policy.param_dtype),), {"seen": True}


def post_all_gather(
    self: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    (tensor,) = outputs
    assert metadata == {"seen": True}
    assert tensor.dtype == param_dtype
    if out is not None:
        assert out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return None
    return tensor, (tensor,)


def patch(model: nn.Module) -> None:
    for param in model.parameters():
        if param.ndim == 2:
            local = param._local_tensor
            local.fsdp_pre_all_gather = pre_all_gather.__get__(local)
            local.fsdp_post_all_gather = post_all_gather.__get__(local)


@on_ranks()
@pytest.mark.parametrize(("hybrid", "num_ranks"), [(False, 2), (True, 4)], ids=["shards", "replicas"])
def test_all_gather_extensions_patched_on_after(hybrid: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    patch(models[0])
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses = [model(x).float().square().mean() for model in models]
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()
        assert torch.equal(losses[0], losses[1])
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local())


class Doubled(torch.Tensor):
    """A wrapper subclass that travels as one inner tensor and is built again at the other end."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        result = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        result.inner = inner
        return result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Doubled:
        return Doubled(inner["inner"])

    def __repr__(self) -> str:
        return f"Doubled({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = torch.utils._pytree.tree_map_only(Doubled, lambda t: t.inner, (args, kwargs or {}))
        out = func(*unwrap[0], **unwrap[1])
        aten = torch.ops.aten
        views = (aten.slice.Tensor, aten.detach.default, aten.view.default, aten.alias.default, aten.view_as.default)
        if func in (aten.clone.default, *views):
            return Doubled(out)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.zero_.default):
            return args[0]
        return out

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.inner, self.inner[:1].clone()), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: Any, *, out: torch.Tensor | None = None
    ) -> Any:
        tensor, extra = outputs
        assert extra.shape[0] == dist.get_world_size()
        if out is not None:
            out.copy_(tensor * 2)
            return None
        full = tensor * 2
        return full, (full,)


@on_ranks(2)
def test_parameters_that_are_tensor_subclasses() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.weight.mul_(2)
    model.weight = nn.Parameter(Doubled(model.weight.detach().clone()))
    fully_shard(model)
    assert isinstance(model.weight, DTensor)
    assert isinstance(model.weight.to_local(), Doubled)
    for _ in range(2):
        x = torch.randn(3, 4)
        assert torch.equal(model(x), reference(x))
        model(x).sum().backward()
        reference(x).sum().backward()
        dist.all_reduce(reference.weight.grad, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)
        model.zero_grad()
        reference.zero_grad()
