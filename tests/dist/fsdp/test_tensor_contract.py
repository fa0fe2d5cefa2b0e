"""Tensors that users hold are like any others: parameters, gradients and optimizer state, whenever they were taken.

A shard has storage offset 0 and a storage of just its own bytes; whoever keeps an alias of it sees training go on; it can be
saved, pickled, copied and sent.  torch's own class is run through the same operations.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import local
from helpers.folders import folder_of_all
from helpers.inside import over
from helpers.models import batch_for
from helpers.pairs import few, pairwise
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, replicate, shard_model
from shardwise.collectives.streams import is_own


class Net(nn.Module):
    """Uneven, scalar, empty, frozen and non-contiguous parameters, in a few units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)
        self.last = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x) + self.frozen)
        return self.last(self.second(x) + x @ self.strided).mean() * self.scale


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def by_blocks(shard: Callable[..., Any]) -> Callable[[Net], nn.Module]:
    def apply(model: Net) -> nn.Module:
        for block in (model.first, model.second):
            shard(block)
        shard(model)
        return model

    return apply


def hybrid(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicate_older(model: Net) -> nn.Module:
    return replicate(model, device_ids=None, process_group=dist.group.WORLD)


APIS: dict[str, Callable[[Net], nn.Module]] = {
    "torch's fully_shard": by_blocks(torch_fully_shard),
    "fully_shard": by_blocks(fully_shard),
    "shard_model": shard_model,
    "hybrid": hybrid,
    "replicate": by_blocks(replicate),
    "replicate, older way": replicate_older,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(batch_for("plain", number + dist.get_rank(), 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- how the memory of parameters comes to be what it is ----


def as_made(api: Callable[[Net], nn.Module]) -> nn.Module:
    return api(make())


def after_steps(api: Callable[[Net], nn.Module]) -> nn.Module:
    model = api(make())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    return model


def from_meta(api: Callable[[Net], nn.Module]) -> nn.Module:
    values = make().state_dict()
    with torch.device("meta"):
        model = api(Net())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            shard_of(param, values[name])
    return model


def shard_of(param: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(param, DTensor):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, param.device_mesh, param.placements)
    param.copy_(value)


def assigned(api: Callable[[Net], nn.Module]) -> nn.Module:
    model = after_steps(api)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    return model


def assigned_and_kept(api: Callable[[Net], nn.Module]) -> nn.Module:
    model = after_steps(api)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)
    model.kept_by_the_test = [kept]
    return model


def converted(api: Callable[[Net], nn.Module]) -> nn.Module:
    return after_steps(api).double().float()


MOMENTS = {
    "as made": as_made,
    "after steps": after_steps,
    "from meta": from_meta,
    "assigned": assigned,
    "assigned and kept": assigned_and_kept,
    "converted": converted,
}

# ---- what users do with tensors ----


def aliases_of(model: nn.Module) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    for name, tensor in model.state_dict().items():
        yield name, "state_dict()", lambda tensor=tensor: local(tensor)
    for name, param in model.named_parameters():
        for what, alias in (("data", param.data), ("detach()", param.detach())):
            yield name, what, lambda alias=alias: local(alias)
        mine = local(param)
        yield name, "to_local()", lambda mine=mine: mine
        view = mine.detach().view_as(mine)
        yield name, "view", lambda view=view: view
        array = mine.detach().numpy()
        yield name, "numpy()", lambda array=array: torch.from_numpy(array)


def check_aliases(model: nn.Module) -> None:
    """Every alias taken now shows the parameter's values after every later step."""
    aliases = list(aliases_of(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
    for number in range(3):
        before = {name: local(param).detach().clone() for name, param in model.named_parameters()}
        train(model, optimizer, number)
        now = {name: local(param) for name, param in model.named_parameters() if isinstance(param, DTensor)}
        if not now:
            now = {name: param.detach() for name, param in model.named_parameters()}
        live = {name: local(value) for name, value in model.state_dict().items()}
        assert not torch.equal(before["first.weight"], live["first.weight"]) or not live["first.weight"].numel()
        for name, what, read in aliases:
            assert torch.equal(read().float(), live[name].float()), f"{what} of {name} is stale after step {number}"


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def sent(value: Any) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found[dist.get_rank()]


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "all_gather_object": sent,
}


def assert_equal(left: Any, right: Any, what: str) -> None:
    for name, tensor in left.items():
        assert torch.equal(local(tensor), local(right[name])), f"{what}: {name}"
        if tensor.numel() and local(tensor).numel():
            assert local(tensor).data_ptr() != local(right[name]).data_ptr(), f"{what}: {name} is no copy"


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    names = {id(param): name for name, param in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {
        f"{names[id(param)]}.{key}": value
        for param, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return {"parameters": dict(model.state_dict()), "gradients": gradients, "state": state}


def check_copies(model: nn.Module) -> None:
    """Tensors are saved, pickled, copied and sent as they are, each with its own bytes alone."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
    train(model, optimizer, 0)
    model(batch_for("plain", dist.get_rank(), 4)).backward()
    for kind, tensors in held(model, optimizer).items():
        assert tensors, kind
        for name, tensor in tensors.items():
            assert tensor.storage_offset() == 0, f"{kind} {name}: storage offset {tensor.storage_offset()}"
            assert is_own(local(tensor)), f"{kind} {name} has the storage of others"
        for what, copied in COPIES.items():
            assert_equal(tensors, copied(tensors), f"{what} of {kind}")
    params = list(model.parameters())
    for left, right in zip(params, copy.deepcopy(params), strict=True):
        assert torch.equal(local(left), local(right))


def check_async_save(model: nn.Module) -> None:
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    with folder_of_all() as folder:
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=str(folder / "step")).result()
        loaded = {key: torch.zeros_like(value) for key, value in kept.items()}
        dcp.load({"model": loaded}, checkpoint_id=str(folder / "step"))
    for key, value in kept.items():
        assert torch.equal(local(loaded[key]), local(value)), key


def check_model_copy(model: nn.Module) -> None:
    model(batch_for("plain", dist.get_rank(), 4)).backward()
    twin = copy.deepcopy(model)
    assert any(param.grad is not None for param in model.parameters())
    assert all(param.grad is None for param in twin.parameters()), "as copies of plain modules have none"
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        optimizer.zero_grad()
        train(each, optimizer, 3)
    assert_equal(model.state_dict(), twin.state_dict(), "a copy trains as its original")


CHECKS = {"aliases": check_aliases, "copies": check_copies, "async_save": check_async_save, "model": check_model_copy}


def run_contract(api: str, transport: Any, check: str, moments: Iterable[str] = MOMENTS) -> None:
    with over(transport):
        for moment in moments:
            if "older" in api and moment == "from meta":
                continue  # parameters stay plain and are made equal at once: meta has no values
            try:
                CHECKS[check](MOMENTS[moment](APIS[api]))
            except Exception as error:
                raise AssertionError(f"{moment}: {type(error).__name__}: {error}") from error


OURS = [name for name in APIS if name not in ("torch's fully_shard", "hybrid")]


@on_ranks(2)
@pytest.mark.parametrize(("api", "check", "transport"), few(pairwise(OURS, CHECKS, ["auto", "gloo", "collective"]), 2))
def test_what_users_hold_are_ordinary_tensors(api: str, transport: str, check: str) -> None:
    """Every second moment: each meets every API, every check and every transport."""
    first = (OURS.index(api) + [*CHECKS].index(check)) % 2
    run_contract(api, transport, check, list(MOMENTS)[first::2])


@on_ranks(4)
@pytest.mark.parametrize(
    ("api", "check"),
    few([("hybrid", "aliases"), ("hybrid", "model"), ("hybrid", "copies"), ("fully_shard", "aliases")], 4),
)
def test_they_are_on_four_ranks(api: str, check: str) -> None:
    run_contract(api, "auto", check, ["from meta", "assigned and kept"])


@on_ranks(1)
@pytest.mark.parametrize("check", list(CHECKS))
def test_they_are_on_one_rank(check: str) -> None:
    run_contract("fully_shard", "auto", check)


@on_ranks(2)
def test_a_gradient_that_somebody_keeps_is_not_written_to_by_later_steps() -> None:
    model = fully_shard(nn.Linear(4, 4))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        model.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).sum().backward()
        assert model.weight.grad is not None
        kept.append((model.weight.grad, model.weight.grad.full_tensor().clone()))
    for gradient, value in kept:
        assert torch.equal(gradient.full_tensor(), value)
