"""State of ShardedOptimizer: by name, sharded, through DCP to other numbers of ranks, and to and from plain optimizers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import full
from helpers.ranks import on_ranks
from helpers.sharded import step_on_drawn_gradients
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import init_device_mesh

from shardwise import ConfigError, LayoutError, ShardedOptimizer, StateError, fully_shard
from shardwise.testing import WorkerPool

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "muon": (torch.optim.Muon, {"lr": 0.1}),
}


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 9, bias=bias)
        self.second = nn.Linear(9, 3, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _plain(kind: str) -> Net:
    return Net(bias=kind != "muon")


def _sharded(kind: str) -> Any:
    model = _plain(kind)
    fully_shard(model.first)
    return fully_shard(model)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def _make(kind: str, model: nn.Module) -> ShardedOptimizer:
    optimizer_class, options = KINDS[kind]
    names = [n for n in _named(model) if n.startswith("first")]
    return ShardedOptimizer(_named(model), optimizer_class, **options, groups=[{"names": names, "weight_decay": 0.3}])


def _make_plain(kind: str, model: Net) -> torch.optim.Optimizer:
    optimizer_class, options = KINDS[kind]
    groups = [
        {"params": list(model.first.parameters()), "weight_decay": 0.3},
        {"params": list(model.second.parameters())},
    ]
    return optimizer_class(groups, **options)


def _expected(kind: str, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = _plain(kind)
    optimizer = _make_plain(kind, model)
    for seed in range(steps):
        step_on_drawn_gradients(model, optimizer, seed)
    return model, optimizer


def _assert_params(model: nn.Module, expected: nn.Module, what: object) -> None:
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = full(found)
        assert torch.equal(whole, wanted), (what, name)


def _assert_state(found: dict[Any, Any], wanted: dict[Any, Any], what: object) -> None:
    assert found.keys() == wanted.keys(), (what, found.keys(), wanted.keys())
    for key, values in wanted.items():
        assert found[key].keys() == values.keys(), what
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(found[key][name]), torch.as_tensor(value)), (what, key, name)


def save(folder: str) -> None:
    """Two steps, then both ways to a checkpoint: our state dict, and torch's get_optimizer_state_dict."""
    for kind in KINDS:
        model = _sharded(kind)
        optimizer = _make(kind, model)
        for seed in range(2):
            step_on_drawn_gradients(model, optimizer, seed)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{kind}-ours")
        found = get_optimizer_state_dict(model, optimizer)
        assert set(found["state"]) == set(_named(model))
        assert [group["params"] for group in found["param_groups"]] == [
            group["param_names"] for group in optimizer.param_groups
        ]
        dcp.save({"model": model.state_dict(), "optimizer": found}, checkpoint_id=f"{folder}/{kind}-torch")


def load(folder: str) -> None:
    """Resume into a ShardedOptimizer on any number of ranks, three ways, and go on as if never stopped."""
    for kind in KINDS:
        expected, reference = _expected(kind, 4)
        for way in ("blank", "torch", "full"):
            model = _sharded(kind)
            optimizer = _make(kind, model)
            for group in optimizer.param_groups:
                group["lr"] = 77.0
            if way == "full":
                donor_model, donor = _expected(kind, 2)
                model.load_state_dict(
                    {
                        n: torch.distributed.tensor.distribute_tensor(
                            p.detach(), _named(model)[n].device_mesh, _named(model)[n].placements, src_data_rank=None
                        )
                        for n, p in donor_model.named_parameters()
                    }
                )
                optimizer.load_state_dict(donor.state_dict())
            else:
                blank = optimizer.blank_state_dict() if way == "blank" else get_optimizer_state_dict(model, optimizer)
                state = {"model": model.state_dict(), "optimizer": blank}
                dcp.load(state, checkpoint_id=f"{folder}/{kind}-{'ours' if way == 'blank' else 'torch'}")
                model.load_state_dict(state["model"])
                if way == "blank":
                    optimizer.load_state_dict(state["optimizer"])
                else:
                    set_optimizer_state_dict(model, optimizer, state["optimizer"])
            for seed in range(2, 4):
                step_on_drawn_gradients(model, optimizer, seed)
            what = (kind, way, dist.get_world_size())
            _assert_params(model, expected, what)
            full = optimizer.full_state_dict(by_index=True)
            _assert_state(full["state"], reference.state_dict()["state"], what)


def load_plain(folder: str) -> None:
    """Read a checkpoint of four ranks into torch's own optimizer over an unsharded model."""
    for kind in KINDS:
        expected, _ = _expected(kind, 4)
        for way in ("ours", "torch"):
            model = _plain(kind)
            optimizer = _make_plain(kind, model)
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=f"{folder}/{kind}-{way}")
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            for seed in range(2, 4):
                step_on_drawn_gradients(model, optimizer, seed)
            _assert_params(model, expected, (kind, way))


def test_saved_on_four_ranks_resumes_anywhere(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save, num_ranks=4, folder=str(tmp_path))
    for num_ranks in (2, 1):
        pool.run(load, num_ranks=num_ranks, folder=str(tmp_path))
    pool.run(load_plain, num_ranks=1, folder=str(tmp_path))


@on_ranks(2)
def test_full_state_is_plain_tensors_both_ways() -> None:
    """torch's full_state_dict option gives plain tensors, and takes them, in both ways of keys."""
    for kind in ("adamw", "adafactor"):
        model = _sharded(kind)
        optimizer = _make(kind, model)
        for seed in range(2):
            step_on_drawn_gradients(model, optimizer, seed)
        _, reference = _expected(kind, 2)
        names = list(_named(model))
        wanted = {names[i]: values for i, values in reference.state_dict()["state"].items()}
        options = StateDictOptions(full_state_dict=True)
        found = get_optimizer_state_dict(model, optimizer, options=options)
        _assert_state(found["state"], wanted, kind)
        _assert_state(optimizer.full_state_dict()["state"], wanted, kind)
        other_model = _sharded(kind)
        other = _make(kind, other_model)
        set_optimizer_state_dict(other_model, other, found, options=options)
        _assert_state(other.full_state_dict()["state"], wanted, kind)
        if kind == "adamw":
            flat = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )
            assert any(key.startswith("state.first.weight.") for key in flat)
            third = _make(kind, other_model)
            set_optimizer_state_dict(
                other_model, third, flat, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )
            _assert_state(third.full_state_dict()["state"], wanted, kind)
        plain_model = _plain(kind)
        plain = _make_plain(kind, plain_model)
        plain.load_state_dict(optimizer.full_state_dict())
        _assert_state(plain.state_dict()["state"], reference.state_dict()["state"], kind)
        stream = io.BytesIO()
        torch.save(optimizer.full_state_dict(cpu_offload=True), stream)
        stream.seek(0)
        again = _make(kind, other_model)
        again.load_state_dict(torch.load(stream, weights_only=True))
        _assert_state(again.full_state_dict()["state"], wanted, kind)


@on_ranks(2)
def test_state_that_does_not_fit_is_refused_by_name() -> None:
    """What does not fit is refused by name; blank dicts and loading leave others alone."""
    model = _sharded("adamw")
    optimizer = _make("adamw", model)
    assert optimizer.state_dict()["state"] == {}
    before = [p.full_tensor().clone() for p in model.parameters()]
    blank = optimizer.blank_state_dict()
    assert set(blank["state"]) == set(_named(model))
    assert not optimizer.state
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), before, strict=True))
    step_on_drawn_gradients(model, optimizer, 0)
    assert len(optimizer.state) == 4
    saved = optimizer.full_state_dict()
    wrong = {**saved, "param_groups": saved["param_groups"][:1]}
    with pytest.raises(ConfigError, match="different number of parameter groups"):
        optimizer.load_state_dict(wrong)
    wrong = {**saved, "param_groups": [{**g, "params": g["params"][:1]} for g in saved["param_groups"]]}
    with pytest.raises(ConfigError, match="doesn't match"):
        optimizer.load_state_dict(wrong)
    local = {n: dict(s) for n, s in saved["state"].items()}
    local["first.weight"]["exp_avg"] = torch.zeros(_named(model)["first.weight"].to_local().shape)
    with pytest.raises(LayoutError, match="first.weight: state 'exp_avg' has shape"):
        optimizer.load_state_dict({**saved, "state": local})
    found = optimizer.state_dict()
    optimizer.load_state_dict(found)
    kept = {n: s["exp_avg"].to_local().clone() for n, s in found["state"].items()}
    step_on_drawn_gradients(model, optimizer, 1)  # loading copied: the loaded dict stays
    assert all(torch.equal(s["exp_avg"].to_local(), kept[n]) for n, s in found["state"].items())


@on_ranks(2)
def test_what_one_rank_leaves_out_of_a_load_is_named_on_every_rank() -> None:
    """A whole-matrix optimizer names what one rank leaves out of a load, on every rank."""
    model = _sharded("muon")
    optimizer = _make("muon", model)
    step_on_drawn_gradients(model, optimizer, 0)
    found = optimizer.full_state_dict()
    if dist.get_rank() == 1:
        del found["state"]["first.weight"]
    with pytest.raises(StateError, match="first.weight: this rank loads state"):
        optimizer.load_state_dict(found)


def sharded_tensors(folder: str) -> None:
    """State of ShardedTensors is made of ShardedTensors, which DCP saves; DTensors of another mesh read them."""
    size = dist.get_world_size()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in (*range(size), 0)])
    whole = torch.arange(27.0).view(9, 3)

    def make(options: Any) -> tuple[Any, ShardedOptimizer]:
        st = sharded_tensor.zeros(spec, 9, 3)
        for shard in st.local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor = whole[start : start + shard.tensor.size(0)].clone().requires_grad_()
        return st, ShardedOptimizer({"weight": st}, torch.optim.Adam, lr=options)

    st, optimizer = make(0.1)
    plain = nn.Parameter(whole.clone())
    expected = torch.optim.Adam([plain], lr=0.1)
    for shard in st.local_shards():
        shard.tensor.grad = shard.tensor.detach().clone()
    plain.grad = whole.clone()
    optimizer.step()
    expected.step()
    found = optimizer.state_dict()
    assert isinstance(found["state"]["weight"]["exp_avg"], sharded_tensor.ShardedTensor)
    _assert_state(optimizer.full_state_dict(by_index=True)["state"], expected.state_dict()["state"], "ShardedTensor")
    dcp.save({"optimizer": found}, checkpoint_id=f"{folder}/st")
    _, other = make(3.0)
    state = {"optimizer": other.blank_state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/st")
    other.load_state_dict(state["optimizer"])
    _assert_state(other.full_state_dict(by_index=True)["state"], expected.state_dict()["state"], "reloaded")
    assert other.param_groups[0]["lr"] == 0.1
    mesh = init_device_mesh("cpu", (size,))
    cut = torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(1)])
    third = ShardedOptimizer({"weight": nn.Parameter(cut)}, torch.optim.Adam)
    third.load_state_dict(found)
    _assert_state(third.full_state_dict(by_index=True)["state"], expected.state_dict()["state"], "as DTensor")


@on_ranks(2)
def test_sharded_tensor_state(tmp_path: Path) -> None:
    sharded_tensors(folder=str(tmp_path))
