"""Optimizers that keep state per block of elements are never run over other blocks than the plain optimizer's."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shardwise import ConfigError, ShardedOptimizer, StateError, ZeroRedundancyOptimizer

BLOCK, MIN_NUMEL = 256, 4096


class Codes(torch.Tensor):
    """Numbers in 8 bits with a scale per block: a tensor of a form of its own, as quantization libraries have."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> "Codes":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    @staticmethod
    def of(values: torch.Tensor) -> "Codes":
        return Codes(*_encoded(values))

    def decoded(self) -> torch.Tensor:
        return _decoded(self.codes, self.scales)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Codes, (self.codes, self.scales)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Codes({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten._to_copy):
            return Codes(args[0].codes.clone(), args[0].scales.clone())
        raise NotImplementedError(f"{func} of Codes")


def _encoded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_min(1e-12)
    return (blocks / scales[:, None] * 127).round().to(torch.int8).view(values.shape), scales


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.reshape(-1, BLOCK).float() / 127 * scales[:, None]).view(codes.shape)


class BlockMomentum(torch.optim.Optimizer):
    """Momentum in 8 bits where a tensor is large and a multiple of the block, else in 32: as AdamW8bit decides.

    ``form``: "tensors" keeps codes and scales side by side, "class" in one tensor of a form of its own; "later" keeps 32
    bits for the first two steps.
    """

    def __init__(self, params: Any, lr: float = 0.1, form: str = "tensors", min_numel: int = MIN_NUMEL) -> None:
        super().__init__(params, {"lr": lr, "form": form, "min_numel": min_numel})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, self.state[p])

    def _update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        momentum = self._read(state)
        momentum = p.grad.clone() if momentum is None else momentum * 0.9 + p.grad
        p.add_(momentum, alpha=-group["lr"])
        is_blocked = p.numel() >= group["min_numel"] and p.numel() % BLOCK == 0
        if not is_blocked or (group["form"] == "later" and state["step"] <= 2):
            state["momentum"] = momentum
        elif group["form"] == "class":
            state["momentum"] = Codes.of(momentum)
        else:
            state.pop("momentum", None)
            state["codes"], state["scales"] = _encoded(momentum)

    @staticmethod
    def _read(state: dict[str, Any]) -> torch.Tensor | None:
        if "codes" in state:
            return _decoded(state["codes"], state["scales"])
        momentum = state.get("momentum")
        return momentum.decoded() if isinstance(momentum, Codes) else momentum


FORMS = ("tensors", "class")
SIZES = {"aligned": (64, 256), "across": (64, 96), "odd": (33, 128), "small": (20, 10), "vector": (8192,)}


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(size) for name, size in SIZES.items()}


def _sharded() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for name, value in _values().items()}


def _step(params: dict[str, torch.Tensor], optimizer: Any, step: int) -> None:
    noise = torch.Generator().manual_seed(step)
    for name, param in params.items():
        gradient = torch.randn(SIZES[name], generator=noise)
        mesh = getattr(param, "device_mesh", None)
        param.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, param.placements)
    optimizer.step()


@on_ranks(2, FOUR)
def test_state_by_blocks_declared_elementwise_is_refused() -> None:
    """On every rank, before anything has moved, with what it keeps and what to do."""
    for form in FORMS:
        with pytest.raises(ConfigError, match="keeps state '(codes|scales|momentum)'.*update='whole_matrix'"):
            ShardedOptimizer(_sharded(), BlockMomentum, update="elementwise", form=form)
        with pytest.raises(ConfigError, match="is not a known class"):
            ShardedOptimizer(_sharded(), BlockMomentum, form=form)
        plain = [nn.Parameter(value) for value in _values().values()]
        with pytest.raises(ConfigError, match="keeps state .*use partition='whole'"):
            ZeroRedundancyOptimizer(plain, BlockMomentum, partition="even", form=form)


@on_ranks(2, FOUR)
def test_state_by_blocks_is_found_out_when_it_turns_up() -> None:
    """State that turns up in the third step, or for tensors larger than those that were tried: an error, not a silence."""
    for options, num_fine in (({"form": "later"}, 2), ({"min_numel": 1 << 17}, 0)):
        size = (2048, 256) if "min_numel" in options else (64, 256)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        param = nn.Parameter(distribute_tensor(torch.randn(size), mesh, [Shard(0)]))
        found = ShardedOptimizer({"weight": param}, BlockMomentum, update="elementwise", **options)
        param.grad = torch.ones_like(param)
        for _ in range(num_fine):
            found.step()
        with pytest.raises(StateError, match="weight: BlockMomentum keeps state 'codes|scales'.*whole_matrix"):
            found.step()


@on_ranks(2, FOUR)
def test_whole_matrices_are_those_of_the_plain_optimizer() -> None:
    """To the bit, state dicts and loading included."""
    for form in FORMS:
        params, values = _sharded(), {name: nn.Parameter(value) for name, value in _values().items()}
        found = ShardedOptimizer(params, BlockMomentum, update="whole_matrix", form=form)
        expected = BlockMomentum(values.values(), form=form)
        for step in range(5):
            if step == 2:
                again = ShardedOptimizer(params, BlockMomentum, update="whole_matrix", form=form)
                again.load_state_dict(found.state_dict())
                found = again
            if step == 3:
                again = ShardedOptimizer(params, BlockMomentum, update="whole_matrix", form=form)
                again.load_state_dict(expected.state_dict())
                found = again
            _step(params, found, step)
            _step(values, expected, step)
            _assert_same(found.full_state_dict(by_index=True)["state"], expected.state_dict()["state"])
            assert [n for n, p in params.items() if not torch.equal(p.full_tensor(), values[n])] == []
        plain = BlockMomentum(values.values(), form=form)
        plain.load_state_dict(found.full_state_dict())
        _assert_same(plain.state_dict()["state"], expected.state_dict()["state"])


def _assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for index, values in expected.items():
        assert found[index].keys() == values.keys()
        for key, value in values.items():
            other = found[index][key]
            assert type(other) is type(value), (index, key)
            pairs = (
                [(other, value)]
                if not isinstance(value, Codes)
                else [(other.codes, value.codes), (other.scales, value.scales)]
            )
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs), (index, key)


@on_ranks(2, FOUR)
def test_whole_tensors_are_right_with_zero() -> None:
    for form, bucket_view in product(FORMS, (False, True)):
        params = {name: nn.Parameter(value) for name, value in _values().items()}
        values = {name: nn.Parameter(value) for name, value in _values().items()}
        options = {"form": form, "parameters_as_bucket_view": bucket_view}
        found = ZeroRedundancyOptimizer(params.values(), BlockMomentum, **options)
        expected = BlockMomentum(values.values(), form=form)
        for step in range(3):
            _step(params, found, step)
            _step(values, expected, step)
            found.consolidate_state_dict(to=1)
            box = [found.state_dict() if dist.get_rank() == 1 else None]
            dist.broadcast_object_list(box, src=1)
            _assert_same(box[0]["state"], expected.state_dict()["state"])
            found = ZeroRedundancyOptimizer(params.values(), BlockMomentum, **options)
            found.load_state_dict(box[0])
        assert [n for n, p in params.items() if not torch.equal(p, values[n])] == []


@on_ranks(2, FOUR)
def test_plain_parameters_are_not_joined() -> None:
    """Neighbours in memory, not sharded: each is a tensor of its own for the optimizer, as it is without us."""
    for form in FORMS:
        flat = torch.cat([value.flatten() for value in _values().values()])
        parts = flat.split([value.numel() for value in _values().values()])
        params = {n: nn.Parameter(part.view(SIZES[n])) for n, part in zip(SIZES, parts, strict=True)}
        values = {name: nn.Parameter(value) for name, value in _values().items()}
        found = ShardedOptimizer(params, BlockMomentum, update="elementwise", form=form)
        expected = BlockMomentum(values.values(), form=form)
        for step in range(3):
            _step(params, found, step)
            _step(values, expected, step)
        assert [n for n, p in params.items() if not torch.equal(p, values[n])] == []


@on_ranks(2, FOUR)
def test_state_of_another_form_is_not_taken() -> None:
    params = _sharded()
    blocks = ShardedOptimizer(params, BlockMomentum, update="whole_matrix", form="class")
    _step(params, blocks, 0)
    found = ShardedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="state of another optimizer class"):
        found.load_state_dict(blocks.state_dict())
