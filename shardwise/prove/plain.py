"""The plain thing: whole models, gradients averaged in one sum at the end of each backward that syncs, plain optimizers.

In the processes of the plain run, and only there, torch's wrappers and those of this package are replaced by what is here.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, init_device_mesh
from torch.optim.optimizer import Optimizer

from shardwise import torch_private
from shardwise.collectives.streams import accelerator_type
from shardwise.errors import StateError
from shardwise.fsdp.api import OLDER_ARGUMENTS, default_mesh
from shardwise.fsdp.mesh import MeshAxes, names_of
from shardwise.fsdp.module import FSDPModule
from shardwise.optim.sharded_optimizer import checked_params, split_by_group, unpacked_groups
from shardwise.plan.grouping import UnitTable
from shardwise.prove.record import RunRecorder, Terms, rank_and_size
from shardwise.random_state import RandomState
from shardwise.reproducible.reproducible import Reproducible
from shardwise.reproducible.tree import BatchPlace

_LOSSY = {"int8": 2.0**-5, "bf16": 2.0**-8}  # what a compressed number is off by, relative to those around it
UNKNOWN = ("deepspeed", "megatron", "colossalai", "fairscale", "horovod", "bagua", "torch_xla")


class Wrap:
    """One call that wraps: modules whose gradients are averaged over the ranks of a mesh.

    Args:
        modules: without what earlier calls have wrapped.
        mesh: its axes are those of the average; None: all ranks.
        options: of the call.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh | None, options: dict[str, Any]) -> None:
        self.modules, self.mesh, self.options = modules, mesh, options
        self.syncs, self.syncs_next = True, True  # now; from the next forward on
        self.syncs_buffers = bool(options.get("shares_buffers"))
        self.divide_by: float | None = None
        self._policy = options.get("mp_policy") or options.get("mixed_precision")
        ignored = [each for module in options.get("ignored_modules") or () for each in module.parameters()]
        self.ignored = {*map(id, options.get("ignored_params") or ()), *map(id, ignored)}
        for module in modules:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which the modules compute; None: that of their parameters."""
        return getattr(self._policy, "param_dtype", None)

    def eps(self, what: str = "gather") -> float:
        """Return the relative error of parameters ("gather") or of sums ("reduce") that the policies of the call allow."""
        dtype = self.dtype if what == "gather" else getattr(self._policy, "reduce_dtype", None) or self.dtype
        return max(_eps(dtype), _LOSSY.get(getattr(self.options.get("compression"), what, None) or "", 0.0))

    def groups(self, param: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups along the axes over which the gradient of ``param`` is averaged."""
        place = self.options.get("shard_placement_fn")
        mesh = getattr(getattr(place(param) if place else None, "mesh_info", None), "mesh", None) or self.mesh
        if mesh is None:
            assert dist.group.WORLD is not None
            return (dist.group.WORLD,)
        return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.syncs = self.syncs_next
        if self.options.get("shares_buffers"):
            for each in module.buffers() if self.syncs_buffers else ():
                dist.broadcast(each, group=self.groups(each)[0], group_src=0)
            self.syncs_buffers = torch.is_grad_enabled() and self.syncs  # as DDP decides
        THE_PLAIN.cast(self)
        if self.dtype is None or not getattr(self._policy, "cast_forward_inputs", True):
            return None
        return torch_private.map_tensors(lambda each: _to(each, self.dtype), (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = getattr(self._policy, "output_dtype", None)
        return None if dtype is None else torch_private.map_tensors(lambda each: _to(each, dtype), output)


def _eps(dtype: torch.dtype | None) -> float:
    return torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0


def _to(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class Plain:
    """What the replaced wrappers of this process share.

    Attributes:
        wraps: in the order of the calls: of inner modules first.
        moves: random numbers of a run whose weights, inputs and sums are moved by half a unit in the last place: those of
            this rank, and those of all ranks.
    """

    def __init__(self) -> None:
        self.wraps: list[Wrap] = []
        self.ties: dict[int, tuple[nn.Module, frozenset[frozenset[str]]]] = {}
        self.moves: tuple[torch.Generator, ...] = ()
        self._casts: list[tuple[dict[str, Any], str]] = []
        self._cast_wraps: set[Wrap] = set()

    def wrap(self, module: Any, **options: Any) -> Wrap:
        """Note a call that wraps ``module``, or several; join the process group as the call would."""
        mesh, dims, group = (options.get(name) for name in ("mesh", "dp_mesh_dims", "process_group"))
        mesh = options.get("device_mesh") if mesh is None else mesh
        if not dist.is_initialized():
            default_mesh()
        if dims is not None and mesh is not None:
            mesh = mesh[(*names_of(dims.replicate), *names_of(dims.shard))]
        if isinstance(group, dist.ProcessGroup):
            mesh = DeviceMesh.from_group(group, accelerator_type())
        modules = [module] if isinstance(module, nn.Module) else [*module]
        for each in modules:
            named = each.named_parameters(remove_duplicate=False)
            by_id: dict[int, set[str]] = {}
            for name, param in named:
                by_id.setdefault(id(param), set()).add(name)
            self.ties[id(each)] = each, frozenset(frozenset(names) for names in by_id.values() if len(names) > 1)
        self.wraps.append(Wrap(modules, mesh, options))
        return self.wraps[-1]

    def lost_ties(self) -> list[str]:
        """Return names of parameters that were one when a module was wrapped, and are several now."""
        found: list[str] = []
        for module, ties in self.ties.values():
            now = {name: id(param) for name, param in module.named_parameters(remove_duplicate=False)}
            found += [" and ".join(sorted(names)) for names in ties if len({now.get(name) for name in names}) > 1]
        return sorted(set(found))

    def params(self) -> Iterator[tuple[Wrap, torch.Tensor]]:
        """Yield every wrapped parameter once, with the call that wrapped it."""
        seen: set[int] = set()
        for wrap in self.wraps:
            for module in wrap.modules:
                for param in module.parameters():
                    if id(param) not in seen and id(param) not in wrap.ignored:
                        seen.add(id(param))
                        yield wrap, param

    def wrap_of(self, tensor: torch.Tensor) -> Wrap | None:
        """Return the call that wrapped a parameter; for other tensors the first call."""
        return next((wrap for wrap, param in self.params() if param is tensor), self.wraps[0] if self.wraps else None)

    # ---- numbers that are moved

    def moved(self, tensor: torch.Tensor, eps: float, is_shared: bool = False) -> torch.Tensor:
        """Return ``tensor``, moved by half of ``eps`` at random in a moved run; alike on all ranks if ``is_shared``."""
        eps = max(eps, _eps(tensor.dtype))
        if not self.moves or not eps or not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=self.moves[is_shared], device="cpu").to(tensor.device)
        return (tensor + tensor * ((signs * 2 - 1) * (eps / 2))).to(tensor.dtype)

    # ---- precision

    def cast(self, wrap: Wrap) -> None:
        """Let the modules of ``wrap`` compute with parameters of its dtype, until the end of the backward."""
        if wrap in self._cast_wraps or (wrap.dtype is None and not (self.moves and wrap.eps())):
            return
        self._cast_wraps.add(wrap)
        own = {id(param) for found, param in self.params() if found is wrap}
        casts: dict[int, torch.Tensor] = {}
        for module in (each for root in wrap.modules for each in root.modules()):
            for name, param in torch_private.parameters_of(module).items():
                if param is not None and id(param) in own and name not in vars(module):
                    if id(param) not in casts:
                        casts[id(param)] = self.moved(_to(param, wrap.dtype or param.dtype), wrap.eps())
                    vars(module)[name] = casts[id(param)]  # found before the parameter
                    self._casts.append((vars(module), name))

    def uncast(self) -> None:
        """Let all modules have their parameters again."""
        for attributes, name in self._casts:
            attributes.pop(name, None)
        self._casts, self._cast_wraps = [], set()


THE_PLAIN = Plain()  # of this process: what replaces functions of torch finds it here


class Reducer:
    """Averages gradients over ranks; one object for the process."""

    def __init__(self) -> None:
        self._synced: dict[int, torch.Tensor] = {}  # before the first backward that was not averaged
        self._unsynced: dict[int, torch.Tensor] = {}  # what backwards have added since

    def begin(self) -> None:
        """Keep the gradients of earlier backwards."""
        for _, param in THE_PLAIN.params():
            if param.grad is None:
                self._synced.pop(id(param), None)
                self._unsynced.pop(id(param), None)
            elif id(param) not in self._unsynced:
                self._synced[id(param)] = param.grad.clone()

    def add(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note what a backward has added to the gradient of ``param``."""
        known = self._unsynced.get(id(param))
        self._unsynced[id(param)] = gradient.clone() if known is None else known + gradient

    @torch.no_grad()
    def reduce(self) -> None:
        """Average what this rank has added since the last time, and set the gradients.  Collective."""
        buckets: dict[Any, list[tuple[Wrap, torch.Tensor]]] = {}
        for wrap, param in THE_PLAIN.params():
            if wrap.syncs and param.requires_grad:
                buckets.setdefault((wrap.groups(param), wrap.divide_by), []).append((wrap, param))
        for (groups, divide_by), members in buckets.items():
            found = [self._unsynced.pop(id(param), None) for _, param in members]
            device, wide = members[0][1].device, torch.float64
            are_there = torch.tensor([float(each is not None) for each in found], dtype=wide, device=device)
            parts = [torch.zeros(param.numel(), dtype=wide, device=device) for _, param in members]
            for (wrap, _), part, own in zip(members, parts, found, strict=True):
                if own is not None:
                    part.copy_(THE_PLAIN.moved(own.to_dense().reshape(-1), wrap.eps("reduce")))
            flat = torch.cat([are_there, *parts])
            for group in groups:
                dist.all_reduce(flat, group=group)
            are_there, *sums = flat.split([len(members), *(part.numel() for part in parts)])
            flat /= divide_by or math.prod(group.size() for group in groups)
            for (wrap, param), mean, is_there in zip(members, sums, are_there.tolist(), strict=True):
                if is_there:
                    mean = THE_PLAIN.moved(mean.view(param.shape).to(param.dtype), wrap.eps("reduce"), is_shared=True)
                    earlier = self._synced.get(id(param))
                    mean = mean if earlier is None else earlier + mean
                    param.grad = mean if param.grad is None else param.grad.copy_(mean)


# ---- What replaces wrappers.


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Do nothing, in place of what changes when and where wrappers communicate."""
    return _Done()


class _Done:
    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


class PlainModule:
    """What stands for ``FSDPModule``, of torch and of this package, in classes of wrapped modules."""

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return _nothing
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]

    def _wraps(self, recurse: bool) -> list[Wrap]:
        inside = [*self.modules()] if recurse else [self]  # pyright: ignore[reportAttributeAccessIssue]
        return [wrap for wrap in THE_PLAIN.wraps if any(each in inside for each in wrap.modules)]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Average gradients at the end of backwards, or do not."""
        for wrap in self._wraps(recurse):
            wrap.syncs = wrap.syncs_next = requires_gradient_sync

    set_requires_all_reduce = set_requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` in place of the number of ranks."""
        for wrap in self._wraps(False):
            wrap.divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of later forwards average gradients."""
        return self._wraps(False)[0].syncs_next

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for wrap in self._wraps(True):
            wrap.syncs_next = value

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Do not average gradients in backwards of forwards within the context."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


_METHODS = {*dir(FSDPModule), *dir(nn.parallel.DistributedDataParallel)} - {*dir(nn.Module)} - {*vars(PlainModule)}


def shard(module: Any, *args: Any, **options: Any) -> Any:
    """Stand for ``fully_shard``, ``replicate`` and ``shard_model``."""
    is_like_ddp = options.get("parameters") == "plain" or options.get("strategy") == "zero1"
    is_like_ddp = is_like_ddp or bool(OLDER_ARGUMENTS & options.keys())
    is_asked = all(options.get(name) is not False for name in ("broadcast_buffers", "forward_sync_buffers"))
    THE_PLAIN.wrap(module, **options, shares_buffers=is_like_ddp and is_asked)
    for each in [module] if isinstance(module, nn.Module) else module:
        if not isinstance(each, PlainModule):
            kind = type(each)
            mixed: Any = type(f"FSDP{kind.__name__}", (PlainModule, kind), {})
            each.__class__ = mixed
    return module


class PlainReplicas(PlainModule, nn.Module):
    """Stands for ``DistributedDataParallel``."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self.module = module
        options = {name: value for name, value in options.items() if name != "mixed_precision"}
        self._wrap = THE_PLAIN.wrap(module, **options, shares_buffers=options.get("broadcast_buffers", True))

    def _wraps(self, recurse: bool) -> list[Wrap]:
        return [self._wrap]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    @staticmethod
    def _get_active_ddp_module() -> None:
        """Tell torch.compile that no reducer waits for gradients."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: ranks with fewer batches."""
        raise Unprovable("the script uses join(), for ranks with fewer batches than others")


class PlainShards(PlainReplicas):
    """Stands for torch's older ``FullyShardedDataParallel``."""

    def __init__(self, module: nn.Module, process_group: Any = None, *args: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._wrap = THE_PLAIN.wrap(module, process_group=process_group, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(*args: Any, **kwargs: Any) -> Generator[None]:
        """Do nothing: parameters are whole."""
        yield

    state_dict_type = summon_full_params
    set_state_dict_type = staticmethod(_nothing)

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the optimizer."""
        return optim.state_dict()


class _OptimizerMethods:
    consolidate_state_dict = _nothing
    full_state_dict = Optimizer.state_dict

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict, whatever its form was to be."""
        return super().state_dict()  # pyright: ignore[reportAttributeAccessIssue]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the norm of the gradients of all groups."""
        params = [param for group in self.param_groups for param in group["params"]]  # pyright: ignore
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)


_OF_ZERO = ("process_group", "parameters_as_bucket_view", "overlap_with_ddp", "partition", "mixed_dtypes")


def partitioned_optimizer(params: Any, optimizer_class: type[Optimizer], *args: Any, **defaults: Any) -> Optimizer:
    """Stand for ``ZeroRedundancyOptimizer``."""
    if defaults.get("overlap_with_ddp"):
        raise Unprovable("the script steps in the backward of DistributedDataParallel (overlap_with_ddp)")
    options = {name: value for name, value in defaults.items() if name not in _OF_ZERO}
    return type(optimizer_class.__name__, (_OptimizerMethods, optimizer_class), {})(params, **options)


def sharded_optimizer(named_params: Any, optimizer_class: type[Optimizer], *args: Any, **options: Any) -> Optimizer:
    """Stand for ``ShardedOptimizer``."""
    for name in ("update", "flat", "offload"):
        options.pop(name, None)
    params, groups = unpacked_groups(named_params, options.pop("groups", ()))
    named = checked_params(params)
    split = [{"params": [named[each] for each in names], **own} for names, own in split_by_group(named, groups)]
    made: Any = type(optimizer_class.__name__, (_OptimizerMethods, optimizer_class), {})(split, *args, **options)
    made.named_params = named
    return made


class SummedMicrobatches(Reproducible):
    """Stands for ``Reproducible``: its microbatches and random numbers, and plain sums."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, num_microbatches: int, seed: int = 0
    ) -> None:
        rank, size = rank_and_size()
        self.axes = MeshAxes(default_mesh(), shard_mesh_dim=0)
        self.place = BatchPlace(num_microbatches, size, 1, rank, 0)
        self.model, self._seed, self.step, self.observer = model, seed, 0, None

    def microbatches(self) -> Iterator[int]:
        """Yield the numbers of this rank's microbatches, whose gradients are summed."""
        for wrap in THE_PLAIN.wraps:
            wrap.divide_by = 1.0
        for number in self.place.own:
            self._set_seed(number)
            yield number
        self._set_seed(self.place.num_microbatches)
        self.step += 1

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the norm of the gradients of the model."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type, error_if_nonfinite)


def distribute(tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for ``distribute_tensor``: send the values of the first rank of the mesh."""
    tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    for dim in range(device_mesh.ndim if device_mesh is not None else 0):
        dist.broadcast(tensor.detach(), group=device_mesh.get_group(dim), group_src=0)  # pyright: ignore
    return tensor


@contextlib.contextmanager
def policy(module: nn.Module, *, recurse: bool = True, **changes: Any) -> Generator[None]:
    """Stand for ``shardwise.policy``: only ``sync`` changes what is computed."""
    wraps = [wrap for wrap in THE_PLAIN.wraps if "sync" in changes]
    before = [wrap.syncs for wrap in wraps]
    for wrap in wraps:
        wrap.syncs = wrap.syncs_next = changes["sync"]
    yield
    for wrap, syncs in zip(wraps, before, strict=True):
        wrap.syncs = wrap.syncs_next = syncs


class Unprovable(StateError):
    """The plain run cannot do what the script does."""


# ---- Put all of it in place.


def _unchanged(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module


_OF_FSDP = dict[str, Any](fully_shard=shard, FSDPModule=PlainModule, share_comm_ctx=_nothing) | {
    "register_fsdp_forward_method": _nothing
}
REPLACED: dict[str, dict[str, Any]] = {
    "shardwise": _OF_FSDP
    | {"replicate": shard, "shard_model": shard, "ReplicateModule": PlainModule, "use_in": _nothing, "policy": policy}
    | {"ZeroRedundancyOptimizer": partitioned_optimizer, "ShardedOptimizer": sharded_optimizer}
    | {"Reproducible": SummedMicrobatches, "describe_units": lambda model: UnitTable(())},
    "torch.distributed.fsdp": _OF_FSDP | {"FullyShardedDataParallel": PlainShards},
    "torch.distributed._composable.replicate": {"replicate": shard},
    "torch.distributed._composable.replicate_with_fsdp": {"replicate": shard},
    "torch.distributed.optim": {"ZeroRedundancyOptimizer": partitioned_optimizer},
    "torch.distributed.tensor.parallel": {"parallelize_module": _unchanged},
    "torch.distributed.tensor": {"distribute_module": _unchanged, "distribute_tensor": distribute},
    "torch.nn.parallel": {"DistributedDataParallel": PlainReplicas},
}


def replace_wrappers() -> None:
    """Replace the wrappers in every module that has them, and let plain tensors answer what DTensors are asked."""
    by_id = {
        id(getattr(importlib.import_module(place), name)): new
        for place, names in REPLACED.items()
        for name, new in names.items()
    }
    places: list[Any] = [*sys.modules.values()]
    for place in (each for each in places if isinstance(each, ModuleType) and each.__name__ != __name__):
        for name, value in [*vars(place).items()]:
            if id(value) in by_id:
                setattr(place, name, by_id[id(value)])
    answers = {
        "full_tensor": lambda self, **_: self,
        "to_local": lambda self, **_: self,
        "redistribute": lambda self, *_, **__: self,
        "device_mesh": property(_mesh_of),
        "placements": property(lambda self: (Replicate(),) * self.device_mesh.ndim),
    }
    for name, answer in answers.items():
        setattr(torch.Tensor, name, answer)


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh:
    wrap = THE_PLAIN.wrap_of(tensor)
    if wrap is not None and wrap.mesh is not None:
        return wrap.mesh
    return init_device_mesh(accelerator_type(), (rank_and_size()[1],))


class PlainRecorder(RunRecorder):
    """Records the plain run, which begins with what the tested run has kept, and what each backward adds to gradients."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._reducer = Reducer()
        self._hooked: set[int] = set()
        if terms.moves:
            THE_PLAIN.moves = tuple(torch.Generator("cpu").manual_seed(each) for each in (1 + (terms.rank or 0), 0))

    def see_model(self, root: nn.Module, index: int) -> None:
        """Give a model the values that it had in the tested run."""
        package = type(root).__module__.partition(".")[0]
        if package in UNKNOWN:
            raise Unprovable(f"{package}'s {type(root).__name__} cannot be replaced by the plain thing")
        path = self.terms.path(f"initial-{index}", "pt", self.terms.initial)
        if not path.exists():
            raise Unprovable(f"the script as it is calls {index} model(s) only, and the plain run another one")
        self.add_parameters("initial")
        kept = torch.load(path, weights_only=False)
        for name, each in {**self.names.parameters(index), **self.names.buffers(index)}.items():
            if name in kept["values"] and kept["values"][name].shape == each.shape:
                each.detach().copy_(THE_PLAIN.moved(kept["values"][name], 0.0, is_shared=True))
        RandomState().load_state_dict(kept["random"])
        self.rows.facts["untied"] = THE_PLAIN.lost_ties()
        super().see_model(root, index)

    def begin_pass(self, module: nn.Module, args: Any) -> Any:
        """Watch gradients of parameters; move inputs in a moved run."""
        THE_PLAIN.uncast()
        for name, param in self.names.parameters().items():
            if param.requires_grad and id(param) not in self._hooked:
                self._hooked.add(id(param))
                param.register_hook(self._hook(name, param))
        if THE_PLAIN.moves:
            return torch_private.map_tensors(lambda each: THE_PLAIN.moved(each, 0.0), args)
        return None

    def _hook(self, name: str, param: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                self._reducer.add(param, gradient)
                self.rows.add(f"own|{self.counts['microbatch']}|{name}", gradient)

        return note

    def begin_backward(self) -> None:
        """Keep the gradients of earlier backwards."""
        self._reducer.begin()

    def end_backward(self, tensors: Any) -> None:
        """Average the gradients before they are recorded."""
        THE_PLAIN.uncast()
        self._reducer.reduce()
        super().end_backward(tensors)

    def add_facts(self) -> None:
        """Note over which ranks gradients are averaged."""
        names = {id(param): name for name, param in self.names.parameters().items()}
        units: dict[Wrap, list[str]] = {}
        for wrap, param in THE_PLAIN.params():
            if id(param) in names:
                units.setdefault(wrap, []).append(names[id(param)])
        self.rows.facts["shares_buffers"] = any(wrap.options.get("shares_buffers") for wrap in THE_PLAIN.wraps)
        self.rows.facts["units"] = [
            {
                "unit": self.names.of_module(wrap.modules[0]) or "the model",
                "axes": [] if wrap.mesh is None else list(wrap.mesh.mesh_dim_names or ()),
                "sizes": [] if wrap.mesh is None else list(wrap.mesh.shape),
                "ranks": list(range(rank_and_size()[1])) if wrap.mesh is None else wrap.mesh.mesh.reshape(-1).tolist(),
                "divide_by": wrap.divide_by,  # None: by the number of ranks
                "names": found,
            }
            for wrap, found in units.items()
        ]
