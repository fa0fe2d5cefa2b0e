"""The plain thing: whole models, gradients averaged in one sum at the end of each backward that syncs, plain optimizers.

In the processes of the plain run, and only there, torch's wrappers and those of this package are replaced by what is here.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import math
import sys
from collections.abc import Generator, Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate
from torch.optim.optimizer import Optimizer

from shardwise import torch_private
from shardwise.collectives.streams import accelerator_type
from shardwise.errors import StateError
from shardwise.fsdp.api import OLDER_ARGUMENTS, default_mesh
from shardwise.fsdp.mesh import MeshAxes, names_of
from shardwise.one_host import RandomState
from shardwise.optim.sharded_optimizer import checked_params, split_by_group, unpacked_groups
from shardwise.prove.record import RunRecorder, Terms, rank_and_size
from shardwise.reproducible.reproducible import Reproducible
from shardwise.reproducible.tree import BatchPlace

_LOSSY = {"int8": 2.0**-5, "bf16": 2.0**-8}  # what a compressed number is off by, relative to those around it
UNKNOWN = ("deepspeed", "megatron", "colossalai", "fairscale", "horovod", "bagua", "torch_xla")


class Unprovable(StateError):
    """The plain run cannot do what the script does."""


# Of this process, since what replaces functions of torch is called by the script: the calls that wrapped, of inner modules
# first; attributes that hide parameters while modules compute in another dtype; and random numbers of this rank and of all
# ranks, in the run whose weights, inputs and sums are moved by half a unit in the last place.
_wraps: list[Wrap] = []
_casts = contextlib.ExitStack()
_moves: list[torch.Generator] = []


def moved(tensor: torch.Tensor, eps: float = 0.0, is_shared: bool = False) -> torch.Tensor:
    """Return ``tensor``, moved by half of ``eps`` at random in a moved run; alike on all ranks if ``is_shared``."""
    # A transform of torch.func may forbid random numbers.
    if not _moves or not tensor.is_floating_point() or torch_private.innermost_transform() is not None:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=_moves[is_shared], device="cpu").to(tensor.device) - 0.5
    return (tensor + tensor * (signs * max(eps, torch.finfo(tensor.dtype).eps))).to(tensor.dtype)


class Wrap:
    """One call that wraps: a module, without what earlier calls have wrapped, and the options of the call."""

    def __init__(self, module: nn.Module, shares_buffers: bool, options: dict[str, Any]) -> None:
        self.module, self.options, self.number = module, options, len(_wraps)
        self.syncs, self.syncs_next = True, True  # now; from the next forward on
        self.shares_buffers = self.syncs_buffers = shares_buffers
        self.divide_by: float | None = None
        dims, group = options.get("dp_mesh_dims"), options.get("process_group")
        # The default joins the process group, as the call would.
        self.mesh: DeviceMesh = options.get("mesh") or options.get("device_mesh") or default_mesh()
        if dims is not None:
            self.mesh = self.mesh[(*names_of(dims.replicate), *names_of(dims.shard))]
        if isinstance(group, dist.ProcessGroup):
            self.mesh = DeviceMesh.from_group(group, accelerator_type())
        named: dict[int, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            named.setdefault(id(param), []).append(name)
        self.ties = [names for names in named.values() if len(names) > 1]
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)
        _wraps.append(self)

    def dtype(self, what: str) -> torch.dtype | None:
        """Return the "param", "reduce" or "output" dtype of the precision policy; None: that of the values."""
        return getattr(self.options.get("mp_policy") or self.options.get("mixed_precision"), f"{what}_dtype", None)

    def eps(self, what: str) -> float:
        """Return the relative error of parameters ("gather") or of sums ("reduce") that the policies of the call allow."""
        dtype = (self.dtype("reduce") if what == "reduce" else None) or self.dtype("param")
        lossy = _LOSSY.get(getattr(self.options.get("compression"), what, None) or "", 0.0)
        return max(lossy, 0.0 if dtype is None else torch.finfo(dtype).eps)

    def groups(self, param: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups along the axes over which the gradient of ``param`` is averaged."""
        place = self.options.get("shard_placement_fn")
        mesh = getattr(getattr(place(param) if place else None, "mesh_info", None), "mesh", None)
        return tuple((mesh or self.mesh).get_all_groups())

    def scale(self, param: torch.Tensor) -> float:
        """Return what makes a mean over ranks what the script divides sums of gradients by."""
        return math.prod(group.size() for group in self.groups(param)) / self.divide_by if self.divide_by else 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrap:
        result = memo[id(self)] = copy.copy(self)
        result.module = copy.deepcopy(self.module, memo)
        _wraps.append(result)
        _wraps.sort(key=lambda wrap: wrap.number)  # those of inner modules are copied last
        return result

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.syncs = self.syncs_next
        if self.syncs_buffers:
            for each in module.buffers():
                dist.broadcast(each, group=self.groups(each)[0], group_src=0)
        self.syncs_buffers = self.shares_buffers and torch.is_grad_enabled() and self.syncs  # as DDP decides
        dtype = self.dtype("param")
        if dtype or (_moves and self.eps("gather")):
            own = {key: param for key, (wrap, param) in wrapped().items() if wrap is self}
            own = {key: moved(param.to(dtype or param.dtype), self.eps("gather")) for key, param in own.items()}
            for each in module.modules():
                for name, param in torch_private.parameters_of(each).items():
                    if id(param) in own:  # also when a checkpoint computes the module again, then with a graph
                        vars(each)[name] = own[id(param)]  # found before the parameter
                        _casts.callback(vars(each).pop, name, None)
        casts_inputs = getattr(self.options.get("mp_policy"), "cast_forward_inputs", True)
        return _cast((args, kwargs), dtype) if dtype and casts_inputs else None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype("output")) if self.dtype("output") else None


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    return torch_private.map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, tree)


def wrapped() -> dict[int, tuple[Wrap, torch.Tensor]]:
    """Return every wrapped parameter once, with the call that wrapped it, by identity."""
    found: dict[int, tuple[Wrap, torch.Tensor]] = {}
    for wrap in _wraps:
        ignored = [each for module in wrap.options.get("ignored_modules") or () for each in module.parameters()]
        ids = {*map(id, (*(wrap.options.get("ignored_params") or ()), *ignored))}
        for param in wrap.module.parameters():
            if id(param) not in ids:
                found.setdefault(id(param), (wrap, param))
    return found


@torch.no_grad()
def average(before: dict[int, torch.Tensor], own: dict[int, torch.Tensor]) -> None:
    """Set gradients to the mean over ranks of what was there before a backward and what it has added.  Collective."""
    buckets: dict[Any, list[tuple[Wrap, torch.Tensor]]] = {}
    for wrap, param in wrapped().values():
        if wrap.syncs and param.requires_grad:
            buckets.setdefault(wrap.groups(param), []).append((wrap, param))
    for groups, members in buckets.items():
        are_there = [float(id(param) in before or id(param) in own) for _, param in members]
        parts = [torch.tensor(are_there, device=members[0][1].device).double()]
        for wrap, param in members:
            found = [each[id(param)].to_dense() for each in (before, own) if id(param) in each]
            total = sum(found[1:], found[0]) if found else torch.zeros_like(param)
            parts.append(moved(total.reshape(-1), wrap.eps("reduce")).double())
        flat = torch.cat(parts)
        for group in groups:
            dist.all_reduce(flat, group=group)
        flat /= math.prod(group.size() for group in groups)
        is_there, *means = flat.split([each.numel() for each in parts])
        for (wrap, param), mean, has_any in zip(members, means, is_there.tolist(), strict=True):
            if has_any:  # on any rank
                mean = moved(mean.view(param.shape).to(param.dtype), wrap.eps("reduce"), is_shared=True)
                param.grad = torch.empty_like(param).copy_(mean)  # with its strides, which fused optimizers expect


# ---- What replaces wrappers.


NOTHING: Any = MagicMock()  # answers whatever wrappers are asked that changes only when and where they communicate


def inside(module: Any, recurse: bool = True) -> list[Wrap]:
    """Return the calls that wrapped a module, or modules inside it; the last one is the outermost."""
    modules = [*module.modules()] if recurse else [module]
    return [wrap for wrap in _wraps if wrap.module in modules]


@contextlib.contextmanager
def _syncing(wraps: list[Wrap], value: bool, names: tuple[str, ...] = ("syncs", "syncs_next")) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for wrap, name in itertools.product(wraps, names):
            stack.enter_context(patch.object(wrap, name, value))
        yield


class PlainModule:
    """What stands for ``FSDPModule``, of torch and of this package, in classes of wrapped modules."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Average gradients at the end of backwards, or do not."""
        for wrap in inside(self, recurse):
            wrap.syncs = wrap.syncs_next = requires_gradient_sync

    set_requires_all_reduce = set_requires_gradient_sync
    require_backward_grad_sync = property(lambda self: inside(self)[-1].syncs_next, set_requires_gradient_sync)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` in place of the number of ranks."""
        for wrap in inside(self, recurse=False):
            wrap.divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def no_sync(self) -> Any:
        """Do not average gradients in backwards of forwards within the context."""
        return _syncing(inside(self), False, ("syncs_next",))

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: ranks with fewer batches."""
        raise Unprovable("the script uses join(), for ranks with fewer batches than others")

    join_process_group = property(join)  # what torch's ``Join`` asks first


def shard(module: Any, *args: Any, **options: Any) -> Any:
    """Stand for ``fully_shard``, ``replicate`` and ``shard_model``."""
    is_like_ddp = options.get("parameters") == "plain" or options.get("strategy") == "zero1"
    is_like_ddp = is_like_ddp or bool(OLDER_ARGUMENTS & options.keys())
    is_asked = all(options.get(name) is not False for name in ("broadcast_buffers", "forward_sync_buffers"))
    for each in [module] if isinstance(module, nn.Module) else module:
        Wrap(each, is_like_ddp and is_asked, options)
        if not isinstance(each, PlainModule):
            mixed: Any = type(f"FSDP{type(each).__name__}", (PlainModule, type(each)), {})
            each.__class__ = mixed
    return module


def clip(self: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Clip by the norm of all gradients, of a wrapped module or of an optimizer."""
    groups = getattr(self, "param_groups", None)
    params = self.parameters() if groups is None else [param for group in groups for param in group["params"]]
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)


class PlainReplicas(PlainModule, nn.Module):
    """Stands for ``DistributedDataParallel``."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self.module = module
        groups = [each for each in args if isinstance(each, dist.ProcessGroup)]
        options |= {"process_group": groups[0]} if groups else {}
        Wrap(module, type(self) is PlainReplicas and options.get("broadcast_buffers", True), options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    _get_active_ddp_module = staticmethod(lambda: None)  # tells torch.compile that no reducer waits for gradients


class PlainShards(PlainReplicas):
    """Stands for torch's older ``FullyShardedDataParallel``."""

    clip_grad_norm_ = clip

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _plain(optimizer_class: type[Optimizer]) -> Any:
    def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:  # whatever its form was to be
        return optimizer_class.state_dict(self)

    methods: dict[str, Any] = {"state_dict": state_dict, "full_state_dict": state_dict, "clip_grad_norm_": clip}
    methods |= {"consolidate_state_dict": NOTHING, "join_process_group": PlainModule.join_process_group}
    return type(optimizer_class.__name__, (optimizer_class,), methods)


_OF_ZERO = {"process_group", "parameters_as_bucket_view", "overlap_with_ddp", "partition", "mixed_dtypes"}
_OF_SHARDED = {"update", "flat", "offload", "groups"}


class PartitionedOptimizer:
    """Stands for ``ZeroRedundancyOptimizer``: makes plain optimizers, which are none of its instances."""

    def __new__(cls, params: Any, optimizer_class: type[Optimizer], *args: Any, **defaults: Any) -> Any:
        """Return a plain optimizer."""
        if defaults.get("overlap_with_ddp"):
            raise Unprovable("the script steps in the backward of DistributedDataParallel (overlap_with_ddp)")
        options = {name: value for name, value in defaults.items() if name not in _OF_ZERO | _OF_SHARDED}
        return _plain(optimizer_class)(params, *args, **options)


class WholeOptimizer:
    """Stands for ``ShardedOptimizer``, as :class:`PartitionedOptimizer` does."""

    def __new__(cls, named_params: Any, optimizer_class: type[Optimizer], *args: Any, **defaults: Any) -> Any:
        """Return a plain optimizer."""
        params, groups = unpacked_groups(named_params, defaults.get("groups", ()))
        named = checked_params(params)
        split = [{"params": [named[each] for each in names], **own} for names, own in split_by_group(named, groups)]
        made = PartitionedOptimizer(split, optimizer_class, *args, **defaults)
        made.named_params = named
        return made


class SummedMicrobatches(Reproducible):
    """Stands for ``Reproducible``: its microbatches and random numbers, and plain sums."""

    def __init__(self, model: nn.Module, optimizer: Any = None, *, num_microbatches: int, seed: int = 0) -> None:
        rank, size = rank_and_size()
        self.axes = MeshAxes(default_mesh(), shard_mesh_dim=0)
        self.place = BatchPlace(num_microbatches, size, 1, rank, 0)
        self.model, self._seed, self.step, self.observer = model, seed, 0, None

    def microbatches(self) -> Iterator[int]:
        """Yield the numbers of this rank's microbatches, whose gradients are summed."""
        for wrap in _wraps:
            wrap.divide_by = 1.0
        for number in self.place.own:
            self._set_seed(number)
            yield number
        self._set_seed(self.place.num_microbatches)
        self.step += 1


def distribute(tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for ``distribute_tensor``: send the values of the first rank of the mesh."""
    tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    for dim in range(device_mesh.ndim if device_mesh is not None else 0):
        dist.broadcast(tensor.detach(), group=device_mesh.get_group(dim), group_src=0)  # pyright: ignore
    return tensor


def policy(module: nn.Module, *, recurse: bool = True, **changes: Any) -> Any:
    """Stand for ``shardwise.policy``: only ``sync`` changes what is computed."""
    return _syncing(inside(module, recurse), changes["sync"]) if "sync" in changes else NOTHING


# ---- Put all of it in place.


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh:
    wrap = wrapped().get(id(tensor), (*_wraps[:1], None))[0]
    return default_mesh() if wrap is None else wrap.mesh


_OF_TORCH = ("fsdp", "optim", "tensor", "tensor.parallel", "_composable.replicate", "_composable.replicate_with_fsdp")
_PLACES = ("shardwise", "torch.nn.parallel.distributed", *(f"torch.distributed.{each}" for each in _OF_TORCH))
_REPLACED: dict[str, Any] = {
    **dict.fromkeys(("fully_shard", "replicate", "shard_model"), shard),
    **dict.fromkeys(("FSDPModule", "ReplicateModule"), PlainModule),
    **dict.fromkeys(("parallelize_module", "distribute_module"), lambda module, *_, **__: module),
    **dict.fromkeys(("share_comm_ctx", "register_fsdp_forward_method", "use_in", "describe_units"), NOTHING),
    "DistributedDataParallel": PlainReplicas,
    "FullyShardedDataParallel": PlainShards,
    "ZeroRedundancyOptimizer": PartitionedOptimizer,
    "ShardedOptimizer": WholeOptimizer,
    "Reproducible": SummedMicrobatches,
    "distribute_tensor": distribute,
    "policy": policy,
}
_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("full_tensor", "to_local", "redistribute"), lambda self, *_, **__: self),
    "device_mesh": property(_mesh_of),
    "placements": property(lambda self: (Replicate(),) * self.device_mesh.ndim),
}


def replace_wrappers() -> None:
    """Replace the wrappers in every module that has them, and let plain tensors answer what DTensors are asked."""
    parts = [vars(importlib.import_module(place)) for place in _PLACES]
    found = [(part[name], new) for part in parts for name, new in _REPLACED.items() if name in part]
    for original, new in found:
        if isinstance(new, type) and issubclass(new, PlainModule):
            for name in {*dir(original)} - {*dir(nn.Module), *dir(PlainShards), "module"}:
                if not name.startswith("_"):
                    setattr(PlainModule, name, NOTHING)
    by_id = {id(original): new for original, new in found}
    composable = importlib.import_module("torch.distributed._composable.replicate").replicate
    by_id[id(composable)] = partial(shard, broadcast_buffers=False)  # its DDP has the parameters alone
    places: list[Any] = [*sys.modules.values()]
    for place in (each for each in places if isinstance(each, ModuleType) and each.__name__ != __name__):
        for name, value in [*vars(place).items()]:
            if id(value) in by_id:
                setattr(place, name, by_id[id(value)])
    for name, answer in _ANSWERS.items():
        setattr(torch.Tensor, name, answer)


class PlainRecorder(RunRecorder):
    """Records the plain run, which begins with what the tested run has kept, and what each backward adds to gradients."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._before: dict[int, torch.Tensor] = {}  # gradients of earlier backwards
        self._hooks: list[tuple[torch.Tensor, dict[int, Any]]] = []  # which are to see the mean of gradients
        if terms.role == "moved":
            _moves.extend(torch.Generator("cpu").manual_seed(each) for each in (1 + (terms.rank or 0), 0))

    def start(self, index: int) -> dict[str, Any]:
        """Give a model the values that it had in the tested run; return over which ranks gradients are averaged."""
        package = type(self.models.roots[index]).__module__.partition(".")[0]
        path = self.terms.path(f"initial-{index}-{{}}.pt", "tested")
        if package in UNKNOWN or not path.exists():
            told = f"the script as it is calls {index} model(s) only, and the plain run another one"
            raise Unprovable(f"{package}'s wrapper cannot be replaced by the plain thing" if path.exists() else told)
        values, random = torch.load(path, weights_only=False)
        params = self.models.tensors(only=index)
        for name, each in (params | self.models.tensors("buffers", index)).items():
            if name in values and values[name].shape == each.shape:
                each.detach().copy_(moved(values[name], is_shared=True))
        RandomState().load_state_dict(random)
        names, units = {id(param): name for name, param in params.items()}, dict[str, Any]()
        for wrap, param in wrapped().values():
            if id(param) in names:
                mesh, unit = wrap.mesh, self.models.of_module(wrap.module) or "the model"
                axes, sizes, ranks = mesh.mesh_dim_names or (), mesh.shape, mesh.mesh.reshape(-1).tolist()
                units[names[id(param)]] = {"unit": unit, "axes": axes, "sizes": sizes, "ranks": ranks}
        untied: list[str] = []
        for wrap in _wraps:
            now = {name: id(each) for name, each in wrap.module.named_parameters(remove_duplicate=False)}
            untied += [" and ".join(sorted(tie)) for tie in wrap.ties if len({now.get(each) for each in tie}) > 1]
        shares_buffers = any(wrap.shares_buffers for wrap in _wraps)
        return {"units": units, "facts": {"untied": untied, "shares_buffers": shares_buffers}}

    def begin_pass(self, args: Any) -> Any:
        """Move inputs in a moved run."""
        _casts.close()
        return torch_private.map_tensors(moved, args) if _moves else None

    def begin_backward(self) -> None:
        """Put aside what wrapped parameters have, so that ``.grad`` becomes what this backward adds, and hooks see means."""
        found = wrapped()
        for param in self.models.tensors().values():
            is_wrapped = id(param) in found
            if param.grad is not None:
                self._before[id(param)] = param.grad if is_wrapped else param.grad.clone()
                param.grad = None if is_wrapped else param.grad
            if is_wrapped and (hooks := torch_private.remove_later_hooks(param, -1)):
                self._hooks.append((param, hooks))

    def end_backward(self, tensors: Any) -> None:
        """Average the gradients before they are recorded."""
        _casts.close()
        found, params, own = wrapped(), self.models.tensors(), dict[int, torch.Tensor]()
        for param in params.values():
            if param.grad is not None:
                own[id(param)] = param.grad * (found[id(param)][0].scale(param) if id(param) in found else 1.0)
                if id(param) in self._before and id(param) not in found:
                    own[id(param)] -= self._before[id(param)]
        self.add("own", {name: own[id(param)] for name, param in params.items() if id(param) in own})
        before, hooked = self._before, self._hooks
        self.undo_backward(own)
        average(before, own)
        for param, hooks in hooked:
            for hook in hooks.values() if found[id(param)][0].syncs and param.grad is not None else ():
                hook(param)
        super().end_backward(tensors)

    def undo_backward(self, own: dict[int, torch.Tensor] | None = None) -> None:
        """Let gradients be those of earlier backwards, and what this one adds if it has not raised; put hooks back."""
        for _, param in wrapped().values():
            parts = [each[id(param)] for each in (self._before, own or {}) if id(param) in each]
            param.grad = sum(parts[1:], parts[0]) if parts else None
        for param, hooks in self._hooks:
            torch_private.restore_hooks(param, hooks)
        self._before, self._hooks = {}, []
