"""Models from the meta device: ``init_parameters`` allocates and initializes them; tensors that have no values yet."""

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
    was_meta = {name for name, param in module.named_parameters() if param.is_meta}
    _materialize(module, units, device)
    params = dict(module.named_parameters())
    meshes = [unit.settings.axes.mesh for unit in units if unit.params]
    meshes += [param.device_mesh for param in params.values() if isinstance(param, DTensor)]  # with tensor parallelism
    with _generators_of_first(max(meshes, key=DeviceMesh.size, default=None)):
        whole = _WholeParameters(units, {id(params[name]) for name in was_meta if name in params})
        try:
            with whole:
                (init_fn or _init_modules)(module)
        finally:  # also after an error: values that were written until then stay, as on one process
            whole.put_back()
    if left := unwritten_in(module):
        logger.warning(
            "init_parameters: %s still have no values. Pass an init_fn that initializes them, or load a checkpoint",
            ", ".join(left),
        )


def _init_modules(module: nn.Module) -> None:
    """Initialize ``module`` and the modules below it by their own methods, outer modules first."""
    if (init := getattr(module, "init_weights", None)) is not None:
        init()
        return
    if reset := getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None):
        reset()
    for child in module.children():
        _init_modules(child)


def _materialize(module: nn.Module, units: Iterable[Unit], device: torch.device | str | None) -> None:
    """Move tensors from meta to a device, with undefined values; tied parameters stay tied."""
    places = [unit.settings.storage for unit in units if unit.params]
    of_params = device or (places[0].storage_device if places else torch.device("cpu"))
    of_others = device or (places[0].device if places else torch.device("cpu"))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        wanted = of_params if isinstance(tensor, DTensor) else of_others
        return torch.empty_like(tensor, device=wanted) if tensor.is_meta else tensor

    registrations: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, param in torch_private.parameters_of(owner).items():
            if param is not None and param.is_meta:
                registrations.setdefault(id(param), []).append((owner, name))
    fresh = {param for unit in units for param in unit.params if param.sharded.is_meta}
    _filled_later.update([id(param.sharded) for param in fresh])
    try:
        torch_private.apply_to_tensors(module, materializing(convert))
    finally:
        _filled_later.clear()
    for (first, name), *others in registrations.values():
        for owner, other in others:
            setattr(owner, other, getattr(first, name))
    for unit in units:
        unit.ensure_packed()
        for param in fresh.intersection(unit.params):
            fill(param.sharded)
        if unit.memory.extended.params:
            raise ConfigError(
                f"init_parameters: {unit.memory.extended.params[0].fqn} has its own all-gather: initialize it before sharding"
            )


@contextmanager
def _generators_of_first(mesh: DeviceMesh | None) -> Generator[None]:
    """Use the random states of the first rank on all ranks of ``mesh``; on exit a rank with another state restores its own."""
    if mesh is None or mesh.size() == 1:
        yield
        return
    devices = [torch] if mesh.device_type == "cpu" else [torch, torch.get_device_module(mesh.device_type)]
    own = [each.get_rng_state() for each in devices]
    states = [state.clone().to(mesh.device_type) for state in own]
    for dim in reversed(range(mesh.ndim)):
        broadcast_from_first(states, mesh.get_group(dim))
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
        units: the units of the parameters.
        fresh: ids of sharded parameters that have no values yet.
    """

    def __init__(self, units: Iterable[Unit], fresh: set[int]) -> None:
        super().__init__()
        pairs = [(unit, param) for unit in units for param in unit.params if isinstance(param.sharded, DTensor)]
        self._owners: dict[int, tuple[Unit, ShardedParam]] = {id(param.sharded): (unit, param) for unit, param in pairs}
        self._fresh = fresh
        self._whole: dict[int, nn.Parameter] = {}  # by the id of the sharded parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if name in _FACTS or (is_attribute and func.__self__.__name__ not in _VALUES):
            return func(*args, **kwargs)
        used: list[Any] = [each for each in tensors_in((args, kwargs)) if id(each) in self._owners]
        if not used:
            return func(*args, **kwargs)
        self._allocate({self._owners[id(each)][0] for each in used})
        for sharded in used:
            if id(sharded) not in self._whole:
                self._whole[id(sharded)] = self._make(sharded)
        args, kwargs = torch_private.map_tensors(lambda each: self._whole.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
        back = {id(whole): self._owners[key][1].sharded for key, whole in self._whole.items()}
        return torch_private.map_tensors(lambda each: back.get(id(each), each), result)

    @torch.no_grad()
    def _make(self, sharded: DTensor) -> nn.Parameter:
        if id(sharded) in self._fresh:
            empty = materializing(lambda tensor: torch.empty_like(tensor, device=sharded.device))
            whole = empty(torch.empty(sharded.shape, dtype=sharded.dtype, device="meta"))
        else:
            whole = full_tensor_of(sharded).clone()
        return nn.Parameter(whole, sharded.requires_grad)

    def _allocate(self, wanted: set[Unit]) -> None:
        """Free the full parameters of units that are not ``wanted``, except those that the user's function references."""
        for key in [key for key in self._whole if self._owners[key][0] not in wanted]:
            whole = self._whole[key]
            if torch_private.storage_use_count(whole.untyped_storage()) <= 1 and sys.getrefcount(whole) <= 3:
                self._put(key)
            del whole

    def put_back(self) -> None:
        """Copy all full parameters to the shards and free them."""
        for key in list(self._whole):
            self._put(key)

    @torch.no_grad()
    def _put(self, key: int) -> None:
        sharded, whole = self._owners[key][1].sharded, self._whole.pop(key)
        assert isinstance(sharded, DTensor)
        mesh = sharded.device_mesh
        cut = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        local = torch_private.local_of(cut.redistribute(placements=sharded.placements))
        with span("init_parameters", "initialize", self._owners[key][1].fqn):
            torch_private.local_of(sharded).copy_(torch_private.wait_tensor(local))
        self._fresh.discard(key)


# ---- Tensors that were moved from the meta device but have no values yet.

# Fill bytes of new memory: NaN in floating-point tensors, an implausible number in others.
_FILL_FLOATING, _FILL = 0xFF, 0xA5
# Ids of parameters on meta that init_parameters fills where they are packed, one unit at a time: until then they take no pages.
_filled_later: set[int] = set()


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return the values of this rank, None if they cannot be read, and their fill byte."""
    local = torch_private.local_of(tensor).detach()
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta and local.numel()
    fill = _FILL_FLOATING if local.is_floating_point() or local.is_complex() else _FILL
    return local if is_plain else None, fill


def materializing(
    convert: Callable[[torch.Tensor], torch.Tensor], attachment: Attachment | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
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
    return bool((found[:1].view(torch.uint8) == byte).all() and (found.view(torch.uint8) == byte).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters (unless ``buffers_only``) and buffers of ``module`` that have no values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_materialized(attachments: Sequence[Attachment]) -> None:
    """Adopt what is registered before the first forward.  Raises: StateError for parameters on meta, or on another device."""
    units = [unit for each in attachments for unit in each.units]
    for unit in units:
        unit.adopt_registered()
    params = [param for unit in units for param in unit.params]
    on_meta = [param.fqn for param in params if param.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "Call shardwise.init_parameters(model), or to_empty() and load a checkpoint. FSDP parameters should be "
            f"materialized from meta device before training, but the following were still on meta device: {on_meta}"
        )
    offloaded = [unit for unit in units if isinstance(unit.settings.storage.offload, CPUOffloadPolicy)]
    on_device = [(p.fqn, p.local.device) for unit in offloaded for p in unit.params if p.local.device.type != "cpu"]
    if on_device:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {on_device}\n"
        )
