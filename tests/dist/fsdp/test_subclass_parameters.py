"""Parameters of tensor subclasses train as they do on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from helpers.compare import average_gradients
from helpers.folders import folder_of_all
from helpers.ranks import on_ranks
from helpers.trains_alike import batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardwise import ConfigError, checkpoint, fully_shard, replicate


class Padding(torch.Tensor):
    """Gathers shards that are padded to the largest; what comes out is longer than the parameter."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        found = func(*unwrapped[0], **unwrapped[1])
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor):
            return args[0]
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, found)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        rows = -(-outer_size[0] // mesh.size())
        padded = self.inner.new_zeros((rows, *outer_size[1:]))
        padded[: self.inner.shape[0]] = self.inner
        return (padded,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: Any, *, out: torch.Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            assert out.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
            return None
        return gathered, outputs


class Bare(Padding):
    """Gathers shards as they are: what is told the mesh alone does not know how long the largest is."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        return (self.inner,), None


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "rows", "api"),
    [
        (Padding, 3, fully_shard),
        (Bare, 3, fully_shard),
        (Padding, 5, fully_shard),
        (Bare, 8, fully_shard),
        (Padding, 5, replicate),
        pytest.param(Bare, 5, fully_shard, marks=pytest.mark.exhaustive),
        pytest.param(Padding, 8, fully_shard, marks=pytest.mark.exhaustive),
        pytest.param(Bare, 5, replicate, marks=pytest.mark.exhaustive),
    ],
)
def test_extensions_may_pad_uneven_shards_or_leave_that_to_the_gather(
    kind: type[Padding], rows: int, api: Callable[[nn.Module], Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6))
    plain = copy.deepcopy(model)
    model[0].weight = nn.Parameter(kind(model[0].weight.detach().clone()), requires_grad=False)
    plain[0].weight.requires_grad_(False)
    for layer in model:
        api(layer)
    api(model)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, plain)]
    for number in range(3):
        assert torch.allclose(model(batch(number)), plain(batch(number)))
        for each in (model, plain):
            each(batch(number)).square().mean().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Kept(Padding):
    """Is of its form where torch moves it; what is computed with it is plain, so an optimizer's state is."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        moves = ("detach", "split", "slice", "view", "as_strided", "new_zeros", "copy_", "add_", "mul_")
        if func.overloadpacket.__name__ in moves:
            return found
        return torch.utils._pytree.tree_map_only(cls, lambda tensor: tensor.inner, found)


@on_ranks(2)
def test_plain_state_of_a_parameter_in_a_form_of_its_own_is_saved_and_loaded() -> None:
    optimizers: list[torch.optim.SGD] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5))
        model[0].weight = nn.Parameter(Kept(model[0].weight.detach().clone()))
        fully_shard(model)
        optimizers.append(torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9))
        model(batch(seed)).square().mean().backward()
        optimizers[-1].step()
    saved, loaded = optimizers
    with folder_of_all() as folder:
        checkpoint.save(folder / "saved", {"optimizer": saved}, step=1)
        checkpoint.load(folder / "saved", {"optimizer": loaded})
    for mine, other in zip(loaded.state.values(), saved.state.values(), strict=True):
        assert type(mine["momentum_buffer"].to_local()) is torch.Tensor
        assert torch.equal(mine["momentum_buffer"].full_tensor(), other["momentum_buffer"].full_tensor())


class Paired(torch.Tensor):
    """A frozen weight held as two tensors; ``shows``: torch may see them."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> Paired:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].low, args[0].high)
        whole = [arg.low + arg.high if isinstance(arg, Paired) else arg for arg in args]
        return func(*whole, **(kwargs or {}))


class Shown(Paired):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "high"], None


@on_ranks(2)
def test_the_older_replicate_makes_what_is_within_subclasses_equal() -> None:
    rank = dist.get_rank()
    for kind in (Shown, Paired):
        model = nn.Linear(6, 4)
        pair = kind(torch.full((4, 6), float(rank)), torch.full((4, 6), 2.0 + rank))
        model.weight = nn.Parameter(pair, requires_grad=False)
        if kind is Paired:
            with pytest.raises(ConfigError, match="does not define __tensor_flatten__"):
                replicate(model, device_ids=None)
        else:
            replicate(model, device_ids=None)
            assert model.weight.low.unique().tolist() == [0.0]
            assert model.weight.high.unique().tolist() == [2.0]


@on_ranks(2)
def test_attributes_of_users_follow_without_what_the_class_keeps_there() -> None:
    model = nn.Linear(6, 3)
    model.weight = nn.Parameter(Padding(model.weight.detach().clone()), requires_grad=False)
    model.weight.mark = "mine"
    fully_shard(model)
    assert model.weight.mark == "mine"
    assert "inner" not in vars(model.weight)
    seen: list[str] = []
    model.register_forward_hook(lambda module, *_: seen.append(module.weight.mark))
    model(torch.ones(2, 6))
    assert seen == ["mine"]


@pytest.mark.parametrize("api", [fully_shard, torch_fsdp.fully_shard])
@on_ranks(2)
def test_what_was_gathered_of_a_parameter_cut_along_dim_1_is_put_together_as_by_torchs_class(api: Any) -> None:
    model = nn.Linear(4, 2, bias=False).requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).view(2, 4))
        api(model, shard_placement_fn=lambda _: Shard(1))
    local: Any = model.weight._local_tensor  # to_local() makes another object
    outputs_of: list[tuple[torch.Size, list[float]]] = []

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: torch.Tensor | None = None) -> Any:
        outputs_of.append((outputs[0].shape, outputs[0].flatten().tolist()))
        full = outputs[0].view(2, 4)
        return (full, (full,)) if out is None else None

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = lambda mesh: ((local.contiguous(),), None), after
    assert torch.equal(model(torch.eye(4)).T, torch.arange(8.0).view(2, 4))
    assert outputs_of == [(torch.Size([4, 2]), [float(each) for each in range(8)])]
