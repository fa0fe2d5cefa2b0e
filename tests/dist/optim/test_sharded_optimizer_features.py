"""ShardedOptimizer in training: flat updates over fully_shard, groups, schedulers, hooks, clipping, owners, errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.inside import counted
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import ConfigError, ShardedOptimizer, StateError, clip_grad_norm_, fully_shard

COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")


def owners_of(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Return the global rank that updates each sharded matrix."""
    meetings = optimizer._backend._meetings.values()
    return {matrix.name: each.ranks.members[matrix.owner] for each in meetings for matrix in each.matrices}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _model(width: int = 6, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Linear(width, 2))


def _sharded(**options: Any) -> Any:
    model = _model(**options)
    for block in list(model)[:-1]:
        fully_shard(block)
    return fully_shard(model)


def _backward(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    return loss.detach()


def _named(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def _assert_close(sharded: Any, plain: Any) -> None:
    for (name, a), b in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, msg=lambda text, name=name: f"{name}: {text}")


def num_runs(optimizer: ShardedOptimizer) -> int:
    """Return how many tensors the inner optimizer sees."""
    return sum(len(group["params"]) for group in optimizer._backend.optimizer.param_groups)


@on_ranks(2)
def test_a_unit_is_updated_in_one_call() -> None:
    """One update per unit once the gradients lie flat, also after accumulation; views of live state stay right."""
    for options in ({}, {"fused": True}, {"foreach": True}):
        model, single, plain = _sharded(), _sharded(), _model()
        found = ShardedOptimizer(_named(model), torch.optim.AdamW, lr=0.1, **options)
        each = ShardedOptimizer(_named(single), torch.optim.AdamW, lr=0.1, flat=False, **options)
        expected = torch.optim.AdamW(plain.parameters(), lr=0.1, **options)
        for step in range(4):
            for tensors, optimizer in ((model, found), (single, each), (plain, expected)):
                for microbatch in range(2):
                    _backward(tensors, 10 * step + microbatch)
                optimizer.step()
                optimizer.zero_grad()
        assert num_runs(found) == 4, num_runs(found)
        assert num_runs(each) == len(_named(model))
        _assert_close(model, plain)
        fused = "fused" in options
        for a, b in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-6 if fused else 0, atol=1e-6 if fused else 0)
        weight = _named(model)["0.up.weight"]
        value = found.state[weight]["exp_avg"]
        assert isinstance(value, DTensor)
        value.to_local().fill_(7.0)
        assert (found.state_dict()["state"]["0.up.weight"]["exp_avg"].to_local() == 7.0).all()


@on_ranks(2)
def test_gradients_and_memory_may_come_and_go() -> None:
    """Gradients that come and go, parameters given new memory: state follows, results stay those of plain tensors."""
    model, plain = _sharded(), _model()
    found = ShardedOptimizer(_named(model), torch.optim.Adam, lr=0.1)
    expected = torch.optim.Adam(plain.parameters(), lr=0.1)
    counts = []
    for step in range(6):
        for tensors in (model, plain):
            _backward(tensors, step)
            if step in (1, 4):
                tensors[1].up.bias.grad = None
        if step == 3:
            with torch.no_grad():
                for param in model[2].parameters():
                    param._local_tensor = param._local_tensor.clone()
        for optimizer in (found, expected):
            optimizer.step()
            optimizer.zero_grad()
        counts.append(num_runs(found))
    _assert_close(model, plain)
    # Its step count differs for good, so that it is updated by itself and cuts its unit in three.
    assert counts[0] == 4, counts
    assert counts[1] == counts[2] == 6, counts
    assert counts[5] == 6, counts


@on_ranks(2)
def test_options_act_as_on_the_plain_optimizer() -> None:
    """Groups by pattern, a scheduler, add_param_group, closure, hooks and both clips act as on the plain optimizer."""
    model, plain = _sharded(), _model()
    extra, plain_extra = (nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    decay = ["*.bias", "*norm*"]
    found = ShardedOptimizer(
        _named(model), torch.optim.AdamW, 0.1, groups=[{"names": decay, "weight_decay": 0.0}], betas=(0.8, 0.9)
    )
    light = [p for n, p in plain.named_parameters() if n.endswith(".bias") or "norm" in n]
    heavy = [p for n, p in plain.named_parameters() if not (n.endswith(".bias") or "norm" in n)]
    expected = torch.optim.AdamW([{"params": light, "weight_decay": 0.0}, {"params": heavy}], 0.1, betas=(0.8, 0.9))
    found.add_param_group({"params": {"extra": extra}, "lr": 0.5})
    expected.add_param_group({"params": [plain_extra], "lr": 0.5})
    pairs = ((model, found, extra), (plain, expected, plain_extra))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for _, o, _ in pairs]
    cycles = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9) for _, o, _ in pairs]
    calls: list[str] = []
    found.register_step_pre_hook(lambda *_: calls.append("pre"))
    found.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(5):
        losses = []
        for tensors, optimizer, param in pairs:

            def closure(
                tensors: Any = tensors, optimizer: Any = optimizer, param: Any = param, step: int = step
            ) -> torch.Tensor:
                optimizer.zero_grad()
                param.grad = torch.full((3,), 1.0 + step)
                loss = _backward(tensors, step)
                if step % 2:
                    torch.nn.utils.clip_grad_norm_(tensors.parameters(), 0.01)
                elif tensors is model:
                    clip_grad_norm_(tensors.parameters(), 0.01)
                else:
                    torch.nn.utils.clip_grad_norm_(tensors.parameters(), 0.01)
                return loss

            losses.append(optimizer.step(closure))
        torch.testing.assert_close(*losses)
        for scheduler in schedulers if step % 2 else cycles:
            scheduler.step()
        assert [g["lr"] for g in found.param_groups] == [g["lr"] for g in expected.param_groups]
    assert calls == ["pre", "post"] * 5
    _assert_close(model, plain)
    assert torch.equal(extra, plain_extra)
    assert sorted(found.named_params) == sorted([*_named(model), "extra"])


@pytest.mark.parametrize("form", ["torch's", "torch's with names", "groups of params"])
@on_ranks(2)
def test_torchs_param_groups_are_taken(form: str) -> None:
    """The same list makes torch's optimizer on one process; it has no names, or names beside the parameters."""
    models = [_model(), _sharded()]
    optimizers: list[Any] = []
    for model in models:
        named = list(model.named_parameters())
        parts: list[list[Any]] = [[(n, p) for n, p in named if (p.dim() < 2) is thin] for thin in (True, False)]
        if form != "torch's with names":
            parts = [[param for _, param in part] for part in parts]
        torchs = [{"params": parts[0], "lr": 0.2, "weight_decay": 0.0}, {"params": parts[1], "lr": 0.1}]
        if model is models[0]:
            optimizers.append(torch.optim.AdamW(torchs, weight_decay=0.3))
        elif form == "groups of params":
            optimizers.append(ShardedOptimizer(dict(named), torch.optim.AdamW, groups=torchs, weight_decay=0.3))
        else:
            optimizers.append(ShardedOptimizer(torchs, torch.optim.AdamW, weight_decay=0.3))
    for seed in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            _backward(model, seed)
            optimizer.step()
    _assert_close(models[1], models[0])


@on_ranks(2)
def test_groups_without_names_or_with_names_and_parameters_that_are_there_are_refused() -> None:
    extra = nn.Parameter(torch.full((3,), 2.0))
    found = ShardedOptimizer({**_named(_sharded()), "extra": extra}, torch.optim.AdamW, 0.1)
    for wrong, text in (
        ({"params": [nn.Parameter(torch.ones(1))]}, "names"),
        ({"params": {"extra": nn.Parameter(torch.ones(1))}}, "already"),
        ({"params": {"other": extra}}, "already"),
    ):
        with pytest.raises((ConfigError, TypeError), match=text):
            found.add_param_group(wrong)


@on_ranks(4)
def test_empty_shards_join_the_updates_of_the_others() -> None:
    """More ranks than rows: empty shards join the updates of the others."""
    model, plain = _sharded(width=6), _model(width=6)
    for kind in (torch.optim.SGD, torch.optim.RAdam):
        found = ShardedOptimizer(_named(model), kind, lr=0.05)
        expected = kind(plain.parameters(), lr=0.05)
        for step in range(2):
            for tensors, optimizer in ((model, found), (plain, expected)):
                _backward(tensors, step)
                optimizer.step()
                optimizer.zero_grad()
        _assert_close(model, plain)


@on_ranks(4)
def test_tensor_parallelism_may_lie_below() -> None:
    """Tensor parallelism below fully_shard: rows cut twice, columns and rows cut; state whole and back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor"))
    for kind, options in ((torch.optim.Adam, {"lr": 0.1}), (torch.optim.Adafactor, {"lr": 0.1})):
        model, plain = _model(blocks=1), _model(blocks=1)
        parallelize_module(model[0], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shards"])
        found = ShardedOptimizer(_named(model), kind, **options)
        expected = kind(plain.parameters(), **options)
        for step in range(3):
            for (_, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.manual_seed(step)
                other.grad = torch.randn(other.shape)
                whole = distribute_tensor(other.grad, param.device_mesh, [Replicate()] * param.device_mesh.ndim)
                param.grad = whole.redistribute(placements=param.placements)
            found.step()
            expected.step()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), other), (kind, name)
        full, wanted = found.full_state_dict(by_index=True)["state"], expected.state_dict()["state"]
        for index, values in wanted.items():
            for key, value in values.items():
                assert torch.equal(full[index][key], value), (kind, index, key)
        other_found = ShardedOptimizer(_named(model), kind, **options)
        other_found.load_state_dict(expected.state_dict())
        again = other_found.full_state_dict(by_index=True)["state"]
        assert all(torch.equal(again[i][k], v) for i, values in wanted.items() for k, v in values.items())


class Sign(torch.optim.Optimizer):
    """A user's optimizer that keeps numbers in its param group, as schedule-free ones do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"] / group["steps"])


@on_ranks(2)
def test_an_unknown_class_is_refused_until_it_says_what_it_is() -> None:
    """A class that is not known is refused until it says what it is; what it keeps in its groups is kept."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0).view(6, 2)
    for update in ("elementwise", "whole_matrix"):
        param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        with pytest.raises(ConfigError, match="Sign is not a known class"):
            ShardedOptimizer({"weight": param}, Sign)
        found = ShardedOptimizer({"weight": param}, Sign, update=update)
        plain = nn.Parameter(whole.clone())
        expected = Sign([plain])
        for _ in range(3):
            param.grad = torch.ones_like(param)
            plain.grad = torch.ones_like(plain)
            found.step()
            expected.step()
        assert torch.equal(param.full_tensor(), plain)
        assert found.param_groups[0]["steps"] == found.state_dict()["param_groups"][0]["steps"] == 3


class RoundsLarge(torch.optim.Optimizer):
    """Its state of tensors of 4,096 elements and more is bfloat16, as 8-bit optimizers choose by size."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                dtype = torch.bfloat16 if param.numel() >= 4096 else torch.float32
                mean = self.state[param].setdefault("mean", torch.zeros_like(param, dtype=dtype))
                mean.lerp_(param.grad.to(dtype), 0.1)
                param.add_(mean.to(param.dtype), alpha=-group["lr"])


@on_ranks(2)
def test_state_whose_precision_depends_on_the_size_of_a_tensor_is_no_elementwise_state() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
    param, plain = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])), nn.Parameter(whole.clone())
    with pytest.raises(ConfigError, match=r"keeps the state of large tensors in another form.*whole_matrix"):
        ShardedOptimizer({"weight": param}, RoundsLarge, update="elementwise")
    for optimizer, each in (
        (ShardedOptimizer({"weight": param}, RoundsLarge, update="whole_matrix"), param),
        (RoundsLarge([plain]), plain),
    ):
        for _ in range(3):
            each.grad = each.detach().clone()
            optimizer.step()
    assert torch.equal(param.full_tensor(), plain)


@on_ranks(4)
def test_whole_matrices_take_two_exchanges_a_step() -> None:
    """Two exchanges a step however many matrices; owners balanced by cost; fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {f"weight{i}": (6 + i, 5) for i in range(8)} | {"row": (1, 5)}
    torch.manual_seed(0)
    wholes = {name: torch.randn(shape) for name, shape in shapes.items()}
    params = {n: nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for n, w in wholes.items()}
    plain = {n: nn.Parameter(w.clone()) for n, w in wholes.items()}
    found = ShardedOptimizer(params, torch.optim.Muon, lr=0.1)
    expected = torch.optim.Muon(plain.values(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        for name in shapes:
            gradient = torch.randn(shapes[name])
            params[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
            plain[name].grad = gradient
        with counted(*COLLECTIVES) as calls:
            found.step()
        assert calls == ["all_to_all_single"] * 2, calls
        expected.step()
    for name, param in params.items():
        assert torch.equal(param.full_tensor(), plain[name]), name
    owners = owners_of(found)
    assert set(owners) == set(shapes)
    loads = [sum(shapes[n][0] for n in shapes if owners[n] == rank) for rank in range(mesh.size())]
    assert max(loads) <= 1.35 * sum(loads) / len(loads), loads
    held = sum(v.numel() for s in found._backend.optimizer.state.values() for v in s.values())
    assert held <= 1.5 * sum(w.numel() for w in wholes.values()) / mesh.size()


@on_ranks(4)
def test_clipping_is_one_collective_over_all_kinds() -> None:
    """One collective over all kinds of parameters; nothing is scaled by a norm that is not finite, on any rank."""
    world = dist.get_world_size()
    row, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    spec = ChunkShardingSpec(
        dim=0, placements=[f"rank:{r}/cpu" for r in range(world - 1)]
    )  # the last rank holds nothing
    torch.manual_seed(0)
    values = [torch.randn(6, 5) for _ in range(4)]
    gradients = [torch.randn(6, 5) for _ in range(4)]
    old = sharded_tensor.zeros(spec, 6, 5)
    for shard in old.local_shards():
        start = shard.metadata.shard_offsets[0]
        shard.tensor.grad = gradients[3][start : start + shard.tensor.size(0)].clone()
    params: dict[str, torch.Tensor] = {
        "plain": nn.Parameter(values[0]),
        "rows": nn.Parameter(distribute_tensor(values[1], row, [Shard(0)])),
        "hybrid": nn.Parameter(distribute_tensor(values[2], square, [Replicate(), Shard(1)])),
    }
    params["plain"].grad = gradients[0].clone()
    params["rows"].grad = distribute_tensor(gradients[1], row, [Shard(0)])
    params["hybrid"].grad = distribute_tensor(gradients[2], square, [Replicate(), Shard(1)])
    for named in (params, {**params, "old": old}):
        found = ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
        for norm_type in (2.0, 1.0, float("inf")):
            expected = torch.nn.utils.get_total_norm(gradients[: len(named)], norm_type)
            with counted(*COLLECTIVES) as calls:
                norm = found.clip_grad_norm_(1e6, norm_type)
            assert calls == ["all_reduce"], calls
            torch.testing.assert_close(norm, expected)
        rows = params["rows"].grad
        assert isinstance(rows, DTensor)
        before = rows.to_local().clone()
        if dist.get_rank() == 0:
            rows.to_local()[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="non-finite"):
            found.clip_grad_norm_(1.0, error_if_nonfinite=True)
        if dist.get_rank() == 0:
            assert rows.to_local()[0, 0].isnan()
            rows.to_local()[0, 0] = before[0, 0]
        assert torch.equal(rows.to_local(), before)
        assert torch.equal(params["plain"].grad, gradients[0])
    found.clip_grad_norm_(0.5)
    torch.testing.assert_close(found.clip_grad_norm_(1e6), torch.tensor(0.5))
    torch.testing.assert_close(params["plain"].grad * (torch.nn.utils.get_total_norm(gradients) / 0.5), gradients[0])


class Explodes(torch.optim.Muon):
    """Fails on the owner of one matrix."""

    sharded_update = "whole_matrix"

    def step(self, closure: Any = None) -> Any:
        if any(p.shape == (4, 3) for group in self.param_groups for p in group["params"] if p.grad is not None):
            raise ArithmeticError("the matrix is singular")
        return super().step(closure)


@on_ranks(2)
def test_an_error_in_a_whole_matrix_is_named_on_all_ranks() -> None:
    """What goes wrong on one rank is named on all, nothing hangs, and the next step works."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    wholes = {"a": torch.randn(4, 3), "b": torch.randn(6, 6)}
    params = {n: nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for n, w in wholes.items()}
    found = ShardedOptimizer(params, Explodes, lr=0.1)
    owner = owners_of(found)["a"]
    for param in params.values():
        param.grad = torch.ones_like(param)
    with pytest.raises(
        StateError, match=rf"raised on rank {owner};.*{'singular' if rank == owner else 'see'}.*load a checkpoint"
    ):
        found.step()
    assert all(torch.equal(params[n].full_tensor(), w) for n, w in wholes.items())
    params["a"].grad = None
    if rank == 0:
        params["b"].grad = None
    with pytest.raises(StateError, match="has a gradient on some of its ranks and none on others"):
        found.step()
    params["b"].grad = torch.ones_like(params["b"])
    found.step()
    assert torch.equal(params["a"].full_tensor(), wholes["a"])
    assert not torch.equal(params["b"].full_tensor(), wholes["b"])
    bias = {"bias": nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))}
    with pytest.raises(ValueError, match="only supports 2D"):
        ShardedOptimizer(bias, torch.optim.Muon)


def _refused(model: nn.Module, prefix: str = "", num_steps: int = 4, scale: float = 0.0) -> list[str]:
    """Return the errors of steps of ShardedOptimizer while ranks train ``model`` on batches of their own."""
    optimizer = ShardedOptimizer({prefix + name: param for name, param in model.named_parameters()}, torch.optim.AdamW)
    found = list[str]()
    for step in range(num_steps):
        optimizer.zero_grad()
        _backward(model, 10 * step + dist.get_rank())
        for param in model.parameters() if scale else ():
            dist.all_reduce(param.grad.mul_(scale))
        try:
            optimizer.step()
        except StateError as error:
            found.append(str(error))
        if num_steps == 4:
            dist.barrier()
    return found


@on_ranks(2, FOUR)
def test_gradients_of_plain_parameters_that_nothing_averages_are_refused_on_every_rank() -> None:
    (found,) = _refused(_model())
    rank = dist.get_rank()
    assert re.search(rf"differ .* on rank {rank} and .* on rank {(rank + 1) % dist.get_world_size()}\), and", found)
    assert "fully_shard or replicate" in found


@on_ranks(2, FOUR)
def test_gradients_that_are_averaged_or_of_other_parameters_are_not_refused() -> None:
    assert _refused(nn.parallel.DistributedDataParallel(_model())) == []
    assert _refused(_sharded()) == []
    for scale in (1.0, math.nan):
        assert _refused(_model(), scale=scale) == []
    assert _refused(_model(), prefix=f"stage {dist.get_rank()}.") == []


@on_ranks(2)
def test_plain_parameters_are_compared_without_waiting_for_a_rank() -> None:
    assert _refused(_model(), num_steps=5 if dist.get_rank() else 0) == []
