"""Every kind of parameter in one ShardedOptimizer; what torch's own tests ask of the class, under their names, first."""

from __future__ import annotations

import copy

import torch
from helpers.compare import full
from helpers.ranks import on_ranks
from helpers.sharded_tensors import cut, set_gradients
from torch import nn, optim
from torch.distributed._shard import shard_parameter, sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shardwise import ShardedOptimizer


def _spec(dim: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


class ShardedModel(nn.Module):
    """A plain parameter and, with a spec, a ShardedTensor of 20 x 10 (5 rows a rank)."""

    def __init__(self, spec: ChunkShardingSpec | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.param = nn.Parameter(torch.rand(5, 10))
        if spec is not None:
            self.sharded_param = nn.Parameter(sharded_tensor.rand(spec, 20, 10, requires_grad=True))
        else:
            self.sharded_param = nn.Parameter(torch.rand(5, 10))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.sharded_param, sharded_tensor.ShardedTensor):
            return self.param + self.sharded_param.local_shards()[0].tensor + input
        return self.sharded_param + self.param + input


class ShardedLinear(nn.Module):
    """Two linears, the weights of which are cut row-wise and column-wise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear1 = nn.Linear(17, 12)
        self.linear2 = nn.Linear(12, 29)
        self.gelu = nn.GELU()

    def shard_parameter(self) -> None:
        shard_parameter(self.linear1, "weight", _spec(0))
        shard_parameter(self.linear2, "weight", _spec(1))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.gelu(self.linear1(inp)))


@on_ranks(4)
def test_sharded_optim() -> None:
    local_model = ShardedModel()
    sharded_model = ShardedModel(spec=_spec(0))
    sharded_model.sharded_param.local_shards()[0].tensor = local_model.sharded_param.detach().clone().requires_grad_()
    local_optim = optim.SGD(local_model.parameters(), lr=0.1)
    found = ShardedOptimizer(dict(sharded_model.named_parameters()), optim.SGD, lr=0.1)
    local_optim.zero_grad()
    found.zero_grad()
    before_update = copy.deepcopy(found.named_params)
    inp = torch.rand([5, 10]).requires_grad_()
    local_model(inp).sum().backward()
    sharded_model(inp).sum().backward()
    local_optim.step()
    found.step()
    assert set(before_update) == {"param", "sharded_param"}
    for key, old in before_update.items():
        new = found.named_params[key]
        if isinstance(old, sharded_tensor.ShardedTensor):
            assert not torch.equal(old.local_shards()[0].tensor, new.local_shards()[0].tensor)
            assert torch.equal(new.local_shards()[0].tensor, local_model.sharded_param)
        else:
            assert not torch.equal(old, new)
            assert torch.equal(new, local_model.param)
    found.zero_grad()
    assert sharded_model.param.grad is None
    assert sharded_model.sharded_param.local_shards()[0].tensor.grad is None


@on_ranks(4)
def test_named_params_with_sharded_tensor() -> None:
    model = ShardedModel(spec=_spec(0))
    assert sorted(dict(model.named_parameters())) == ["param", "sharded_param"]
    linear = ShardedLinear()
    linear.shard_parameter()
    names = list(dict(linear.named_parameters()))
    assert len(names) == 4
    assert {"linear1.bias", "linear2.bias", "linear1.weight", "linear2.weight"} == set(names)
    assert "bias" not in names
    found = ShardedOptimizer(dict(linear.named_parameters()), optim.AdamW, lr=0.1)
    assert list(found.named_params) == names
    assert found.named_params["linear1.weight"] is linear.linear1.weight
    assert found.param_groups[0]["param_names"] == names


def _kinds() -> dict[str, torch.Tensor]:
    """Every kind of parameter, all cut from the same whole tensors: uneven, empty on some ranks, several a rank."""
    mesh = init_device_mesh("cpu", (4,))
    wholes = _wholes()
    found: dict[str, torch.Tensor] = {"plain": nn.Parameter(wholes["plain"].clone())}
    for name, spec in _specs().items():
        st = sharded_tensor.rand(spec, *wholes[name].shape)
        for shard in st.local_shards():
            shard.tensor = cut(wholes[name], shard.metadata).clone().requires_grad_()
        found[name] = st.requires_grad_() if "few" in name else nn.Parameter(st)  # torch cannot wrap two empty shards
    for name, dim in (("rows", 0), ("few_rows", 0), ("columns", 1), ("vector", 0)):
        found[name] = nn.Parameter(distribute_tensor(wholes[name], mesh, [Shard(dim)]))
    return found


def _specs() -> dict[str, ChunkShardingSpec]:
    return {
        "st_rows": _spec(0),
        "st_columns": _spec(1),
        "st_several": _spec(0, (0, 1, 2, 3, 0, 1)),
        "st_few_rows": _spec(0),
        "st_absent": _spec(0, (1, 2)),
    }


def _wholes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "plain": (3, 4), "st_rows": (10, 3), "st_columns": (3, 9), "st_several": (17, 2), "st_few_rows": (2, 3),
        "st_absent": (4, 3), "rows": (9, 4), "few_rows": (3, 5), "columns": (4, 6), "vector": (7,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _assert_equal(params: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, param in params.items():
        if isinstance(param, sharded_tensor.ShardedTensor):
            for shard in param.local_shards():
                assert torch.equal(shard.tensor, cut(expected[name], shard.metadata)), name
        else:
            whole = full(param)
            assert torch.equal(whole, expected[name]), name


@on_ranks(4)
def test_one_optimizer_may_hold_every_kind_of_parameter() -> None:
    """One optimizer over every kind at once moves each as the plain optimizer moves the whole."""
    for kind, options in ((optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.AdamW, {"lr": 0.1})):
        params = _kinds()
        plain = {name: nn.Parameter(whole) for name, whole in _wholes().items()}
        found = ShardedOptimizer(params, kind, **options)
        expected = kind(list(plain.values()), **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            gradients = {name: torch.randn(whole.shape, generator=generator) for name, whole in plain.items()}
            for each in (params, plain):
                set_gradients(each, gradients)
            found.step()
            expected.step()
        _assert_equal(params, plain)
        full = found.full_state_dict(by_index=False)
        assert list(full["state"]) == list(params)
        other = kind([plain[name] for name in params], **options)
        other.load_state_dict(full)  # by name into a plain optimizer over the same order
        reference = dict(zip(plain, expected.state.values(), strict=True))
        for name, values in full["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(reference[name][key])), (name, key)
        norm = found.clip_grad_norm_(0.5)
        whole_norm = nn.utils.clip_grad_norm_(plain.values(), 0.5)
        torch.testing.assert_close(norm, whole_norm)
        found.zero_grad(set_to_none=False)
        assert all(
            not shard.tensor.grad.any() for n in _specs() for shard in params[n].local_shards() if shard.tensor.numel()
        )
