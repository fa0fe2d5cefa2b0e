"""Models from the meta device: ``init_parameters`` allocates and initializes them; tensors that have no values yet.

``to_empty()`` and ``reset_parameters()`` would be two lines.  But a shard is no matrix: an initialization that reads sizes or
norms (orthogonal, fan-in) computes another thing on it, and equal seeds give every rank the same shard.  So the user's function
runs on full parameters, of one unit at a time, with the random numbers of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.overrides import TorchFunctionMode

from shardwise import torch_private
from shardwise.collectives.owned import broadcast_from_first, full_tensor_of
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.attachment import Attachment, units_in
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
    meshes += [
        param.device_mesh for param in module.parameters() if isinstance(param, DTensor)
    ]  # with tensor parallelism
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
