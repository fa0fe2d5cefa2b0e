"""``fully_shard`` in the simplest form that is right: read it before ``shardwise/fsdp``, and trust it when the two differ.

Each rank stores a slice of every parameter, and all ranks together store the model once.  A *unit* is a module whose
parameters travel together.  Its whole life is in this file, from top to bottom:

1. :func:`fully_shard` cuts the parameters of a module, and registers two hooks around its forward;
2. before the forward, :meth:`SimpleUnit.gather` collects the slices of all ranks: the module computes with full parameters;
3. after the forward nothing refers to them any more, so their memory is free;
4. backward collects them a second time, when the first operation asks for one (:class:`FullAgain`);
5. when backward has the gradients of the whole unit, :meth:`SimpleUnit.reduce` averages them over ranks, and each rank receives
   the average of its slices alone, which autograd adds to ``parameter.grad``.

Nothing overlaps, no buffer is used twice, and nothing is checked: a collective starts when its result is needed, and ranks
that run different programs hang.  The engine computes the same numbers (``tests/dist/fsdp/test_reference.py``).
Source: ZeRO, arXiv 1910.02054, stage 3; PyTorch FSDP, arXiv 2304.11277.

Limits: one mesh dimension, slices along dimension 0, no double backward, parameters that only some ranks use hang.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.fsdp.precision import MixedPrecisionPolicy, dtype_of_full, dtype_of_reduction
from shardwise.torch_private import map_tensors

# Which module is a unit, and which sharded parameter replaced which plain one.  These are tables beside the model because
# modules and parameters get no attributes of ours; the keys are weak, so that a model is freed with its last user.
_UNITS: weakref.WeakKeyDictionary[nn.Module, SimpleUnit] = weakref.WeakKeyDictionary()
_SHARDED = WeakTensorKeyDictionary()


# ---- 1. Cut the parameters of a module.


def fully_shard(
    module: nn.Module, mesh: DeviceMesh | None = None, mp_policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """Make ``module`` a unit: cut all its parameters that belong to no unit yet.  Call it on blocks first, then on the model.

    ``mesh``: one dimension, the ranks that share the parameters; None: all ranks.
    """
    device = next(module.parameters()).device.type
    mesh = mesh if mesh is not None else init_device_mesh(device, (dist.get_world_size(),))
    unit = SimpleUnit(module, mesh, mp_policy or MixedPrecisionPolicy())
    # The hooks form the only link between a unit and its module; always_call: also if the forward raises an exception.
    module.register_forward_pre_hook(unit.before_forward, with_kwargs=True)
    module.register_forward_hook(unit.after_forward, always_call=True)
    _UNITS[module] = unit
    return module


def modules_of_unit(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and its submodules, without those that are units, which look after themselves."""
    yield module
    for child in module.children():
        if child not in _UNITS:
            yield from modules_of_unit(child)


@dataclass(frozen=True, eq=False)
class Cut:
    """How one parameter is cut: like ``torch.chunk`` along dimension 0, as DTensor's ``Shard(0)`` expects.

    5 rows on 4 ranks are 2 + 2 + 1 + 0.  In a collective every rank's section has the size of the first, so zeros fill the
    rest of shorter ones.  They are always behind the last row: sections in the order of ranks are the full tensor, then
    zeros.  A scalar has no rows, so each rank stores it, in a section of one element.

    Attributes:
        shape: the shape of the full parameter.
        dtype: its dtype in memory and for the optimizer.
        num_ranks: the number of ranks that share it.
    """

    shape: torch.Size
    dtype: torch.dtype
    num_ranks: int

    @property
    def section_numel(self) -> int:
        """Elements of one rank's section."""
        if not self.shape:
            return 1
        return -(-self.shape[0] // self.num_ranks) * self.shape[1:].numel()

    def sections(self, full: Tensor) -> Tensor:
        """Return the (num_ranks, section_numel) sections of a full tensor."""
        if not self.shape:
            return full.expand(self.num_ranks, 1)
        missing = self.num_ranks * self.section_numel - full.numel()
        return nn.functional.pad(full.flatten(), (0, missing)).view(self.num_ranks, -1)

    def full(self, sections: Tensor) -> Tensor:
        """Return the full tensor that (num_ranks, section_numel) sections contain."""
        return sections.flatten()[: self.shape.numel()].view(self.shape)

    def padded(self, local: Tensor) -> Tensor:
        """Return this rank's section: its slice and zeros."""
        return nn.functional.pad(local.flatten(), (0, self.section_numel - local.numel()))

    def distribute(self, section: Tensor, rank: int, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor whose slice on this rank is at the start of its ``section``; nothing is sent."""
        shape = self.shape
        if shape:
            num_rows = -(-shape[0] // self.num_ranks)
            shape = torch.Size([min(max(shape[0] - rank * num_rows, 0), num_rows), *shape[1:]])
        local = section[: shape.numel()].view(shape)
        stride = torch.empty(self.shape, device="meta").stride()
        placement = Shard(0) if self.shape else Replicate()
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=self.shape, stride=stride)


class SimpleUnit:
    """Parameters that are gathered by one message and whose gradients are reduced by one.

    Attributes:
        mesh: the ranks that share the parameters.
        policy: the dtypes.
        params: the sharded parameters, which the optimizer gets.
        cuts: how each of them is cut.
        places: (module, name, index of the parameter): a tied parameter has several.
        is_synced: False: backward keeps its gradients on this rank, for accumulation.
        unsynced: by index, the full gradients that it kept.
        running: for each forward that is running, the context of its saved tensors.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.mesh, self.policy = mesh, policy
        self.params: list[nn.Parameter] = []
        self.cuts: list[Cut] = []
        self.places: list[tuple[nn.Module, str, int]] = []
        self.is_synced = True
        self.unsynced: dict[int, Tensor] = {}
        self.running: list[AbstractContextManager[object]] = []
        for each in modules_of_unit(module):
            for name, param in list(each.named_parameters(recurse=False, remove_duplicate=False)):
                self.places.append((each, name, self.add(param)))
        self.register(self.params)

    def add(self, param: nn.Parameter) -> int:
        """Return the index of a parameter's sharded form, which it makes unless this or another unit has done so."""
        cut = Cut(param.shape, param.dtype, self.mesh.size())
        sharded = _SHARDED.get(param)
        if sharded is None:
            rank = self.mesh.get_local_rank()
            # clone: a view would keep the memory of the full parameter.  Row-major, whatever the strides of the original.
            section = cut.sections(param.detach())[rank].clone()
            sharded = nn.Parameter(cut.distribute(section, rank, self.mesh), requires_grad=param.requires_grad)
            _SHARDED[param] = sharded
        for index, known in enumerate(self.params):
            if known is sharded:
                return index
        self.params.append(sharded)
        self.cuts.append(cut)
        return len(self.params) - 1

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Give every place its tensor of ``tensors``.

        torch's modules accept a tensor that is no parameter under a parameter's name only after the parameter is deleted.
        All are deleted first, so that the parameters of a module keep their order.
        """
        for module, name, _ in self.places:
            delattr(module, name)
        for module, name, index in self.places:
            setattr(module, name, tensors[index])

    # ---- 2 and 3. Forward: gather, compute, free.

    def gather(self) -> list[Tensor]:
        """All-gather the full parameters, by one message of bytes for any mixture of dtypes.

        The slices are cast before they are sent, so that a ``param_dtype`` of half the size halves the message.
        """
        sent: list[Tensor] = []
        for param, cut in zip(self.params, self.cuts, strict=True):
            assert isinstance(param, DTensor)
            local = param.to_local().detach()
            sent.append(cut.padded(local.to(dtype_of_full(self.policy, local.dtype))))
        if not sent:
            return []
        message = torch.cat([each.view(torch.uint8) for each in sent])
        received = message.new_empty(self.mesh.size() * message.numel())
        dist.all_gather_single(received, message, group=self.mesh.get_group())
        # As rows, one message of each rank: the sections of one parameter are a column.  It is copied out, so that every full
        # parameter is row-major and has its own memory.
        columns = received.view(self.mesh.size(), -1).split([each.nbytes for each in sent], dim=1)
        return [
            cut.full(column.clone(memory_format=torch.contiguous_format).flatten().view(each.dtype))
            for cut, column, each in zip(self.cuts, columns, sent, strict=True)
        ]

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters, register them in place of the sharded ones, and cast the inputs."""
        full: tuple[Tensor, ...] = Unshard.apply(self, *self.params)  # pyright: ignore[reportAssignmentType]
        self.register(full)
        again = FullAgain(self, full)
        self.running.append(torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack))
        self.running[-1].__enter__()
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Register the sharded parameters again: the last reference to the full ones goes, and with it their memory."""
        self.running.pop().__exit__(None, None, None)
        self.register(self.params)
        return cast_floats(output, self.policy.output_dtype)

    # ---- 5. Backward: reduce.

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[DTensor | None]:
        """Average full gradients over ranks, and return this rank's slices; None for parameters without a gradient.

        They are averaged in ``reduce_dtype``, and so are gradients kept that wait for the last of several backwards:
        in bfloat16, a sum of many small gradients would lose most of them.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradient = gradient.to(dtype_of_reduction(self.policy, self.cuts[index].dtype, gradient.dtype))
                before = self.unsynced.get(index)
                self.unsynced[index] = gradient if before is None else before + gradient
        averages: list[DTensor | None] = [None] * len(self.params)
        if not self.is_synced:
            return averages
        # One message for each dtype, usually one.  A section of it has the sections of all gradients, one after another.
        for dtype in sorted({each.dtype for each in self.unsynced.values()}, key=str):
            indices = [index for index in sorted(self.unsynced) if self.unsynced[index].dtype is dtype]
            sections = [self.cuts[index].sections(self.unsynced.pop(index)) for index in indices]
            message = torch.cat(sections, dim=1)
            mine = message.new_empty(message.shape[1])
            dist.reduce_scatter_single(mine, message.flatten(), dist.ReduceOp.AVG, self.mesh.get_group())
            parts = mine.split([each.shape[1] for each in sections])
            for index, part in zip(indices, parts, strict=True):
                cut = self.cuts[index]
                averages[index] = cut.distribute(part.to(cut.dtype), self.mesh.get_local_rank(), self.mesh)
        return averages


class Unshard(torch.autograd.Function):
    """Sharded parameters in, full parameters out; backward: full gradients in, averaged slices out.

    It is one function for the whole unit.  Autograd calls its backward when all operations that used one of its outputs
    have run theirs: the moment at which the gradients of the unit are complete.
    """

    @staticmethod
    def forward(ctx: Any, unit: SimpleUnit, *shards: Tensor) -> tuple[Tensor, ...]:
        """Gather; ``shards`` are the unit's parameters, an argument so that autograd connects them with the outputs."""
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # an unused parameter has no gradient, rather than one of zeros
        full = unit.gather()
        ctx.mark_non_differentiable(
            *(each for each, shard in zip(full, shards, strict=True) if not shard.requires_grad)
        )
        return tuple(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce."""
        return (None, *ctx.unit.reduce(gradients))


# ---- 4. Backward: gather again.


class FullAgain:
    """What the graph of one forward saves in place of full parameters, which would otherwise live until backward.

    Operations save tensors for backward, among them weights and views of them.  autograd offers each to :meth:`pack` and
    saves what that returns: for a view of a full parameter, a note of where it lies.  When backward needs the tensor,
    :meth:`unpack` makes the same view of a parameter that is gathered again.  The first of a unit's operations gathers, the
    others find the result here.  The notes refer to this object, and each operation drops its notes when it has run:
    after the last one of the unit no reference to the object is left, and the full parameters are freed.
    """

    def __init__(self, unit: SimpleUnit, full: Sequence[Tensor]) -> None:
        self.unit = unit
        # Addresses are unique while the forward runs, because the module holds all these tensors.
        self.index_of = {each.untyped_storage().data_ptr(): index for index, each in enumerate(full) if each.numel()}
        self.dtypes = [each.dtype for each in full]
        self.full: list[Tensor] = []

    def pack(self, saved: Tensor) -> Tensor | Note:
        """Return a note of where ``saved`` lies in a full parameter; activations are returned as they are."""
        index = self.index_of.get(saved.untyped_storage().data_ptr())
        if index is None or saved.dtype is not self.dtypes[index]:
            return saved
        return Note(self, index, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, packed: Tensor | Note) -> Tensor:
        """Return the tensor that was saved, equal to the bit."""
        return packed.view() if isinstance(packed, Note) else packed


@dataclass(frozen=True, eq=False)
class Note:
    """Where a saved tensor lies in parameter number ``index`` of a unit."""

    again: FullAgain
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        """Gather the unit unless another note has done so, and return the view."""
        if not self.again.full:
            self.again.full = self.again.unit.gather()
        return self.again.full[self.index].as_strided(self.size, self.stride, self.offset)


# ---- Around it: dtypes and accumulation.


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with its floating-point tensors cast to ``dtype``; None casts nothing."""
    if dtype is None:
        return tree
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Let backwards inside this context add their gradients up on each rank; the next one outside averages the sum."""
    units = [_UNITS[each] for each in model.modules() if each in _UNITS]
    for unit in units:
        unit.is_synced = False
    try:
        yield
    finally:
        for unit in units:
            unit.is_synced = True
