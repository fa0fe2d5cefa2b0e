"""The training behaviour that torch's own tests ask of fully_shard, under their names."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients
from helpers.pairs import pairwise
from helpers.ranks import FOUR, on_ranks
from helpers.torchs_tests import Reshard, check, check_sharded_parity, same_losses, train_beside
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_fsdp import MLP
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer, TransformerBlock
from torch.utils.checkpoint import checkpoint as checkpoint_function

from shardwise import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method

c10d_ops, funcol = torch.ops.c10d, torch.ops.c10d_functional
WRAPPER_PREFIX = ("_checkpoint_wrapped_module.",)


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
        check_sharded_parity(reference, model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        inp = torch.randn((2, 4), dtype=torch.float64)
        for iter_idx in range(5):
            losses = [each(inp).sum() for each in (ddp, model)]
            for loss in losses:
                loss.backward()
            same_losses(losses)
            check_sharded_parity(reference, model)
            for each in (ref_optim, optim):
                each.step()
                each.zero_grad(set_to_none=iter_idx % 2 == 0)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@on_ranks(2, FOUR)
def test_train_parity_single_group() -> None:
    for first, second in (((16, 15), (15, 8)), ((7, 15), (15, 3))):
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        reference = DistributedDataParallel(copy.deepcopy(model))
        fully_shard(model)
        torch.manual_seed(42 + dist.get_rank() + 1)
        inp = torch.randn((4, first[0]))
        train_beside(reference, model, lambda inp=inp: inp)


def run_multi_group(reshards: list[Reshard], offloads: list[OffloadPolicy], compiled: bool = False) -> None:
    """Train with delays, alone and together, after forward and before gathers, reductions and steps."""
    if compiled:
        torch._dynamo.config.suppress_errors = False
    delays = [(False,) if compiled else (False, True)] * 4
    for reshard, offload, after_forward, before_gather, before_reduce, before_optim in pairwise(
        reshards, offloads, *delays
    ):
        torch.manual_seed(42)
        model = nn.Sequential(*(MLP(16, torch.device("cpu"), dim_multiplier=m) for m in (3, 1, 3)))
        reference = DistributedDataParallel(copy.deepcopy(model))
        for mlp in model:
            if compiled:
                mlp.compile(backend="eager")
            fully_shard(mlp, reshard_after_forward=reshard, offload_policy=offload)
        fully_shard(model, reshard_after_forward=reshard, offload_policy=offload)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (reference, model)]
        torch.manual_seed(42 + dist.get_rank() + 1)
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


@on_ranks(2, FOUR)
def test_train_parity_multi_group() -> None:
    run_multi_group(reshards=[True, False, 2] if dist.get_world_size() == 2 else [2], offloads=[OffloadPolicy()])


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
    reference, model, model_args = sharded_transformer(n_layers=4)
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    inp = torch.randint(0, model_args.vocab_size, (2, 8))
    train_beside(reference, model, lambda: inp, steps=3)


class _Event:
    """Stands for a recorded event: on CPU lanes have nothing to wait for."""


@on_ranks(2)
def test_post_optim_event() -> None:
    reference, model, model_args = sharded_transformer()
    ref_optim = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

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


@on_ranks(2, FOUR)
def test_train_parity_with_activation_checkpointing() -> None:
    cases: list[tuple[Reshard, str]] = [(2, "composable"), (True, "reentrant")]
    if dist.get_world_size() == 2:
        cases += [(False, "utils"), (True, "wrapper")]
    for reshard, how in cases:
        torch.manual_seed(42)
        args = ModelArgs(n_layers=2, dropout_p=0.0, checkpoint_activations=how == "utils")
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
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (reference, model)]
        torch.manual_seed(42 + dist.get_rank())
        for _ in range(2):
            inp = torch.randint(0, args.vocab_size, (3, 8))
            losses = [each(inp).sum() for each in (reference, model)]
            for loss in losses:
                loss.backward()
            same_losses(losses)
            if how != "reentrant":
                check_sharded_parity(reference.module, model, WRAPPER_PREFIX)
            for each in optims:
                each.step()
                each.zero_grad()


@on_ranks(2, FOUR)
def test_train_parity_with_shared_params() -> None:
    for reshard, recomputes in ((False, False), (True, True)):
        torch.manual_seed(42)
        args = ModelArgs(n_layers=2, dropout_p=0.0, weight_tying=True)
        model = Transformer(args)
        reference = DistributedDataParallel(copy.deepcopy(model))
        for module in [m for m in model.modules() if isinstance(m, TransformerBlock)]:
            if recomputes:
                checkpoint(module)
            fully_shard(module, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        torch.manual_seed(42 + dist.get_rank() + 1)
        train_beside(reference, model, lambda args=args: torch.randint(0, args.vocab_size, (2, 16)), steps=2)


NUM_MLPS, NUM_MICROBATCHES = 3, 3
MODES = ("all", "root_only", "some_mlps", "scatter_only")
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
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (reference, model)]
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
        check_sharded_parity(reference, model)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=False)
        check_sharded_parity(reference, model)


@on_ranks(2)
@pytest.mark.parametrize("mode", MODES[:3])
def test_gradient_accumulation(mode: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    offloads = (OffloadPolicy(), CPUOffloadPolicy())
    for reshard, after_backward, offload in pairwise(RESHARDS, (False, True), offloads)[MODES.index(mode) % 2 :: 2]:
        accumulate(mesh, mode, reshard, after_backward, offload)


@on_ranks(4)
@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in MODES[:3]), MODES[3]])
def test_gradient_accumulation_over_replicas(mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases = pairwise(RESHARDS, (False, True), (OffloadPolicy(), CPUOffloadPolicy()))
    for reshard, after_backward, offload in cases[MODES.index(mode) % 3 :: 6]:  # two ranks have had all of them
        accumulate(mesh, mode, reshard, after_backward, offload)


@on_ranks(2)
def test_1f1b_microbatching() -> None:
    for explicit, after_backward in ((False, True), (True, False)):
        torch.manual_seed(42)
        args = ModelArgs(dropout_p=0.0)
        model = Transformer(args)
        reference = copy.deepcopy(model)
        optims = [torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True)]
        for module in [m for m in model.modules() if isinstance(m, TransformerBlock)]:
            fully_shard(module, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optims.append(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
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
        check_sharded_parity(reference, model)


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
        check_sharded_parity(reference, each)
