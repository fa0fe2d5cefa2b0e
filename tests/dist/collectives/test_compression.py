"""Parameters and gradients in fewer bits: how far off, on how many bytes, the same on every rank, and what is kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full, local
from helpers.inside import start_peak
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from shardwise import (
    CompressionPolicy,
    ConfigError,
    DesyncError,
    TransportError,
    describe_units,
    fully_shard,
    replicate,
    transaction,
)
from shardwise.checkpoint import load, save
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.engine import engine_of

BOTH = CompressionPolicy(gather="int8", reduce="int8", block=64, min_bytes=1024)
REDUCE = CompressionPolicy(reduce="int8", block=64, min_bytes=1024)


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models of two large matrices, a small one, and biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 65), nn.Tanh(), nn.Linear(65, 48), nn.Linear(48, 3))
    return model, copy.deepcopy(model)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def backward(model: nn.Module, seed: int) -> None:
    model(rows(seed)).square().sum().backward()


def averaged(model: nn.Module, seeds: range) -> dict[str, torch.Tensor]:
    """Return the sum over ``seeds`` of gradients of a plain model, averaged over ranks."""
    model.zero_grad()
    for seed in seeds:
        backward(model, seed)
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    for gradient in found.values():
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    return found


def apis(num_ranks: int) -> dict[str, Any]:
    """Return what shards a model, by name, with the policy that is allowed there."""
    found: dict[str, Any] = {
        "sharded": lambda model: fully_shard(model, compression=BOTH),
        "replicas": lambda model: replicate(model, compression=REDUCE),
        "plain replicas": lambda model: replicate(model, process_group=dist.group.WORLD, compression=REDUCE),
    }
    if num_ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        found["both"] = lambda model: fully_shard(model, mesh=mesh, compression=REDUCE)
    return found


@on_ranks(2, FOUR)
def test_gradients_are_within_half_a_step_of_each_rank_and_small_ones_are_exact(num_ranks: int) -> None:
    for name, shard in apis(num_ranks).items():
        model, plain = twins()
        shard(model)
        if name == "sharded":  # what is compared is the reduction: without loss in the gather
            model.unshard()
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.data.copy_(param)
        wanted = averaged(plain, range(1))
        backward(model, 0)
        for key, param in model.named_parameters():
            off = (full(param.grad) - wanted[key]).abs().max()
            if key.endswith("bias") or key.startswith("3"):
                torch.testing.assert_close(full(param.grad), wanted[key], rtol=1e-5, atol=1e-5)
            else:
                backward(plain, 0)
                largest = torch.stack([plain.get_parameter(key).grad.abs().max()])
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                # A rank's coding is off by half a step at most; between replicas the sum is coded once more.
                assert 0 < off <= 1.1 * largest.item() / 127, (name, key)


@on_ranks(2, FOUR)
def test_every_rank_computes_with_the_same_bits_near_the_shards(num_ranks: int) -> None:
    model, plain = twins()
    fully_shard(model, compression=BOTH)
    masters = [local(param).clone() for param in model.parameters()]
    model.unshard()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = [torch.empty_like(other) for _ in range(num_ranks)]
        dist.all_gather(found, param.detach().contiguous())
        assert all(torch.equal(each, found[0]) for each in found), name
        off = (found[0] - other).abs().max()
        is_exact = name.endswith("bias") or name.startswith("3")
        assert (off == 0) if is_exact else (0 < off <= 1.001 * other.abs().max() / 127 / 2), name
    model.reshard()
    assert all(torch.equal(local(p), m) for p, m in zip(model.parameters(), masters, strict=True)), "masters stay"


@on_ranks(2, FOUR)
def test_what_was_sent_over_steps_follows_the_sum_of_gradients(num_ranks: int) -> None:
    for name, shard in apis(num_ranks).items():
        model, plain = twins()
        shard(model)
        if name == "sharded":
            model.unshard()
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.data.copy_(param)
            model.reshard()
        wanted = averaged(plain, range(6))
        for seed in range(6):
            backward(model, seed)  # .grad is the sum
        left = model.compression_state().state_dict()
        assert sorted(left) == ["0.weight", "2.weight"]
        for key, residual in left.items():
            param = model.get_parameter(key)
            assert residual.shape == param.shape
            sent = full(param.grad)
            torch.testing.assert_close(
                sent + full(residual) / (2 if name == "both" else num_ranks),  # by how many the coded sum is divided
                wanted[key],
                rtol=1e-4,
                atol=1e-4,
                msg=lambda text, name=name: name + text,
            )


@on_ranks(4)
def test_residuals_load_at_another_number_of_ranks_and_going_on_is_resuming(tmp_path: Any) -> None:
    four, _ = twins()
    fully_shard(four, compression=BOTH)
    backward(four, 0)
    save(tmp_path / "saved", {"model": four, "compression": four.compression_state()}, step=1)
    saved = {name: full(value) for name, value in four.compression_state().state_dict().items()}
    again, _ = twins()
    fully_shard(again, compression=BOTH)
    load(tmp_path / "saved", {"model": again, "compression": again.compression_state()})
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))["shards"]
    two, _ = twins()
    fully_shard(two, mesh=pair, compression=BOTH)
    two.compression_state().load_state_dict(
        {name: distribute_tensor(value, pair, src_data_rank=None) for name, value in saved.items()}
    )
    for name, value in two.compression_state().state_dict().items():
        torch.testing.assert_close(full(value), saved[name], rtol=0, atol=0)
    for model in (four, again):
        model.zero_grad()
        backward(model, 1)
    for left, right in zip(four.parameters(), again.parameters(), strict=True):
        assert torch.equal(local(left.grad), local(right.grad))


@on_ranks(2)
def test_a_backward_without_sync_sends_nothing_and_loses_nothing() -> None:
    model, _ = twins()
    fully_shard(model, compression=REDUCE)
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    assert model.compression_report()[0].reductions.num_calls == 0
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    assert model.compression_report()[0].reductions.num_calls == 1


@on_ranks(4)
def test_int8_sends_at_most_three_tenths_of_the_bytes() -> None:
    sent = [0]
    single = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
    originals = {name: getattr(dist, name) for name in single}

    def counting(original: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[0] += max(output.nbytes, given.nbytes)
            return original(output, given, *args, **kwargs)

        return call

    counts: dict[str, int] = {}
    try:
        for name, original in originals.items():
            setattr(dist, name, counting(original))
        for coding in (None, "int8"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
            fully_shard(model, compression=CompressionPolicy(gather=coding, reduce=coding))
            sent[0] = 0
            model(torch.ones(2, 128)).sum().backward()
            counts[str(coding)] = sent[0]
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert counts["int8"] <= 0.3 * counts["None"], counts
    traffic = model.compression_report()[0]
    for each in (traffic.gathers, traffic.reductions):
        assert 0 < each.last_error <= each.worst_error < 0.02
        assert 0 < each.sent_bytes <= 0.3 * each.plain_bytes


@on_ranks(2)
def test_an_error_above_the_bound_warns_once_and_routes_name_the_coding() -> None:
    model, _ = twins()
    policy = CompressionPolicy(gather="int8", reduce="bf16", min_bytes=1024, warn_above=1e-9)
    fully_shard(model, compression=policy)
    with pytest.warns(UserWarning, match="warn_above"):
        backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, 1)
    assert describe_units(model).rows[0].route == "collectives, gather int8, reduce bf16"


@torch.no_grad()
def _write(module: nn.Module, _inputs: object) -> None:
    module.get_parameter("weight")[:, 0] = 7.0


@on_ranks(2)
def test_what_a_forward_writes_reaches_masters_and_nothing_else() -> None:
    model, _ = twins()
    model[0].register_forward_pre_hook(_write)
    fully_shard(model, compression=BOTH)
    before = full(model.get_parameter("0.weight")).clone()
    model(torch.ones(2, before.shape[1])).sum().backward()
    after = full(model.get_parameter("0.weight"))
    assert torch.all(after[:, 0] == 7.0)
    assert torch.equal(after[:, 1:], before[:, 1:])


@on_ranks(2)
def test_a_gather_between_replicas_and_other_things_than_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="mesh with replicas"):
        replicate(nn.Linear(2, 2), compression=BOTH)
    with pytest.raises(ConfigError, match="expected a CompressionPolicy"):
        fully_shard(nn.Linear(2, 2), compression="int8")


@on_ranks(2, fresh=True, group_timeout_s=3)
@pytest.mark.parametrize("other", [{"block": 64}, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_ranks_with_other_policies_are_named_before_anything_is_sent(other: dict[str, Any] | None) -> None:
    mine: dict[str, Any] | None = other if dist.get_rank() == 1 else {}
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, compression=None if mine is None else CompressionPolicy(gather="int8", min_bytes=0, **mine))
    with pytest.raises((DesyncError, TransportError, RuntimeError)) as caught:
        model(torch.ones(2, 64)).sum().backward()
    if mine is not None:
        assert isinstance(caught.value, DesyncError)
        assert "compression policies" in str(caught.value)


@on_ranks(2)
def test_a_step_that_is_taken_back_takes_its_residuals_back() -> None:
    model = twins()[0]
    fully_shard(model, compression=REDUCE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.compression_state()
    seen: list[dict[str, torch.Tensor]] = []
    for step in range(2):
        with transaction(model, optimizer, skip=KeyError) as attempt:
            optimizer.zero_grad()
            backward(model, 10 * step + dist.get_rank())
            if step == 1 and dist.get_rank() == 1:
                raise KeyError("a broken sample")
            optimizer.step()
        assert attempt.outcome == ("committed", "skipped")[step]
        seen.append({name: full(each).clone() for name, each in state.state_dict().items()})
    assert any(each.any() for each in seen[0].values())
    for name, before in seen[0].items():
        assert torch.equal(seen[1][name], before), name


def replicated_blocks(policy: CompressionPolicy) -> nn.Sequential:
    """Return four blocks, each a unit of replicas, whose sums are coded."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
    for block in model:
        replicate(block, compression=policy)
    replicate(model, compression=policy)
    return model


@contextmanager
def parts_and_sums() -> Generator[list[str]]:
    """Yield a list that gets "s" where parts of a coded sum are sent, and "b" where what they sum to comes back."""
    order: list[str] = []
    gather = "all_gather_single"
    with pytest.MonkeyPatch.context() as patched:
        for letter, name in (("s", "all_to_all_single"), ("b", gather)):
            original = getattr(dist, name)

            def call(*args: Any, letter: str = letter, original: Any = original, **kwargs: Any) -> Any:
                order.append(letter)
                return original(*args, **kwargs)

            patched.setattr(dist, name, call)
        yield order


@on_ranks(2)
def test_a_backward_that_raises_leaves_no_coded_sum_behind() -> None:
    policy = CompressionPolicy(reduce="int8", block=64, min_bytes=1024, error_feedback=False)
    model, plain = replicated_blocks(policy), replicated_blocks(policy)
    handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    handle.remove()
    for seed in (2, 3):
        for each in (model, plain):
            each.zero_grad()
            with parts_and_sums() as order:
                backward(each, seed)
            assert "".join(order) == "sb" * 4
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(param.grad), local(other.grad))


@on_ranks(2)
def test_what_two_sums_of_a_parameter_have_lost_is_brought_once() -> None:
    model, plain = twins()
    replicate(model, compression=REDUCE)  # one unit: nothing follows its sums but its own of the next backward
    wanted = averaged(plain, range(6))
    for seed in range(6):
        model.set_is_last_backward(seed % 3 == 2)
        backward(model, seed)
    for key, residual in model.compression_state().state_dict().items():
        sent = full(model.get_parameter(key).grad)
        torch.testing.assert_close(sent + full(residual) / dist.get_world_size(), wanted[key], rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_coded_sums_take_the_memory_of_one_unit() -> None:
    def peak_bytes(num_blocks: int) -> int:
        model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(num_blocks)])
        for block in model:
            replicate(block, compression=REDUCE)
        replicate(model, compression=REDUCE)
        backward(model, 0)
        attachment = attachment_of(model)
        engine = attachment and engine_of(attachment.unit)
        assert engine is not None
        start_peak(engine)
        backward(model, 1)
        return engine.comm_ctx.pool.peak_used_bytes

    assert 0 < peak_bytes(9) <= peak_bytes(1)


@on_ranks(4)
def test_what_the_heap_holds_behind_an_uneven_shard_changes_no_gradient() -> None:
    """Blocks of a coding between replicas may have padding beside elements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(100, 1001, bias=False)
    fully_shard(model, mesh=mesh, compression=CompressionPolicy(reduce="int8", warn_above=1e9))
    for _ in range(2):
        output = model(torch.full((1, 100), 1e-4))
        del_soon = [torch.full((numel,), torch.nan) for numel in (50100, 50101, 50102) * 4]
        del del_soon  # the section of the gradients gets this memory
        output.sum().backward()
        gradient: Any = model.weight.grad
        torch.testing.assert_close(gradient.to_local(), torch.full_like(gradient.to_local(), 1e-4), rtol=0.02, atol=0)
        model.zero_grad()
