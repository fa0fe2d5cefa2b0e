"""Every private name of torch that shardwise relies on: each entry says why, and until when, and has a test.

The test of them is ``tests/inproc/test_torch_private.py``, the list ``docs/torch.md``.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor  # torch has no public name for it
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, _random, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_Kind = TypeVar("_Kind", bound=torch.Tensor)
_Convert = Callable[[torch.Tensor], torch.Tensor]
_Hook = Callable[[torch.Tensor], torch.Tensor | None]


swap_storage: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = torch.UntypedStorage._swap_data_ptr_  # pyright: ignore[reportAttributeAccessIssue]
"""Exchanges the memory under two storages; tensors keep their storage object and see the other's bytes.

Why: autograd keeps the storage of a full parameter from forward to backward, while its memory comes and goes; ``resize_``
would allocate other memory.  Until torch has a public exchange of memory.
"""


@contextmanager
def convertible(modules: Iterable[nn.Module], convert: _Convert) -> Generator[_Convert]:
    """Yield a replacement of the ``convert`` that ``Module._apply`` calls with each tensor; its result may replace the tensor.

    torch does not swap tensors that have weak references, and LSTMs and similar modules keep some to their weights.
    While torch converts one, the module drops its own; with this, other modules that share its weights drop theirs too.
    All are restored at the end.  For the function of ``Module.share_memory`` the replacement shares the local tensors of
    DTensors: they have no memory of their own, and torch ends the process if it is asked to share that.

    Why: without it conversions of LSTMs that share weights raise, and ``share_memory`` of a sharded module ends the process.
    Until torch sets weak references aside by itself, and DTensor refuses ``share_memory_``.
    """
    keepers = [module for module in modules if isinstance(module, nn.RNNBase)]
    is_share = getattr(convert, "__code__", None) in nn.Module.share_memory.__code__.co_consts

    def convert_alone(tensor: torch.Tensor) -> torch.Tensor:
        for keeper in keepers:
            keeper._flat_weight_refs = [None] * len(keeper._flat_weights)
        if not is_share:
            return convert(tensor)
        local_of(tensor).share_memory_()
        return tensor

    try:
        yield convert_alone if keepers or is_share else convert
    finally:
        for keeper in keepers:
            keeper._flat_weight_refs = [None if w is None else weakref.ref(w) for w in keeper._flat_weights]


# Bools of torch 2.13, next to the fields that it swaps, that forbid accesses to a storage: "anything is checked", "no
# writes" and "no reads". Only CUDA builds have a function that sets the last one.
_CHECKED, _NO_WRITES, _NO_READS = 59, 60, 61


def _refuse_reads(storage: torch.UntypedStorage, words: str) -> None:
    place: int = storage._cdata  # pyright: ignore[reportAttributeAccessIssue]
    refuse: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is not None:
        refuse(place, words)
        return
    torch._C._set_throw_on_mutable_data_ptr(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))  # pyright: ignore
    if ctypes.string_at(place + _CHECKED, 3) == b"\x01\x01\x00":
        ctypes.c_uint8.from_address(place + _NO_READS).value = 1


def _is_refused(storage: torch.UntypedStorage) -> bool:
    try:
        storage.data_ptr()
    except RuntimeError:
        return True
    return False


@functools.cache
def can_refuse_reads() -> bool:
    """Return True if this torch can mark a storage as without memory, and :data:`swap_storage` moves the mark.

    Why: whether :func:`refuse_reads` has an effect depends on the build.  Until the same.
    """
    bare, other = (torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage() for _ in range(2))
    _refuse_reads(bare, "")
    if not _is_refused(bare):
        return False
    swap_storage(bare, other)
    return _is_refused(other) and not _is_refused(bare)


def refuse_reads(storage: torch.UntypedStorage, words: str) -> None:
    """Make every use of the current memory of ``storage`` raise RuntimeError, with ``words`` in builds that support a text.

    Otherwise reading a storage of no bytes through a non-empty tensor ends the process.  :data:`swap_storage` moves the
    refusal with the memory.  Without effect if torch does not support it.

    Why: a read of freed memory ends the process; it becomes a named error.  Until builds for CPUs have the function that
    those for CUDA have.
    """
    if can_refuse_reads():
        _refuse_reads(storage, words)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many references ``storage`` has besides the passed Python object: tensors, arrays, works in flight.

    Why: memory that user code or a work in flight still reads is not used again.  Until torch counts references of a storage
    in public.
    """
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportAttributeAccessIssue]


def use_counter(tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> Callable[[], int]:
    """Return a function that counts all references, of Python and C++, to ``tensors`` and ``storages`` together.

    Why: gradients of the last step that user code still holds are not written over.  Until torch counts references of a
    tensor in public.
    """
    count: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
    use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # pyright: ignore[reportAttributeAccessIssue]
    data = [storage._cdata for storage in storages]  # pyright: ignore[reportAttributeAccessIssue]
    objects: list[object] = [*tensors, *storages]

    def count_uses() -> int:
        return sum(map(sys.getrefcount, objects)) + sum(map(use_count, tensors)) + sum(map(count, data))

    return count_uses


chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""``chunk_cat(tensors, dim, num_chunks, out=rows)``: row r of ``out`` is chunk r of each tensor, flattened and concatenated.

Why: one kernel copies all gradients of a unit in rows for their ranks, as FSDP2 does.  Until it is public.
"""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in one call; shapes match pairwise, dtypes may differ.

    Why: one call for all tensors of a unit.  Until foreach operators are public.
    """
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the running backward, -1 outside one; a nested (reentrant) backward has its own.

Why: a nested backward is told from the one around it.  Until it is public.
"""


num_nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
"""Returns how many graph nodes this thread has created.

Why: a unit's node is told from those of forwards that began later.  Until it is public.
"""


def node_number(tensor: torch.Tensor) -> int:
    """Return how many graph nodes this thread had created before that of ``tensor``; -1 for tensors without one.

    Why: a unit's node is told from those of forwards that began later.  Until nodes have public numbers.
    """
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward ends; it is dropped if that backward raises.

    Why: nothing public runs at the end of a backward; FSDP2 and DDP use it.  Until there is a public hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


base_of_view: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Returns the base of a view, None for other tensors.

Why: an output that is a view of an input gets no hook.  Until it is public.
"""


is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns True while a profiler records on this thread.

Why: ranges of the profiler cost time where none records.  Until it is public.
"""


saved_tensor_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
"""Called with True: returns the innermost ``saved_tensors_hooks`` of this thread, None if there are none.

Why: hooks on saved tensors would keep freed full parameters.  Until it is public.
"""


def checkpoint_region(
    forward: Callable[..., object], contexts: Callable[[], Any], args: tuple[Any, ...]
) -> AbstractContextManager[None]:
    """Return the context of a call ``forward(*args)`` that backward repeats, as ``torch.utils.checkpoint`` does it.

    ``contexts``: its ``context_fn``.

    Why: a forward hook enters a region of ``torch.utils.checkpoint``, whose public form is a call.  Until it has a context
    manager.
    """
    from torch.utils import checkpoint

    region = contextmanager(checkpoint._checkpoint_without_reentrant_generator)
    return region(forward, True, contexts, "default", False, True, *args)


def is_last_pre_hook(module: nn.Module, hook: Callable[..., object]) -> bool:
    """Return True if ``hook``, or a ``partial`` of it, is called last before the forward of ``module``.

    Why: a hook after ours would change the arguments of the recomputation, in silence.  Until hooks can be listed in public.
    """
    last: Any = next(reversed(module._forward_pre_hooks.values()))
    return getattr(last, "func", last) == hook


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called.

    Why: recomputing such a module would run other code than its forward.  Until it is public.
    """
    return module._compiled_call_impl is not None


innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
"""Returns what ``torch.func`` runs on this thread (``vmap``, ``grad``, ``jvp``), or None.

Why: under ``torch.func`` hooks of tensors do not run.  Until it is public.
"""


def beside_transforms() -> AbstractContextManager[object]:
    """Return a context in which tensors are created and used as outside ``torch.func``'s transforms.

    Why: full parameters that are made under a transform would belong to it.  Until it is public.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def graphs_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor`` and, under ``torch.func``'s transforms, the tensors that it wraps at every level: values and tangents.

    Each of them is part of its own autograd graph.

    Why: the end of a unit's backward is seen at every level of a transform.  Until transforms run hooks of tensors.
    """
    found: list[torch.Tensor] = []
    todo = [tensor]
    while todo:
        each = todo.pop()
        found.append(each)
        if torch._C._functorch.is_functorch_wrapped_tensor(each):  # pyright: ignore[reportAttributeAccessIssue]
            todo.append(torch._C._functorch.get_unwrapped(each))  # pyright: ignore[reportAttributeAccessIssue]
            tangent = torch.autograd.forward_ad.unpack_dual(each).tangent
            if tangent is not None:
                todo.append(tangent)
    return found


def same_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to ``tensor`` do not bump its version counter.

    Why: a refill of a buffer with the same values is no write for autograd; FSDP2 uses it.  Until it is public.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def apply_to_tensors(module: Any, *args: Any, after: type | None = None, **kwargs: Any) -> Any:
    """Call ``module._apply``, which replaces parameters and buffers, as ``Module.to`` does.

    ``after``: call that of the next class in the method resolution order.

    Why: conversions of a sharded module go through its shards.  Until conversions have a public hook.
    """
    return (module if after is None else cast(Any, super(after, module)))._apply(*args, **kwargs)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live dict of a module's own parameters: an assignment to it skips ``__setattr__`` (2 us each).

    Why: units register parameters without ``__setattr__``, which takes 2 us each.  Until modules exchange parameters in
    public.
    """
    return module._parameters


def buffers_of(module: nn.Module, saved: bool = False) -> dict[str, torch.Tensor | None]:
    """Return the live dict of a module's own buffers; ``saved``: a new dict of those that its state dict contains.

    Why: a transaction and a dry run put buffers back without ``register_buffer``.  Until modules exchange buffers in public.
    """
    if not saved:
        return module._buffers
    hidden = module._non_persistent_buffers_set
    return {name: each for name, each in module._buffers.items() if each is not None and name not in hidden}


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function(tensor)`` in place of every tensor in its lists, tuples and dicts.

    Why: torch casts arguments so, with containers that users have registered.  Until ``torch.utils.pytree`` is public.
    """
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)


def fake_mode() -> AbstractContextManager[object]:
    """Return a mode in which tensors have sizes but no memory, and operations compute nothing.

    Why: a plan runs a step without memory.  Until it is public.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def post_accumulate_hooks(
    parameters: Iterable[torch.Tensor], left_out: Container[int] = ()
) -> list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Return the hooks of ``register_post_accumulate_grad_hook``, per parameter in registration order.

    ``left_out``: ids of hooks to omit.

    Why: hooks of users run on the averaged gradient.  Until hooks can be listed in public.
    """
    found = [(each, *item) for each in parameters for item in (_POST_ACCUMULATE_HOOKS(each) or {}).items()]
    return [(parameter, hook) for parameter, key, hook in found if key not in left_out]


def remove_later_hooks(parameter: torch.Tensor, kept: int) -> dict[int, Callable[[torch.Tensor], None]]:
    """Remove the hooks of ``register_post_accumulate_grad_hook`` except the one with the id ``kept``; return them by id.

    Why: a hook of users would see the gradient of one rank, in silence.  Until hooks can be listed in public.
    """
    hooks = _POST_ACCUMULATE_HOOKS(parameter)
    if not hooks or len(hooks) == (kept in hooks):
        return {}
    return {key: hooks.pop(key) for key in list(hooks) if key != kept}


def restore_hooks(parameter: torch.Tensor, hooks: dict[int, Callable[[torch.Tensor], None]]) -> None:
    """Undo :func:`remove_later_hooks`.

    Why: the end of :func:`remove_later_hooks`.  Until hooks can be listed in public.
    """
    parameter._post_accumulate_grad_hooks.update(hooks)  # pyright: ignore[reportAttributeAccessIssue]


def gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[tuple[int, _Hook]]:
    """Return the hooks of ``register_hook``, each with the index of its parameter, in registration order.

    Why: hooks of users run on the averaged gradient, of a full parameter never.  Until hooks can be listed in public.
    """
    return [(index, hook) for index, each in enumerate(parameters) for hook in (_HOOKS(each) or {}).values()]


_HOOKS: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
_POST_ACCUMULATE_HOOKS: Callable[[torch.Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether one of ``parameters`` has a hook of ``register_hook``, and of ``register_post_accumulate_grad_hook``.

    Why: units without hooks pay nothing for them.  Until hooks can be listed in public.
    """
    return any(map(_HOOKS, parameters)), any(map(_POST_ACCUMULATE_HOOKS, parameters))


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the gradient hooks of ``source``, which handles still remove.

    Why: the shard has the hooks that users registered before sharding; they would be lost in silence.  Until hooks can be
    listed in public.
    """
    if source._backward_hooks:
        target._backward_hooks, source._backward_hooks = source._backward_hooks, None
    accumulated = source._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    if accumulated:
        target._post_accumulate_grad_hooks = accumulated  # pyright: ignore[reportAttributeAccessIssue]


_BARE = (torch.Tensor, nn.Parameter, DTensor)  # their dicts have attributes that users have set, and ``_is_param``


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on ``tensor``.

    Plain tensors and DTensors: the live dict.  Other classes may store their components there: a copy without these.

    Why: attributes of users (``no_decay``) follow a parameter through sharding, as with FSDP2.  Until torch copies them.
    """
    if type(tensor) in _BARE:
        return vars(tensor)
    components = vars(tensor.detach())
    return {name: value for name, value in vars(tensor).items() if name not in components}


def give_attributes(attributes: dict[str, Any], tensor: torch.Tensor) -> None:
    """Add ``attributes`` to those of ``tensor``.

    Plain tensors and DTensors get ``attributes`` itself as their dict, so that several tensors can share it.

    Why: forms of one parameter have one set of attributes.  Until torch copies them.
    """
    if type(tensor) in _BARE:
        attributes.update(vars(tensor))
        tensor.__dict__ = attributes  # pyright: ignore[reportAttributeAccessIssue]  torch's swap_tensors does so, too
    else:
        vars(tensor).update({**attributes, **vars(tensor)})


storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # pyright: ignore[reportAttributeAccessIssue]
"""Returns an identity of a tensor's storage, also for a wrapper, whose storage is empty; no Python function.

Why: an assignment to ``.data`` changes nothing else; every forward asks for every parameter.  Until storages have a public
identity.
"""


children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
"""Returns the live dict of a module's children; no Python function.

Why: every forward of the root sees whether the tree has changed, in microseconds.  Until modules count changes of their tree.
"""


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor; all that are alike share one as long as it lives, since making it takes 50 us.

    Why: ``DTensor.from_local`` makes one per call, which takes 50 us and autograd.  Until specs are public.
    """
    key = id(mesh), tuple(placements), shape, stride, dtype
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, key[1], tensor_meta=TensorMeta(shape, stride, dtype))
    return spec


_specs: weakref.WeakValueDictionary[object, DTensorSpec] = weakref.WeakValueDictionary()


_SPEC = operator.attrgetter("_spec")


def spec_of(tensor: DTensor, dtype: torch.dtype | None = None) -> DTensorSpec:
    """Return the mesh, placements and global shape of ``tensor``; ``dtype``: for a tensor of that.

    Why: mesh, placements and global shape at once; gradients may have another dtype than their parameter.  Until specs are
    public.
    """
    spec = tensor._spec
    meta = None if dtype is None else spec.tensor_meta
    if dtype is None or meta is None or meta.dtype is dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def specs_of(tensors: Sequence[torch.Tensor]) -> list[DTensorSpec | None]:
    """Return the specs of DTensors, None for other tensors.

    Why: one call sees that no parameter of a unit was replaced.  Until specs are public.
    """
    try:
        return [*map(_SPEC, tensors)]  # the common case: all are DTensors
    except AttributeError:
        return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def dtensor_from_local(
    local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False, is_kept: bool = False
) -> DTensor:
    """Wrap ``local`` without autograd or checks: ``DTensor.from_local`` costs 10 times as much and is differentiable.

    ``__init__`` only serves the compiler, and would double the cost of ``__new__``.  ``is_kept``: users may deep-copy it, also
    where ``local`` begins within its storage.

    Why: a DTensor per gradient and step.  Until there is a public one without autograd.
    """
    if not (is_kept and local.storage_offset()):
        return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]
    # The wrapper copies the offset, and by ``data_ptr() == 0`` torch distinguishes it from tensors that have memory.
    place = torch.empty((), dtype=local.dtype, device=local.device).expand(local.shape)
    wrapper = DTensor.__new__(DTensor, place, spec, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]
    wrapper._local_tensor = local
    return wrapper


def parameter_from_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """Return a DTensor that is a parameter; ``nn.Parameter(dtensor)`` detaches it first, at ten times the cost.

    Why: ``nn.Parameter(dtensor)`` detaches it first, at ten times the cost.  Until there is a public one without autograd.
    """
    parameter = dtensor_from_local(local.detach(), spec, requires_grad, is_kept=True)
    parameter._is_param = True  # pyright: ignore[reportAttributeAccessIssue]  what isinstance(_, nn.Parameter) asks for
    return parameter  # pyright: ignore[reportReturnType]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor (``to_local`` would create a new one through autograd); else ``tensor``.

    Why: ``to_local`` makes a tensor and a node of the graph.  Until there is a public one without autograd.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Returns the number of counted writes to a tensor, which its views share; raises RuntimeError for one of inference mode.

Why: writes to parameters outside of a step are seen, and named.  Until it is public; it is documented for saved tensors.
"""
_LOCAL: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return version numbers, which grow with each counted write to a DTensor itself or to its local tensor.

    Why: the same for all parameters of a unit.  Until it is public.
    """
    return [*map(operator.add, map(version_of, tensors), map(version_of, locals_of(tensors)))]


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_of` of each.

    Why: the same for all parameters of a unit.  Until there is a public one without autograd.
    """
    try:
        return [*map(_LOCAL, tensors)]  # the common case: all are DTensors
    except AttributeError:
        return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the memory of a DTensor, or of a plain tensor; shape and dtype must be as before.

    Why: a DTensor whose memory is placed elsewhere stays the same parameter.  Until there is a public one.
    """
    if isinstance(tensor, DTensor):
        tensor._local_tensor = local
    else:
        tensor.data = local


class _ShardDraws:
    """Random operations on DTensors of CPU ranks give the values of one process: see :class:`_DrawnWhole`.

    Without it torch draws from the generator of each rank, so that ranks with one seed draw the same numbers for their shards,
    and ignores a generator of the user.

    Attributes:
        distribute_region_enabled: torch enters the region that follows; False: it draws as without this object.
    """

    distribute_region_enabled = True

    def __init__(self, draws_as_torch: Callable[[], bool]) -> None:
        self._draws_as_torch = draws_as_torch

    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> AbstractContextManager[object]:
        if _are_we_tracing() or self._draws_as_torch():
            return contextlib.nullcontext()
        return _DrawnWhole(spec, generator)


class _DrawnWhole(TorchDispatchMode):
    """Runs a random operation on a tensor of the whole shape and keeps the elements of this rank's shard.

    A CPU generator cannot skip to the numbers of a shard: which numbers an element takes depends on the size of the tensor.
    """

    def __init__(self, spec: DTensorSpec, generator: torch.Generator | None) -> None:
        super().__init__()
        self._spec, self._generator = spec, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._generator is not None:
            given = {**given, "generator": self._generator}
        meta, shard = cast(TensorMeta, self._spec.tensor_meta), args[0]
        index = tuple(self._positions(dim) for dim in range(len(meta.shape)))
        if not isinstance(shard, torch.Tensor):  # torch.distributed.tensor.rand and randn give the shape of a shard
            return func(meta.shape, *args[1:], **given)[index]
        whole = torch.empty_strided(meta.shape, meta.stride, dtype=shard.dtype, device=shard.device).zero_()
        whole[index] = shard
        out = func(whole, *args[1:], **given)
        if out is whole:
            return shard.copy_(whole[index])
        return tree_map(lambda each: each[index] if isinstance(each, torch.Tensor) else each, out)

    def _positions(self, dim: int) -> torch.Tensor:
        """Return the positions of the shard's elements in the whole tensor along ``dim``, shaped to index with all dims."""
        shape, mesh = cast(TensorMeta, self._spec.tensor_meta).shape, self._spec.mesh
        cuts = [_cut_of_rows(each, dim) for each in self._spec.placements]
        rows = distribute_tensor(torch.arange(shape[dim], device="cpu"), mesh, cuts, src_data_rank=None).to_local()
        return rows.reshape([-1 if each == dim else 1 for each in range(len(shape))])


def _cut_of_rows(placement: Placement, dim: int) -> Placement:
    is_cut = getattr(placement, "dim", None) == dim
    return strided_shard(0, getattr(placement, "split_factor", 1)) if is_cut else Replicate()


_aten = torch.ops.aten
# torch enters no region for these.
_DRAWS_ELSEWHERE = (_aten.cauchy_, _aten.exponential_, _aten.geometric_, _aten.log_normal_, _aten.random_)


def _draw_elsewhere(op: Any, args: Any, kwargs: Any) -> DTensor:
    tensor: DTensor = args[0]
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    draws: Any = _random._rng_tracker
    with draws._distribute_region(tensor._spec, kwargs.get("generator")):
        op(tensor._local_tensor, *args[1:], **given)
    return tensor


def draw_as_one_process(draws_as_torch: Callable[[], bool]) -> None:
    """Let random operations on DTensors of CPU ranks give the values of one process, while ``draws_as_torch()`` is False.

    Call it where there is no accelerator, for which torch fills the same place.

    Why: ranks with one seed draw the same numbers for their shards, in silence.  Until DTensor seeds CPU ranks as it does
    accelerators.
    """
    if _random._rng_tracker is None:
        _random._rng_tracker = cast(Any, _ShardDraws(draws_as_torch))
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        handlers.update({getattr(op, each): _draw_elsewhere for op in _DRAWS_ELSEWHERE for each in op.overloads()})


def clip_mixed_by(
    norm_of: Callable[[Sequence[torch.Tensor], float, bool], torch.Tensor],
    scale: Callable[[Sequence[torch.Tensor], float, torch.Tensor], None],
    before: Callable[[Sequence[Any]], Sequence[Any]],
    check: Callable[[Sequence[Any]], None],
) -> None:
    """Use ``norm_of`` and ``scale`` in ``torch.nn.utils`` where torch's own raise, or leave other ranks waiting.

    That is for DTensors on several meshes or beside plain gradients, and for the maximum norm, of which empty shards have none.
    ``before(parameters)`` returns the parameters that have the gradients; ``check(parameters)`` refuses others.

    The functions are public, but are replaced in their modules, once.  ``clip_grad_norm_`` looks its two halves up there, also
    if a program has imported it by name before.

    Why: torch's own clip nothing while a unit is unsharded, hang where ranks diverge, refuse mixed meshes.  Until torch's own
    take these.
    """
    of_torch = torch.nn.utils
    clip, total_norm_of, scale_by = of_torch.clip_grad_norm_, of_torch.get_total_norm, of_torch.clip_grads_with_norm_
    if hasattr(clip, "shardwise_clip"):
        return

    @functools.wraps(clip)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return clip(before(_as_list(parameters)), *args, **kwargs)

    @functools.wraps(total_norm_of)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        given, order = _as_list(tensors), float(norm_type)
        meshes = _meshes_of(given)
        if len(meshes) > 1 or (math.isinf(order) and meshes not in ({None}, set())):
            return norm_of(given, order, error_if_nonfinite)
        return total_norm_of(given, norm_type, error_if_nonfinite, foreach)

    @functools.wraps(scale_by)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        params = _as_list(parameters)
        check(params)
        gradients = [param.grad for param in params if param.grad is not None]
        if len(_meshes_of(gradients) | (_meshes_of([total_norm]) - {None})) > 1:
            scale(gradients, float(max_norm), total_norm)
        else:
            scale_by(params, max_norm, total_norm, foreach)

    clip_grad_norm_.shardwise_clip = clip  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.get_total_norm = torch.nn.utils.clip_grad._get_total_norm = get_total_norm
    torch.nn.utils.clip_grads_with_norm_ = torch.nn.utils.clip_grad._clip_grads_with_norm_ = clip_grads_with_norm_


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _meshes_of(tensors: Iterable[torch.Tensor]) -> set[DeviceMesh | None]:
    return {each.device_mesh if isinstance(each, DTensor) else None for each in tensors}


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a tensor dim that another mesh axis, right of it, has split ``split_factor`` times, or not (1).

    Why: a dim that tensor parallelism has split is split again.  Until it is public.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh whose axes are those of ``meshes`` in order; they must come from one parent mesh.

    Why: a parameter lies on the data-parallel and the tensor-parallel mesh; FSDP2 uses it.  Until it is public.
    """
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return ``mesh`` as a mesh of one axis called ``name``.

    Why: several axes act as one that shards.  Until it is public.
    """
    return mesh._flatten(name)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a pending functional collective; return ``tensor`` as a plain tensor.

    Why: a gradient may be a functional collective in flight.  Until it is public.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of ``group``, prefixed, so that groups do not share keys.

    Why: ``get_group_store`` returns none where ranks are threads (torch's own tests).  Until it does.
    """
    return dist.distributed_c10d._get_process_group_store(group)


def timeout_s_of(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return after how many seconds a collective of ``group`` times out, on ``device`` or on the first that it serves.

    If no backend tells (threads as ranks, a fake one): torch's default for a new group.

    Why: waits of shardwise end with those of the group.  Until groups tell their timeout.
    """
    devices = [torch.device("cpu"), torch.accelerator.current_accelerator()] if device is None else [device]
    for each in filter(None, devices):
        try:
            return group._get_backend(each).options._timeout.total_seconds()
        except (AttributeError, RuntimeError):
            continue
    return default_pg_timeout.total_seconds()


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that serves ``device`` in ``group``.

    Why: allocators of NCCL, and reductions without torch's bookkeeping.  Until it is public.
    """
    return group._get_backend(device)


def is_gloo(group: torch.distributed.ProcessGroup) -> bool:
    """Return True if gloo itself (no wrapper, no fake) serves CPU tensors in ``group``.

    Why: transports between processes need gloo itself.  Until backends tell their kind.
    """
    try:
        return type(group._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    except (AttributeError, RuntimeError):
        return False


def abort_groups() -> None:
    """Abort the collectives of all groups of this process, also those in kernels; the groups are unusable afterwards.

    Why: kernels that wait for a lost rank end on all groups at once.  Until ``abort`` of several groups is public.
    """
    groups = [group for group in all_groups() if hasattr(group, "abort")]
    found = [group._get_backend(device) for group in groups for device in group._device_types]  # pyright: ignore
    starters: list[Any] = [backend for backend in found if hasattr(backend, "_group_start")][:1]
    for backend in starters:  # aborted one by one, each would wait for kernels of the others
        backend._group_start()
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    for backend in starters:
        backend._group_end()


@contextmanager
def watching(watch: Callable[[Any, Any, Any], None], *, is_seen: bool = True) -> Generator[None, None, None]:
    """Call ``watch(op, (args, kwargs), out)`` after every operation of this thread that torch dispatches.

    For operations on DTensors, the operations on their local tensors count; those on fake tensors, by which torch learns
    placements once, count in a fake mode only.
    ``is_seen`` False: :func:`has_dispatch_mode` ignores it, so that tensors take the same code path as without it.

    Why: a dry run and a meter count operations; a probe finds optimizers that sum over elements.  Until the mode is public.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    parts, is_faked = (DTensor, AsyncCollectiveTensor), detect_fake_mode() is not None

    class Watching(TorchDispatchMode):
        _is_seen_by_links = is_seen

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(each, parts) for each in types):
                return NotImplemented  # the class is dispatched first, then its local tensors arrive here
            given = kwargs or {}
            if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
                return args[0]  # torch creates another one here; for real ones it waits, and returns the same
            out = func(*args, **given)
            if is_faked or not any(isinstance(each, FakeTensor) for each in tree_leaves((args, out))):
                watch(func, (args, given), out)
            return out

    with Watching():
        yield


@contextmanager
def fake_world(num_ranks: int) -> Generator[None, None, None]:
    """Make this process, which has no process group, rank 0 of ``num_ranks`` in a group that sends nothing.

    Why: a plan of tensor parallelism runs in one process.  Until the fake backend is public.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        forget_meshes()


def has_dispatch_mode() -> bool:
    """Return True while a ``TorchDispatchMode`` (CommDebugMode, a FLOP counter, ...) sees every operation of this thread.

    Why: tools that see every operation see collectives, not copies through shared memory.  Until it is public.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(getattr(mode, "_is_seen_by_links", True) for mode in _get_current_dispatch_mode_stack())


def skip_frames(function: Callable[..., Any], why: str) -> None:
    """Exclude ``function``, and everything that it calls, from torch.compile.

    No graph contains it, and its frames are not compiled.  Hooks that are registered after a module was compiled are
    such frames.  A surrounding graph breaks there; ``why``: torch's text if ``fullgraph=True`` forbids that.  Imports
    nothing of torch.compile.

    Why: hooks are in no graph; ``torch.compiler.disable`` adds 1.6 us to every call of one (torch 2.13, CPU).  Until it costs
    nothing.
    """
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    function._torchdynamo_disable_msg = why  # pyright: ignore[reportFunctionMemberAccess]
    from torch._C._dynamo import eval_frame  # pyright: ignore[reportMissingModuleSource]

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


# --- torch's own tools (fsdp/module.py) ---


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"


def class_that_tools_ask_for() -> type | None:
    """Return the class by which torch's tools recognize a sharded module, if its module is imported; else None.

    It is looked up in ``sys.modules`` and never imported: a program that uses such a tool has imported it.

    Why: tools of torch check ``isinstance`` of its class.  Until tools ask for methods.
    """
    return getattr(sys.modules.get(_FULLY_SHARD), "FSDPModule", None)


def show_to_tools(module: nn.Module, state: object) -> None:
    """Let ``fully_shard.state(module)`` of torch's own function return ``state``, and torch's composable APIs skip ``module``.

    Its replicate skips modules that are registered under the first name, its fully_shard and FSDP1 those under the second.
    What is not imported is not asked.

    Why: torch's replicate and FSDP1 would wrap sharded modules again, in silence.  Until the registry is public.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    api = getattr(sys.modules.get(_FULLY_SHARD), "fully_shard", None)
    if contract is not None:
        entries = module.__dict__.setdefault(_registry_key(), {})
        entries.update({name: cast(Any, contract).RegistryItem() for name in ("fully_shard", "replicate")})
        if api is not None:
            module.__dict__.setdefault(cast(Any, contract).STATE_KEY, {})[api.__wrapped__] = state


def _registry_key() -> str:
    return getattr(sys.modules.get("torch.distributed._composable.contract"), "REGISTRY_KEY", "")


def leave_join(joined: object) -> None:
    """Give ``joined`` the configuration of an object that is in no ``Join`` of torch's.

    Why: a model that ``Join`` has left takes no part in the next one.  Until ``Join`` tells objects to leave.
    """
    from torch.distributed.algorithms.join import _JoinConfig

    cast(Any, joined)._join_config = _JoinConfig.construct_disabled_join_config()


def composable_apis_of(module: nn.Module) -> list[str]:
    """Return the names of ``module`` in torch's registry of composable APIs: "fully_shard", "replicate", ...

    Why: modules that torch's APIs manage are refused.  Until the registry is public.
    """
    return [*module.__dict__.get(_registry_key(), ())]


# --- ZeroRedundancyOptimizer (consistency/agreement.py) ---


def tensor_without_memory(kind: type[_Kind], like: torch.Tensor, dtype: torch.dtype) -> _Kind:
    """Return an empty tensor of the subclass ``kind`` with the shape, strides and device of ``like``.

    Why: gradients that wait for a backward with sync cost no memory and refuse to be read.  Until it is public.
    """
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)  # pyright: ignore[reportReturnType]


def add_all(targets: Sequence[torch.Tensor], addends: Sequence[torch.Tensor]) -> None:
    """Add each addend to its target, in place, in one call.

    Why: one call for all gradients of a unit.  Until foreach operators are public.
    """
    torch._foreach_add_(list(targets), list(addends))


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one dtype and device by the 0-dim ``factor``, in place, in one call.

    Why: one call for all gradients, as torch's own clipping does.  Until foreach operators are public.
    """
    torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, computed in the real ``dtype``, in one call; none of them may be empty or complex.

    Why: one call for all gradients, as torch's own clipping does.  Until foreach operators are public.
    """
    return list(torch._foreach_norm(list(tensors), order, dtype))


# --- ShardedOptimizer (optim/, optim/sharded_optimizer.py) ---


def process_group_of(tensor: Any) -> dist.ProcessGroup:
    """Return the process group over which a ShardedTensor is sharded.

    Why: state of a ShardedTensor is exchanged over its group.  Until ShardedTensor goes.
    """
    return tensor._process_group


def sharded_tensor_like(reference: Any, values: Sequence[torch.Tensor]) -> Any:
    """Return a ShardedTensor cut like ``reference`` with the local shards ``values``; no communication.

    Why: state of a ShardedTensor is one.  Until ShardedTensor goes.
    """
    import dataclasses

    from torch.distributed._shard.sharded_tensor import Shard

    def clamped(place: Any) -> Any:  # empty shards of torch's own specs start after the end, which its checks refuse
        offsets = [min(start, size) for start, size in zip(place.shard_offsets, reference.size(), strict=True)]
        return dataclasses.replace(place, shard_offsets=offsets)

    shards = [Shard(value, clamped(old.metadata)) for value, old in zip(values, reference.local_shards(), strict=True)]
    metadata = reference.metadata()
    metadata = dataclasses.replace(metadata, shards_metadata=[clamped(place) for place in metadata.shards_metadata])
    dtype = values[0].dtype if values else metadata.tensor_properties.dtype
    properties = dataclasses.replace(metadata.tensor_properties, dtype=dtype, requires_grad=False)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, dataclasses.replace(metadata, tensor_properties=properties), process_group=reference._process_group
    )


def step_inside(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that works inside another one: global step hooks run for the outer one only.

    Why: global step hooks would run twice.  Until a step without hooks is public.
    """
    step = type(optimizer).step
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if has_hooks or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # pyright: ignore[reportFunctionMemberAccess]


def state_dict_hooks(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """Return the hooks registered on ``optimizer``: ``when`` is state_dict_pre, load_state_dict_post, ...

    Why: hooks registered on a ShardedOptimizer's inner optimizer run.  Until hooks can be listed in public.
    """
    return list(getattr(optimizer, f"_optimizer_{when}_hooks").values())


without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Returns a context in which tensor subclasses do not intercept functions.

Why: the tensor that refuses reads is described in its error.  Until it is public.
"""


def forget_meshes() -> None:
    """Clear DTensor's caches: they keep meshes, and so ended process groups with their threads, alive with the process.

    Why: caches of DTensor keep ended groups, with their threads.  Until ``destroy_process_group`` clears them.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    topologies = getattr(_collective_utils, "MeshTopoInfo", None)
    for place, name in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (getattr(topologies, "build_from_mesh", None), "cache_clear"),
    ):
        clear: Callable[[], None] | None = getattr(place, name, None)
        if clear is not None:
            clear()


# --- transactions (consistency/process_groups.py, transaction/) ---


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process is a member of.

    Why: a lost rank ends the waits of every group.  Until it is public.
    """
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def sequence_of(group: dist.ProcessGroup) -> int:
    """Return how many collectives and messages this process has begun in ``group``, which has gloo.

    Why: ranks tell which of them is behind.  Until it is public.
    """
    return cast(Any, group)._get_sequence_number_for_group()


def replace_gloo(group: dist.ProcessGroup, prefix: str, kind: int) -> None:
    """Put a new gloo backend under ``group``, connected through its store under ``prefix``.  Collective.

    ``kind``: a number that no backend of the group has; otherwise torch would use the old one again.  The old one lives
    on, without connections, until the group is destroyed.

    Why: a retried step connects the ranks again after a broken connection.  Until gloo reconnects.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    old: Any = group._get_backend(torch.device("cpu"))
    store = dist.PrefixStore(prefix, store_of(group))
    new = ProcessGroupGloo(store, group.rank(), group.size(), old.options)
    for device in group._device_types:  # pyright: ignore[reportAttributeAccessIssue]
        group._register_backend(device, dist.ProcessGroup.BackendType(kind), new)


def settle_buckets(ddp: nn.parallel.DistributedDataParallel, has_failed: bool = False) -> None:
    """Make DDP lay out its buckets as the last step has shown, which it would do in its next forward.  Collective.

    ``has_failed``: forget a backward that has not ended instead; the next step records the order of its buckets again.

    Why: a step of DDP that is undone begins again.  Until DDP resets its reducer in public.
    """
    if not has_failed:
        ddp.reducer._rebuild_buckets()
        return
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False
