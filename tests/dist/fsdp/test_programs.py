"""Programs train as they do on one process: structures and calls that take care to get right."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients, full
from helpers.inside import over
from helpers.models import Block
from helpers.pairs import checkered, pairwise
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import ConfigError, FSDPModule, StateError, fully_shard, replicate

# ---- what is done to parameters that are registered whole ----


@on_ranks(2)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", ["fully_shard", "replicate", "tensor parallel"])
def test_gradients_are_dropped_through_what_was_unsharded_by_hand(way: str, waits: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    if way == "tensor parallel":
        meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "heads"))
        parallelize_module(model, meshes["heads"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=meshes["data"])
    else:
        (fully_shard if way == "fully_shard" else replicate)(model)
    assert isinstance(model, FSDPModule)
    shards = list(model.parameters())
    model(batch(0)).square().mean().backward()
    assert all(shard.grad is not None for shard in shards)
    with torch.inference_mode():
        model(batch(1))
    handle = model.unshard(async_op=not waits)
    if handle is not None:
        handle.wait()
    model.zero_grad()
    assert all(shard.grad is None for shard in shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match="its steps would not reach the model"):
        optimizer.step()


@on_ranks()
@pytest.mark.parametrize(
    ("transport", "api", "num_ranks"), pairwise(["auto", "gloo", "collective"], [fully_shard, replicate], [2, 1])
)
def test_an_evaluation_that_comes_first_after_a_change_leaves_memory_to_train_in(api: Any, transport: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    api(model)
    model.set_transport(transport)
    model(batch(0)).sum()
    for each in (model, plain):
        each.load_state_dict({name: tensor * 0.5 for name, tensor in each.state_dict().items()}, assign=True)
        with torch.inference_mode():
            each(batch(1))
        values = {name: tensor.clone() for name, tensor in each.state_dict().items()}
        each.to_empty(device="cpu")
        each.load_state_dict(values)
    assert_trains_alike(model, plain)


@on_ranks()
@pytest.mark.parametrize(("api", "evaluates", "num_ranks"), pairwise([fully_shard, replicate], [True, False], [2, 1]))
def test_shards_that_are_put_in_place_need_not_be_contiguous(api: Any, evaluates: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    api(model)
    model(batch(0)).sum()
    model.reshard()
    for owner in model.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            half = param.to_local().detach() * 0.5
            if half.ndim == 2:  # not contiguous: the parameter gets another local tensor, not other memory alone
                half = torch.cat([half, half], 1)[:, : half.shape[1]]
            place = {"shape": param.shape, "stride": param.stride()}
            setattr(owner, name, nn.Parameter(DTensor.from_local(half, param.device_mesh, param.placements, **place)))
            del half, param
    for param in plain.parameters():
        param.data.mul_(0.5)
    if evaluates:  # then it is what brings shards home: nothing it makes may be of inference mode
        with torch.inference_mode():
            model(batch(1))
        model.reshard()
    assert not any(param.is_inference() or param.to_local().is_inference() for param in model.parameters())
    assert_trains_alike(model, plain)


@on_ranks(1, 2)
def test_replicated_parameters_compute_as_they_lie_after_a_transposition_in_place() -> None:
    model, x = replicate(nn.Linear(6, 6, bias=False)), batch(0)
    assert isinstance(model, FSDPModule)
    before = model(x)
    model.reshard()
    weight = model.weight
    turned = DTensor.from_local(weight.to_local().detach().t(), weight.device_mesh, weight.placements)
    model.weight = nn.Parameter(turned)
    torch.testing.assert_close(model(x), x @ full(turned).t())
    assert not torch.equal(model(x), before)


@on_ranks(2)
@pytest.mark.parametrize(("crosses", "warm", "api"), pairwise([True, False], [True, False], [fully_shard, replicate]))
def test_shared_weights_stay_shared_or_say_so(api: Callable[[nn.Module], Any], warm: bool, crosses: bool) -> None:
    """Loading with ``assign=True`` leaves one parameter per place."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    for values in ("alike", "different", "tied again", "one place", "the first place"):
        texts.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        if crosses:
            api(model[0])
        api(model)
        if warm:
            model(batch(0)).sum().backward()
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        state["1.weight"] += values == "different"
        if values in ("alike", "different", "tied again"):
            model.load_state_dict(state, assign=True)
            if values == "tied again":
                model[1].weight = model[0].weight
            y = model(batch(0))
            assert model[0].weight is model[1].weight
            assert bool(texts) is (values == "different"), texts
            weight, *biases = (full(state[name]) for name in ("0.weight", "0.bias", "1.bias"))
            expected = nn.functional.linear(nn.functional.linear(batch(0), weight, biases[0]), weight, biases[1])
            torch.testing.assert_close(y, expected)
        else:
            place = 1 if values == "one place" else 0
            model[place].weight = nn.Parameter(state["0.weight"])
            with pytest.raises(StateError, match="is shared by 2 places, and only some of them"):
                model(batch(0))
    logging.getLogger("shardwise").removeHandler(handler)


# ---- partial sums of deferred backwards ----


@on_ranks(4)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([(False, False)], marks=pytest.mark.exhaustive),
        [(False, False), (False, False)],
        [(False, True), (False, False)],
        [(False, False), (True, False)],
        [(True, False), (False, True)],
    ],
)
def test_partial_sums_of_deferred_backwards_count(flags: list[tuple[bool, bool]]) -> None:
    """``flags``: (all-reduce, last backward) of each microbatch; the last one is whole."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), Block(6, 7))
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        for number, (reduces, is_last) in enumerate([*flags, (True, True)]):
            model.set_requires_all_reduce(reduces)
            model.set_is_last_backward(is_last)
            model(batch(number)).square().mean().backward()
            plain(batch(number)).square().mean().backward()
        average_gradients(plain)
        assert_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()


# ---- replicate ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


@on_ranks(2)
@pytest.mark.parametrize("way", [{}, {"device_ids": None}], ids=["DTensors", "older way"])
@pytest.mark.parametrize("swaps", [False, True], ids=["", "swapped"])
def test_replicated_modules_may_share_a_weight(way: dict[str, Any], swaps: bool) -> None:
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    for module in (model.embed, model.middle, model.head):
        replicate(module, **way)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    root = replicate(model, **way)
    assert_trains_alike(root, plain)
    assert model.head.weight is model.embed.weight


class Ahead(nn.Module):
    """Unshards its inner modules by hand before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(6, 9), Block(6, 7), Block(6, 5)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second, self.third):
            if isinstance(block, FSDPModule):
                block.unshard(async_op=True)
        return self.third(self.second(self.first(x * self.scale)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("way", "reshard", "transport"),
    checkered([{}, {"device_ids": None}], [False, True], ["auto", "gloo", "collective"], every=3),
)
def test_units_unsharded_by_hand_inside_a_replicated_module(way: dict[str, Any], reshard: bool, transport: Any) -> None:
    torch.manual_seed(0)
    model = Ahead()
    plain = copy.deepcopy(model)
    with over(transport):
        for block in (model.first, model.second, model.third):
            fully_shard(block, reshard_after_forward=reshard)
        replicate(model, **way)
    assert_trains_alike(model, plain, steps=4)


# ---- modules that follow their parameters ----


class Follower(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["followed"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.__dict__["followed"], self.bias)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x[None])[0][0])


@on_ranks()
@pytest.mark.parametrize(("reshard", "copies", "num_ranks"), [(True, False, 2), (False, True, 2), (2, True, 4)])
def test_modules_that_follow_a_parameter_get_the_one_that_computes(reshard: bool | int, copies: bool) -> None:
    for make in (lambda: nn.Sequential(Follower(6, 6), nn.Tanh(), Follower(6, 6)), Recurrent):
        torch.manual_seed(0)
        model = make()
        plain = copy.deepcopy(model)
        for child in model.children():
            if list(child.parameters()):
                fully_shard(child, reshard_after_forward=reshard)
        fully_shard(model)
        if copies:
            assert_trains_alike(copy.deepcopy(model), copy.deepcopy(plain))
        assert_trains_alike(model, plain)


class TwoRecurrent(nn.Module):
    """Two LSTMs that share all weights: each keeps weak references to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(6, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)
        for name, _ in list(self.first.named_parameters()):
            setattr(self.second, name, getattr(self.first, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x[None])[0])[0][0]


@on_ranks(2)
@pytest.mark.parametrize(
    ("units", "api", "begun"),
    pairwise([["first"], ["second"], ["first", "second"]], [fully_shard, replicate], [False, True]),
)
def test_recurrent_modules_that_share_weights_are_converted(units: list[str], api: Any, begun: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TwoRecurrent())  # plain: what is converted is found from above the units
    plain = copy.deepcopy(model)
    for name in units:
        api(model[0].get_submodule(name))
    api(model[0])
    if begun:
        assert_trains_alike(model, plain)
    for each in (model, plain):
        each.double().float()
    assert_trains_alike(model, plain)
    model.double()
    params = {param for param in model.parameters() if param.dtype is torch.float64}
    assert len(params) == len(list(model.parameters())) == 4, "they are still shared"


# ---- hooks that raise on one rank ----


@on_ranks(2, timeout_s=60)
@pytest.mark.parametrize(("transport", "when"), [("auto", 1), ("auto", 2), ("auto", 3), ("gloo", 2), ("collective", 3)])
def test_a_hook_that_raises_on_one_rank_leaves_the_ranks_in_step(transport: Any, when: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), Block(6, 7))
    plain = copy.deepcopy(model)
    with over(transport):
        for block in model:
            fully_shard(block)
        fully_shard(model)
    calls = [0]

    def fail(_: torch.Tensor) -> None:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == when:
            raise ArithmeticError("boom in a hook")

    model[0].up.weight.register_post_accumulate_grad_hook(fail)
    for number in range(5):
        if dist.get_rank() == 1 and number + 1 == when:
            with pytest.raises(ArithmeticError, match="boom"):
                model(batch(number)).square().mean().backward()
        else:
            model(batch(number)).square().mean().backward()
        plain(batch(number)).square().mean().backward()
        average_gradients(plain)
        assert_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()


# ---- parameters without elements ----


class Hollow(nn.Module):
    def __init__(self, only: bool) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(0, 6))
        self.columns = nn.Parameter(torch.zeros(6, 0))
        self.weight = None if only else nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (x @ self.rows.t()).sum() + (x @ self.columns).sum()
        return x if self.weight is None else x @ self.weight


@on_ranks(4)
@pytest.mark.parametrize(
    ("transport", "api"),
    [
        ("auto", "fully_shard"),
        pytest.param("gloo", "fully_shard", marks=pytest.mark.exhaustive),
        ("collective", "kept"),
        pytest.param("auto", "hybrid", marks=pytest.mark.exhaustive),
        ("collective", "hybrid"),
        ("gloo", "replicate"),
    ],
)
def test_parameters_may_have_no_elements(transport: Any, api: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Hollow(only=True), Hollow(only=False), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    with over(transport):
        for block in (*model, model):
            if api == "replicate":
                replicate(block)
            else:
                fully_shard(block, mesh=mesh if api == "hybrid" else None, reshard_after_forward=api != "kept")
    assert_trains_alike(model, plain)
    assert model[0].rows.grad is None
    model(batch(0)).sum().backward()
    assert model[0].rows.grad.shape == (0, 6)


# ---- outputs that are views ----


class ChangedThroughAView(nn.Module):
    """Returns a view that was written to through another view: its history is made anew when somebody asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = y.reshape(-1).view(y.shape)
        y.view(-1).add_(1)
        return y


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_outputs_may_be_views_written_to_through_others(api: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ChangedThroughAView(), ChangedThroughAView())
    model = copy.deepcopy(plain)
    for block in model:
        api(block)
    api(model)
    for each in (model, plain):
        each(batch(0)).square().mean().backward()
    average_gradients(plain)
    assert_gradients(model, plain, rtol=1e-5, atol=1e-6)


# ---- hooks on streams, compilation ----


@on_ranks(2)
def test_an_all_reduce_hook_with_a_stream_runs_without_an_accelerator() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5))
    seen: list[int] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()), stream=torch.Stream("cpu"))
    model(batch(0)).sum().backward()
    assert len(seen) == 1


@on_ranks(2)
def test_tensors_that_functional_call_puts_in_place_of_parameters_are_refused_and_the_model_goes_on() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    for api in (fully_shard, replicate):
        model = copy.deepcopy(plain)
        api(model[0])
        api(model)
        own = dict(model.named_parameters())
        assert torch.equal(torch.func.functional_call(model, own, batch(0)), plain(batch(0)))
        doubled = {name: param * 2 for name, param in own.items()}
        for replaced in (doubled, {name: full(value).detach() for name, value in doubled.items()}):
            with pytest.raises(ConfigError, match=r"1\.weight: a D?Tensor that is no Parameter.*functional_call"):
                torch.func.functional_call(model, replaced, batch(0))
            assert torch.equal(model(batch(0)), plain(batch(0)))
