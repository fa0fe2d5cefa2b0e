"""``Reproducible``: the same bits at any number of ranks, and named errors for what cannot have them."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.inside import engine_of
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.same_bits import NUM, Net, Way, differences, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise import ConfigError, Reproducible, ShardedOptimizer, StateError, UsageError, fully_shard, shard_model
from shardwise.reproducible.sums import GroupSums
from shardwise.testing import WorkerPool

Make = Callable[[nn.Module, Any], torch.optim.Optimizer]


def adamw(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def zero(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.05)


def even(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return shardwise.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, partition="even", lr=0.05, fused=True
    )


def sharded(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.05)


def muon(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    matrices = {name: param for name, param in model.named_parameters() if param.ndim == 2}
    return ShardedOptimizer(matrices, torch.optim.Muon, lr=0.05)


def train(mesh: DeviceMesh, strategy: str, make: Make, dtype: torch.dtype, steps: int = 2) -> list[Any]:
    """Return the losses, norms and parameters of a run over ``mesh``."""
    torch.manual_seed(0)
    model = Net()
    precision = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    shard_model(model, strategy=strategy, mesh=mesh, min_unit_bytes=0, mp_policy=precision)
    optimizer = make(model, None if mesh.ndim > 1 else mesh.get_group())
    fixed = Reproducible(model, optimizer, num_microbatches=NUM, seed=1)
    data = torch.randn(NUM, 3, 9, generator=torch.Generator().manual_seed(0))
    found, draws = list[Any](), list[float]()
    for step in range(steps):
        losses: list[torch.Tensor] = []
        for number in fixed.microbatches():
            loss = model(data[number]).square().mean() / NUM
            loss.backward()
            losses.append(loss.detach())
        norm = fixed.clip_grad_norm_(0.1, norm_type=(2.0, 1.0, torch.inf)[step % 3])
        optimizer.step()
        optimizer.zero_grad()
        found += [float(norm), float(fixed.sum(losses))]
        draws.append(float(torch.rand(())))
    assert len({*draws}) == steps
    return [*found, *draws, *(full_of(param).tolist() for param in model.parameters())]


def full_of(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()


def assert_same_bits(shapes: list[tuple[int, int]], *args: Any) -> None:
    """Train over a mesh of each of ``shapes``, and compare on all ranks with the first."""
    results: list[Any] = []
    for ranks, replicas in shapes:
        mesh = mesh_of(ranks, replicas)
        results.append(train(mesh, *args) if dist.get_rank() < ranks else None)
    for shape, found in zip(shapes, results, strict=True):
        assert found is None or found == (results[0] if results[0] is not None else found), shape


@pytest.mark.parametrize(
    ("strategy", "make", "dtype", "steps"),
    [
        ("zero3", adamw, torch.float32, 2),
        ("zero2", sharded, torch.bfloat16, 2),
        ("ddp", sgd, torch.float32, 2),
        ("zero1", even, torch.float32, 6),  # its vectors end differently in few elements
    ],
)
@on_ranks(3)
def test_the_bits_do_not_depend_on_the_number_of_ranks(
    strategy: str, make: Make, dtype: torch.dtype, steps: int
) -> None:
    assert_same_bits([(1, 0), (2, 0), (3, 0)], strategy, make, dtype, steps)


@on_ranks(4)
def test_whole_matrices_have_the_same_bits() -> None:
    assert_same_bits([(1, 0), (4, 0)], "zero3", muon, torch.float32)


@on_ranks(4)
def test_replicas_of_shards_have_the_same_bits() -> None:
    assert_same_bits([(1, 1), (4, 2), (3, 3)], "hsdp", adamw, torch.float32)


def test_a_run_that_is_resumed_at_other_numbers_of_ranks_has_the_same_bits(pool: WorkerPool, tmp_path: Path) -> None:
    """All rows: test_reproducible_matrix.py."""
    way = Way("hfsdp", "sharded fused", "mixed")
    assert differences(pool, way, [(1, 1), (3, 3), (4, 2)], tmp_path, 4) == []


class Scaled(nn.Linear):
    """Has a scalar, of which every rank has all."""

    def __init__(self, width: int = 9, out: int = 5) -> None:
        super().__init__(width, out)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


@on_ranks(2)
def test_ends_are_stepped_as_the_rest_with_closures_hooks_and_scalers() -> None:
    """They change or scale gradients after the pre-hooks that were registered first."""

    def train(how: str) -> list[Any]:
        torch.manual_seed(0)
        model: Any = fully_shard(Scaled(10, 7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        fixed = Reproducible(model, optimizer, num_microbatches=2)
        scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler")
        if how == "hook":
            optimizer.register_step_pre_hook(lambda *_: [param.grad.neg_() for param in model.parameters()] and None)

        def backward(factor: float = -1.0 if how == "hook" else 1.0) -> float:
            optimizer.zero_grad()
            for number in fixed.microbatches():
                data = torch.randn(3, 10, generator=torch.Generator().manual_seed(number))
                scaler.scale(model(data).square().sum() * factor).backward()
            return 0.0

        if how == "scaler":  # which skips this step
            backward(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        for _ in range(3):
            if how == "closure":
                optimizer.step(backward)
            else:
                backward()
                scaler.step(optimizer)
                scaler.update()
        return [param.full_tensor().tolist() for param in model.parameters()]

    expected = train("plain")
    for how in ("closure", "hook", "scaler"):
        assert train(how) == expected, how


@pytest.mark.parametrize("how", ["loaded", "set"])
@on_ranks(2)
def test_options_that_are_loaded_or_set_keep_the_bits(how: str) -> None:
    """A checkpoint restores fused=True, whose kernel rounds the end of a vectorized loop differently."""
    results: list[Any] = []
    for ranks in (1, 2):
        mesh = mesh_of(ranks, 0)
        if dist.get_rank() >= ranks:
            continue
        torch.manual_seed(0)
        model: Any = shard_model(Scaled(65, 29), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        fixed = Reproducible(model, optimizer, num_microbatches=2)
        if how == "set":
            optimizer.param_groups[0]["fused"] = True
        else:
            optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True).state_dict())
        assert optimizer.param_groups[0]["fused"]
        for _ in range(8):
            for _ in fixed.microbatches():
                model(torch.randn(3, 65)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.full_tensor().tolist())
    assert results[0] == results[-1]


@on_ranks(2)
def test_scalars_count_once_in_norms_and_digests(tmp_path: Path) -> None:
    norms: list[float] = []
    for ranks in (1, 2):
        mesh = mesh_of(ranks, 0)
        if dist.get_rank() < ranks:
            torch.manual_seed(0)
            model = shard_model(Scaled(), mesh=mesh)
            fixed = Reproducible(model, num_microbatches=2)
            against = None if ranks == 1 else tmp_path / "1"
            dist.barrier(mesh.get_group())
            with shardwise.RunDigests(fixed, tmp_path / f"{ranks}", against=against):
                for _ in fixed.microbatches():
                    _backward(model)
                norms.append(float(fixed.clip_grad_norm_(1.0)))
        dist.barrier()
    assert norms[0] == norms[-1] > 0


@on_ranks(2)
def test_norms_are_those_of_all_gradients() -> None:
    model = fully_shard(Net().double(), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    fixed = Reproducible(model, num_microbatches=2)
    for _ in fixed.microbatches():
        model(torch.ones(2, 9, dtype=torch.float64)).sum().backward()
    gradients = [full_of(param.grad) for param in model.parameters() if param.grad is not None]
    for norm_type in (1.0, 2.0, torch.inf):
        expected = nn.utils.get_total_norm(gradients, norm_type)
        assert torch.isclose(fixed.clip_grad_norm_(1e9, norm_type), expected, rtol=1e-12)


# ---- Gradients are whole after the loop; in it nobody may use them.

USES: dict[str, Callable[[Any, Any], object]] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "None": lambda model, optimizer: setattr(model.head.bias, "grad", None),
    "replaced": lambda model, optimizer: setattr(model.head.bias, "grad", torch.zeros_like(model.head.bias)),
    "scaled": lambda model, optimizer: model.head.bias.grad.mul_(0.5),
    "added": lambda model, optimizer: model.head.bias.grad.add_(1.0),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "logged": lambda model, optimizer: model.head.bias.grad.norm().item(),
    "accumulated": lambda model, optimizer: torch.zeros_like(model.head.bias).add_(model.head.bias.grad),
    "unscaled": lambda model, optimizer: _unscale(model, optimizer),
    "step": lambda model, optimizer: optimizer.step(),
}


@pytest.mark.parametrize(
    ("use", "cases"),
    checkered(USES, [(("zero3", 4, False), ("zero1", 2, True)), (("ddp", 4, False), ("hsdp", 4, True))]),
)
@on_ranks(2)
def test_gradients_that_are_used_in_the_loop_are_named(use: str, cases: tuple[tuple[str, int, bool], ...]) -> None:
    for strategy, num, at_end in cases:
        torch.manual_seed(0)
        mesh = mesh_of(2, 2) if strategy == "hsdp" else None
        model = shard_model(Net(), strategy=strategy, mesh=mesh)
        optimizer: Any = (zero if strategy == "zero1" else sgd)(model, None)
        fixed = Reproducible(model, optimizer, num_microbatches=num)
        with pytest.raises(
            StateError, match=r"the gradient of \S+ was .* in a loop over Reproducible.microbatches\(\)"
        ):
            for number in fixed.microbatches():
                _backward(model)
                if not at_end or number == fixed.place.own[-1]:
                    USES[use](model, optimizer)
        optimizer.zero_grad()
        for _ in fixed.microbatches():
            _backward(model)
        optimizer.step()


def _clears_on_one_rank() -> str:
    """Rank 0 clears gradients in its first microbatch; return the message that this rank got."""
    model = _shared()
    fixed = Reproducible(model, num_microbatches=4)
    try:
        for number in fixed.microbatches():
            _backward(model)
            if number == 0:
                model.zero_grad()
        fixed.clip_grad_norm_(1.0)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_all_ranks_end_if_one_clears_its_gradients_in_the_loop(pool: WorkerPool) -> None:
    found = pool.run(_clears_on_one_rank, num_ranks=2, timeout_s=60.0, group_timeout_s=8.0, fresh=True)
    assert "was cleared, replaced or used in a loop over" in found[0], found
    assert found[1].startswith(("DesyncError", "TransportError", "StateError")), found
    assert "rank 0" in found[1], found


def _after_loop(ranks: int, use: Callable[[Any, Any], object], strategy: str = "zero3") -> Any:
    """Return the parameters after two steps over ``ranks`` ranks that use the gradients; None on other ranks."""
    mesh = mesh_of(ranks, 0)
    if dist.get_rank() >= ranks:
        return None
    torch.manual_seed(0)
    model: Any = shard_model(Net(), strategy=strategy, mesh=mesh)
    optimizer = sgd(model, None)
    fixed = Reproducible(model, optimizer, num_microbatches=4)
    for _ in range(2):
        for number in fixed.microbatches():
            noise = torch.Generator().manual_seed(number)
            model(torch.randn(3, 9, generator=noise)).square().sum().backward()
        use(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [full_of(param).tolist() for param in model.parameters()]


def _unscale(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@on_ranks(2)
def test_what_is_done_to_gradients_after_the_loop_counts(strategy: str) -> None:
    uses: list[Callable[[Any, Any], object]] = [
        lambda model, optimizer: None,
        lambda model, optimizer: [param.grad.mul_(0.5) for param in model.parameters()],
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model, optimizer: [param.grad.add_(param.detach(), alpha=0.1) for param in model.parameters()],
        lambda model, optimizer: setattr(model.head.weight, "grad", None),
        _unscale,
    ]
    results = [[_after_loop(ranks, use, strategy) for use in uses] for ranks in (1, 2)]
    assert dist.get_rank() or results[0] == results[1]
    assert all(each != results[1][0] for each in results[1][1:])


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@on_ranks(2)
def test_hooks_of_parameters_see_whole_gradients_once_per_step(strategy: str) -> None:
    model: Any = shard_model(nn.Linear(4, 2, bias=False), strategy=strategy)
    fixed = Reproducible(model, num_microbatches=8)
    seen: list[torch.Tensor] = []
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(full_of(param.grad)))
    for _ in fixed.microbatches():
        model(torch.ones(1, 4)).sum().backward()
    assert [each.tolist() for each in seen] == [[[8.0] * 4] * 2]


@on_ranks(2)
def test_a_gradient_hook_changes_the_sum() -> None:
    model: Any = shard_model(nn.Linear(4, 2, bias=False))
    fixed = Reproducible(model, num_microbatches=8)
    model.weight.register_hook(lambda grad: grad + 1.0)
    for _ in fixed.microbatches():
        model(torch.ones(1, 4)).sum().backward()
    assert full_of(model.weight.grad).tolist() == [[9.0] * 4] * 2


@on_ranks(2)
def test_sums_of_negative_zeros_are_negative_zeros() -> None:
    model: Any = shard_model(nn.RMSNorm(9), strategy="ddp")
    fixed = Reproducible(model, num_microbatches=4)
    for _ in fixed.microbatches():
        (model(torch.ones(9)) * -0.0).sum().backward()
    assert model.weight.grad.signbit().all()


@on_ranks(2)
def test_gradients_of_two_loops_add_up() -> None:
    model: Any = shard_model(nn.Linear(4, 2, bias=False))
    fixed = Reproducible(model, num_microbatches=4)
    for _ in range(2):
        for _ in fixed.microbatches():
            model(torch.ones(1, 4)).sum().backward()
    assert full_of(model.weight.grad).tolist() == [[8.0] * 4] * 2


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "zero1"])
@on_ranks(1, 2)
def test_backwards_without_sync_in_a_second_loop_add_up_or_are_named(strategy: str) -> None:
    model: Any = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    shard_model(model, strategy=strategy)
    fixed = Reproducible(model, num_microbatches=2)
    found: list[torch.Tensor] = []

    def loop() -> None:
        for number in fixed.microbatches():
            for sync in (False, True):
                with shardwise.policy(model, sync=sync):
                    model(torch.full((1, 3), 1.0 + number)).sum().backward()
        found.append(full_of(next(model.parameters()).grad).clone())

    loop()
    with pytest.raises(StateError, match="zero_grad") if strategy == "zero1" else nullcontext():
        loop()
    assert found[0].tolist() == [[6.0] * 3] * 2
    assert strategy == "zero1" or torch.equal(found[1], 2 * found[0])


@on_ranks(2)
def test_a_deep_copy_takes_a_loop_of_its_own() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=2)
    copied = copy.deepcopy(model)
    with pytest.raises(StateError, match=r"outside of Reproducible.microbatches\(\); .* A copy of a model takes"):
        for _ in fixed.microbatches():
            _backward(copied)
    with torch.no_grad():
        copied(torch.ones(2, 9))
    for each in (Reproducible(copied, num_microbatches=2), fixed):
        for _ in each.microbatches():
            _backward(each.model)
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all(torch.equal(full_of(own.grad), full_of(its.grad)) for own, its in pairs if own.grad is not None)  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]


@on_ranks(2)
def test_settings_that_are_changed_later_are_refused() -> None:
    model: Any = _shared()
    fixed = Reproducible(model, num_microbatches=2)
    model.set_gradient_divide_factor(2.0)
    with pytest.raises(ConfigError, match="has set_gradient_divide_factor"):
        list(fixed.microbatches())


# ---- What it costs.

MORE = [("zero3", 4), ("ddp", 2), ("hsdp", 2), ("zero2", 4)]


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("zero3", 2),
        ("ddp", 4),
        ("hsdp", 4),
        ("zero2", 2),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE),
    ],
)
@on_ranks()
def test_bytes_that_are_sent_and_held_are_those_of_the_plan(strategy: str) -> None:
    ranks = dist.get_world_size()
    model: Any = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    shard_model(model, strategy=strategy, mesh=mesh_of(ranks, 2 * (strategy == "hsdp")), min_unit_bytes=0)
    fixed = Reproducible(model, num_microbatches=12)
    model.set_transport("collective")
    sent = 0.0
    plain_exchange, plain_sum, plain_push = dist.all_to_all_single, dist.all_reduce, GroupSums.push

    def exchange(output: Any, given: Any, in_sizes: Any, out_sizes: Any, group: Any, **more: Any) -> Any:
        nonlocal sent
        sent += sum(out_sizes) - out_sizes[dist.get_rank(group)]
        return plain_exchange(output, given, in_sizes, out_sizes, group=group, **more)

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        nonlocal sent
        size = dist.get_world_size(group)
        sent += 2 * (size - 1) / size * tensor.numel() * tensor.element_size()
        return plain_sum(tensor, *args, group=group, **more)

    counts: dict[GroupSums, int] = {}

    def push(sums: GroupSums, key: Any, part: Any) -> None:
        mine = [each for counter in sums._counters.values() for _, each in counter.parts]  # pyright: ignore[reportPrivateUsage]
        num_bytes = sum(each.tensor.numel() * each.tensor.element_size() for each in [*mine, part])
        counts[sums] = max(counts.get(sums, 0), num_bytes)
        plain_push(sums, key, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(GroupSums, "push", push)
        for _ in fixed.microbatches():
            model(torch.ones(1, 256)).sum().backward()
    num_bytes = 2 * 256 * 512 * 4 // fixed.place.num_shards
    assert sent == pytest.approx(fixed.place.sent(num_bytes), rel=0.01)
    assert sum(counts.values()) == pytest.approx(fixed.place.held(num_bytes), rel=0.01)
    assert engine_of(model).comm_ctx.pool.used_bytes == 0


# ---- What cannot have the same bits is refused.


def _shared(model: nn.Module | None = None) -> nn.Module:
    return fully_shard(Net() if model is None else model)


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 9)).sum().backward()


@on_ranks(2)
def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_microbatches is 9, .* 2 data-parallel ranks .* fit \[1, 3, 9\] ranks"):
        Reproducible(_shared(), num_microbatches=9)


@on_ranks(2)
def test_a_backward_outside_of_the_loop_is_refused() -> None:
    model = _shared()
    Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match="were reduced outside of Reproducible.microbatches()"):
        _backward(model)
    assert engine_of(model).comm_ctx.pool.used_bytes == 0


@on_ranks(2)
def test_a_second_backward_of_a_microbatch_is_refused_and_one_without_sync_counts() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=4)
    for _ in fixed.microbatches():
        with shardwise.policy(model, sync=False):
            _backward(model)
        _backward(model)
    assert fixed.step == 1
    with pytest.raises(StateError, match=r"were reduced twice in microbatch [02]; .* sync=False"):
        for _ in fixed.microbatches():
            _backward(model)
            _backward(model)


@pytest.mark.parametrize("how", ["sum of losses", "later batch", "earlier batch"])
@on_ranks(2)
def test_two_microbatches_in_one_backward_are_refused(how: str) -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=4)
    losses: list[torch.Tensor] = []
    with pytest.raises(
        StateError, match=r"were not reduced in microbatch " + ("[13]" if how == "earlier batch" else "[02]")
    ):
        for number in fixed.microbatches():
            if how == "sum of losses":
                losses.append(model(torch.ones(2, 9)).sum())
            if number % 2 == (how != "earlier batch"):
                (sum(losses) if losses else model(torch.ones(4, 9)).sum()).backward()  # type: ignore[union-attr]


@on_ranks(2)
def test_buffers_that_follow_from_the_microbatches_of_a_rank_are_refused() -> None:
    model = _shared(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)))
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match=r"1\.\w+ was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(model)


class Running(nn.Module):
    """Replaces its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * data.mean()
        return data * self.weight


@on_ranks(2)
def test_values_that_are_replaced_or_written_in_the_loop_are_refused() -> None:
    model = _shared(Running())
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match=r"mean was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(model)
    torch.manual_seed(0)  # the loop has left another state on each rank
    layers = _shared(nn.Sequential(_shared(nn.Linear(9, 9)), _shared(nn.Linear(9, 9))))
    fixed = Reproducible(layers, num_microbatches=2)
    with pytest.raises(StateError, match=r"0\.weight was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(layers)
            with torch.no_grad():
                layers.get_parameter("0.weight").mul_(0.5)


@on_ranks(2)
def test_gradients_of_a_loop_that_has_not_ended_are_not_used() -> None:
    for kind in (sgd, zero, sharded):
        torch.manual_seed(0)
        model = shard_model(Net(), strategy="zero1" if kind is zero else "zero3")
        optimizer = kind(model, None)
        fixed = Reproducible(model, optimizer, num_microbatches=4)
        for leaves in (False, True):
            with pytest.raises(StateError, match=r"an optimizer steps too early: .* in a loop over .*, or after one"):
                for _ in fixed.microbatches():
                    _backward(model)
                    if leaves:
                        break
                    optimizer.step()
                optimizer.step()
        with pytest.raises(StateError, match=r"the gradient of \S+ was .* in a loop over"):
            fixed.clip_grad_norm_(1.0)
        for _ in fixed.microbatches():
            _backward(model)
        optimizer.step()


@on_ranks(2)
def test_loops_within_loops_and_backwards_before_them_are_refused() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(UsageError, match="was called in microbatch [01] of a loop over it"):
        for _ in fixed.microbatches():
            list(fixed.microbatches())
    with shardwise.policy(model, sync=False):
        _backward(model)
    with pytest.raises(StateError, match="wait for a backward with sync"):
        list(fixed.microbatches())


class Switch(nn.Module):
    """One of two layers of the same shapes, behind layers that come first in the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        self.ways = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
        self.way = 0

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.ways[self.way](self.trunk(data))


@on_ranks(2)
def test_microbatches_that_use_other_parameters_of_a_unit_are_refused() -> None:
    model = Switch()
    fully_shard(model)
    fixed = Reproducible(model, num_microbatches=4)
    with pytest.raises(StateError, match=r"were not reduced in microbatch [02]"):
        for number in fixed.microbatches():
            model.way = number % 2
            _backward(model)


class Relative(torch.optim.Optimizer):
    """Divides each gradient by its norm, which a rank takes over its shard."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local, grad = (
                        each.to_local() if isinstance(each, DTensor) else each for each in (param.detach(), param.grad)
                    )
                    local.sub_(group["lr"] * grad / (grad.norm() + 1e-6))


@on_ranks(2)
def test_optimizers_whose_bits_depend_on_shards_are_refused() -> None:
    model = _shared()
    with pytest.raises(
        ConfigError, match=r"Relative computes other bits for parameters of torch\.float32 that are cut"
    ):
        Reproducible(model, Relative(model.parameters()), num_microbatches=2)
    offload = shardwise.OptimizerOffload(undo=True)
    fused = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, fused=True, offload=offload)
    with pytest.raises(ConfigError, match=r"AdamW computes other bits .* or are updated unit by unit"):
        Reproducible(model, fused, num_microbatches=2)
    Reproducible(model, torch.optim.AdamW(model.parameters()), num_microbatches=2)


@pytest.mark.parametrize("clip", ["shardwise", "torch", "sharded", "zero"])
@on_ranks(2)
def test_norms_in_the_order_of_ranks_are_refused(clip: str) -> None:
    model = _shared() if clip != "zero" else shard_model(Net(), strategy="zero1")
    optimizers = {"sharded": sharded, "zero": zero}
    optimizer: Any = optimizers[clip](model, None) if clip in optimizers else None
    fixed = Reproducible(model, optimizer, num_microbatches=2)
    for _ in fixed.microbatches():
        _backward(model)
    with pytest.raises(UsageError, match=r"sums the gradient of \w+.*Call fixed\.clip_grad_norm_"):
        if optimizer is not None:
            optimizer.clip_grad_norm_(1.0)
        elif clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            shardwise.clip_grad_norm_(model.parameters(), 1.0)
    assert fixed.clip_grad_norm_(1.0) > 0


class Constant(nn.Linear):
    """A layer with a buffer that no forward changes, such as a causal mask."""

    def __init__(self) -> None:
        super().__init__(9, 9)
        self.register_buffer("mask", torch.ones(9))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return super().forward(data) * self.mask


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
@on_ranks(2)
def test_a_buffer_that_no_forward_changes_is_trained_with_every_strategy(strategy: str) -> None:
    model = shard_model(Constant(), strategy=strategy)
    fixed = Reproducible(model, num_microbatches=2)
    for _ in fixed.microbatches():
        _backward(model)
    with pytest.raises(StateError, match="mask was written in a microbatch"):
        for number in fixed.microbatches():
            model.mask.add_(number + 1)
            _backward(model)


Batch = Callable[[int, int], torch.Tensor]  # step, microbatch


def _batches(rows: Any, draws: str) -> Batch:
    """Return how a loop gets microbatches, and draws random numbers before it calls the model."""
    begun: list[Any] = []
    loaders = {"in the loop": None, "generator": torch.Generator().manual_seed(0)}

    def batch(step: int, number: int) -> torch.Tensor:
        if draws in loaders:
            if not number % (NUM // dist.get_world_size()):
                begun[:] = [iter(torch.utils.data.DataLoader(rows[number:], batch_size=None, generator=loaders[draws]))]
            return next(begun[0])
        if draws == "every second step" and not step % 2:
            return rows[number] * torch.rand(())
        if draws == "by chance" and random.random() < 0.5:
            return rows[number] + torch.randn(9)
        return rows[number]

    return batch


def _draw_in_loop(draws: str) -> list[str]:
    """Return the warnings of three steps whose model has dropout."""
    model: Any = nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.5), nn.Linear(9, 9))
    fixed = Reproducible(fully_shard(model), num_microbatches=NUM)
    batch = _batches(torch.randn(NUM, 2, 9, generator=torch.Generator().manual_seed(0)), draws)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            for number in fixed.microbatches():
                model(batch(step, number)).square().sum().backward()
    return [str(each.message) for each in found]


@on_ranks(1, 2, 4)
def test_random_numbers_that_some_microbatches_alone_draw_before_the_model_are_warned_of_once_on_every_rank() -> None:
    """The iteration of a DataLoader begins at another microbatch at each number of ranks, and draws."""
    (found,) = _draw_in_loop("in the loop")
    first, *others = Reproducible(fully_shard(nn.Linear(1, 1)), num_microbatches=NUM).place.own
    words = f"in step 0 the loop drew random numbers before the forward of microbatches [{first}], and not of {others}."
    assert words in found
    assert "A DataLoader draws where its iteration begins: call iter() before the loop" in found


@pytest.mark.parametrize("draws", ["generator", "every second step", "by chance"])
@on_ranks(1, 2)
def test_random_numbers_that_follow_from_the_microbatch_are_not_warned_of(draws: str) -> None:
    assert _draw_in_loop(draws) == []


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the optimizer has parameters of another model; give it those of this"):
        Reproducible(_shared(), torch.optim.SGD(_shared().parameters()), num_microbatches=2)


@on_ranks(2)
def test_a_resumed_run_has_the_step_and_the_seed_of_the_saved_one() -> None:
    saved = Reproducible(_shared(), num_microbatches=2, seed=7).state_dict() | {"step": 3}
    fixed = Reproducible(_shared(), num_microbatches=2)
    fixed.load_state_dict(saved)
    assert fixed.state_dict() == saved


@on_ranks(2)
def test_a_run_that_was_saved_with_other_microbatches_is_refused() -> None:
    saved = Reproducible(_shared(), num_microbatches=4).state_dict()
    fixed = Reproducible(_shared(), num_microbatches=2)
    with pytest.raises(ConfigError, match="the saved run has num_microbatches=4 and this one 2"):
        fixed.load_state_dict(saved)
    saved = fixed.state_dict() | {"num_threads": torch.get_num_threads() + 1}
    with pytest.raises(ConfigError, match=r"the saved run has num_threads=\d+ and this one \d+: other bits"):
        fixed.load_state_dict(saved)
    with pytest.raises(UsageError, match="sum got 2 numbers, .* this rank computes 1 microbatches"):
        fixed.sum([torch.ones(())] * 2)
    with pytest.raises(UsageError, match="sum got 1 numbers, 0 as tensors with one element"):
        fixed.sum([1.0])  # type: ignore[list-item]
