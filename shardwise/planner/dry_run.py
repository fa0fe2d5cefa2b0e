"""One forward and backward of a model without memory and without arithmetic, recorded as a profile.

Tensors are fake: they have shapes, dtypes and storages of a size, so autograd saves and frees what it would save and
free, recomputation included.  The live bytes at each moment are counted, not computed from a formula.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwise import torch_private
from shardwise.errors import ConfigError
from shardwise.fsdp.shard_model import families_of
from shardwise.plan.grouping import group_blocks
from shardwise.plan.schedule import StepEvent
from shardwise.planner.hardware import ROOT, ParamFacts, Profile, StepMark, Stretch, Work

# ---- Tensor parallelism in a dry run: a copy of the model without memory, split by ``parallelize_module``.


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The split of a model's blocks.

    Attributes:
        ranks: that share one block.
        plan: the argument of ``parallelize_module`` for a block: paths in it, and how each module there is split.
    """

    ranks: int
    plan: Mapping[str, ParallelStyle]


@contextmanager
def split_copy(model: nn.Module, blocks: Sequence[str], split: TensorSplit) -> Generator[nn.Module, None, None]:
    """Yield a copy of ``model`` on the meta device whose ``blocks`` are split, as the first of ``split.ranks`` ranks has it.

    Existing process groups stay as they are.  Raises: ConfigError if the plan does not match the blocks.
    """
    twins: dict[int, object] = {}
    for each in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        is_param = isinstance(each, nn.Parameter)
        twins[id(each)] = nn.Parameter(empty, requires_grad=each.requires_grad) if is_param else empty
    twin = copy.deepcopy(model, twins)
    with torch_private.fake_world(split.ranks):
        mesh = init_device_mesh("cpu", (split.ranks,), mesh_dim_names=("tp",))
        for path in blocks[1:]:
            block = twin.get_submodule(path)
            parts = dict(block.named_modules())
            missing = [name for name in split.plan if "*" not in name and name not in parts]
            if missing:
                raise ConfigError(
                    f"tensor_plan names {', '.join(missing)}, which {path} ({type(block).__name__}) has not; name its modules, "
                    "such as {'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}"
                )
            parallelize_module(block, mesh, dict(split.plan), src_data_rank=None)
        yield twin


# ---- A watch of what operations of a dry run allocate, free and compute, where torch dispatches them.

# Collectives of DTensor: number of rings over the bytes of the result, or of the input if that is larger.
_RINGS = {
    "all_reduce": 2,
    "all_reduce_": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class OpWatch:
    """Counts the live bytes that operations have allocated, and their work, from mark to mark.

    Attributes:
        stretches: those that have ended.
        live_bytes: now.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        """``given``: tensors whose memory does not count."""
        self.stretches: list[Stretch] = []
        self.live_bytes = 0
        self._mark: StepMark | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._follow(tensor.untyped_storage(), 0)
        self._restart()

    def mark(self, mark: StepMark) -> None:
        """End the current stretch and begin that of ``mark``."""
        self.end()
        self._mark = mark
        self._restart()

    def end(self) -> None:
        """End the current stretch."""
        if self._mark is not None:
            work = Work(self._flops, self._traffic, self._num_ops + self._rings, self._ring_bytes, self._rings)
            self.stretches.append(Stretch(self._mark, self._peak, self.live_bytes, work))
            self._mark = None

    def _restart(self) -> None:
        self._peak = self.live_bytes
        self._flops = self._traffic = self._ring_bytes = 0.0
        self._rings = self._num_ops = 0

    def after(self, func: Any, given: tuple[Any, Any], out: object) -> None:
        """Record an operation that has just run."""
        if func.namespace == "prim":
            return
        inputs = [each for each in torch_private.leaves_of(given) if isinstance(each, torch.Tensor)]
        outputs = [each for each in torch_private.leaves_of(out) if isinstance(each, torch.Tensor)]
        made = 0
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                self._follow(storage, storage.nbytes())
                made += 1
        self._peak = max(self._peak, self.live_bytes)
        if func.namespace == "_c10d_functional":
            rings = _RINGS.get(func._overloadpacket.__name__, 0)
            self._rings += rings
            self._ring_bytes += rings * max(t.numel() * t.element_size() for t in [*inputs, *outputs])
        elif made or torch_private.is_mutating(func):
            self._num_ops += 1
            flops = flops_of(func, *given, out)
            self._flops += flops
            sizes = ((t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in [*inputs, *outputs])
            self._traffic += 0 if flops else sum(map(min, sizes))

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)  # a storage keeps its Python object alive as long as it lives

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> float:
    """Return the floating-point operations of matrix products and attention; 0 for anything else."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name == _ATTENTION:
        is_causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
        return (0.5 if is_causal else 1.0) * sdpa_flop_count(*(each.shape for each in args[:3]))
    if name == f"{_ATTENTION}_backward":
        is_causal = bool(args[7]) if len(args) > 7 else bool(kwargs.get("is_causal", False))
        return (0.5 if is_causal else 1.0) * sdpa_backward_flop_count(
            tuple(args[0].shape), *(each.shape for each in args[1:4])
        )
    return 0.0


Loss = Callable[..., torch.Tensor]


def default_loss(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return next-token cross entropy in fp32 for integer inputs (batch, time), else the mean of the output."""
    output: object = model(*inputs)
    found = getattr(output, "logits", output)
    logits = found if isinstance(found, torch.Tensor) else cast(torch.Tensor, torch_private.leaves_of(found)[0])
    if inputs and not inputs[0].is_floating_point() and logits.shape[:-1] == inputs[0].shape:
        return F.cross_entropy(logits.float().flatten(0, -2), inputs[0].flatten().long())
    return logits.float().mean()


def dry_run(
    model: nn.Module,
    inputs: Sequence[object],
    loss: Loss = default_loss,
    *,
    precision: str = "fp32",
    recompute: bool = False,
    split: TensorSplit | None = None,
) -> Profile:
    """Run ``loss(model, *inputs).backward()`` on fake tensors and return what it does.

    Args:
        model: on any device, including meta; it is unchanged when this returns.
        inputs: of one microbatch of one rank; only shape and dtype of tensors matter; dim 0 of the first is the batch.
        loss: called with ``model`` and the inputs.
        precision: "fp32": the model unchanged; "bf16": parameters are cast, as the engine does; "autocast": torch's.
        recompute: save only the inputs of repeated blocks, as ``torch.utils.checkpoint`` does.
        split: tensor parallelism, as on the first of its ranks, with the collectives of DTensor.

    Raises: ConfigError if parameters are sharded already.  Errors of the model pass through. Cost: about 0.3 ms per
    operation of the model, independent of its sizes.
    """
    families = tuple(families_of(model, frozenset()))
    paths = {path for each in families for group in group_blocks(each, 0) for path in group}
    blocks = ("", *[path for path, _ in model.named_modules() if path in paths])
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"{name} is a DTensor: plan the model before fully_shard, shard_model or replicate is called on it"
            )
    with ExitStack() as stack:
        if split is not None:
            model = stack.enter_context(split_copy(model, blocks, split))
            families = tuple(families_of(model, frozenset()))
        stack.enter_context(torch_private.fake_mode())
        stack.enter_context(torch.enable_grad())
        fakes = {id(param): _fake_parameter(param, precision) for param in model.parameters()}
        buffers = {id(each): _fake(each) for each in model.buffers()}
        given = [_fake(each) if isinstance(each, torch.Tensor) else each for each in inputs]
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        watch = OpWatch([*map(torch_private.local_of, fakes.values()), *buffers.values(), *tensors])
        steps = _Steps(model, blocks, watch, precision)
        with _standing_in(model, fakes, buffers), steps.hooked(fakes, recompute):
            autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
            with torch_private.watching(watch.after):
                with autocast:
                    value = loss(model, *given)
                value.backward()
            watch.end()
        return Profile(
            model=type(model).__name__,
            params=tuple(_facts(name, param, steps.block_of[id(param)]) for name, param in model.named_parameters()),
            buffer_bytes=sum(each.numel() * each.element_size() for each in buffers.values()),
            input_bytes=sum(each.numel() * each.element_size() for each in tensors),
            blocks=blocks,
            families=families,
            stretches=tuple(watch.stretches),
            precision=precision,
            recomputes=recompute,
            batch=tensors[0].shape[0] if tensors and tensors[0].ndim else 1,
            tensor=1 if split is None else split.ranks,
        )


def _facts(name: str, param: nn.Parameter, block: int) -> ParamFacts:
    dtype, shape = str(param.dtype).removeprefix("torch."), tuple(torch_private.local_of(param).shape)
    return ParamFacts(name, shape, dtype, param.element_size(), param.is_floating_point(), param.requires_grad, block)


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def _fake_parameter(param: nn.Parameter, precision: str) -> nn.Parameter:
    dtype = torch.bfloat16 if precision == "bf16" and param.is_floating_point() else param.dtype
    if isinstance(param, DTensor):
        spec = torch_private.spec_in(torch_private.spec_of(param), dtype)
        local = _fake(torch_private.local_of(param), dtype)
        fake = torch_private.parameter_from_local(local, spec, param.requires_grad)
    else:
        fake = nn.Parameter(_fake(param, dtype), requires_grad=param.requires_grad)
    torch_private.give_attributes(dict(torch_private.attributes_of(param)), fake)
    return fake


@contextmanager
def _standing_in(
    model: nn.Module, fakes: dict[int, nn.Parameter], buffers: dict[int, torch.Tensor]
) -> Generator[None, None, None]:
    """Replace the parameters and buffers of modules by fakes inside the context."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        for held, stand_ins in (
            (torch_private.parameters_of(module), fakes),
            (torch_private.buffers_of(module), buffers),
        ):
            tensors = cast("dict[str, Any]", held)
            before.append((tensors, dict(tensors)))
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = stand_ins.get(id(tensor), tensor)
    try:
        yield
    finally:
        for held, tensors in before:
            held.clear()
            held.update(tensors)


class _Steps:
    """Marks the events of blocks and the arrival of gradients while a model runs.

    Attributes:
        block_of: number of the block of each parameter, by its id.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], watch: OpWatch, precision: str) -> None:
        self._watch = watch
        self._casts = precision == "bf16"
        self._modules = [model.get_submodule(path) for path in blocks]
        self.block_of = {id(param): ROOT for param in model.parameters()}
        for number in range(len(blocks) - 1, ROOT, -1):  # a tied parameter belongs to the first block
            self.block_of |= {id(param): number for param in self._modules[number].parameters()}
        self._order = {id(param): number for number, param in enumerate(model.parameters())}

    @contextmanager
    def hooked(self, fakes: dict[int, nn.Parameter], recompute: bool) -> Generator[None, None, None]:
        """Hook the modules, which recompute in backward if ``recompute``."""
        replaced: list[nn.Module] = []
        handles: list[Any] = []
        for number, module in enumerate(self._modules):
            if self._casts:
                handles.append(module.register_forward_pre_hook(_cast_inputs, with_kwargs=True, prepend=True))
            if recompute and number != ROOT and "forward" not in vars(module):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                replaced.append(module)
        for number, module in enumerate(self._modules):
            enter = functools.partial(self._pass, StepEvent.PRE_FORWARD, number)
            leave = functools.partial(self._leave_forward, number)
            handles += [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)]
        for key, fake in fakes.items():
            if fake.requires_grad:
                mark = StepMark(None, self.block_of[key], self._order[key])
                handles.append(fake.register_post_accumulate_grad_hook(functools.partial(self._arrive, mark)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in replaced:
                del module.forward

    def _pass(self, event: StepEvent, number: int, *_: object) -> None:
        self._watch.mark(StepMark(event, number))

    def _leave_forward(self, number: int, _module: nn.Module, _args: object, output: object) -> None:
        self._pass(StepEvent.POST_FORWARD, number)
        begun: list[bool] = []

        def enter_backward(_: torch.Tensor) -> None:  # with the first gradient of the outputs
            if not begun:
                begun.append(True)
                self._pass(StepEvent.PRE_BACKWARD, number)

        for each in torch_private.leaves_of(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(enter_backward)

    def _arrive(self, mark: StepMark, param: torch.Tensor) -> None:
        param.grad = None  # the memory of gradients from here on depends on the API: the plan adds it
        self._watch.mark(mark)


def _cast_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    return torch_private.map_tensors(cast_one, (args, kwargs))
