"""The result of gathering one parameter is the full parameter; the gathers of several are copied out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.plans import planned_calls
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import build_sharded, loss_of, noise
from helpers.trains_alike import assert_trains_alike
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard

ALL_GATHER = "all_gather_single"


class Product(nn.Module):
    """A matrix that notes where it is in each forward."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(rows, 6, generator=generator).to(dtype))
        self.addresses: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.addresses.append(self.weight.data_ptr())
        return x.to(self.weight.dtype) @ self.weight.t()


@contextmanager
def results_seen() -> Iterator[list[int]]:
    """Yield the addresses of the results of all-gathers."""
    seen: list[int] = []
    real: Callable[..., Any] = getattr(dist, ALL_GATHER)

    def gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(output.data_ptr())
        return real(output, *args, **kwargs)

    with mock.patch.object(dist, ALL_GATHER, gather):
        yield seen


@on_ranks(2, FOUR)
def test_the_parameter_of_a_unit_is_the_result_of_its_gather() -> None:
    bf16 = MixedPrecisionPolicy(torch.bfloat16)
    for rows in (12, 11):  # the last of two and of four ranks is a row short
        for options in ({}, {"mp_policy": bf16}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
            if dist.get_world_size() == 2 and "reshard_after_forward" in options:
                continue
            module = fully_shard(Product(rows), **options)
            root = fully_shard(nn.Sequential(module))
            with results_seen() as seen:
                for number in range(3):
                    del seen[:]
                    root(noise(number, 6)).float().sum().backward()
                    assert module.addresses[-1] == seen[0], options


@on_ranks(4)
def test_a_parameter_that_some_rank_has_no_row_of_is_copied_out_and_right() -> None:
    model, plain = Product(9), Product(9)  # rows 3, 3, 3, 0: as much padding as a shard
    fully_shard(model)
    with results_seen() as seen:
        assert_trains_alike(model, plain)
    assert len(seen) == len(model.addresses)
    assert not any(used == gathered for used, gathered in zip(model.addresses, seen, strict=True))


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.num_bytes += sum(each.numel() * each.element_size() for each in args[0])
        return func(*args, **(kwargs or {}))


@on_ranks(2, FOUR)
@pytest.mark.parametrize("name", ["plain", "matrices", "tied"])
def test_gathers_of_one_parameter_copy_nothing(name: str) -> None:
    model = build_sharded(name)
    with torch.no_grad():
        loss_of(model, name=name)
        model.reshard()
        with Copies() as copies:
            loss_of(model, name=name)
    # Of the matrices only the last, of nine rows, leaves one of four ranks without any.
    last = 4 * 31 * 9 if dist.get_world_size() == 4 else 0
    assert copies.num_bytes == last if name == "matrices" else copies.num_bytes > 0


class Gather:
    """A user's all-gather, with memory of its own."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        return getattr(dist, ALL_GATHER)(output, shard, group=group, async_op=async_op)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "the group's allocator, which gloo lacks": lambda model: model.set_allocate_memory_from_process_group_for_comm(
        True
    ),
    "the user's collective": lambda model: model[0].set_custom_all_gather(Gather()),
    "memory that is kept": lambda model: model.set_keep_unsharded_storage(True),
}


@on_ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_knows_the_bytes_of_gathers(change: str) -> None:
    model: Any = nn.Sequential(*[Product(6) for _ in range(3)])
    for module in model:
        fully_shard(module)
    fully_shard(model).set_transport("collective")
    CHANGES[change](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        model(noise(seed, 6)).sum().backward()
        optimizer.step()

    for seed in range(2):
        step(seed)
    del model[0].addresses[:]
    with shardwise.trace(model) as trace:
        for seed in range(2):
            step(seed)
    assert trace.calls == 2 * planned_calls(model)


@on_ranks(2)
def test_memory_that_is_kept_is_refilled_where_it_is() -> None:
    model: Any = fully_shard(Product(6))
    model.set_transport("collective")
    model.set_keep_unsharded_storage(True)
    plain, x = Product(6), torch.ones(4, 6)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        found, expected = model(x), plain(x)
        assert torch.equal(found, expected)
        for loss, optimizer in zip((found.sum(), expected.sum()), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len({*model.addresses}) == 1


class _Broken:
    """A collective that has written a part of its result when it fails."""

    def __init__(self, output: torch.Tensor) -> None:
        output[: output.numel() // 2].fill_(torch.nan)

    def wait(self) -> None:
        raise RuntimeError("the connection is closed")

    def is_completed(self) -> bool:
        return False


@on_ranks(2)
def test_a_gather_that_fails_shows_nobody_what_it_has_written() -> None:
    model = Product(7)
    fully_shard(model, reshard_after_forward=True)
    kept: list[torch.Tensor] = []
    hook = model.register_forward_pre_hook(lambda *_: kept.append(model.weight))
    model(noise(0, 6))
    hook.remove()
    with (
        mock.patch.object(dist, ALL_GATHER, lambda output, *args, **kwargs: _Broken(output)),
        pytest.raises(RuntimeError, match="the connection is closed"),
    ):
        model(noise(0, 6))
    model.reshard()
    assert not model.weight.to_local().isnan().any()
    with pytest.raises(RuntimeError, match="data pointer|was resharded"):
        kept[0].sum()
