"""replicate: gradients averaged, those of small units together, in DTensors or in plain tensors."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients
from helpers.inside import parts_from
from helpers.models import Block
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.sharded import batch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from shardwise import ConfigError, ReplicateModule, StateError, fully_shard, policy, replicate
from shardwise.fsdp.api import OLDER_ARGUMENTS
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.roots import live_engine

DDP_TAKES = {*inspect.signature(DistributedDataParallel).parameters} - {"module"}  # torch 2.13 has one more


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(7, 15), Block(7, 9), nn.BatchNorm1d(7))


def train_beside(reference: nn.Module, model: nn.Module, optim: torch.optim.Optimizer, num_units: int = 1) -> None:
    """Accumulate two microbatches a step; compare gradients, and count all-reduces: one for each unit, in the second."""
    assert isinstance(model, ReplicateModule)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        for microbatch in range(2):
            x = batch(2 * step + microbatch)
            model.set_requires_gradient_sync(microbatch == 1)
            loss = model(x).square().sum()
            with CommDebugMode() as counts:
                loss.backward()
            assert counts.get_comm_counts()[torch.ops.c10d.allreduce_] == microbatch * num_units
            reference(x).square().sum().backward()
        average_gradients(reference)
        assert_gradients(model, reference)
        for each in (optim, expected):
            each.step()
            each.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("how", ["a unit for each block", "a list"])
def test_parameters_and_gradients_are_replicated_dtensors(how: str) -> None:
    torch.manual_seed(0)
    model = blocks()
    reference = copy.deepcopy(model)
    for block in list(model)[:2] if how == "a unit for each block" else []:
        replicate(block)
    replicate([model]) if how == "a list" else replicate(model)
    num_units = 3 if how == "a unit for each block" else 1
    train_beside(reference, model, torch.optim.SGD(model.parameters(), lr=0.1), num_units)
    loss = model(batch()).sum()
    loss.backward()
    for param in model.parameters():
        assert param.placements == param.grad.placements == (Replicate(),)
        assert param.device_mesh.mesh_dim_names == ("replicate",)


@on_ranks(2)
def test_the_older_way_keeps_plain_tensors_and_starts_from_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    model = blocks()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)  # holds the parameters, which stay the same objects
    assert replicate(model, process_group=dist.group.WORLD) is model
    values = [param.detach().clone() for param in model.parameters()]
    for value in values:
        dist.broadcast(value, 0)
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), values, strict=True))
    reference = blocks()
    reference.load_state_dict(model.state_dict())
    train_beside(reference, model, optim)


@on_ranks(2)
def test_a_sharded_module_may_lie_inside() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(7, 15), Block(7, 9))
    fully_shard(model[0])
    replicate(model)
    model(batch()).sum().backward()
    assert model[0].up.weight.grad.placements == (Shard(0),)
    assert model[1].up.weight.grad.placements == (Replicate(),)


def test_what_ddp_takes_is_known() -> None:
    """One that a newer torch adds may change what is trained: it is refused until somebody has looked at it."""
    assert DDP_TAKES <= OLDER_ARGUMENTS


@on_ranks(2)
def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected device_id to be int or torch.device"):
        replicate(nn.Linear(2, 2), device_id="cpu")
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="expects a 1D DeviceMesh"):
        replicate(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="does not take DDP's mixed_precision: pass mp_policy"):
        replicate(nn.Linear(2, 2), mixed_precision=object())
    for wrong in (
        {"reshard_after_forward": True},
        {"mp_polcy": None},
        {"shard_placement_fn": None, "device_ids": None},
    ):
        module = nn.Linear(2, 2)
        with pytest.raises(
            TypeError, match=f"has no argument {next(iter(wrong))!r}.*It takes ignored_modules, mesh, mp_policy"
        ):
            replicate(module, **wrong)
        assert type(module) is nn.Linear


EQUAL = [
    ({"broadcast_buffers": None}, True, True, True),
    ({"broadcast_buffers": False}, True, False, False),
    ({"forward_sync_buffers": False}, True, True, False),
    ({"forward_sync_buffers": True, "broadcast_buffers": False}, True, True, True),
    ({"init_sync": False}, False, False, True),
]


@pytest.mark.parametrize(
    ("arguments", "is_synced", "are_at_start", "are_later"),
    [row for row in EQUAL if set(row[0]) <= DDP_TAKES],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@on_ranks(2)
def test_the_older_way_makes_equal_what_ddp_does(
    arguments: dict[str, Any], is_synced: bool, are_at_start: bool, are_later: bool
) -> None:
    def own(fill: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("mark", torch.tensor([fill]))
        nn.init.constant_(module.weight, fill)
        return module

    rank = float(dist.get_rank())
    model, ddp = replicate(own(rank), **arguments), DistributedDataParallel(own(rank), **arguments)
    for module in (model, ddp.module):
        assert module.weight[0, 0] == (0.0 if is_synced else rank)
        assert module.mark == (0.0 if are_at_start else rank)
    for module in (model, ddp):
        (module.module if module is ddp else module).mark.fill_(rank)
        module(torch.ones(1, 2))
    assert model.mark == ddp.module.mark == (0.0 if are_later else rank)


@on_ranks(1, 2)
def test_the_older_way_divides_what_ranks_have_summed_once(num_ranks: int) -> None:
    """Where a factor would divide it again, that is named."""
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    replicate(model, bucket_cap_mb=25)
    inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    parts: list[torch.Tensor] = []
    for x in inputs:
        plain.zero_grad()
        plain(x).sum().backward()
        assert plain.weight.grad is not None
        parts.append(plain.weight.grad)
    model(inputs[0]).sum().backward()
    first = model.weight.grad
    model.set_requires_gradient_sync(False)
    model(inputs[1]).sum().backward()
    assert model.weight.grad is first
    model(inputs[2]).sum().backward()
    torch.testing.assert_close(model.weight.grad, parts[0] + parts[1] + parts[2])
    model.set_requires_gradient_sync(True)
    model(inputs[3]).sum().backward()
    torch.testing.assert_close(model.weight.grad, parts[0] + parts[1] + parts[2] + parts[3])
    model.set_gradient_divide_factor(4.0)
    shown = model.weight.grad
    for _ in range(2):  # nothing is half-changed by the first
        with pytest.raises(StateError, match="set_gradient_divide_factor on the root unit, whose parameters are plain"):
            model(inputs[1]).sum().backward()
    assert model.weight.grad is shown


@on_ranks(1, 2)
def test_a_backward_that_is_refused_is_over_though_its_error_is_kept(num_ranks: int) -> None:
    model = nn.Linear(3, 2)
    replicate(model, bucket_cap_mb=25)
    x, seen = torch.ones(4, 3), list[torch.Tensor]()

    def see(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.clone())

    model.weight.register_post_accumulate_grad_hook(see)
    model(x).sum().backward()
    shown = model.weight.grad
    assert shown is not None
    with policy(model, divide_factor=4.0), pytest.raises(StateError, match="whose parameters are plain") as kept:
        model(x).sum().backward()
    assert model.weight.grad is shown
    model.zero_grad()
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
    seen.clear()
    model.weight.register_post_accumulate_grad_hook(see)
    model(x).sum().backward()
    assert kept.value is not None
    expected = torch.full((2, 3), 4.0)
    torch.testing.assert_close(model.weight.grad, expected)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)


@on_ranks(1, 2)
def test_a_parameter_put_in_place_after_the_forward_has_no_gradient_of_the_one_before(num_ranks: int) -> None:
    model = nn.Linear(3, 2)
    replicate(model, bucket_cap_mb=25)
    x, old = torch.ones(4, 3), model.weight
    model(x).sum().backward()
    shown = old.grad
    loss = model(x).sum()
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
    loss.backward()
    assert model.weight.grad is None
    assert shown is not None
    assert old.grad is shown
    torch.testing.assert_close(shown, torch.full((2, 3), 8.0))  # as in one process
    model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 4.0))


class Branches(nn.Module):
    """Two layers of different sizes, of which a call may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 9)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        left = self.left(x).square().sum() if which in ("left", "both") else 0.0
        return left + (self.right(x).square().sum() if which in ("right", "both") else 0.0)


@on_ranks(2)
def test_plain_parameters_are_asked_for_by_name() -> None:
    model, older = nn.Linear(3, 2), nn.Linear(3, 2)  # other values on each rank
    with torch.no_grad():
        for param in (*model.parameters(), *older.parameters()):
            param.fill_(dist.get_rank() + 1.0)
    replicate(model, parameters="plain")
    replicate(older, process_group=None)
    for each in (model, older):
        each(torch.full((4, 3), float(dist.get_rank()))).sum().backward()
        assert type(each.weight) is nn.Parameter
        assert each.weight.eq(1.0).all(), "rank 0's"
        assert each.weight.grad.eq(2.0).all(), "the mean of 0 and 4"
    with pytest.raises(ConfigError, match=r"replicate\(parameters='full'\); expected 'dtensor' or 'plain'"):
        replicate(nn.Linear(3, 2), parameters="full")  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize("is_older", [False, True])
@on_ranks(2)
def test_ranks_that_have_held_gradients_of_other_parameters_sum_the_same_ones(is_older: bool) -> None:
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    with parts_from(12):  # every weight is reduced where it lies, unless somebody holds its gradient
        model = replicate(model) if not is_older else replicate(model, bucket_cap_mb=25)
        which = ("left", "right")[dist.get_rank()]
        for step in range(2):
            model.set_requires_gradient_sync(False)
            model(batch(2 * step), which).backward()
            model.set_requires_gradient_sync(True)
            model(batch(2 * step + 1)).backward()
            reference(batch(2 * step), which).backward()
            reference(batch(2 * step + 1)).backward()
            for param in reference.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            average_gradients(reference)
            assert_gradients(model, reference)
            model.zero_grad()
            reference.zero_grad()


@on_ranks(2)
def test_the_older_way_keeps_buffers_equal_when_ddp_does() -> None:
    """The first forward of an evaluation has the first rank's statistics, too; a copy goes on by the same rule."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))
    ddp = DistributedDataParallel(copy.deepcopy(plain))
    model = replicate(copy.deepcopy(plain), device_ids=None)

    def compare(number: int, what: str) -> None:
        with torch.no_grad() if what == "no_grad" else nullcontext():
            outputs = [each(batch(number)) for each in (model, ddp)]
        assert torch.equal(*outputs), (number, what)
        for mine, theirs in zip(model.buffers(), ddp.module.buffers(), strict=True):
            assert torch.equal(mine, theirs), (number, what)
        if what == "backward":
            for output in outputs:
                output.sum().backward()

    for number in range(2):
        for is_training, what in (
            (True, "backward"),
            (False, "no_grad"),
            (False, "no_grad"),
            (True, "no_grad"),
            (True, ""),
        ):
            model.train(is_training)
            ddp.train(is_training)
            compare(number, what)
        for syncs in (False, True, True):
            model.set_requires_gradient_sync(syncs)
            ddp.require_backward_grad_sync = syncs
            compare(number, "backward")
        if not number:
            model, ddp = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(ddp.module))
    model.eval()
    model(batch())
    same = model(torch.ones(2, 7))
    dist.broadcast(first := same.detach().clone(), 0)
    assert torch.equal(same, first)


class Forked(nn.Module):
    """Goes past its second block where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.is_short = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x if self.is_short else self.second(x)


@pytest.mark.parametrize("way", ["each", "whole", "older"])
@on_ranks(2, group_timeout_s=20)
def test_a_rank_may_go_forward_alone(way: str) -> None:
    """At any time, by another way than training, and back without sync: nobody waits for the others, nor do they see it."""

    def train(looks: int = -1) -> None:
        """Do a step; rank ``looks`` evaluates alone between forward and backward."""
        reference(torch.ones(2, 3) + dist.get_rank()).sum().backward()
        loss = model(torch.ones(2, 3) + dist.get_rank()).sum()
        if dist.get_rank() == looks:
            model.is_short = True
            with torch.no_grad():
                model(torch.ones(1, 3))
            model.is_short = False
        loss.backward()
        average_gradients(reference)
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()

    def go_alone(rank: int, is_short: bool) -> None:
        if dist.get_rank() == rank:
            model.is_short = is_short
            with torch.no_grad():
                model(torch.ones(1, 3))
            model.set_requires_gradient_sync(False)
            model(torch.ones(1, 3)).sum().backward()
            model.set_requires_gradient_sync(True)
            model.is_short = False
            live_engine(attachment_of(model)).forget_step()  # what it holds back is its own affair
            model.zero_grad()

    torch.manual_seed(0)
    model, reference = Forked(), Forked()
    reference.load_state_dict(model.state_dict())
    if way == "each":
        replicate(model.first)
        replicate(model.second)
    model = replicate(model, device_ids=None) if way == "older" else replicate(model)
    go_alone(0, False)
    train()
    for rank, is_short in ((1, True), (0, True), (1, False)):
        go_alone(rank, is_short)
        train()
        train(looks=rank)
        train()


@pytest.mark.parametrize("way", ["each", "whole", "older"])
@on_ranks(2, group_timeout_s=20)
def test_a_rank_may_evaluate_alone_before_the_first_step(way: str) -> None:
    """As often as it likes; nobody waits for it, also where gradients come by calls of parts of the module."""
    torch.manual_seed(0)
    model, reference = Forked(), Forked()
    reference.load_state_dict(model.state_dict())
    for block in (model.first, model.second) if way == "each" else ():
        replicate(block)
    model = replicate(model, device_ids=None) if way == "older" else replicate(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for part in ("", "second" if way != "whole" else "", ""):
                mine, plain = (each.get_submodule(part) for each in (model, reference))
                assert torch.equal(mine(torch.ones(1, 3)), plain(torch.ones(1, 3)))
    dist.barrier()
    for step in range(2):
        x = torch.ones(2, 3) + dist.get_rank()
        (model.first if way == "older" and step == 0 else model)(x).sum().backward()
        (reference.first if way == "older" and step == 0 else reference)(x).sum().backward()
        average_gradients(reference)
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
        dist.barrier()


WAYS_TO_HOLD = ["no_sync", "flag", "forward only", "backward only", "nested", "raises"]


def _hold(model: Any, what: str, x: torch.Tensor, is_last: bool) -> bool:
    """Run one microbatch as users of DDP accumulate; return the number of all-reduces of its backward."""
    if what == "flag":
        model.require_backward_grad_sync = is_last

    def hold() -> Any:
        return nullcontext() if is_last or what == "flag" else model.no_sync()

    raises = what == "raises" and not is_last
    loss = None
    with nullcontext() if what == "backward only" else hold():
        if what == "nested":
            with hold():
                model(x).square().sum().backward()
        if what in ("forward only", "backward only"):
            loss = model(x).square().sum()
    with (
        CommDebugMode() as counts,
        pytest.raises(ValueError, match="mine") if raises else nullcontext(),
        nullcontext() if what == "forward only" else hold(),
    ):
        (model(x).square().sum() if loss is None else loss).backward()
        if raises:
            raise ValueError("mine")
    assert model.require_backward_grad_sync is (is_last if what == "flag" else True)
    return bool(counts.get_comm_counts()[torch.ops.c10d.allreduce_])


@pytest.mark.parametrize(("what", "way"), checkered(WAYS_TO_HOLD, ["whole", "each", "older"]))
@on_ranks(2)
def test_gradients_are_held_as_users_of_ddp_do(what: str, way: str) -> None:
    """With no_sync and with the flag: the forward decides whether its backward reduces."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(7, 15), Block(7, 9))
    ddp, model = DistributedDataParallel(copy.deepcopy(plain)), copy.deepcopy(plain)
    for layer in model if way == "each" else ():
        replicate(layer)
    replicate(model, device_ids=None) if way == "older" else replicate(model)
    assert hasattr(model, "no_sync")
    for step in range(2):
        for number in range(3):
            x, is_last = batch(3 * step + number), number == 2
            assert _hold(model, what, x, is_last) == (is_last or what == "backward only")
            _hold(ddp, what, x, is_last)
            if number == 1:  # forwards of an evaluation change nothing
                with torch.no_grad():
                    model(x)
        assert_gradients(model, ddp)
        if not step:
            model, ddp = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(ddp.module))
        model.zero_grad()
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("way", ["each", "older"])
def test_gradients_become_zeros_between_a_forward_and_its_backward(way: str) -> None:
    plain = blocks()
    model: Any = copy.deepcopy(plain)
    for block in model if way == "each" else ():
        replicate(block)
    replicate(model, device_ids=None) if way == "older" else replicate(model)
    for each in (model, plain):
        each(batch(0)).exp().sum().backward()
        loss = each(batch(1)).exp().sum()
        each.zero_grad(set_to_none=False)
        loss.backward()
    average_gradients(plain)
    assert_gradients(model, plain)


@on_ranks(2)
def test_an_explicit_choice_of_sync_replaces_that_of_the_flag() -> None:
    model: Any = replicate(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    def reduces() -> bool:
        with CommDebugMode() as counts:
            model(torch.ones(2, 3)).sum().backward()
        return bool(counts.get_comm_counts()[torch.ops.c10d.allreduce_])

    with model.no_sync():
        assert not reduces()
    model.set_requires_gradient_sync(True)
    model.require_backward_grad_sync = False
    with policy(model, sync=True):
        assert reduces()
    model.require_backward_grad_sync = True
    model.set_requires_gradient_sync(False)
    assert not reduces()
    model.require_backward_grad_sync = True
    copied = copy.deepcopy(model)
    assert copied.require_backward_grad_sync
    assert reduces()
