"""What users do to a model beside its engine trains as on one process, or is refused by name on every rank."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, assert_same, average_gradients, comparable
from helpers.models import Block
from helpers.ranks import FOUR, on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, vector_to_parameters

from shardwise import ConfigError, DesyncError, StateError, fully_shard, replicate


def _blocks(make: Callable[[], nn.Module] = lambda: Block(6, 10), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(make(), make())


def _sharded(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def _replicated(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        replicate(block)
    replicate(model)
    return model


def _older(model: nn.Sequential) -> nn.Sequential:
    replicate(model, device_ids=None)
    return model


def _step(model: nn.Module, number: int = 0) -> None:
    model(batch(number)).square().mean().backward()


# ---- hooks on gradients ----


def _scale(factor: float, param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(factor)


@on_ranks(2, FOUR)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_the_gradient_of_a_parameter_change_what_is_accumulated(when: str) -> None:
    for add in ("register_hook", "register_post_accumulate_grad_hook"):
        model, plain = _blocks(), _blocks()
        plain_weight = plain[0].up.weight
        if when == "after":
            _sharded(model)
        for weight in (model[0].up.weight, plain_weight):
            if add == "register_hook":
                weight.register_hook(lambda gradient: gradient * 0.5)
                handle = weight.register_hook(lambda gradient: gradient * 100)
            else:
                weight.register_post_accumulate_grad_hook(functools.partial(_scale, 0.5))
                handle = weight.register_post_accumulate_grad_hook(functools.partial(_scale, 100.0))
            handle.remove()
        if when == "before":
            _sharded(model)
        assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_registered_on_a_parameter_that_stays_full_is_named(add: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Block(6, 10))
    fully_shard(model[1])
    fully_shard(model)
    loss = model(batch(0)).square().mean()  # the root's own parameters are full
    handle = getattr(model[0].bias, add)(lambda _: None)
    with pytest.raises(StateError, match=r"a hook was registered on the full form of 0\.bias"):
        loss.backward()
    handle.remove()
    model(batch(0)).square().mean().backward()


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "replicate", "replicate_older"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_follows_the_accumulation_sees_all_that_has_been_accumulated(api: str, when: str) -> None:
    model, plain = _blocks(), _blocks()
    shard = {"fully_shard": _sharded, "replicate": _replicated, "replicate_older": _older}[api]
    calls = {id(model): 0, id(plain): 0}

    def follow(which: int, param: torch.Tensor) -> None:
        calls[which] += 1
        _scale(0.5, param)

    def hook(each: nn.Module) -> None:  # torch never frees a parameter that such a hook of its own refers to
        each[0].up.weight.register_post_accumulate_grad_hook(functools.partial(follow, id(each)))
        each[1].down.weight.register_post_accumulate_grad_hook(functools.partial(follow, id(each)))

    hook(plain)
    if when == "before":
        hook(model)
    shard(model)
    if when == "after":
        hook(model)
    for number in range(4):
        for each in (model, plain):
            _step(each, number)
        if number == 2:
            for each in (model, plain):
                each.zero_grad()
    average_gradients(plain)
    assert_gradients(model, plain)
    assert calls == {id(model): 8, id(plain): 8}


@on_ranks(2)
def test_backwards_that_are_set_together_are_followed_once() -> None:
    model, calls = _sharded(_blocks()), list[int]()
    model[0].up.weight.register_post_accumulate_grad_hook(lambda param: calls.append(id(param)))
    model.set_is_last_backward(False)
    _step(model, 0)
    model.set_is_last_backward(True)
    _step(model, 1)
    assert len(calls) == 1


@on_ranks(2)
def test_a_removed_hook_of_before_sharding_is_not_called_any_more() -> None:
    model, plain = _blocks(), _blocks()
    handle = model[0].up.weight.register_hook(lambda gradient: gradient * 100)
    _sharded(model)
    handle.remove()
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_a_hook_that_raises_leaves_all_gradients_and_one_that_returns_something_else_is_named() -> None:
    model = _sharded(_blocks())
    handle = model[0].up.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _step(model)
    assert all(param.grad is not None for param in model.parameters())
    handle.remove()
    model.zero_grad()
    model[0].up.weight.register_hook(lambda gradient: gradient.to_local())
    for _ in range(2):  # the second time, too: the ranks have not lost each other
        with pytest.raises(StateError, match=r"0\.up\.weight.*return a DTensor of the same shape"):
            _step(model)


@on_ranks(2)
def test_sparse_gradients_of_embeddings_are_those_of_dense_ones() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.block = nn.Embedding(11, 6, sparse=True), Block(6, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.table((x.abs() * 10).long() % 11).mean(1) + x)

    for way in ("fully_shard", "replicate"):
        model, plain = _blocks(Lookup), _blocks(Lookup)
        if way == "fully_shard":
            _sharded(model)
        else:
            replicate(model)
        for number in range(3):
            for each in (model, plain):
                _step(each, number)
            for each in plain:
                each.table.weight.grad = each.table.weight.grad.to_dense()
            average_gradients(plain)
            for each in (model, plain):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(*comparable(ours, theirs))


# ---- gradients of gradients ----


@on_ranks(2)
@pytest.mark.parametrize("forwards_between", [0, 1])
def test_a_graph_of_a_backward_reads_parameters_again(forwards_between: int) -> None:
    model, plain = _sharded(_blocks()), _blocks()
    for number in range(3):
        for each in (model, plain):
            x = batch(number).requires_grad_()
            y = each(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            rest = each(batch(number + 7)).mean() if forwards_between else 0.0
            (y.mean() + gradient.square().sum(1).mean() + rest).backward()
        average_gradients(plain)
        assert_gradients(model, plain)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


# ---- parameters that no unit has ----


def _new_layer(model: nn.Sequential) -> None:
    model[0].up = nn.Linear(6, 10)


def _new_block(model: nn.Sequential) -> None:
    model.append(Block(6, 10))


def _new_parameter(model: nn.Sequential) -> None:
    model[1].register_parameter("extra", nn.Parameter(torch.ones(3)))


@on_ranks(2)
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("change", [_new_layer, _new_block, _new_parameter])
def test_parameters_that_come_after_sharding_are_plain_and_warned_of_once_unless_frozen_ignored_or_sharded(
    change: Callable[[nn.Sequential], None], warm: bool
) -> None:
    for api in (_sharded, replicate):
        model = _blocks()
        api(model)
        if warm:
            _step(model)
        change(model)
        with mock.patch.object(logging.getLogger("shardwise.checks"), "warning") as warned:
            for _ in range(2):
                _step(model)
        (text, names) = (str(warned.call_args.args[part]) for part in (0, 1))
        assert warned.call_count == 1
        assert "unless somebody averages it" in text
        added = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
        assert api is replicate or names.split(", ") == added
        if change is _new_block:
            fully_shard(model[2])
            _step(model)
    ignoring = _blocks()
    fully_shard(ignoring, ignored_params={ignoring[0].up.weight})
    _step(ignoring)
    del ignoring[0]
    _step(ignoring)


@pytest.mark.parametrize("shard", [fully_shard, replicate])
@on_ranks(2)
def test_a_weight_tied_between_two_roots_is_named_and_trains_below_one(shard: Callable[[nn.Module], Any]) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, plain, inputs = tied(), tied(), torch.ones(2, 3)
    for layer in model:
        shard(layer)
    with pytest.raises(StateError, match=r"weight of this \w+ is shared with \w+Linear, which was sharded by itself"):
        model(inputs)
    model = tied()
    for module in (*model, model):
        shard(module)
    for net in (model, plain):
        net(inputs).sum().backward()
    assert_same(model, plain)


@on_ranks(2)
def test_a_parameter_that_leaves_its_module_after_sharding_is_named() -> None:
    for warm in (True, False):
        model = _sharded(_blocks())
        if warm:
            _step(model)
        parametrizations.weight_norm(model[0].up)
        with pytest.raises(
            StateError,
            match=r"up\.weight was removed from its module .* Call them, and remove",
        ):
            _step(model)
    early, plain = _blocks(), _blocks()
    for each in (early, plain):
        parametrizations.weight_norm(each[0].up)
    assert_trains_alike(_sharded(early), plain)


class _Keeping(nn.Module):
    """Uses a parameter that it keeps beside its registered one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.scale = Block(6, 10), nn.Parameter(torch.ones(6))
        self.kept: Any = [self.scale] if way == "list" else functools.partial(torch.mul, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.kept(x) if callable(self.kept) else self.kept[0] * x)


@on_ranks(2)
@pytest.mark.parametrize("way", ["list", "partial"])
def test_gradients_of_parameters_of_before_they_were_sharded_are_no_secret(way: str) -> None:
    model = _sharded(_blocks(lambda: _Keeping(way)))
    with pytest.raises(StateError, match=r"forward has used [01]\.scale as it was before it was sharded"):
        _step(model)
    held = _blocks()
    before = list(held.parameters())
    assert_trains_alike(_sharded(held), _blocks())  # who only holds them makes no mistake
    assert all(param.grad is None for param in before)


# ---- values that are written past the parameter ----


def _assign(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def _assign_vector(model: nn.Module) -> None:
    vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("assign", [_assign, _assign_vector])
def test_data_that_is_assigned_to_a_sharded_parameter_is_no_secret(assign: Callable[[nn.Module], None]) -> None:
    for warm in (True, False):
        model = _sharded(_blocks())
        if warm:
            _step(model)
        assign(model)
        with pytest.raises(StateError, match=r"\.data of 0\.norm\.weight was assigned to, which changes nothing"):
            _step(model)
    model = _sharded(_blocks())
    for convert in (nn.Module.double, nn.Module.float):
        convert(model)
        model(batch(0).to(next(model.parameters()).dtype)).sum().backward()


class _Codebook(nn.Module):
    """Changes its frozen parameter in forward, as codebooks with moving averages do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.way = Block(6, 10), way
        self.codes = nn.Parameter(torch.randn(5, 6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "data":
            self.codes.data.mul_(0.9)
        elif self.way == "assign":
            self.codes.data = self.codes.data * 0.9
        else:
            self.codes.mul_(0.9)
        return self.block(x + self.codes.sum(0))


@on_ranks(2, FOUR)
def test_what_forward_writes_to_a_parameter_reaches_the_shards() -> None:
    for api in (_sharded, replicate):
        model = _blocks(lambda: _Codebook("count"))
        api(model)
        assert_trains_alike(model, _blocks(lambda: _Codebook("count")), steps=4)


@on_ranks(2)
@pytest.mark.parametrize("way", ["data", "assign"])
def test_what_forward_writes_through_data_is_named(way: str) -> None:
    model = _sharded(_blocks(lambda: _Codebook(way)))
    with pytest.raises(StateError, match=r"write to .*\.codes in forward, or .*through \.data.*codes\.copy_\(values\)"):
        _step(model)
    for block in model:
        block.way = "count"
    plain = _blocks(lambda: _Codebook("count"))
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_values_that_are_not_numbers_are_no_writes() -> None:
    model = _sharded(_blocks())
    with torch.no_grad():
        model[0].up.weight.fill_(float("nan"))
    for _ in range(3):
        model(batch(0)).sum().backward()


@pytest.mark.parametrize("stays_full", [False, True])
@on_ranks(2)
def test_ranks_that_write_different_values_in_forward_are_named(stays_full: bool) -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.block = nn.Embedding(11, 6, max_norm=0.5), Block(6, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.table((x.abs() * 10).long() % 11).mean(1) + x)

    model = fully_shard(_blocks(Limited)) if stays_full else _sharded(_blocks(Limited))
    with pytest.raises(
        DesyncError, match=r"different values to parameters in forward.*table\.weight is not the same on rank"
    ):
        for number in range(3):
            model(batch(number + 100 * dist.get_rank())).square().mean().backward()


@on_ranks(2)
def test_an_alias_of_a_whole_parameter_is_refused_when_its_memory_is_gone() -> None:
    model = _blocks()
    for block in model:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0))
    weight = model[0].up.weight
    aliases = [weight.detach(), weight.view(-1), weight[1:], *weight.unbind(), weight.T]
    copies = [weight.clone(), weight + 1]
    again = aliases[0][0]
    assert torch.equal(aliases[0], copies[0])
    optimizer.step()
    for alias in (*aliases, again):
        assert alias.shape.numel() > 0
        with pytest.raises(RuntimeError, match=r"Cannot access data pointer|shared memory with a full parameter"):
            alias.sum()
    assert all(torch.isfinite(copy).all() for copy in copies)


@on_ranks(2)
def test_a_step_without_any_gradient_after_a_backward_that_named_shards_is_warned_of_once() -> None:
    model, said = _sharded(_blocks()), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardwise").addHandler(handler)
    try:
        _step(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(0))
        optimizer.step()
        assert not said
        for _ in range(2):
            model(batch(0)).square().mean().backward(inputs=list(model.parameters()))
            optimizer.step()
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    assert len(said) == 1
    assert "none of which has a gradient" in said[0]
    assert "call backward() without inputs" in said[0]


@on_ranks(2)
@pytest.mark.parametrize("warm", [True, False])
def test_shards_that_are_moved_to_shared_memory_are_named(warm: bool) -> None:
    outer = nn.Sequential(fully_shard(_blocks()))  # a module that nobody has sharded asks the others
    if warm:
        outer(batch(0))
    outer.share_memory()
    with pytest.raises(StateError, match=r"was moved to shared memory by share_memory_\(\)"):
        outer(batch(0))


@pytest.mark.parametrize(
    ("holder", "num_ranks"), [("state dict", 2), ("optimizer", 2), ("empty shards", 2), ("empty shards", 4)]
)
@on_ranks()
def test_former_shards_that_are_held_while_others_are_assigned_are_named_on_every_rank(holder: str) -> None:
    def made() -> Any:
        return nn.Linear(6, 1) if holder == "empty shards" else _blocks()  # rank 0 has the only row

    model, plain = fully_shard(made()), made()
    model(batch(0)).sum().backward()
    model.zero_grad()
    held: Any = {
        "state dict": model.state_dict,
        "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "empty shards": lambda: [param.to_local() for param in model.parameters()],
    }[holder]()
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(StateError, match=r"a variable still holds its former shard"):
        model(batch(0))
    del held
    plain.load_state_dict({name: value.full_tensor() for name, value in state.items()})
    assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_a_sharded_module_is_not_pickled_and_the_error_says_what_to_save(api: Any) -> None:
    model = nn.ModuleList([api(_blocks())])
    for attempt in (pickle.dumps, copy.copy, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(StateError, match=r"cannot be pickled.* Save its state_dict\(\)"):
            attempt(model[0] if attempt is copy.copy else model)
    copied = copy.deepcopy(model)[0]
    assert isinstance(copied, nn.Sequential)
    assert_trains_alike(copied, _blocks())


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_lazy_parameters_are_named_and_nothing_is_changed(api: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(9), nn.Linear(9, 6))
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet.* Run one forward of the plain model"):
        api(model)
    assert type(model) is nn.Sequential
    model(batch(0))
    plain = copy.deepcopy(model)
    api(model)
    assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_scripted_modules_are_named_and_train_beside_the_others_where_they_are_ignored(api: Any) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 9), nn.Linear(9, 6).requires_grad_(False)
    plain = copy.deepcopy(nn.Sequential(first, last))
    model = nn.Sequential(first, torch.jit.trace(last, torch.ones(2, 9)))
    with pytest.raises(ConfigError, match=r"1\.weight belongs to a module of torch.jit.script or trace"):
        api(model)
    assert type(model) is nn.Sequential
    api(model, ignored_params=set(model[1].parameters()))
    assert_trains_alike(model, plain)
