"""What parameters begin with: ``init_parameters`` for models from meta, tensors without values, values that ranks have alike.

``to_empty()`` and ``reset_parameters()`` would be two lines.  But a shard is no matrix: an initialization that reads sizes or
norms (orthogonal, fan-in) computes another thing on it, and equal seeds give every rank the same shard.  So the user's function
runs on full parameters, of one unit at a time, with the random numbers of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.overrides import TorchFunctionMode

from shardwise import torch_private
from shardwise.collectives.owned import broadcast_from_first, full_tensor_of
from shardwise.consistency.agreement import open_agreement
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError, ShardwiseError, StateError
from shardwise.fsdp.attachment import Attachment, units_in
from shardwise.fsdp.mesh import MeshAxes
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.precision import CPUOffloadPolicy
from shardwise.fsdp.unit import Unit
from shardwise.observe import span

logger = getLogger("shardwise")

Convert = Callable[[torch.Tensor], torch.Tensor]
# Attributes of a tensor that return its values; all other attributes, and the methods in _FACTS, need no values.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_FACTS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"}) | {
    *("is_floating_point", "is_complex", "is_contiguous", "get_device", "requires_grad_", "register_hook"),
    *("__len__", "__hash__"),
}


def init_parameters(
    module: nn.Module, init_fn: Callable[[nn.Module], object] | None = None, *, device: torch.device | str | None = None
) -> None:
    """Move the meta tensors of ``module`` to a device and initialize all parameters and buffers as one process does.

    Call it on every rank, after ``fully_shard`` (or ``shard_model``, ``replicate``) and before an optimizer is built.
    ``init_fn`` runs once, as on an unsharded model: it reads and writes full parameters, and only those of one unit are in
    memory at a time.  Random numbers come from the generators of the mesh's first rank, so that every rank has its shard of
    the same values.  These are bit-identical to those of the same call on the unsharded model with the same seed.

    Args:
        module: the whole model.
        init_fn: is called with ``module`` and initializes all parameters and buffers.  None: ``init_weights()`` of the
            outermost modules that have it (models of transformers do), ``reset_parameters()`` of all others.
        device: the device for tensors on meta.  None: the device of the mesh; with ``CPUOffloadPolicy`` the host for
            parameters.

    A warning names tensors that ``init_fn`` does not initialize.  The first forward refuses them unless they were written to
    by then, for example by ``load``.
    Raises: ConfigError for parameters with their own all-gather (quantized weights).

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = MyTransformer()
        >>> shard_model(model)  # doctest: +SKIP
        >>> init_parameters(model)  # doctest: +SKIP
    """
    units = [*units_in(module)]
    fresh = _materialize(module, units, device)
    meshes = [unit.settings.axes.mesh for unit in units if unit.params]
    # With tensor parallelism a parameter is on more ranks than its unit.
    meshes += [param.device_mesh for param in module.parameters() if isinstance(param, DTensor)]
    with _generators_of_first(max(meshes, key=DeviceMesh.size, default=None)):
        whole = _WholeParameters([param for unit in units for param in unit.params], fresh)
        try:
            with whole:
                (init_fn or _init_modules)(module)
        finally:  # also after an error: values that were written until then stay, as on one process
            whole.put_back()
    if left := unwritten_in(module):
        logger.warning("init_parameters: %s have no values: initialize or load them before a forward", ", ".join(left))


def _init_modules(module: nn.Module) -> None:
    """Initialize ``module`` and the modules below it by their own methods, outer modules first."""
    if (init := getattr(module, "init_weights", None)) is not None:
        init()
    else:
        if reset := getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None):
            reset()
        for child in module.children():
            _init_modules(child)


def _materialize(module: nn.Module, units: Iterable[Unit], device: torch.device | str | None) -> set[int]:
    """Move tensors from meta to a device; tied parameters stay tied.  Return the ids of shards without values."""
    place = next((unit.settings.storage for unit in units if unit.params), None)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        own = torch.device("cpu") if place is None else place.device
        own = place.storage_device if place is not None and isinstance(tensor, DTensor) else own
        return torch.empty_like(tensor, device=device or own) if tensor.is_meta else tensor

    named = [(owner, pair) for owner in module.modules() for pair in owner.named_parameters("", False, False)]
    on_meta = [(owner, name, id(param)) for owner, (name, param) in named if param.is_meta]
    fresh = {param for unit in units for param in unit.params if param.sharded.is_meta}
    _filled_later.update([id(param.sharded) for param in fresh])
    try:
        torch_private.apply_to_tensors(module, materializing(convert))
    finally:
        _filled_later.clear()
    first: dict[int, nn.Parameter] = {}
    for owner, name, key in on_meta:
        setattr(owner, name, first.setdefault(key, getattr(owner, name)))
    for unit in units:
        unit.ensure_packed()
        for param in fresh.intersection(unit.params):
            fill(param.sharded)
        if unit.memory.extended.params:
            fqn = unit.memory.extended.params[0].fqn
            raise ConfigError(f"init_parameters: {fqn} has its own all-gather: initialize it before sharding")
    return {id(param.sharded) for param in fresh}


@contextmanager
def _generators_of_first(mesh: DeviceMesh | None) -> Generator[None]:
    """Use the random states of the first rank on all ranks of ``mesh``; on exit a rank with another state restores its own."""
    groups = [] if mesh is None or mesh.size() == 1 else [*reversed(mesh.get_all_groups())]
    kind = "cpu" if mesh is None else mesh.device_type
    devices = [torch] if kind == "cpu" else [torch, torch.get_device_module(kind)]
    own = [each.get_rng_state() for each in devices]
    states = [state.clone().to(kind) for state in own]
    for group in groups:
        broadcast_from_first(states, group)
    first = [state.cpu() for state in states]
    for each, state in zip(devices, first, strict=True):
        each.set_rng_state(state)
    try:
        yield
    finally:
        for each, mine, state in zip(devices, own, first, strict=True):
            if not torch.equal(mine, state):
                each.set_rng_state(mine)


class _WholeParameters(TorchFunctionMode):
    """Replaces sharded parameters in calls of torch functions by full ones, of one unit at a time.

    Args:
        params: the sharded parameters.
        fresh: ids of those that have no values yet.
    """

    def __init__(self, params: Iterable[ShardedParam], fresh: set[int]) -> None:
        super().__init__()
        self._owners = {id(param.sharded): param for param in params if isinstance(param.sharded, DTensor)}
        self._fresh = fresh
        self._whole: dict[int, nn.Parameter] = {}  # by the id of the sharded parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        # What needs no values is answered by the shard, which has the full shape: no memory, no collective.
        if name in _FACTS or (is_attribute and func.__self__.__name__ not in _VALUES):
            return func(*args, **kwargs)
        used: list[Any] = [each for each in tensors_in((args, kwargs)) if id(each) in self._owners]
        if not used:
            return func(*args, **kwargs)
        self._free_others({self._owners[id(each)].unit() for each in used})
        for sharded in used:
            if id(sharded) not in self._whole:
                self._whole[id(sharded)] = self._make(sharded)
        args, kwargs = torch_private.map_tensors(lambda each: self._whole.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
        # In-place functions return the full parameter: user code is to go on with the registered one.
        back = {id(whole): self._owners[key].sharded for key, whole in self._whole.items()}
        return torch_private.map_tensors(lambda each: back.get(id(each), each), result)

    @torch.no_grad()
    def _make(self, sharded: DTensor) -> nn.Parameter:
        if id(sharded) in self._fresh:
            whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device)
            fill(whole)
        else:
            whole = full_tensor_of(sharded).clone()
        return nn.Parameter(whole, sharded.requires_grad)

    def _free_others(self, wanted: set[Unit]) -> None:
        """Free the full parameters of units that are not ``wanted``, except those that the user's function references."""
        for key in [key for key in self._whole if self._owners[key].unit() not in wanted]:
            whole = self._whole[key]
            # Three references: the dict's, ``whole`` here, and the argument of ``getrefcount``.
            if torch_private.storage_use_count(whole.untyped_storage()) <= 1 and sys.getrefcount(whole) <= 3:
                self._put(key)
            del whole

    def put_back(self) -> None:
        """Copy all full parameters to the shards and free them."""
        for key in list(self._whole):
            self._put(key)

    @torch.no_grad()
    def _put(self, key: int) -> None:
        sharded, whole = self._owners[key].sharded, self._whole.pop(key)
        assert isinstance(sharded, DTensor)
        mesh = sharded.device_mesh
        cut = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        local = torch_private.local_of(cut.redistribute(placements=sharded.placements))
        with span("init_parameters", "initialize", self._owners[key].fqn):
            torch_private.local_of(sharded).copy_(torch_private.wait_tensor(local))
        self._fresh.discard(key)


# ---- Tensors that were moved from the meta device but have no values yet.

# Ids of parameters on meta that init_parameters fills where they are packed, one unit at a time: until then they take no pages.
_filled_later: set[int] = set()


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return the values of this rank, None if they cannot be read, and the byte that fills them while they have none.

    It makes NaN in floating-point tensors, an implausible number in others.
    """
    local = torch_private.local_of(tensor).detach()
    has_bytes = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta and local.numel()
    return local if has_bytes else None, 0xFF if local.is_floating_point() or local.is_complex() else 0xA5


def materializing(convert: Convert, attachment: Attachment | None = None) -> Convert:
    """Return ``convert`` with a mark: tensors that it moves from meta to a device are filled with bytes that mean "no values".

    ``attachment``: the attachment of the module whose tensors are converted.
    """

    def convert_and_fill(tensor: torch.Tensor) -> torch.Tensor:
        result = convert(tensor)
        if tensor.is_meta and not result.is_meta:
            if attachment is not None:
                attachment.is_materialized = True
            if id(tensor) not in _filled_later:
                fill(result)
        return result

    return convert_and_fill


def fill(tensor: torch.Tensor) -> None:
    """Fill memory of ``tensor``, which has no values yet, with bytes that mean so."""
    local, byte = bytes_of(tensor)
    if local is not None:
        torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage()).fill_(byte)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` was moved from meta and was not written to since, on this rank."""
    local, byte = bytes_of(tensor)
    if local is None:
        return False
    found = local.reshape(-1)
    # One element decides for most tensors.
    return all(bool((part.view(torch.uint8) == byte).all()) for part in (found[:1], found))


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters (unless ``buffers_only``) and buffers of ``module`` that have no values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_materialized(attachments: Sequence[Attachment]) -> None:
    """Adopt what is registered before the first forward.  Raises: StateError for parameters on meta, or on another device."""
    units = [unit for each in attachments for unit in each.units]
    for unit in units:
        unit.adopt_registered()
    if on_meta := [param.fqn for unit in units for param in unit.params if param.sharded.device.type == "meta"]:
        raise StateError(
            "Call shardwise.init_parameters(model), or to_empty() and load a checkpoint. FSDP parameters should be "
            f"materialized from meta device before training, but the following were still on meta device: {on_meta}"
        )
    offloaded = [unit for unit in units if isinstance(unit.settings.storage.offload, CPUOffloadPolicy)]
    places = [(param.fqn, param.local.device) for unit in offloaded for param in unit.params]
    if on_device := [each for each in places if each[1].type != "cpu"]:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {on_device}\n"
        )


# ---- Values that ranks have alike: samples of initial ones, ``sync_module_states``, and buffers that differ (BatchNorm).
# ``fully_shard`` itself sends nothing, so values that differ between ranks (a seed per rank) are not seen when they are cut:
# each rank keeps its rows of another model.  So samples stay until the first forward compares them, and ``sync_module_states``
# is there for those who want one rank's values.  Source: ``DistributedDataParallel``, which broadcasts module states.

_SAMPLE_NUMEL, _SOME_NUMEL = 1 << 12, 64
_ROUGH = torch.bfloat16  # a conversion of a model to another dtype is no write, so shards are compared as this
SHARES_BUFFERS = "_shardwise_shares_buffers"  # marks a module whose forward broadcasts the first rank's buffers
_MOST_LISTED = 8  # names in an error


def few(names: Iterable[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MOST_LISTED} more" if len(every) > _MOST_LISTED else ""
    return ", ".join(every[:_MOST_LISTED]) + more


def beginning_of(whole: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return samples of ``whole``, which is sharded, and of ``shard``; None for values on meta or of a tensor subclass."""
    if type(whole) is not torch.Tensor or whole.is_meta:
        return None
    # a copy of one element would keep its stride, and then is not to be read as bytes
    kept, some = _spaced(whole, _SAMPLE_NUMEL), _spaced(shard, _SOME_NUMEL)
    return kept.clone(memory_format=torch.contiguous_format), some.clone(memory_format=torch.contiguous_format)


def unwritten(begun: tuple[torch.Tensor, torch.Tensor] | None, shard: torch.Tensor) -> bytes | None:
    """Return the sample of a parameter before it was sharded; None if it has none, or its shard was written to since."""
    if begun is None or shard.is_meta:
        return None
    before, now = (each.to("cpu", _ROUGH) for each in (begun[1], _spaced(shard, _SOME_NUMEL)))
    # A write on this rank shows in the sample of the shard: initialization and loading replace all of it.
    return begun[0].cpu().view(torch.uint8).numpy().tobytes() if torch.equal(before, now) else None


def _spaced(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most ``most`` evenly spaced elements of ``values``, 1-D: all of them if there are no more."""
    flat = values.detach().view(-1) if values.is_contiguous() else values.detach().reshape(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat if flat.numel() <= most else flat[:: -(-flat.numel() // most)]


Named = Sequence[tuple[str, torch.Tensor]]


def values_of_first(named: Named, axes: MeshAxes, error: ShardwiseError | None = None) -> list[torch.Tensor]:
    """Broadcast tensors from the first rank of the mesh; return them, with new tensors for those on meta.  Collective.

    Raises: ``error`` of any rank, ConfigError if the first rank has meta tensors, DesyncError if ranks pass different tensors;
        on every rank.
    """
    dims = [dim for dim in (axes.replicate_mesh_dim, axes.shard_mesh_dim) if dim is not None]
    groups = [group for dim in dims if (group := axes.mesh.get_group(dim)).size() > 1]
    _agree(named, axes, groups, error)
    tensors = [tensor.detach() for _, tensor in named]
    # A rank on meta gets memory here; the others send and receive where their values are.
    found = [torch.empty_like(each, device=axes.device) if each.is_meta else each for each in tensors]
    for group in groups:  # first along the replicas, then along the shards
        broadcast_from_first(found, group)
    return found


def sync_buffers(modules: Iterable[tuple[str, nn.Module]], axes: MeshAxes, error: ShardwiseError | None = None) -> None:
    """Broadcast the buffers of ``modules``, pairs of path and module, from the first rank; raise ``error``.  Collective."""
    places = [(path, module, name) for path, module in modules for name, _ in module.named_buffers(recurse=False)]
    buffers = [(f"{path}.{name}", module.get_buffer(name)) for path, module, name in places]
    values = values_of_first(buffers, axes, error)
    for (_, module, name), (_, buffer), value in zip(places, buffers, values, strict=True):
        if buffer.is_meta:
            torch_private.buffers_of(module)[name] = value


def _agree(named: Named, axes: MeshAxes, groups: Sequence[dist.ProcessGroup], error: ShardwiseError | None) -> None:
    facts = [f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in named]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty and dist.get_rank() == int(axes.mesh.mesh.min()):
        error = ConfigError(
            f"sync_module_states=True: the first rank has {empty[0]} on meta, expected values to broadcast. Load the "
            "weights on that rank before sharding, or leave sync_module_states out and call init_parameters after sharding"
        )
    try:
        for group in groups:  # an error in one group is agreed on in the next, so that it reaches every rank
            try:
                open_agreement(group, "sync_module_states").agree("sync_module_states", facts, error)
            except ShardwiseError as found:
                error = found
        if error is not None:
            raise error
    finally:
        del error  # the error refers to this frame


def unlike_buffers(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the buffers that differ, each with two ranks whose values are different."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, list[int]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                found.setdefault(name, [other, rank])
    return found


def unlike_in_words(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return what is wrong with buffers that differ, and what to do."""
    return (
        f"buffers differ between ranks: {few(names)}; rank {ranks[0]} and rank {ranks[1]} have different values, and a "
        "checkpoint holds one. Call save(..., buffers='rank0') to save those of the lowest rank, or 'per_rank' for those of "
        "every rank, which load at the same number of ranks; or keep buffers equal during training (SyncBatchNorm)"
    )
