"""Units whose parameters are read again, or not at all: recomputed, lent to other units, passed several times, left out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients, comparable, full
from helpers.inside import Recorder, engine_of
from helpers.models import Block
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, replicate


class TwiceChecked(nn.Module):
    """Runs one layer twice within its unit, each time under a checkpoint of its own; ``order`` says where others run."""

    def __init__(self, order: str, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.order, self.reentrant = order, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.order:
            module = {"l": self.layer, "o": self.other}[step]
            if step == "l":
                x = checkpoint(module, x, use_reentrant=self.reentrant)
            else:
                x = module(x)
            x = torch.tanh(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize(
    ("order", "reentrant", "frozen"),
    checkered(["ll", "llo", "lol", "oll", "lolo"], [True, False], [False, True], every=3),
)
def test_a_layer_may_be_checkpointed_twice_within_its_unit(order: str, reentrant: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), TwiceChecked(order, reentrant), TwiceChecked(order, reentrant), Block(6, 5))
    model[1].other.bias.requires_grad_(not frozen)
    plain = copy.deepcopy(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    assert_trains_alike(model, plain)


class FrozenTwice(nn.Module):
    """A frozen part that an input with a gradient goes through twice."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
        self.between = nn.Linear(6, 6, bias=False)
        self.order = order
        if order == "partly frozen":
            self.part[0].bias.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.order == "side by side":
            return self.part(x) + self.part(2 * x)
        return self.part(self.part(x) if self.order == "in a row" else self.between(self.part(x)))


@on_ranks(2)
def test_a_frozen_unit_stays_unsharded_until_backward_has_left_all_its_passes() -> None:
    for order in ("in a row", "side by side", "around another", "partly frozen"):
        torch.manual_seed(0)
        model = FrozenTwice(order)
        plain = copy.deepcopy(model)
        for part in (model.part, model.between, model):
            fully_shard(part)
        assert_trains_alike(model, plain)


class HalfCheckpointed(nn.Module):
    """A layer that is used twice, once in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layer = Block(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return self.layer(x)


@on_ranks(2)
def test_a_layer_may_be_used_in_a_reentrant_checkpoint_and_outside_of_it() -> None:
    for units in ([], ["layer"], ["first"]):
        torch.manual_seed(0)
        model = nn.Sequential(HalfCheckpointed(), nn.Linear(6, 6))
        plain = copy.deepcopy(model)
        for name in units:
            fully_shard(model[0].get_submodule(name))
        fully_shard(model[0])
        fully_shard(model)
        assert_trains_alike(model, plain)


class CheckpointedLater(nn.Module):
    """One layer, used twice; its first use is a reentrant checkpoint when ``is_checkpointed``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Block(6, 5)
        self.is_checkpointed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True) if self.is_checkpointed else self.layer(x)
        return self.layer(x)


@on_ranks(2)
@pytest.mark.parametrize("how", ["an input needs a gradient", "it is switched on"])
def test_a_reentrant_checkpoint_may_come_into_the_graph_after_the_first_step(how: str) -> None:
    torch.manual_seed(0)
    model = CheckpointedLater()
    plain = copy.deepcopy(model)
    fully_shard(model)
    for step in range(3):
        x = batch(step)
        if how == "it is switched on":
            model.is_checkpointed = plain.is_checkpointed = step > 0
        x.requires_grad_(step > 0 or how == "it is switched on")
        for each in (model, plain):
            each(x).square().mean().backward()
        average_gradients(plain)
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(*comparable(mine.grad, expected.grad))
        model.zero_grad()
        plain.zero_grad()


class LentWithinACheckpoint(nn.Module):
    """Two layers with one weight, recomputed together; the second one is a unit, and lends the weight to the first."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.weight.requires_grad_(not is_frozen)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(torch.cos(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_unit_that_lends_a_weight_keeps_it_until_the_borrower_is_done(is_frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), LentWithinACheckpoint(is_frozen))
    plain = copy.deepcopy(model)
    fully_shard(model[1].second)
    fully_shard(model)
    assert_trains_alike(model, plain)


class LentAndRecomputed(nn.Module):
    """The first layer runs before the second, a unit that lends it its weight, and again under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.first, torch.sin(self.second(torch.sin(self.first(x)))), use_reentrant=True)


@on_ranks(2)
def test_gradients_of_a_nested_backward_do_not_end_a_unit_that_lends() -> None:
    """Also in a second backward over the same graph, when one has shown how many gradients come."""
    torch.manual_seed(0)
    model = LentAndRecomputed()
    plain = copy.deepcopy(model)
    fully_shard(model.second)
    fully_shard(model)
    for each in (model, plain):
        loss = each(batch(0).requires_grad_()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    average_gradients(plain)
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(*comparable(right.grad, left.grad))


class LentInARecomputedSegment(nn.Module):
    """One checkpoint around the unit that lends its weight and the layer of the outer unit that uses it after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.second(torch.sin(self.first(x))), x, use_reentrant=False)


class TiedAcrossACheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(checkpoint(self.inner, self.first(x), use_reentrant=True)))


class RecomputedAfterTheOwner(nn.Module):
    """Backward recomputes a layer whose weight is that of a unit, after both units have all their own gradients."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.first, self.owner, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6)
        self.owner.weight = self.first.weight
        self.owner.weight.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(self.owner(torch.sin(checkpoint(self.first, x, use_reentrant=True)))))


@on_ranks(2)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_tied_weight_stays_full_while_a_reentrant_checkpoint_of_another_unit_has_to_read_it(is_frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), RecomputedAfterTheOwner(is_frozen))
    plain = copy.deepcopy(model)
    for module in (model[1].owner, model[1], model):
        fully_shard(module)
    assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("forwards", [(1, 2), (2, 1)])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_lent_weight_stays_full_after_a_nested_backward_while_the_borrower_may_need_it(
    reshard: bool | None, forwards: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = TiedAcrossACheckpoint()
    plain = copy.deepcopy(model)
    fully_shard(model.inner, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            torch.stack([each(batch(step)).square().mean() for _ in range(forwards[step % 2])]).sum().backward()
        average_gradients(plain)
        for left, right in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(*comparable(right.grad, left.grad))


@on_ranks(2)
def test_a_unit_that_lends_a_weight_keeps_it_while_the_borrower_is_recomputed() -> None:
    torch.manual_seed(0)
    model = LentInARecomputedSegment()
    plain = copy.deepcopy(model)
    fully_shard(model.first)
    fully_shard(model)
    assert_trains_alike(model, plain)
    engine = engine_of(model)
    assert engine.exec_order.plan is not None
    model(batch(0)).square().mean().backward()
    recorder = Recorder(engine)
    model(batch(0)).square().mean().backward()
    assert tuple(recorder.calls) == engine.exec_order.plan.calls


class Aside(nn.Module):
    """Runs its first block in every forward; what comes out counts where ``uses_first``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), nn.Linear(6, 6)
        self.uses_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y if self.uses_first else x + 0 * y.detach())


@on_ranks(2)
@pytest.mark.parametrize("way", ["fully_shard", "replicate", "tensor parallel", "not unsharded in backward"])
def test_a_unit_that_backward_does_not_come_to_keeps_the_gradient_of_its_shards(way: str) -> None:
    """Its full parameters stay registered, and what their ``.grad`` shows then is no gradient of this backward."""
    torch.manual_seed(0)
    model = Aside()
    plain = copy.deepcopy(model)
    mesh, seed = None, 100 * dist.get_rank()
    if way == "tensor parallel":
        meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "heads"))
        parallelize_module(model, meshes["heads"], {"first.0": ColwiseParallel(), "first.1": RowwiseParallel()})
        mesh, seed = meshes["data"], 0  # ranks that share heads share batches
    for block in (model.first, model.second, model):
        if way == "replicate":
            replicate(block)
        else:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    for block in (model.first, model.second):
        block.set_unshard_in_backward(way != "not unsharded in backward")
    for number, uses_first in enumerate((True, False, True)):
        for each in (model, plain):
            each.uses_first = uses_first
            each(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed + number))).square().mean().backward()
    average_gradients(plain)
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(right.grad), left.grad, rtol=1e-5, atol=1e-6)
