"""Units whose parameters are read again, or not at all: checkpoints, lent weights, frozen parts used twice, units left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_averaged
from helpers.inside import Recorder, engine_of
from helpers.layers import Layers, layer
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, replicate

Way = Callable[[Any, torch.Tensor], torch.Tensor]


def three(way: Way, is_lent: bool = False) -> Layers:
    """Return three layers; ``is_lent``: the second has the weight of the first."""
    it: Any = Layers(way, first=layer(), second=layer(), third=layer())
    if is_lent:
        it.second.weight = it.first.weight
    it.is_checkpointed = True
    return it


def reentrant(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=True)


def in_order(order: str, is_reentrant: bool) -> Way:
    """Run the first layer, under a checkpoint each time, where ``order`` has an f, and the second where it has an s."""

    def way(it: Any, x: torch.Tensor) -> torch.Tensor:
        for step in order:
            x = torch.tanh(checkpoint(it.first, x, use_reentrant=is_reentrant) if step == "f" else it.second(x))
        return x

    return way


FROZEN, WEIGHT = ("second.weight", "second.bias"), ("first.weight",)
WAYS: dict[str, Way] = {
    "in a row": lambda it, x: it.second(torch.tanh(it.second(it.first(x)))).tanh(),
    "side by side": lambda it, x: it.second(y := it.first(x)).tanh() + it.second(2 * y).tanh(),
    "around another": lambda it, x: it.second(it.third(it.second(it.first(x)).tanh())).tanh(),
    "in a checkpoint and outside": lambda it, x: it.second(torch.tanh(reentrant(it.second, it.first(x)))),
    "lent within a checkpoint": lambda it, x: reentrant(lambda y: it.second(torch.sin(it.first(torch.cos(y)))), x),
    "lent to what is recomputed later": lambda it, x: it.third(torch.sin(it.second(torch.sin(reentrant(it.first, x))))),
    "lent in a recomputed segment": lambda it, x: checkpoint(
        lambda y: it.second(torch.sin(it.first(y))), x, use_reentrant=False
    ),
}
# The way, whether the first weight is lent, frozen parameters, and units.
PROGRAMS: dict[str, tuple[Way, bool, tuple[str, ...], tuple[str, ...]]] = {
    **{f"checkpointed {order}": (in_order(order, True), False, (), ("",)) for order in ("ff", "ffs", "sff", "fsfs")},
    **{
        f"checkpointed {order}, not reentrant": (in_order(order, False), False, ("second.bias",), ("",))
        for order in ("ff", "fsf")
    },
    "checkpointed fsf, half frozen": (in_order("fsf", True), False, ("second.bias",), ("",)),
    **{f"frozen {way}": (WAYS[way], False, FROZEN, ("second", "third", "")) for way in [*WAYS][:3]},
    "partly frozen": (WAYS["around another"], False, FROZEN[:1], ("second", "third", "")),
    **{
        f"in a checkpoint and outside, unit {unit!r}": (WAYS["in a checkpoint and outside"], False, (), (unit, ""))
        for unit in ("second", "first")
    },
    "in a checkpoint and outside": (WAYS["in a checkpoint and outside"], False, (), ("",)),
    "lent within a checkpoint": (WAYS["lent within a checkpoint"], True, (), ("second",)),
    "lent within a checkpoint, frozen": (WAYS["lent within a checkpoint"], True, WEIGHT, ("second",)),
    "lent to what is recomputed later": (WAYS["lent to what is recomputed later"], True, (), ("second", "")),
    "lent to what is recomputed later, frozen": (
        WAYS["lent to what is recomputed later"], True, WEIGHT, ("second", "")
    ),
    "lent in a recomputed segment": (WAYS["lent in a recomputed segment"], True, (), ("first",)),
}  # fmt: skip


def made(way: Way, is_lent: bool, frozen: tuple[str, ...], units: tuple[str, ...]) -> tuple[Any, nn.Module]:
    """Return a sharded model of three layers between two others, and the plain one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), three(way, is_lent), nn.Linear(6, 6))
    for name in frozen:
        model[1].get_parameter(name).requires_grad_(False)
    plain = copy.deepcopy(model)
    for name in units:
        fully_shard(model[1].get_submodule(name))
    return fully_shard(model), plain


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_a_program_trains_as_on_one_process(program: str) -> None:
    assert_trains_alike(*made(*PROGRAMS[program]))


@on_ranks(2)
def test_the_plan_of_a_lent_weight_in_a_recomputed_segment_is_what_is_done() -> None:
    model, _ = made(*PROGRAMS["lent in a recomputed segment"])
    for _ in range(2):
        model(batch(0)).square().mean().backward()
    engine = engine_of(model)
    recorder = Recorder(engine)
    model(batch(0)).square().mean().backward()
    assert engine.exec_order.plan is not None
    assert tuple(recorder.calls) == engine.exec_order.plan.calls


@on_ranks(2)
@pytest.mark.parametrize("how", ["an input needs a gradient", "it is switched on"])
def test_a_reentrant_checkpoint_may_come_into_the_graph_after_the_first_step(how: str) -> None:
    torch.manual_seed(0)
    model: Any = three(lambda it, x: it.first(reentrant(it.first, x) if it.is_checkpointed else it.first(x)))
    plain = copy.deepcopy(model)
    fully_shard(model)
    for step in range(3):
        x = batch(step)
        if how == "it is switched on":
            model.is_checkpointed = plain.is_checkpointed = step > 0
        x.requires_grad_(step > 0 or how == "it is switched on")
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        assert_averaged(model, plain)


@on_ranks(2)
def test_gradients_of_a_nested_backward_do_not_end_a_unit_that_lends() -> None:
    """Also in a second backward over the same graph, when one has shown how many gradients come."""
    torch.manual_seed(0)
    model: Any = three(lambda it, x: reentrant(it.first, torch.sin(it.second(torch.sin(it.first(x))))), is_lent=True)
    plain = copy.deepcopy(model)
    fully_shard(model.second)
    fully_shard(model)
    for each in (model, plain):
        loss = each(batch(0).requires_grad_()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_averaged(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("forwards", [(1, 2), (2, 1)])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_lent_weight_stays_full_after_a_nested_backward_while_the_borrower_may_need_it(
    reshard: bool | None, forwards: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model: Any = three(lambda it, x: it.second(torch.tanh(reentrant(it.first, it.third(x)))), is_lent=True)
    plain = copy.deepcopy(model)
    fully_shard(model.first, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            torch.stack([each(batch(step)).square().mean() for _ in range(forwards[step % 2])]).sum().backward()
        assert_averaged(model, plain)


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
    assert_averaged(model, plain, rtol=1e-5, atol=1e-6)
