"""Aliases of full parameters that forward takes and keeps: right values while there are any, an error after, never a crash."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, shard_model

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": torch.sum,
    "clone": torch.clone,
    "repr": repr,
    "array": torch.Tensor.numpy,
    "copy": lambda alias: torch.zeros_like(alias, memory_format=torch.contiguous_format).copy_(alias),
    "write": lambda alias: alias.add_(1),
    "several": lambda alias: torch._foreach_norm([alias]),
    "element": lambda alias: alias.reshape(-1)[0].item(),
}
GONE = r"Cannot access data pointer|storage of size 0|shared memory with a full parameter"  # the last one: torch 2.15


class Keeping(nn.Module):
    """Keeps aliases of its weight in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.eye(6) + 0.1), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        self.kept = [weight.data, weight.detach(), weight.detach().view(-1), weight.data[1:], weight.detach().T]
        return x @ weight


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Keeping(), Keeping())


def _cut(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


APIS: dict[str, Callable[[nn.Sequential], Any]] = {
    "reshards": lambda model: _cut(model, reshard_after_forward=True),
    "keeps": lambda model: _cut(model, reshard_after_forward=False),
    "shard_model": lambda model: shard_model(model, min_unit_bytes=0),
    "hybrid": lambda model: _cut(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))),
}


@pytest.mark.parametrize(
    ("num_ranks", "api"),
    [(2, "reshards"), (2, "keeps"), (2, "shard_model"), (4, "hybrid")],
    ids=lambda each: str(each),
)
@on_ranks()
def test_aliases_of_forward_raise_once_their_memory_is_gone_and_training_goes_on(api: str) -> None:
    model, plain = _model(), _model()
    APIS[api](model)
    assert_trains_alike(model, plain, steps=1)
    for kept in [list(block.kept) for block in model]:
        for alias in kept:
            for name, read in READS.items():
                with pytest.raises(RuntimeError, match=GONE):
                    pytest.fail(f"{name} of {tuple(alias.shape)} gave {read(alias)!r}")
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_an_alias_shows_the_values_of_now_while_its_parameter_is_whole() -> None:
    model, plain = _cut(_model(), reshard_after_forward=False), _model()
    assert_trains_alike(model, plain, steps=1)
    old = [list(block.kept) for block in model]
    model(batch(0))
    plain(batch(0))
    for kept, block in zip(old, plain, strict=True):
        for mine, theirs in zip(kept, block.kept, strict=True):
            torch.testing.assert_close(mine, theirs)


class Peeking(nn.Module):
    """Reads in its forward what another module has kept of its own."""

    def __init__(self, other: Keeping) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.eye(6)), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return y * self.others[0].kept[0].sum() if self.others else y


@on_ranks(2)
def test_a_forward_that_reads_what_another_module_has_kept_raises_and_the_next_step_is_right() -> None:
    keeping = Keeping()
    model = _cut(nn.Sequential(keeping, Peeking(keeping)), reshard_after_forward=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=GONE):
            model(batch(0))
    model[1].others.clear()
    model(batch(0)).sum().backward()


def _report() -> tuple[int, int]:
    """Return the bytes of all storages, and how many have none, as tools do that walk over all objects."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values()), sum(
        not each.nbytes() for each in storages
    )


@on_ranks(2)
def test_a_report_of_memory_inside_forward_reads_that_resharded_parameters_have_none() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    found: list[tuple[int, int]] = []
    for block in model:
        fully_shard(block)
        block.register_forward_pre_hook(lambda *_: found.append(_report()))
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert len(found) == 6
    assert all(held > 0 and freed > 0 for held, freed in found[1:])
