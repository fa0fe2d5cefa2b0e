"""float8 linear layers of torchao whose weights are gathered in float8, beside torch's own class and one process.

torchao 0.18 computes in float8 on accelerators alone; here it emulates the products (``emulate``), not the casts, scales and
gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import assert_equal, full
from helpers.folders import folder_of_all
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import CheckpointError, checkpoint, fully_shard

pytestmark = pytest.mark.clients
WIDTH, STEPS = 32, 4


def make(seed: int = 0, hidden: int = 64) -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)) for _ in range(3)]
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(nn.Sequential(*blocks), config=config)


def shard(model: nn.Sequential, api: Callable[..., Any], **options: Any) -> Any:
    for block in model:
        api(block, **options)
    return api(model, **options)


class Trained:
    """Losses and whole parameters of some steps."""

    def __init__(self, model: nn.Module, seed: int, precomputes: bool = False) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        self.model = model
        self.optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        self.losses: list[torch.Tensor] = []
        self._precomputes = precompute_float8_dynamic_scale_for_fsdp if precomputes else None
        self.inputs = torch.Generator().manual_seed(seed)

    def steps(self, count: int = STEPS) -> Trained:
        for _ in range(count):
            self.optimizer.zero_grad()
            x = torch.randn(16, WIDTH, generator=self.inputs)
            loss = (self.model(x).float() - x).square().mean()
            loss.backward()
            self.optimizer.step()
            if self._precomputes is not None:
                self._precomputes(self.model)
            self.losses.append(loss.detach())
        return self

    def values(self) -> list[torch.Tensor]:
        return [plain(param) for param in self.model.parameters()]


def plain(param: torch.Tensor) -> torch.Tensor:
    whole = full(param).detach()
    return getattr(whole, "_tensor", whole).clone()


class Plain:
    """Weights as what they are cast from, as a checkpoint wants them: it holds no tensor of a form of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: self._plain(value) for name, value in self.model.state_dict().items()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.model.load_state_dict(values)

    @staticmethod
    def _plain(value: Any) -> DTensor:
        local = getattr(value.to_local(), "_tensor", value.to_local())
        place = value.device_mesh, value.placements
        return DTensor.from_local(local, *place, run_check=False, shape=value.shape, stride=value.stride())


@pytest.mark.parametrize("precomputes", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2)
def test_losses_and_parameters_are_those_of_torchs_class(
    precomputes: bool, dtype: torch.dtype | None, reshards: bool
) -> None:
    rank = dist.get_rank()
    options: list[dict[str, Any]] = [
        {"mp_policy": package.MixedPrecisionPolicy(param_dtype=dtype), "reshard_after_forward": reshards}
        for package in (shardwise, torchs)
    ]
    ours = Trained(shard(make(), fully_shard, **options[0]), rank, precomputes).steps()
    theirs = Trained(shard(make(), torchs.fully_shard, **options[1]), rank, precomputes).steps()
    assert_equal(ours.losses, theirs.losses)
    assert_equal(ours.values(), theirs.values())


@pytest.mark.parametrize("precomputes", [False, True])
@on_ranks(4)
def test_the_same_over_replicas(precomputes: bool) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    ours = Trained(shard(make(), fully_shard, mesh=mesh), rank, precomputes).steps()
    theirs = Trained(shard(make(), torchs.fully_shard, mesh=mesh), rank, precomputes).steps()
    assert_equal(ours.losses, theirs.losses)
    assert_equal(ours.values(), theirs.values())


@pytest.mark.parametrize("precomputes", [False, True])
@pytest.mark.parametrize("hidden", [64, 33])
@on_ranks(1, 2)
def test_ranks_with_the_same_inputs_train_as_one_process_also_with_uneven_rows(hidden: int, precomputes: bool) -> None:
    """Of uneven rows torch's own class ends the process: torchao sends them as they are, and gloo wants one size of all."""
    model = shard(make(hidden=hidden), fully_shard)
    ours, alone = Trained(model, 0, precomputes).steps(), Trained(make(hidden=hidden), 0).steps()
    assert_equal(ours.losses, alone.losses)
    assert_equal(ours.values(), alone.values())


@on_ranks(2)
def test_weights_are_gathered_in_float8_and_given_back() -> None:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    seen: list[torch.Tensor] = []
    model = shard(make(), fully_shard)
    for block in model:
        block[0].register_forward_hook(lambda layer, *_: seen.append(layer.weight))
    trained = Trained(model, dist.get_rank()).steps(1)
    assert [type(each) for each in seen] == [Float8TrainingTensor] * 3
    assert {each._data.dtype for each in seen} == {torch.float8_e4m3fn}
    assert {each._data.untyped_storage().nbytes() for each in seen} == {0}  # between steps
    assert {param.to_local()._tensor.dtype for param in model.parameters() if param.ndim == 2} == {torch.float32}
    assert all(param.grad.dtype == torch.float32 for param in trained.model.parameters())


@on_ranks(2)
def test_scales_that_were_computed_ahead_are_used() -> None:
    from torchao.float8 import fsdp_utils

    trained = Trained(shard(make(), fully_shard), dist.get_rank(), precomputes=True).steps(1)
    with mock.patch.object(fsdp_utils, "hp_tensor_to_float8_dynamic", side_effect=AssertionError("computed again")):
        trained.steps(2)


@on_ranks(2)
def test_a_state_is_loaded_from_a_state_dict_and_from_a_checkpoint() -> None:
    rank = dist.get_rank()
    first = Trained(shard(make(), fully_shard), rank, precomputes=True).steps()
    copied, loaded = (Trained(shard(make(seed), fully_shard), rank, precomputes=True) for seed in (1, 2))
    copied.model.load_state_dict(first.model.state_dict())
    with folder_of_all() as folder:
        with pytest.raises(CheckpointError, match="WeightWithDynamicFloat8CastTensor is a tensor subclass"):
            checkpoint.save(folder / "refused", {"model": first.model}, step=1)
        checkpoint.save(folder / "saved", {"model": Plain(first.model), "optimizer": first.optimizer}, step=1)
        checkpoint.load(folder / "saved", {"model": Plain(loaded.model), "optimizer": loaded.optimizer})
    assert_equal(copied.values(), first.values())
    assert_equal(loaded.values(), first.values())
    loaded.inputs.set_state(first.inputs.get_state())
    assert_equal(loaded.steps(2).losses, first.steps(2).losses[STEPS:])
    assert_equal(loaded.values(), first.values())
