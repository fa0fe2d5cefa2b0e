"""Programs train as they do on one process: structures and calls that take care to get right."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients, full
from helpers.inside import Recorder, engine_of, over
from helpers.ranks import on_ranks
from helpers.sharded import noise
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardwise import ConfigError, FSDPModule, StateError, fully_shard, replicate
from shardwise.testing.models import Block

batch = functools.partial(noise, width=6)


def assert_trains_alike(
    model: nn.Module, plain: nn.Module, steps: int = 3, make_batch: Callable[[int], torch.Tensor] = batch
) -> None:
    """Train both with the same batches and compare all parameters after every step."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for number in range(steps):
        for each in (model, plain):
            each(make_batch(number)).square().mean().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, left), right in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(full(right), left, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


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
    assert all(param.grad is shard.grad for param, shard in zip(model.parameters(), shards, strict=True))
    model.zero_grad()
    assert all(shard.grad is None for shard in shards)
    with pytest.raises(StateError, match="its steps would not reach the model"):
        torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("crosses", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("door", [fully_shard, replicate])
def test_shared_weights_stay_shared_or_say_so(door: Callable[[nn.Module], Any], warm: bool, crosses: bool) -> None:
    """Loading with ``assign=True`` leaves one parameter per place."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    for values in ("alike", "different", "tied again", "one place", "the first place"):
        texts.clear()
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        if crosses:
            door(model[0])
        door(model)
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
            with pytest.raises(StateError, match="is shared by 2 places, of which only some"):
                model(batch(0))
    logging.getLogger("shardwise").removeHandler(handler)


# ---- partial sums of deferred backwards ----


@on_ranks(4)
@pytest.mark.parametrize(
    "flags",
    [
        [(False, False)],
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
        for left, right in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(right.grad), left.grad)
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
@pytest.mark.parametrize("way", [{}, {"device_ids": None}], ids=["DTensors", "older way"])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("transport", ["auto", "gloo", "collective"])
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


@on_ranks(4)
@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("copies", [False, True])
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


# ---- checkpoints of one layer used twice ----


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
@pytest.mark.parametrize("order", ["ll", "llo", "lol", "oll", "lolo"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_may_be_checkpointed_twice_within_its_unit(order: str, reentrant: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), TwiceChecked(order, reentrant), TwiceChecked(order, reentrant), Block(6, 5))
    model[1].other.bias.requires_grad_(not frozen)
    plain = copy.deepcopy(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    assert_trains_alike(model, plain)


# ---- hooks that raise on one rank ----


@on_ranks(2, timeout_s=60)
@pytest.mark.parametrize("transport", ["auto", "gloo", "collective"])
@pytest.mark.parametrize("when", [1, 2, 3])
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
        for left, right in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(right.grad), left.grad)
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
@pytest.mark.parametrize("transport", ["auto", "gloo", "collective"])
@pytest.mark.parametrize("door", ["fully_shard", "kept", "hybrid", "replicate"])
def test_parameters_may_have_no_elements(transport: Any, door: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Hollow(only=True), Hollow(only=False), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    with over(transport):
        for block in (*model, model):
            if door == "replicate":
                replicate(block)
            else:
                fully_shard(block, mesh=mesh if door == "hybrid" else None, reshard_after_forward=door != "kept")
    assert_trains_alike(model, plain)
    assert model[0].rows.grad is None
    model(batch(0)).sum().backward()
    assert model[0].rows.grad.shape == (0, 6)


# ---- all-gather extensions that pad ----


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


@on_ranks(4)
@pytest.mark.parametrize(("rows", "door"), [(3, fully_shard), (5, fully_shard), (8, fully_shard), (5, replicate)])
def test_extensions_may_pad_uneven_shards(rows: int, door: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6))
    plain = copy.deepcopy(model)
    model[0].weight = nn.Parameter(Padding(model[0].weight.detach().clone()), requires_grad=False)
    plain[0].weight.requires_grad_(False)
    for layer in model:
        door(layer)
    door(model)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, plain)]
    for number in range(3):
        assert torch.allclose(model(batch(number)), plain(batch(number)))
        for each in (model, plain):
            each(batch(number)).square().mean().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


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
@pytest.mark.parametrize("door", [fully_shard, replicate])
def test_outputs_may_be_views_written_to_through_others(door: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ChangedThroughAView(), ChangedThroughAView())
    model = copy.deepcopy(plain)
    for block in model:
        door(block)
    door(model)
    for each in (model, plain):
        each(batch(0)).square().mean().backward()
    average_gradients(plain)
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(right.grad), left.grad, rtol=1e-5, atol=1e-6)


# ---- hooks on streams, compilation ----


@on_ranks(2)
def test_an_all_reduce_hook_with_a_stream_runs_without_an_accelerator() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5))
    seen: list[int] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()), stream=torch.Stream("cpu"))
    model(batch(0)).sum().backward()
    assert len(seen) == 1


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("how", ["method", "function", "whole"])
def test_blocks_may_be_compiled_after_they_are_sharded(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), Block(6, 7), Block(6, 5))
    plain = copy.deepcopy(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    whole: nn.Module = model
    if how == "method":
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
    elif how == "function":
        for index, block in enumerate(model):
            model[index] = torch.compile(block, fullgraph=True, backend="aot_eager")
    else:
        whole = torch.compile(model, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for number in range(3):
        whole(batch(number)).square().mean().backward()
        plain(batch(number)).square().mean().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(right), left, rtol=1e-5, atol=1e-6)


# ---- frozen parameters, other dtypes ----


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


@on_ranks(2)
@pytest.mark.parametrize("door", ["fully_shard", "replicate", "older way"])
def test_parameters_that_change_their_dtype_before_backward(door: str) -> None:
    torch.manual_seed(0)
    x = batch(0)
    gradients: list[torch.Tensor] = []
    for there_and_back in (None, True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(6, 9), Block(6, 7))
        if door == "fully_shard":
            for block in model:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(model)
        else:
            replicate(model, **({} if door == "replicate" else {"device_ids": None}))
        loss = model(x).square().mean()
        if there_and_back is not None:
            model.double()
        if there_and_back:
            model.float()
        if there_and_back is False:
            # Parameters that stay what they were give what torch gives on one process.
            error, text = (RuntimeError, "scalar type") if door == "older way" else (StateError, "after the forward")
            with pytest.raises(error, match=text):
                loss.backward()
            continue
        loss.backward()
        gradients.append(torch.cat([full(param.grad).flatten().double() for param in model.parameters()]))
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-6)


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
        torch.testing.assert_close(full(right.grad), left.grad)


class LentInARecomputedSegment(nn.Module):
    """One checkpoint around the unit that lends its weight and the layer of the outer unit that uses it after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.second(torch.sin(self.first(x))), x, use_reentrant=False)


@on_ranks(2)
def test_a_unit_that_lends_a_weight_keeps_it_while_the_borrower_is_recomputed() -> None:
    torch.manual_seed(0)
    model = LentInARecomputedSegment()
    plain = copy.deepcopy(model)
    fully_shard(model.first)
    fully_shard(model)
    assert_trains_alike(model, plain)
    engine = engine_of(model)
    assert engine.journal.plan is not None
    model(batch(0)).square().mean().backward()
    recorder = Recorder(engine)
    model(batch(0)).square().mean().backward()
    assert tuple(recorder.events) == engine.journal.plan.calls


# ---- subclasses of tensors under the older replicate ----


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
