"""A program that catches an exception of a step and goes on has the numbers of one process, and keeps nothing gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import (
    DesyncError,
    StateError,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    set_default_transport,
    set_wait_report,
)


class Lookup(nn.Module):
    """Writes to its table, or raises, when it is told to."""

    def __init__(self, todo: str = "") -> None:
        super().__init__()
        self.table, self.todo = nn.Embedding(6, 4), todo

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.todo == "data":
            self.table.weight.data = self.table.weight.data + 1
        if self.todo == "write and raise":
            with torch.no_grad():
                self.table.weight.mul_(2)
            raise ValueError
        return self.table(x)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError


def _train(model: nn.Module, x: torch.Tensor, num_steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(num_steps):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _pair() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    plain = nn.Sequential(Lookup(), nn.Linear(4, 4), nn.Linear(4, 3))
    model = nn.Sequential(Lookup(), nn.Linear(4, 4), nn.Linear(4, 3))
    model.load_state_dict(plain.state_dict())
    return plain, model, torch.tensor([0, 3, 5])


@pytest.mark.parametrize("warm", [False, True])
@on_ranks(2)
def test_a_forward_whose_end_raised_leaves_no_pass_open(warm: bool) -> None:
    plain, model, x = _pair()
    fully_shard(model[1])
    fully_shard(model, reshard_after_forward=True)
    before = _train(model, x) if warm else []
    model[0].todo = "data"
    with pytest.raises(StateError, match=r"0\.table\.weight .* through \.data"):
        model(x)
    model[0].todo = ""
    assert isinstance(model[0].table.weight, DTensor)
    torch.testing.assert_close([*before, *_train(model, x)], _train(plain, x, 6 if warm else 3))


@on_ranks(2)
def test_a_write_of_a_forward_that_raised_reaches_shards_after_the_pass() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup, self.seen = Lookup(), list[torch.Tensor]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lookup.todo = "write and raise"
            try:
                self.lookup(x)
            except ValueError:
                self.seen += [each.clone() for each in shards]
            self.lookup.todo = ""
            return self.lookup(x)

    model, shards = Careful(), list[torch.Tensor]()
    fully_shard(model.lookup)
    fully_shard(model)
    with torch.no_grad():
        model(torch.tensor([1]))  # packs the shards
    weight: Any = model.lookup.table.weight
    shards.append(weight.to_local())
    before = shards[0].clone()
    output = model(torch.tensor([1, 2]))
    torch.testing.assert_close(model.seen[-1], before, rtol=0, atol=0)  # other ranks may have read it
    torch.testing.assert_close(shards[0], 2 * before, rtol=0, atol=0)
    torch.testing.assert_close(output, weight.full_tensor()[1:3], rtol=0, atol=0)


@on_ranks(2)
def test_a_double_backward_that_raised_keeps_nothing_full() -> None:
    class Net(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x = self[0](input)
            return self[1](Raises.apply(x) if self.training else x)

    model = Net(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fully_shard(each)
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model.eval()
    loss = model(x).sum()
    assert all(isinstance(param, DTensor) for each in model for param in each.parameters())
    loss.backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_backward_in_a_forward_that_raised_leaves_no_gather_behind() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.asks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            if self.asks:
                with pytest.raises(ValueError):
                    torch.autograd.grad(self.blocks[0](Raises.apply(x)).sum(), x)
            for each in [*self.blocks][1:]:
                h = each(h)
            return h

    torch.manual_seed(0)
    plain, model, x = Net(), Net(), torch.ones(2, 4, requires_grad=True)
    model.load_state_dict(plain.state_dict())
    for each in (*model.blocks, model):
        fully_shard(each)
    assert _train(model, x) == pytest.approx(_train(plain, x))  # from here on a plan prefetches
    plain.asks = model.asks = True
    assert _train(model, x) == pytest.approx(_train(plain, x))


class _NoMemory(torch.Tensor):
    """A shard whose gather ends without memory while ``fails``."""

    fails = False

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor) -> _NoMemory:
        return torch.Tensor._make_subclass(cls, data)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]

    def __init__(self, data: torch.Tensor) -> None: ...

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if _NoMemory.fails:
            raise torch.OutOfMemoryError("no memory for the full parameter")
        if out is not None:
            return None
        return outputs[0], outputs


@on_ranks(2)
def test_the_divide_factor_cannot_change_while_sums_over_shards_wait() -> None:
    model: Any = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        StateError, match=r"between backwards of one step: gradients of weight .* wait for their all-reduce"
    ):
        model.set_gradient_divide_factor(1.0)
    model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    model.set_requires_all_reduce(True)
    model(torch.ones(2, 4)).sum().backward()
    gradient: Any = model.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), torch.full((4, 4), 4.0))  # 2 ranks of 2 samples: not divided


class Predicts(nn.Sequential):
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


@on_ranks(2)
def test_a_rank_without_memory_raises_torchs_error_and_can_go_on() -> None:
    model: Any = Predicts(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in model:
        each.weight = nn.Parameter(_NoMemory(each.weight.detach()))
        fully_shard(each)
    fully_shard(model)
    register_fsdp_forward_method(model, "predict")
    x = torch.ones(2, 4)
    model(x).sum().backward()
    for call in (model, model[1], model.predict):
        _NoMemory.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="no memory for the full parameter"):
            call(x)
        _NoMemory.fails = False
        call(x).sum().backward()


@pytest.mark.parametrize("api", [fully_shard, replicate])
@on_ranks(2)
def test_a_backward_that_raised_on_one_rank_leaves_the_next_step_whole(api: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.raises = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            for each in [*self.blocks][1:]:
                x = each(Raises.apply(x) if self.raises else x)
            return x

    torch.manual_seed(0)
    plain, model, x = Net(), Net(), torch.ones(2, 4)
    model.load_state_dict(plain.state_dict())
    for each in (*model.blocks, model):
        api(each)
    losses = _train(model, x)
    model.raises = dist.get_rank() == 0
    with pytest.raises((ValueError, DesyncError)):
        model(x).sum().backward()
    model.raises = False
    model.zero_grad()
    assert [*losses, *_train(model, x)] == pytest.approx(_train(plain, x, 6))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.raises = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, each in enumerate(self.blocks):
            x = each(x)
            if self.raises and number == 1:
                raise ValueError
        return x


def _chain() -> Chain:
    torch.manual_seed(0)
    model = Chain()
    for each in (*model.blocks, model):
        fully_shard(each)
    return model


@on_ranks(2, fresh=True)  # the watch of waits may still cut connections when the body has ended
def test_an_exception_that_one_rank_has_caught_is_named_where_a_backend_gathers() -> None:
    set_wait_report(30.0, deadlock_s=3.0)
    set_default_transport("gloo")
    try:
        model, x = _chain(), torch.ones(2, 4)
        with torch.no_grad():
            expected = model(x)
            model.raises = dist.get_rank() == 0
            if dist.get_rank() == 0:
                with pytest.raises(ValueError):
                    model(x)
            model.raises = False
            with pytest.raises(DesyncError):
                model(x)
                model(x)  # rank 1 may end the forward that rank 0 has left, by gathers of this one
        assert expected.isfinite().all()
    finally:
        set_default_transport("auto")


@on_ranks(2)
def test_an_exception_that_all_ranks_have_caught_at_one_place_leaves_the_model() -> None:
    set_default_transport("gloo")
    try:
        model, x = _chain(), torch.ones(2, 4)
        expected = model(x)
        for _ in range(2):
            model.raises = True
            with pytest.raises(ValueError):
                model(x)
            model.raises = False
            torch.testing.assert_close(model(x), expected)
    finally:
        set_default_transport("auto")
