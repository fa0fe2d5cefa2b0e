"""A frozen base in quantized blocks beside fp32 adapters: what QLoRA asks of a tensor type, without a package for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.compare import CLOSE, assert_equal, full
from helpers.folders import folder_of_all
from helpers.ranks import FOUR, on_ranks
from torch import nn

from shardwise import checkpoint, fully_shard

WIDTH, BLOCK = 16, 8
aten = torch.ops.aten


class Blocks(torch.Tensor):
    """Codes of one byte with a scale per block, in rows; refuses windows, and its clone has been quantized again.

    Attributes:
        codes: uint8, one per element, flat.  scales: float32, one per block.
    """

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, size: tuple[int, ...]) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, size: tuple[int, ...]) -> None:
        self.codes, self.scales = codes, scales

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def quantize(cls, values: torch.Tensor, floor: float = 0.0) -> Blocks:
        blocks = values.reshape(-1, BLOCK)
        scales = blocks.abs().amax(1).clamp_min(1e-3) + floor
        codes = (blocks / scales[:, None] * 7 + 8).round().to(torch.uint8).flatten()
        return cls(codes, scales, tuple(values.shape))

    def whole(self) -> torch.Tensor:
        return ((self.codes.view(-1, BLOCK).float() - 8) / 7 * self.scales[:, None]).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        it = args[0]
        if func is aten.detach.default:
            return cls(it.codes, it.scales, tuple(it.shape))
        if func is aten.clone.default:
            return cls.quantize(it.whole(), floor=0.5)  # other values than before
        if func is aten.split.Tensor:
            assert len(args) == 2, "cuts rows alone"
            parts = it.shape[0] // args[1]
            pairs = zip(it.codes.chunk(parts), it.scales.chunk(parts), strict=True)
            return [cls(codes, scales, (args[1], *it.shape[1:])) for codes, scales in pairs]
        if func is aten.new_zeros.default:
            num_blocks = torch.Size(args[1]).numel() // BLOCK
            return cls(it.codes.new_zeros(num_blocks * BLOCK), it.scales.new_zeros(num_blocks), tuple(args[1]))
        if func is aten.copy_.default and isinstance(args[1], Blocks):
            it.codes.copy_(args[1].codes)
            it.scales.copy_(args[1].scales)
            return it
        if func in (aten.view.default, aten.as_strided.default, aten.slice.Tensor):
            size = it.shape if func is aten.slice.Tensor else torch.Size(args[1])
            if tuple(size) == tuple(it.shape) and (func is not aten.slice.Tensor or args[3] >= it.shape[0]):
                return cls(it.codes, it.scales, tuple(it.shape))
        raise TypeError(f"Blocks refuses {func}")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), tuple(self.shape)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: torch.Tensor | None = None
    ) -> Any:
        codes, scales = outputs
        if out is not None:
            assert isinstance(out, Blocks)
            assert out.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            return None
        return Blocks(codes, scales, (codes.numel() // metadata[1], metadata[1])), outputs


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Blocks) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.whole().t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ ctx.weight.whole(), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(Blocks.quantize(torch.randn(WIDTH, WIDTH) / 4), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Multiply.apply(x, self.base) + self.up(self.down(x)))  # type: ignore[operator]


class Adapters:
    """The trainable part of a model, as a checkpoint asks for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.model.state_dict().items() if "base" not in name}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.model.load_state_dict(values, strict=False)


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer() for _ in range(2)])


def shard(model: nn.Sequential, mesh: Any = None) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, rank: int, size: int) -> nn.Module:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        model(x).square().mean().backward()
        optimizer.step()
    return model


def adapters(model: nn.Module) -> list[torch.Tensor]:
    return [full(param).detach() for param in model.parameters() if param.requires_grad]


@on_ranks(2, FOUR)
def test_adapters_on_a_quantized_base_train_as_one_process_and_the_base_keeps_its_codes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded, alone = train(shard(make()), rank, size), train(make(), 0, 1)
    for mine, theirs in zip(adapters(sharded), adapters(alone), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    for mine, theirs in zip(sharded, alone, strict=True):
        shard_of_base, rows = mine.base.to_local(), WIDTH // size  # type: ignore[union-attr,operator]
        assert torch.equal(shard_of_base.codes, theirs.base.codes.view(size, rows * WIDTH)[rank])  # type: ignore[union-attr]
        assert torch.equal(shard_of_base.scales, theirs.base.scales.chunk(size)[rank])  # type: ignore[union-attr]


@on_ranks(4)
def test_adapters_on_a_quantized_base_are_loaded_at_another_number_of_ranks() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    trained = train(shard(make()), dist.get_rank(), 4)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shards"))["shards"]
    loaded = shard(make(1), pairs)
    with folder_of_all() as folder:
        checkpoint.save(folder / "saved", {"adapters": Adapters(trained)}, step=1)
        checkpoint.load(folder / "saved", {"adapters": Adapters(loaded)})
    assert_equal(adapters(loaded), adapters(trained))
    whole = {name: full(value) for name, value in Adapters(trained).state_dict().items()}
    other = shard(make(2), pairs)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, strict=False))
    assert_equal(adapters(other), adapters(trained))
