"""Wrong arguments end in errors of the package, which say what was found, what was expected and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import (
    MixedPrecisionPolicy,
    ShardedOptimizer,
    ShardwiseError,
    ZeroRedundancyOptimizer,
    fully_shard,
    replicate,
    shard_model,
)
from shardwise.checkpoint import load, save

APIS: list[Callable[..., Any]] = [fully_shard, shard_model, replicate]


def _net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])


def _refused(call: Callable[[], Any], words: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(ShardwiseError, match=re.escape(words)) as found:
        call()
    assert isinstance(found.value, kind)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_arguments_of_another_type_are_named(api: Callable[..., Any]) -> None:
    half = torch.bfloat16
    _refused(lambda: api(_net(), mp_policy=half), "such as MixedPrecisionPolicy(param_dtype=torch.bfloat16)", TypeError)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        policy = SimpleNamespace(**vars(MixedPrecisionPolicy()) | {name: "bf16"})  # as torch's class
        _refused(lambda policy=policy: api(_net(), mp_policy=policy), f"mp_policy: {name} is 'bf16'", TypeError)
    _refused(lambda: api(_net(), mesh="cpu"), "mesh is 'cpu' of type str; expected a DeviceMesh", TypeError)
    _refused(
        lambda: api(_net(), offload_policy="cpu"),
        "offload_policy is 'cpu'; expected OffloadPolicy(), CPUOffloadPolicy(), ",
    )
    words = "ignored_params holds '0.0.weight', expected the parameters themselves"
    _refused(lambda: api(_net(), ignored_params=["0.0.weight"]), words)
    model = _net()
    api(model, offload_policy=None, ignored_params=iter([model[0][0].weight]))
    assert type(model[0][0].weight) is nn.Parameter
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_misspelt_arguments_get_a_question(api: Callable[..., Any]) -> None:
    _refused(lambda: api(_net(), mp_polcy=None), "Did you mean 'mp_policy'?", TypeError)
    _refused(shardwise.policy(api(_net()), synk=False).__enter__, "no field ['synk']. Did you mean 'sync'?")
    _refused(shardwise.policy(_net(), sync=False).__enter__, "contains no sharded module")
    _refused(lambda: api(_net(), cpu_offload=True), "Did you mean 'offload_policy'?", TypeError)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop])
@on_ranks(2)
def test_optimizers_whose_step_is_another_over_shards_are_named(kind: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            return loss.item()

        closure()
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]

    model = fully_shard(_net())
    expected = [param.full_tensor() for param in model.parameters()]
    _refused(
        lambda: step(model, kind(model.parameters())), f"{kind.__name__} cannot step on 0.0.weight, which is sharded"
    )
    assert all(torch.equal(param.full_tensor(), one) for param, one in zip(model.parameters(), expected, strict=True))
    plain = replicate(_net(), process_group=None)
    step(plain, kind(plain.parameters()))


@on_ranks(2)
def test_an_optimizer_whose_closure_runs_the_first_forward_is_named_too() -> None:
    model = fully_shard(_net())
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    _refused(lambda: optimizer.step(closure), "LBFGS cannot step on 0.0.weight, which is sharded")  # pyright: ignore


@on_ranks(2)
def test_a_module_is_sharded_once_and_without_wrappers() -> None:
    for api in (fully_shard, replicate):
        _refused(lambda api=api: api(api(_net())), "was given to", AssertionError)
    _refused(lambda: replicate(fully_shard(_net())), "already managed by `fully_shard`", RuntimeError)
    for api in APIS:
        ddp = DistributedDataParallel(_net())
        for model in (ddp, nn.Sequential(nn.Linear(8, 8), ddp)):
            _refused(lambda api=api, model=model: api(model), "DistributedDataParallel, which exchanges gradients")
            assert all(type(param) is nn.Parameter for param in model.parameters())
    around = nn.Sequential(nn.Linear(8, 8), ddp)
    fully_shard(around, ignored_params=set(ddp.parameters()))
    around(torch.ones(2, 8)).sum().backward()


@on_ranks(2)
def test_optimizers_and_checkpoints_say_what_they_take(tmp_path: Any) -> None:
    model = fully_shard(_net())
    words = "Pass dict(model.named_parameters()), not model.parameters()"
    _refused(lambda: ShardedOptimizer(model.parameters(), torch.optim.AdamW), words, TypeError)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW)
    zero = ZeroRedundancyOptimizer(_net().parameters(), torch.optim.AdamW)
    for value in (-1.0, float("nan")):
        for each in (optimizer, zero):
            _refused(
                lambda each=each, value=value: each.clip_grad_norm_(value), f"max_norm is {value}; expected 0 or more"
            )
    with pytest.raises(AttributeError, match="no attribute 'reduce_gradients', which was for ZeRO-2: shard_model"):
        zero.reduce_gradients()  # pyright: ignore
    assert not hasattr(zero, "no_sync")
    words = "load_state_dict takes shards, and this state dict has full tensors: write shardwise.checkpoint.load"
    _refused(lambda: model.load_state_dict(_net().state_dict()), words, RuntimeError)
    model.load_state_dict(model.state_dict())
    for call in (lambda: save(tmp_path, model, step=1), lambda: load(tmp_path, model)):
        _refused(call, "", RuntimeError)
    _refused(lambda: save(tmp_path, model, step=1), "the state is a FSDPSequential; give", RuntimeError)
    _refused(lambda: save(tmp_path, {"model": model}, step=1, kep=1), "Did you mean 'keep'?", TypeError)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixedPrecisionPolicy(torch.int8), "mp_policy: param_dtype is torch.int8; expected None or a floating"),
        (lambda: MixedPrecisionPolicy(output_dtype="bf16"), "mp_policy: output_dtype is 'bf16'; expected None or a"),  # pyright: ignore
        (
            lambda: MixedPrecisionPolicy(param_dype=torch.bfloat16),
            "has no argument 'param_dype'. Did you mean 'param_dtype'",
        ),  # pyright: ignore
        (lambda: shardwise.CPUOffloadPolicy(pin=True), "CPUOffloadPolicy() has no argument 'pin'."),  # pyright: ignore
        (lambda: shardwise.CompressionPolicy(gather_dtype=1), "CompressionPolicy() has no argument 'gather_dtype'."),  # pyright: ignore
    ],
)
def test_policies_name_arguments_that_they_do_not_take(make: Callable[[], Any], words: str) -> None:
    _refused(make, words, TypeError)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shard_model(_net(), memory=8.5), "memory is 8.5; expected bytes, a text such as '8 GiB', or a"),  # pyright: ignore
        (lambda: shard_model(_net(), memory="8 apples"), "MemoryLimit('8 apples'); expected bytes, or a text such as"),
        (lambda: shardwise.MemoryLimit("8 GiB", 4), "MemoryLimit: inputs is 4; expected (batch, length)"),  # pyright: ignore
        (lambda: shardwise.MemoryLimit("8 GiB", folder="."), "decided before the first forward: give inputs"),
        (lambda: shardwise.MemoryLimit(-1, (4, 8)), "MemoryLimit(-1); expected bytes, or a text such as '8 GiB'"),
        (lambda: shardwise.apply_activations(_net(), "recompute"), "expected ActivationPolicy('recompute')"),  # pyright: ignore
        (
            lambda: shardwise.OptimizerOffload("run"),
            "(fraction='run'); expected a number from 0 to 1, or folder=...",
        ),  # pyright: ignore
        (
            lambda: shardwise.OptimizerOffload(folder=".", undo=True),
            "(undo=True) keeps state in memory: leave out undo= or folder=",
        ),
        (
            lambda: ShardedOptimizer(dict(_net().named_parameters()), torch.optim.Adam, offload=True),  # pyright: ignore
            "ShardedOptimizer: offload is True; expected OptimizerOffload()",
        ),
    ],
)
def test_a_value_in_place_of_a_policy_is_named_with_the_policy(call: Callable[[], Any], words: str) -> None:
    try:
        _refused(call, words)
    finally:
        if torch.distributed.is_initialized():  # of one rank, made by shard_model
            torch.distributed.destroy_process_group()
