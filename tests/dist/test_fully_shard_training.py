"""The training behaviour that torch's own tests ask of fully_shard, under their names."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import average_gradients
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import MLP, MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer, TransformerBlock
from torch.utils.checkpoint import checkpoint as checkpoint_function

from shardwise import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method

check = TestCase()
c10d_ops, funcol = torch.ops.c10d, torch.ops.c10d_functional
Reshard = bool | int
WRAPPER_PREFIX = ("_checkpoint_wrapped_module.",)


def same_losses(losses: list[torch.Tensor]) -> None:
    check.assertEqual(losses[0], losses[1])


@contextlib.contextmanager
def delayed(names: tuple[str, ...], is_on: bool) -> Iterator[None]:
    """Delay those collectives of ``names`` that the installed torch has."""
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    assert originals

    def slowed(original: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(0.002)
            return original(*args, **kwargs)

        return slow

    for name, original in originals.items():
        setattr(dist, name, slowed(original) if is_on else original)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@on_ranks(2)
def test_to_float64_after_init() -> None:
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.manual_seed(42)
        model = MLP(4, device=torch.device("cpu"))
        reference = copy.deepcopy(model).to(torch.float64)
        ref_optim = torch.optim.Adam(reference.parameters(), lr=1e-2)
        ddp = DistributedDataParallel(reference)
        for module in (model.in_proj, model.out_proj, model):
            fully_shard(module)
        model.to(torch.float64)
        assert all(param.dtype == torch.float64 for param in model.parameters())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        check_sharded_parity(check, reference, model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        inp = torch.randn((2, 4), dtype=torch.float64)
        for iter_idx in range(10):
            losses = [each(inp).sum() for each in (ddp, model)]
            for loss in losses:
                loss.backward()
            same_losses(losses)
            check_sharded_parity(check, reference, model)
            for each in (ref_optim, optim):
                each.step()
                each.zero_grad(set_to_none=iter_idx % 2 == 0)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def train_beside(
    reference: nn.Module, model: nn.Module, inputs: Callable[[], torch.Tensor], steps: int = 10, **adam: object
) -> None:
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2, **adam) for each in (reference, model)]
    for iter_idx in range(steps):
        inp = inputs()
        losses: list[torch.Tensor] = []
        for each, optim in zip((reference, model), optims, strict=True):
            optim.zero_grad(set_to_none=iter_idx % 2 == 0)
            losses.append(each(inp).sum())
            losses[-1].backward()
            optim.step()
        same_losses(losses)


@on_ranks(2, 4)
def test_train_parity_single_group() -> None:
    for first, second in (((16, 15), (15, 8)), ((7, 15), (15, 3))):
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        reference = DistributedDataParallel(copy.deepcopy(model))
        fully_shard(model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        inp = torch.randn((4, first[0]))
        train_beside(reference, model, lambda inp=inp: inp)


def delays_of(compiled: bool) -> list[tuple[bool, ...]]:
    """Return what is delayed, of forward, gathers, reductions, steps: everything that may be on two ranks, each on four."""
    every = list(itertools.product((False, True), repeat=4))
    if compiled:
        return every[:1]
    return every if dist.get_world_size() == 2 else [delays for delays in every if sum(delays) in (0, 1, 4)]


def run_multi_group(reshards: list[Reshard], offloads: list[OffloadPolicy], compiled: bool = False) -> None:
    if compiled:
        torch._dynamo.config.suppress_errors = False
    for reshard, offload in itertools.product(reshards, offloads):
        for delays in delays_of(compiled):
            torch.manual_seed(42)
            model = nn.Sequential(*(MLP(16, torch.device("cpu"), dim_multiplier=m) for m in (3, 1, 3)))
            reference = DistributedDataParallel(copy.deepcopy(model))
            for mlp in model:
                if compiled:
                    mlp.compile(backend="eager")
                fully_shard(mlp, reshard_after_forward=reshard, offload_policy=offload)
            fully_shard(model, reshard_after_forward=reshard, offload_policy=offload)
            optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
            torch.manual_seed(42 + dist.get_rank() + 1)
            after_forward, before_gather, before_reduce, before_optim = delays
            with (
                delayed(("all_gather_single", "all_gather_into_tensor"), before_gather and dist.get_rank() == 0),
                delayed(("reduce_scatter_single", "reduce_scatter_tensor"), before_reduce and dist.get_rank() == 1),
            ):
                for iter_idx in range(3):
                    inp = torch.randn((8, 16))
                    losses: list[torch.Tensor] = []
                    for each, optim in zip((reference, model), optims, strict=True):
                        optim.zero_grad(set_to_none=iter_idx % 2 == 0)
                        losses.append(each(inp).sum())
                        time.sleep(0.002 * after_forward)
                        losses[-1].backward()
                        time.sleep(0.002 * before_optim)
                        optim.step()
                    same_losses(losses)


@on_ranks(2, 4)
def test_train_parity_multi_group() -> None:
    run_multi_group(reshards=[True, False, 2], offloads=[OffloadPolicy()])


@on_ranks(2)
def test_train_parity_multi_group_compiled_submodules() -> None:
    run_multi_group(reshards=[True], offloads=[OffloadPolicy()], compiled=True)


@on_ranks(2)
def test_train_parity_multi_group_cpu_offload_eager() -> None:
    offloads = [CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)]
    run_multi_group(reshards=[True], offloads=offloads)


@on_ranks(2)
def test_non_root_forward_backward() -> None:
    torch.manual_seed(42)
    model = nn.Sequential(*(MLP(32, torch.device("cpu")) for _ in range(3)))
    reference = copy.deepcopy(model)
    ref_optim = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for mlp in model:
        fully_shard(mlp)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    torch.manual_seed(42 + dist.get_rank())
    inp = torch.randn((8, 32))
    for part in (lambda each: each, lambda each: each[0]):
        losses = [part(each)(inp).sum() for each in (reference, model)]
        for loss in losses:
            loss.backward()
        average_gradients(reference)
        for each in (ref_optim, optim):
            each.step()
            each.zero_grad()
        same_losses(losses)
    check.assertEqual(reference(inp).sum(), model(inp).sum())


class MultiForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) + self.inner(x))


@on_ranks(2)
def test_multi_forward_module() -> None:
    for reshard in (True, False, 2):
        torch.manual_seed(42)
        model = MultiForward()
        reference = DistributedDataParallel(copy.deepcopy(model))
        fully_shard(model.inner, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        torch.manual_seed(42 + dist.get_rank())
        inp = torch.randn((32, 4))
        train_beside(reference, model, lambda inp=inp: inp)


def sharded_transformer(**args: object) -> tuple[nn.Module, Transformer, ModelArgs]:
    torch.manual_seed(42)
    model_args = ModelArgs(dropout_p=0.0, **args)
    model = Transformer(model_args)
    reference = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=False)
    for layer in itertools.chain(model.layers, [model]):
        fully_shard(layer)
    torch.manual_seed(42 + dist.get_rank())
    return reference, model, model_args


@on_ranks(2)
def test_explicit_prefetching() -> None:
    reference, model, model_args = sharded_transformer(n_layers=8)
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    inp = torch.randint(0, model_args.vocab_size, (2, 8))
    train_beside(reference, model, lambda: inp, steps=4)


class _Event:
    """Stands for a recorded event: on CPU lanes have nothing to wait for."""


@on_ranks(2)
def test_post_optim_event() -> None:
    reference, model, model_args = sharded_transformer()
    ref_optim = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def after_step(module: FSDPModule, *_: object) -> None:
        module.set_post_optim_event(_Event())

    optim.register_step_post_hook(functools.partial(after_step, model))
    inp = torch.randint(0, model_args.vocab_size, (2, 8))
    for _ in range(4):
        losses = [each(inp).sum() for each in (reference, model)]
        for loss in losses:
            loss.backward()
        for each in (ref_optim, optim):
            each.step()
            each.zero_grad()
        same_losses(losses)


class CheckpointedBlock(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint_function(self.block, *args, use_reentrant=self.use_reentrant)


@on_ranks(2, 4)
def test_train_parity_with_activation_checkpointing() -> None:
    reshards = (True, False, 2) if dist.get_world_size() == 2 else (True, 2)
    for reshard, how in itertools.product(reshards, ("composable", "utils", "reentrant", "wrapper")):
        torch.manual_seed(42)
        args = ModelArgs(n_layers=3, dropout_p=0.0, checkpoint_activations=how == "utils")
        model = Transformer(args)
        reference = DistributedDataParallel(copy.deepcopy(model))
        if how == "wrapper":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerBlock))
        if how == "reentrant":
            model.layers = nn.ModuleList(CheckpointedBlock(block, True) for block in model.layers)
        for block in [m for m in model.modules() if isinstance(m, TransformerBlock)]:
            if how == "composable":
                checkpoint(block)
            fully_shard(block, reshard_after_forward=reshard)
        if how == "wrapper":
            assert any(isinstance(module, CheckpointWrapper) for module in model.modules())
        fully_shard(model, reshard_after_forward=reshard)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
        torch.manual_seed(42 + dist.get_rank())
        for _ in range(3):
            inp = torch.randint(0, args.vocab_size, (3, 8))
            losses = [each(inp).sum() for each in (reference, model)]
            for loss in losses:
                loss.backward()
            same_losses(losses)
            if how != "reentrant":
                check_sharded_parity(check, reference.module, model, WRAPPER_PREFIX)
            for each in optims:
                each.step()
                each.zero_grad()


@on_ranks(2, 4)
def test_train_parity_with_shared_params() -> None:
    for reshard, recomputes in itertools.product((False, True), repeat=2):
        torch.manual_seed(42)
        args = ModelArgs(n_layers=3, dropout_p=0.0, weight_tying=True)
        model = Transformer(args)
        reference = DistributedDataParallel(copy.deepcopy(model))
        for module in [m for m in model.modules() if isinstance(m, TransformerBlock)]:
            if recomputes:
                checkpoint(module)
            fully_shard(module, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        torch.manual_seed(42 + dist.get_rank() + 1)
        train_beside(reference, model, lambda args=args: torch.randint(0, args.vocab_size, (2, 16)), steps=4)


NUM_MLPS, NUM_MICROBATCHES = 3, 3
RESHARDS: tuple[Reshard, ...] = (True, False, 2)


def say_what_syncs(model: nn.Module, mode: str, is_last: bool) -> None:
    if mode == "scatter_only":
        model.set_requires_all_reduce(is_last)
    elif mode == "some_mlps":
        for mlp in model[: NUM_MLPS // 2]:
            mlp.set_requires_gradient_sync(is_last, recurse=True)
    else:
        model.set_requires_gradient_sync(is_last, recurse=mode == "all")


def expected_counts(mode: str, replicates: bool) -> tuple[int, int]:
    """Return the reduce-scatters and all-reduces of a step; a root without parameters of its own reduces nothing."""
    num_held = {"all": NUM_MLPS, "some_mlps": NUM_MLPS // 2}.get(mode, 0)
    scatters = num_held + (NUM_MLPS - num_held) * NUM_MICROBATCHES
    return scatters, (NUM_MLPS if mode == "scatter_only" else scatters) if replicates else 0


def accumulate(mesh: DeviceMesh, mode: str, reshard: Reshard, after_backward: bool, offload: OffloadPolicy) -> None:
    """Train beside one process; ``after_backward``: parameters are resharded after each backward, else after the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = nn.Sequential(*(MLP(4, torch.device("cpu"), dim_multiplier=3) for _ in range(NUM_MLPS)))
    reference = copy.deepcopy(model)
    for each in (*model, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard, offload_policy=offload)
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
    torch.manual_seed(1)
    for _ in range(2):
        scatters = all_reduces = 0
        for microbatch in range(NUM_MICROBATCHES):
            is_last = microbatch == NUM_MICROBATCHES - 1
            say_what_syncs(model, mode, is_last)
            if not after_backward:
                model.set_reshard_after_backward(is_last)
            inputs = torch.randn(2 * size, 4)
            losses = [model(inputs.chunk(size)[rank]).sum(), reference(inputs).sum() / size]
            with CommDebugMode() as comm:
                losses[0].backward()
            losses[1].backward()
            scatters += comm.get_comm_counts()[c10d_ops._reduce_scatter_base_]
            all_reduces += comm.get_comm_counts()[c10d_ops.allreduce_]
            total = losses[0].detach().clone()
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            check.assertEqual(total, losses[1].detach())
        assert (scatters, all_reduces) == expected_counts(mode, mesh.ndim == 2)
        check_sharded_parity(check, reference, model)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=False)
        check_sharded_parity(check, reference, model)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["all", "root_only", "some_mlps"])
def test_gradient_accumulation(mode: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    offloads = (OffloadPolicy(), CPUOffloadPolicy())
    for reshard, after_backward, offload in itertools.product(RESHARDS, (False, True), offloads):
        accumulate(mesh, mode, reshard, after_backward, offload)


@on_ranks(4)
@pytest.mark.parametrize("mode", ["all", "root_only", "some_mlps", "scatter_only"])
def test_gradient_accumulation_over_replicas(mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for number, (reshard, after_backward) in enumerate(itertools.product(RESHARDS, (False, True))):
        # In turns, so that offload meets every value of the others: two ranks have had all of both.
        offload = CPUOffloadPolicy() if number in (0, 3, 4) else OffloadPolicy()
        accumulate(mesh, mode, reshard, after_backward, offload)


@on_ranks(2)
def test_1f1b_microbatching() -> None:
    for explicit, after_backward in itertools.product((False, True), repeat=2):
        torch.manual_seed(42)
        args = ModelArgs(dropout_p=0.0)
        model = Transformer(args)
        reference = copy.deepcopy(model)
        optims = [torch.optim.AdamW(reference.parameters(), lr=1e-2)]
        for module in [m for m in model.modules() if isinstance(m, TransformerBlock)]:
            fully_shard(module, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optims.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(42 + dist.get_rank() + 1)
        inputs = [torch.randint(0, args.vocab_size, (2, 16)) for _ in range(3)]
        if explicit:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=True)
        for index, inp in enumerate(inputs):
            is_last = index == 2
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            if not after_backward:
                model.set_reshard_after_backward(is_last)
            losses = [each(inp).sum() for each in (model, reference)]
            for loss in losses:
                loss.backward()
            same_losses(losses)
        average_gradients(reference)
        for optim in optims:
            optim.step()
        check_sharded_parity(check, reference, model)


@contextlib.contextmanager
def our_door() -> Iterator[None]:
    """Let torch's test models shard themselves with our function."""
    original = common_fsdp.fully_shard
    common_fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        common_fsdp.fully_shard = original


def run_2d_mlp(with_pipeline_axis: bool) -> None:
    size = dist.get_world_size()
    dp = 2 if size > 2 else 1
    if with_pipeline_axis:
        mesh = init_device_mesh("cpu", (1, dp, size // dp), mesh_dim_names=("pp", "dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    widths = (3, 16, 17) if size == 2 or with_pipeline_axis else (16, 17)
    for reshard, recomputes, width in itertools.product((False, True), (False, True), widths):
        torch.manual_seed(42)
        model = MLPStack(width)
        reference = DistributedDataParallel(copy.deepcopy(model), process_group=mesh["dp"].get_group())
        with our_door():
            model.parallelize(mesh["tp"], mesh["dp"], recomputes, reshard_after_forward=reshard)
        torch.manual_seed(42 + mesh["dp"].get_local_rank() + 1)
        train_beside(reference, model, lambda width=width: torch.randn(8, width), steps=3, foreach=False)
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.device_mesh.mesh_dim_names == ("dp", "tp")
            assert len(param.placements) == 2


@on_ranks(2, 4, fresh=True)
def test_train_parity_2d_mlp() -> None:
    run_2d_mlp(with_pipeline_axis=False)


@on_ranks(4, fresh=True)
def test_2d_mlp_with_nd_mesh() -> None:
    run_2d_mlp(with_pipeline_axis=True)


@on_ranks(2, fresh=True)
def test_tp_with_fsdp_offloading() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    model = MLPStack(16)
    reference = copy.deepcopy(model)
    ref_optim = torch.optim.Adam(reference.parameters(), lr=1e-2, foreach=False)
    with our_door():
        model.parallelize(mesh["tp"], mesh["dp"], False, reshard_after_forward=True, offload_policy=CPUOffloadPolicy())
    assert all(param.device.type == "cpu" for param in model.parameters())
    num_mlps = sum(isinstance(module, MLP) for module in model.modules())
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    inp = torch.randn((4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        ref_optim.zero_grad()
        optim.zero_grad()
        with CommDebugMode() as forward:
            loss = model(inp).sum()
        expected = {funcol.all_reduce: num_mlps, c10d_ops._allgather_base_: num_mlps}
        check.assertEqual(dict(forward.get_comm_counts()), expected)
        ref_loss = reference(inp).sum()
        check.assertEqual(loss, ref_loss)
        ref_loss.backward()
        with CommDebugMode() as backward:
            loss.backward()
        expected = {funcol.all_reduce: num_mlps - 1, c10d_ops._allgather_base_: num_mlps}
        expected[c10d_ops._reduce_scatter_base_] = num_mlps
        check.assertEqual(dict(backward.get_comm_counts()), expected)
        optim.step()
        ref_optim.step()


def parallel_transformer(args: ModelArgs, mesh: DeviceMesh, sequence_parallel: bool) -> Transformer:
    torch.manual_seed(42)
    model = Transformer.parallelize(Transformer(args), mesh["tp"], sequence_parallel, local_output_for_attn=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@on_ranks(2, 4, fresh=True)
def test_train_parity_2d_transformer_checkpoint_resume(tmp_path: Path) -> None:
    size = dist.get_world_size()
    dp = 2 if size > 2 else 1
    mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    args = ModelArgs(n_layers=1, dropout_p=0.0)
    cases = itertools.product((False, True), (False, True), (torch.optim.Adam, torch.optim.AdamW))
    for number, (sequence_parallel, reuse, optimizer_class) in enumerate(cases):
        model = parallel_transformer(args, mesh, sequence_parallel)
        optim = optimizer_class(model.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(42 + mesh["dp"].get_local_rank() + 1)
        batches = [torch.randint(0, args.vocab_size, (3, 16)) for _ in range(3)]

        def step(model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            return loss.detach()

        step(model, optim, batches[0])
        path = str(tmp_path / str(number))
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
        dcp.save(state, checkpoint_id=path)
        expected = [step(model, optim, batch) for batch in batches[1:]]
        expected_values = [param.to_local().clone() for param in model.parameters()]
        if not reuse:
            model = parallel_transformer(args, mesh, sequence_parallel)
            optim = optimizer_class(model.parameters(), lr=1e-2, foreach=False)
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optim, state["optim"])
        resumed = [step(model, optim, batch) for batch in batches[1:]]
        assert all(torch.equal(left, right) for left, right in zip(expected, resumed, strict=True))
        values = [param.to_local() for param in model.parameters()]
        assert all(torch.equal(left, right) for left, right in zip(expected_values, values, strict=True))


@on_ranks(2, 4)
def test_train_parity_hsdp() -> None:
    size = dist.get_world_size()
    shards = 2 if size > 2 else 1
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    for reshard, recomputes, width, sync_last in itertools.product(
        (False, True), (False, True), (3, 16, 17) if size == 2 else (3, 17), (True, False)
    ):
        torch.manual_seed(42)
        model = nn.Sequential(
            nn.LayerNorm(width, bias=False), MLP(width, dim_multiplier=3), MLP(width), MLP(width, dim_multiplier=3)
        )
        reference = copy.deepcopy(model)
        ddp = DistributedDataParallel(reference)
        for mlp in model:
            if recomputes:
                checkpoint(mlp)
            fully_shard(mlp, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
        check_sharded_parity(check, reference, model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        for iter_idx in range(2):
            for microbatch in range(3):
                if sync_last:
                    model.set_requires_gradient_sync(microbatch == 2)
                inp = torch.randn((8, width))
                losses = [each(inp).sum() for each in (ddp, model)]
                for loss in losses:
                    loss.backward()
                same_losses(losses)
            check_sharded_parity(check, reference, model)
            for each in optims:
                each.step()
                each.zero_grad(set_to_none=iter_idx % 2 == 0)
            check_sharded_parity(check, reference, model)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_proj = nn.Conv2d(3, 64, kernel_size=14, stride=14)

    def forward_features(self, imgs: torch.Tensor) -> torch.Tensor:
        return self.patch_proj(imgs).flatten(2).transpose(1, 2)

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        return self.forward_features(imgs).sum(dim=1)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit, self.projector = VisionTransformer(), nn.Linear(64, 16)

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vit.forward_features(imgs))


@on_ranks(2)
def test_register_fsdp_forward_method() -> None:
    torch.manual_seed(42)
    model = Projected()
    reference = copy.deepcopy(model)
    for module in (model.vit, model.projector, model):
        fully_shard(module)
    register_fsdp_forward_method(model.vit, "forward_features")
    torch.manual_seed(42 + dist.get_rank() + 1)
    inp = torch.randn(2, 3, 56, 56)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        reference.zero_grad()
        losses = [reference(inp).sum(), each(inp).sum()]
        same_losses(losses)
        for loss in losses:
            loss.backward()
        average_gradients(reference)
        check_sharded_parity(check, reference, each)
