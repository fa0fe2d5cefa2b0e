"""Every private torch name that shardwise relies on: one function each, one test each (tests/inproc/test_torch_private.py)."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import math
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
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
from torch.utils._pytree import tree_map

_Kind = TypeVar("_Kind", bound=torch.Tensor)


swap_storage: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = torch.UntypedStorage._swap_data_ptr_  # pyright: ignore[reportAttributeAccessIssue]
"""Exchanges the memory under two storages; tensors keep their storage object and see the other's bytes."""


def shares_locals(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``fn``; for the function that ``Module.share_memory`` applies, return one that shares DTensors' local tensors.

    A DTensor has no memory of its own, and torch ends the process if it is asked to share that.
    """
    if getattr(fn, "__code__", None) not in nn.Module.share_memory.__code__.co_consts:
        return fn

    def share(tensor: torch.Tensor) -> torch.Tensor:
        local_of(tensor).share_memory_()
        return tensor

    return share


@contextmanager
def without_weak_references(
    modules: Iterable[nn.Module], convert: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield a replacement of the ``convert`` that ``Module._apply`` calls with each tensor; its result may replace the tensor.

    torch does not swap tensors that have weak references, and LSTMs and similar modules keep some to their weights.
    While torch converts one, the module drops its own; with this, other modules that share its weights drop theirs too.
    All are restored at the end.
    """
    keepers = [module for module in modules if isinstance(module, nn.RNNBase)]

    def convert_alone(tensor: torch.Tensor) -> torch.Tensor:
        for keeper in keepers:
            keeper._flat_weight_refs = [None] * len(keeper._flat_weights)
        return convert(tensor)

    try:
        yield convert_alone if keepers else convert
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
    """Return True if this torch can mark a storage as without memory, and :data:`swap_storage` moves the mark."""
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
    """
    if can_refuse_reads():
        _refuse_reads(storage, words)


class ReportedStorage(torch.UntypedStorage):
    """A storage of which reports of memory read 0 bytes at 0 while :func:`refuse_reads` forbids reads."""

    def data_ptr(self) -> int:
        """Return the address, 0 without memory, as torch's own storages of no bytes do."""
        return super().data_ptr() if self.nbytes() else 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy that is a storage of torch's: it recognizes these by their class alone."""
        return copy.copy, (torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self),)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many references ``storage`` has besides the passed Python object: tensors, arrays, works in flight."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportAttributeAccessIssue]


def use_counter(tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> Callable[[], int]:
    """Return a function that counts all references, of Python and C++, to ``tensors`` and ``storages`` together."""
    count: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
    use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # pyright: ignore[reportAttributeAccessIssue]
    data = [storage._cdata for storage in storages]  # pyright: ignore[reportAttributeAccessIssue]
    objects: list[object] = [*tensors, *storages]

    def count_uses() -> int:
        return sum(map(sys.getrefcount, objects)) + sum(map(use_count, tensors)) + sum(map(count, data))

    return count_uses


chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""``chunk_cat(tensors, dim, num_chunks, out=rows)``: row r of ``out`` is chunk r of each tensor, flattened and concatenated.
"""


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
"""Copies each source into its target; there must be one at least; shapes match pairwise, dtypes may differ."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Do :data:`copy_each`, also for no tensors."""
    if targets:
        copy_each(list(targets), list(sources))


graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the running backward, -1 outside one; a nested (reentrant) backward has its own."""


num_nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
"""Returns how many graph nodes this thread has created."""


def node_number(tensor: torch.Tensor) -> int:
    """Return how many graph nodes this thread had created before that of ``tensor``; -1 for tensors without one."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward ends; it is dropped if that backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


base_of_view: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Returns the base of a view, None for other tensors."""


is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns True while a profiler records on this thread."""


saved_tensor_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
"""Called with True: returns the innermost ``saved_tensors_hooks`` of this thread, None if there are none."""


def checkpoint_region(
    forward: Callable[..., object], contexts: Callable[[], Any], args: tuple[Any, ...]
) -> AbstractContextManager[None]:
    """Return the context of a call ``forward(*args)`` that backward repeats, as ``torch.utils.checkpoint`` does it.

    ``contexts``: its ``context_fn``.
    """
    from torch.utils import checkpoint

    region = contextmanager(checkpoint._checkpoint_without_reentrant_generator)
    return region(forward, True, contexts, "default", False, True, *args)


def is_last_pre_hook(module: nn.Module, hook: Callable[..., object]) -> bool:
    """Return True if ``hook``, or a ``partial`` of it, is called last before the forward of ``module``."""
    last: Any = next(reversed(module._forward_pre_hooks.values()))
    return getattr(last, "func", last) == hook


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
"""Returns what ``torch.func`` runs on this thread (``vmap``, ``grad``, ``jvp``), or None."""


def beside_transforms() -> AbstractContextManager[object]:
    """Return a context in which tensors are created and used as outside ``torch.func``'s transforms."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def graphs_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor`` and, under ``torch.func``'s transforms, the tensors that it wraps at every level: values and tangents.

    Each of them is part of its own autograd graph.
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
    """Return a context in which writes to ``tensor`` do not bump its version counter."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of ``module`` by ``function(tensor)``, as ``Module.to`` does."""
    module._apply(function)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live dict of a module's own parameters: an assignment to it skips ``__setattr__`` (2 us each)."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the live dict of a module's own buffers."""
    return module._buffers


def saved_buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that its state dict contains."""
    hidden = module._non_persistent_buffers_set
    return {name: each for name, each in module._buffers.items() if each is not None and name not in hidden}


def leaves_of(tree: object) -> list[Any]:
    """Return the leaves of the lists, tuples and dicts in ``tree``, in order."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function(tensor)`` in place of every tensor in its lists, tuples and dicts."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)


def fake_mode() -> AbstractContextManager[object]:
    """Return a mode in which tensors have sizes but no memory, and operations compute nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def post_accumulate_hooks(
    parameters: Iterable[torch.Tensor], left_out: Container[int] = ()
) -> list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Return the hooks of ``register_post_accumulate_grad_hook``, per parameter in registration order.

    ``left_out``: ids of hooks to omit.
    """
    return [
        (parameter, hook)
        for parameter in parameters
        for key, hook in (_POST_ACCUMULATE_HOOKS(parameter) or {}).items()
        if key not in left_out
    ]


def remove_later_hooks(parameter: torch.Tensor, kept: int) -> dict[int, Callable[[torch.Tensor], None]]:
    """Remove the hooks of ``register_post_accumulate_grad_hook`` except the one with the id ``kept``; return them by id."""
    hooks = _POST_ACCUMULATE_HOOKS(parameter)
    if not hooks or len(hooks) == (kept in hooks):
        return {}
    return {key: hooks.pop(key) for key in list(hooks) if key != kept}


def restore_hooks(parameter: torch.Tensor, hooks: dict[int, Callable[[torch.Tensor], None]]) -> None:
    """Undo :func:`remove_later_hooks`."""
    parameter._post_accumulate_grad_hooks.update(hooks)  # pyright: ignore[reportAttributeAccessIssue]


def gradient_hooks(
    parameters: Iterable[torch.Tensor],
) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor | None]]]:
    """Return the hooks of ``register_hook``, each with the index of its parameter, in registration order."""
    return [(index, hook) for index, each in enumerate(parameters) for hook in (each._backward_hooks or {}).values()]


_HOOKS = operator.attrgetter("_backward_hooks")
_POST_ACCUMULATE_HOOKS: Callable[[torch.Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether one of ``parameters`` has a hook of ``register_hook``, and of ``register_post_accumulate_grad_hook``."""
    return any(map(_HOOKS, parameters)), any(map(_POST_ACCUMULATE_HOOKS, parameters))


def hook_alone(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register ``hook`` on ``parameter`` in place of its other gradient hooks, which may be shared with another tensor."""
    # ``register_hook`` would do the same, at several times the cost.
    parameter._backward_hooks = OrderedDict({-1: hook})


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Share the gradient hooks of ``source`` with ``target``: one set for both, from which handles remove them."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    accumulated = source._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    if accumulated:
        target._post_accumulate_grad_hooks = accumulated  # pyright: ignore[reportAttributeAccessIssue]


_BARE = (torch.Tensor, nn.Parameter, DTensor)  # their dicts have attributes that users have set, and ``_is_param``


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on ``tensor``.

    Plain tensors and DTensors: the live dict.  Other classes may store their components there: a copy without these.
    """
    if type(tensor) in _BARE:
        return vars(tensor)
    components = vars(tensor.detach())
    return {name: value for name, value in vars(tensor).items() if name not in components}


def give_attributes(attributes: dict[str, Any], tensor: torch.Tensor) -> None:
    """Add ``attributes`` to those of ``tensor``.

    Plain tensors and DTensors get ``attributes`` itself as their dict, so that several tensors can share it.
    """
    if type(tensor) in _BARE:
        attributes.update(vars(tensor))
        tensor.__dict__ = attributes  # pyright: ignore[reportAttributeAccessIssue]  torch's swap_tensors does so, too
    else:
        vars(tensor).update({**attributes, **vars(tensor)})


# Returns an identity of a tensor's storage, also for a wrapper, whose storage is empty. It is not a Python function,
# because every forward calls it for every parameter.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # pyright: ignore[reportAttributeAccessIssue]


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live dict of a module's children."""
    return module._modules


def has_chosen_grad_dtype(parameter: torch.Tensor) -> bool:
    """Return True if ``parameter.grad_dtype`` was set; before torch 2.15 the parameter's own dtype cannot be detected."""
    known: bool | None = getattr(parameter, "_has_grad_dtype_override", None)
    return parameter.grad_dtype is not parameter.dtype if known is None else known


@functools.cache
def reduces_in_param_dtype() -> bool:
    """Return True if torch's FSDP2 reduces in ``param_dtype`` without a ``reduce_dtype``, as before torch 2.15."""
    return torch.__version__ < "2.15"


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor; all that are alike share one as long as it lives, since making it takes 50 us."""
    key = id(mesh), tuple(placements), shape, stride, dtype
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, key[1], tensor_meta=TensorMeta(shape, stride, dtype))
    return spec


_specs: weakref.WeakValueDictionary[object, DTensorSpec] = weakref.WeakValueDictionary()


def spec_in(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return ``spec`` for a tensor of ``dtype``."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype is dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


_SPEC = operator.attrgetter("_spec")


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the mesh, placements and global shape of ``tensor``."""
    return tensor._spec


def specs_of(tensors: Sequence[torch.Tensor]) -> list[DTensorSpec | None]:
    """Return the specs of DTensors, None for other tensors."""
    try:
        return [*map(_SPEC, tensors)]  # the common case: all are DTensors
    except AttributeError:
        return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def dtensor_from_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """Wrap ``local`` without autograd or checks: ``DTensor.from_local`` costs 10 times as much and is differentiable.

    ``__init__`` only serves the compiler, and would double the cost of ``__new__``.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


def dtensor_from_view(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """Return :func:`dtensor_from_local` of ``local``, which may begin within its storage, so that it can be deep-copied."""
    if not local.storage_offset():
        return dtensor_from_local(local, spec, requires_grad)
    # The wrapper copies the offset, and by ``data_ptr() == 0`` torch distinguishes it from tensors that have memory.
    place = torch.empty((), dtype=local.dtype, device=local.device).expand(local.shape)
    wrapper = dtensor_from_local(place, spec, requires_grad)
    wrapper._local_tensor = local
    return wrapper


def parameter_from_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """Return a DTensor that is a parameter; ``nn.Parameter(dtensor)`` detaches it first, at ten times the cost."""
    parameter = dtensor_from_view(local.detach(), spec, requires_grad)
    parameter._is_param = True  # pyright: ignore[reportAttributeAccessIssue]  what isinstance(_, nn.Parameter) asks for
    return parameter  # pyright: ignore[reportReturnType]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor (``to_local`` would create a new one through autograd); else ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Returns the number of counted writes to a tensor, which its views share; raises RuntimeError for one of inference mode."""
LOCAL: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Returns the local tensor of a DTensor, for ``map``; raises AttributeError for another tensor."""


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return version numbers, which grow with each counted write to a DTensor itself or to its local tensor."""
    return [*map(operator.add, map(version_of, tensors), map(version_of, locals_of(tensors)))]


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_of` of each."""
    try:
        return [*map(LOCAL, tensors)]  # the common case: all are DTensors
    except AttributeError:
        return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the memory of a DTensor, or of a plain tensor; shape and dtype must be as before."""
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

    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> AbstractContextManager[object]:
        if _are_we_tracing() or (dist.is_initialized() and are_threads()):  # threads have one generator
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
        cuts = [
            _cut_of_rows(each) if getattr(each, "dim", None) == dim else Replicate() for each in self._spec.placements
        ]
        rows = distribute_tensor(torch.arange(shape[dim], device="cpu"), mesh, cuts, src_data_rank=None).to_local()
        return rows.reshape([-1 if each == dim else 1 for each in range(len(shape))])


def _cut_of_rows(placement: Any) -> Placement:
    factor = getattr(placement, "split_factor", None)
    return Shard(0) if factor is None else strided_shard(0, factor)


_aten = torch.ops.aten
_DRAWS_ELSEWHERE = (  # torch enters no region for these
    _aten.cauchy_.default,
    _aten.exponential_.default,
    _aten.geometric_.default,
    _aten.log_normal_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)


def _draw_elsewhere(op: Any, args: Any, kwargs: Any) -> DTensor:
    tensor: DTensor = args[0]
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    draws: Any = _random._rng_tracker
    with draws._distribute_region(tensor._spec, kwargs.get("generator")):
        op(tensor._local_tensor, *args[1:], **given)
    return tensor


def draw_as_one_process() -> None:
    """Let random operations on DTensors of CPU ranks give the values of one process.

    Call it where there is no accelerator, for which torch fills the same place.
    """
    if _random._rng_tracker is None:
        _random._rng_tracker = cast(Any, _ShardDraws())
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        handlers.update(dict.fromkeys(_DRAWS_ELSEWHERE, _draw_elsewhere))


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
    """Return the placement of a tensor dim that another mesh axis, to the right, has already split ``split_factor`` times."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def num_shards_of_dim(spec: DTensorSpec, dim: int) -> int:
    """Return the number of shards into which the placements of ``spec`` cut tensor dim ``dim``."""
    return spec.num_shards_map[dim]


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh whose axes are those of ``meshes`` in order; they must come from one parent mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return ``mesh`` as a mesh of one axis called ``name``."""
    return mesh._flatten(name)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a pending functional collective; return ``tensor`` as a plain tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def default_store() -> torch.distributed.Store | None:
    """Return the store of the default process group, None if it is unusable (a fake group's)."""
    store = torch.distributed.distributed_c10d._get_default_store()
    inner = innermost_store(store)
    return None if type(inner) is torch.distributed.Store or "Fake" in type(inner).__name__ else store


def are_threads() -> bool:
    """Return True if the ranks are threads of this process, as in torch's tests: their store is its memory."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return type(innermost_store(store)) is torch.distributed.HashStore and torch.distributed.get_world_size() > 1


def innermost_store(store: torch.distributed.Store) -> torch.distributed.Store:
    """Return the store under the prefixes of ``store``."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return store


def timeout_s_of(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return after how many seconds a collective of ``group`` times out, on ``device`` or on the first that it serves.

    If no backend tells (threads as ranks, a fake one): torch's default for a new group.
    """
    for each in [torch.device("cpu"), torch.device(accelerator_type())] if device is None else [device]:
        try:
            return group._get_backend(each).options._timeout.total_seconds()
        except (AttributeError, RuntimeError):
            continue
    return default_pg_timeout.total_seconds()


# public since torch 2.15, which warns about the older name
_set_timeout: Callable[[timedelta, dist.ProcessGroup], None] = (
    getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of collectives of ``group`` that begin from now on to ``seconds``."""
    _set_timeout(timedelta(seconds=seconds), group)


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that serves ``device`` in ``group``."""
    return group._get_backend(device)


def is_gloo(group: torch.distributed.ProcessGroup) -> bool:
    """Return True if gloo itself (no wrapper, no fake) serves CPU tensors in ``group``."""
    try:
        return type(group._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    except (AttributeError, RuntimeError):
        return False


def is_only_gloo(group: dist.ProcessGroup) -> bool:
    """Return True if gloo serves every device of ``group``."""
    names = {type(group._get_backend(device)).__name__ for device in group._device_types}  # pyright: ignore
    return names == {"ProcessGroupGloo"}


def abort_groups() -> None:
    """Abort the collectives of all groups of this process, also those in kernels; the groups are unusable afterwards."""
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


def accelerator_type() -> str:
    """Return the device type of default meshes: the accelerator's, or "cpu" without one."""
    device = torch._C._get_accelerator()
    return device.type


@contextmanager
def watching(watch: Callable[[Any, Any, Any], None], *, is_seen: bool = True) -> Generator[None, None, None]:
    """Call ``watch(op, (args, kwargs), out)`` after every operation of this thread that torch dispatches.

    For operations on DTensors, the operations on their local tensors count; those on fake tensors, by which torch learns
    placements once, count in a fake mode only.
    ``is_seen`` False: :func:`has_dispatch_mode` ignores it, so that tensors take the same code path as without it.
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
            if is_faked or not any(isinstance(each, FakeTensor) for each in leaves_of((args, out))):
                watch(func, (args, given), out)
            return out

    with Watching():
        yield


@contextmanager
def fake_world(num_ranks: int) -> Generator[None, None, None]:
    """Make this process, which has no process group, rank 0 of ``num_ranks`` in a group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        forget_meshes()


def is_mutating(op: Any) -> bool:
    """Return True if ``op``, an overload of an operator, writes to an argument."""
    return bool(op._schema.is_mutable)


def has_dispatch_mode() -> bool:
    """Return True while a ``TorchDispatchMode`` (CommDebugMode, a FLOP counter, ...) sees every operation of this thread."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(getattr(mode, "_is_seen_by_links", True) for mode in _get_current_dispatch_mode_stack())


def skip_frames(function: Callable[..., Any], why: str) -> None:
    """Exclude ``function``, and everything that it calls, from torch.compile.

    No graph contains it, and its frames are not compiled.  Hooks that are registered after a module was compiled are
    such frames.  A surrounding graph breaks there; ``why``: torch's text if ``fullgraph=True`` forbids that.  Imports
    nothing of torch.compile.
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
    """
    return getattr(sys.modules.get(_FULLY_SHARD), "FSDPModule", None)


def put_state_that_tools_ask_for(module: nn.Module, state: object) -> None:
    """Make ``fully_shard.state(module)`` of torch's own function, if that is imported, return ``state``."""
    api = getattr(sys.modules.get(_FULLY_SHARD), "fully_shard", None)
    key = getattr(sys.modules.get("torch.distributed._composable.contract"), "STATE_KEY", None)
    if api is not None and key is not None:
        module.__dict__.setdefault(key, {})[api.__wrapped__] = state


def _registry_key() -> str:
    return getattr(sys.modules.get("torch.distributed._composable.contract"), "REGISTRY_KEY", "")


def leave_join(joined: object) -> None:
    """Give ``joined`` the configuration of an object that is in no ``Join`` of torch's."""
    from torch.distributed.algorithms.join import _JoinConfig

    cast(Any, joined)._join_config = _JoinConfig.construct_disabled_join_config()


def apply_of_next_class(module: nn.Module, after: type, *args: Any, **kwargs: Any) -> Any:
    """Call ``nn.Module._apply`` of ``module`` as the class after ``after`` in its method resolution order has it."""
    return cast(Any, super(after, module))._apply(*args, **kwargs)


def packet_of(operator_overload: Any) -> Any:
    """Return the operator, such as ``aten.add``, of an overload of it, such as ``aten.add.Tensor``."""
    return operator_overload._overloadpacket


def composable_apis_of(module: nn.Module) -> list[str]:
    """Return the names of ``module`` in torch's registry of composable APIs: "fully_shard", "replicate", ..."""
    return [*module.__dict__.get(_registry_key(), ())]


def enter_composable_api(module: nn.Module, name: str) -> None:
    """Add ``module`` to torch's registry of composable APIs, if that is imported."""
    key = _registry_key()
    if key:
        module.__dict__.setdefault(key, {})[name] = sys.modules["torch.distributed._composable.contract"].RegistryItem()


# --- ZeroRedundancyOptimizer (consistency/agreement.py) ---


def process_group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of ``group`` (prefixed, so groups do not share keys)."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def tensor_without_memory(kind: type[_Kind], like: torch.Tensor, dtype: torch.dtype) -> _Kind:
    """Return an empty tensor of the subclass ``kind`` with the shape, strides and device of ``like``."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)  # pyright: ignore[reportReturnType]


def add_all(targets: Sequence[torch.Tensor], addends: Sequence[torch.Tensor]) -> None:
    """Add each addend to its target, in place, in one call."""
    torch._foreach_add_(list(targets), list(addends))


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one dtype and device by the 0-dim ``factor``, in place, in one call."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, computed in the real ``dtype``, in one call; none of them may be empty or complex."""
    return list(torch._foreach_norm(list(tensors), order, dtype))


# --- ShardedOptimizer (optim/, optim/sharded_optimizer.py) ---


def chunks_of(tensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of this rank's part of ``tensor`` in the global shape, as checkpoints see it."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]


def process_group_of(tensor: Any) -> dist.ProcessGroup:
    """Return the process group over which a ShardedTensor is sharded."""
    return tensor._process_group


def sharded_tensor_like(reference: Any, values: Sequence[torch.Tensor]) -> Any:
    """Return a ShardedTensor cut like ``reference`` with the local shards ``values``; no communication."""
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
    """Step an optimizer that works inside another one: global step hooks run for the outer one only."""
    step = type(optimizer).step
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if has_hooks or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # pyright: ignore[reportFunctionMemberAccess]


def state_dict_hooks(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """Return the hooks registered on ``optimizer``: ``when`` is state_dict_pre, load_state_dict_post, ..."""
    return list(getattr(optimizer, f"_optimizer_{when}_hooks").values())


without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Returns a context in which tensor subclasses do not intercept functions."""


def forget_meshes() -> None:
    """Clear DTensor's caches: they keep meshes, and so ended process groups with their threads, alive with the process."""
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


DispatchMode = TorchDispatchMode
"""What torch documents for tools that see every operation."""


# --- transactions (consistency/process_groups.py, transaction/) ---


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process is a member of."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def sequence_of(group: dist.ProcessGroup) -> int:
    """Return how many collectives and messages this process has begun in ``group``, which has gloo."""
    return cast(Any, group)._get_sequence_number_for_group()


def replace_gloo(group: dist.ProcessGroup, prefix: str, kind: int) -> None:
    """Put a new gloo backend under ``group``, connected through its store under ``prefix``.  Collective.

    ``kind``: a number that no backend of the group has; otherwise torch would use the old one again.  The old one lives
    on, without connections, until the group is destroyed.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    old: Any = group._get_backend(torch.device("cpu"))
    store = dist.PrefixStore(prefix, process_group_store(group))
    new = ProcessGroupGloo(store, group.rank(), group.size(), old.options)
    for device in group._device_types:  # pyright: ignore[reportAttributeAccessIssue]
        group._register_backend(device, dist.ProcessGroup.BackendType(kind), new)


def settle_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP lay out its buckets as the last step has shown, which it would do in its next forward.  Collective."""
    ddp.reducer._rebuild_buckets()


def reset_reducer(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP forget a backward that has not ended; its next step records the order of its buckets again."""
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False
