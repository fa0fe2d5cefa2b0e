"""Checks of a root before its forwards: its parameters have values, and user code has changed nothing beside the engine."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.store import digest_of
from shardwise.errors import StateError
from shardwise.fsdp.attachment import Attachment, attachment_of, is_managed_by_torch, managed_by_registration
from shardwise.fsdp.buffers import warn_of_unlike
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.precision import CPUOffloadPolicy

_MOST_SHOWN = 8  # names that an error lists


def _few(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MOST_SHOWN} more" if len(every) > _MOST_SHOWN else ""
    return ", ".join(every[:_MOST_SHOWN]) + more


# ---- Tensors that were moved from the meta device but have no values yet.

# Fill bytes of new memory: NaN in floating-point tensors, an implausible number in others.
_FILL_FLOATING, _FILL = 0xFF, 0xA5
_NUM_FIRST = 8  # elements that are compared to detect equal seeds; few, since uneven shards may be small


def _bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
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
            local, fill = _bytes_of(result)
            if local is not None:
                torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage()).fill_(fill)
        return result

    return convert_and_fill


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` was moved from meta and was not written to since, on this rank."""
    local, fill = _bytes_of(tensor)
    if local is None:
        return False
    found = local.reshape(-1)
    is_first = bool((found[:1].view(torch.uint8) == fill).all())  # one element decides for most tensors
    return is_first and bool((found.view(torch.uint8) == fill).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters (unless ``buffers_only``) and buffers of ``module`` that have no values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_values(root: nn.Module, attachments: Sequence[Attachment], mismatch_check: MismatchCheck | None) -> None:
    """Check before the first forward that a model from meta has values, and that shards differ between ranks.

    If every rank has initialized its shard with the same seed, all shards have the same random numbers.  Collective, unless
    ``mismatch_check`` is None.  Raises: StateError on every rank.
    """
    if not any(each.is_materialized for each in attachments):
        return
    local = [json.dumps(["", name]) for name in unwritten_in(root)]
    for group in (group for each in attachments for group in each.unit.groups):
        starts_here = [(param.fqn, _start_of(param)) for param in group.params]
        local += [json.dumps([name, start, group.axes.shard_rank]) for name, start in starts_here if start is not None]
    every = local if mismatch_check is None else mismatch_check.union("values", local)
    starts: dict[str, list[int]] = defaultdict(list)
    for name, value, *_ in map(json.loads, sorted(every)):
        starts[name].append(value)
    if unwritten := starts.pop("", None):
        raise StateError(
            f"{_few(map(str, unwritten))} have no values: they were not written to after to_empty() allocated them. Call "
            "shardwise.init_parameters(model, init_fn) with a function that initializes all parameters and buffers, or "
            "load them; build buffers that are computed in __init__ under torch.device('cpu') instead of on meta"
        )
    for each in attachments:
        each.is_materialized = False
    # With equal seeds the shards that were initialized first are equal; after shards of unequal sizes, random numbers differ.
    several = [name for name, _ in root.named_parameters() if len(starts[name]) > 1]
    alike = [name for name in several if len(set(starts[name])) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {_few(alike)} begin with the same values on all ranks: every rank has initialized its "
            "local tensor (to_local()) with the same seed. Call shardwise.init_parameters(model), which initializes parameters "
            "as one process would, or draw on the parameters themselves. If the values are right (copies of one expert), call "
            "forward again: this is checked only once"
        )


def _start_of(param: ShardedParam) -> int | None:
    """Return a digest of the first elements of a shard; None if they are all equal, or the parameter is not sharded."""
    local, _ = _bytes_of(param.sharded)
    if local is None or param.shard.is_whole or local.shape != param.shard_shape:
        return None
    first = local.reshape(-1)[:_NUM_FIRST]
    return None if bool((first == first[0]).all()) else digest_of(first)


def check_materialized(attachments: Sequence[Attachment]) -> None:
    """Adopt what is registered before the first forward.  Raises: StateError for parameters on meta, or on another device."""
    groups = [group for each in attachments for group in each.unit.groups]
    params = [param for group in groups for param in group.params]
    for param in params:
        param.check_places()
        if len(param.registrations) > 1:
            param.check_ties()
        param.adopt_registered()
    on_meta = [param.fqn for param in params if param.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "Call shardwise.init_parameters(model), which allocates and initializes parameters, or to_empty() and load a "
            "checkpoint. FSDP parameters should be materialized from meta device before training, but the following were still "
            f"on meta device: {on_meta}"
        )
    offloaded = [group for group in groups if isinstance(group.place.offload, CPUOffloadPolicy)]
    on_device = [(p.fqn, p.local.device) for group in offloaded for p in group.params if p.local.device.type != "cpu"]
    if on_device:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {on_device}\n"
        )


# ---- Changes to the model by user code that bypass the engine.  Without these checks training would go wrong silently.
# Each rank would train its own copy of a parameter that was added to the module tree; an assignment to ``.data`` of a DTensor
# has no effect.

_VALUES = dict.values


class ModificationChecks:
    """Watches the module tree of one root, and the storages of its shards.

    Args:
        root: the module.
        attachments: the attachments in its tree.
    """

    def __init__(self, root: nn.Module, attachments: Iterable[Attachment]) -> None:
        self._root = weakref.ref(root)
        self._params = [param for each in attachments for param in each.unit.params]
        self._storages: list[int] = []
        self._num_steps = 0
        self._note_tree(root)
        self._check_data()

    def check(self) -> None:
        """Check the tree and the shards; it takes microseconds if nothing has changed.

        Raises: StateError that names parameters without a unit, or shards whose ``.data`` was assigned to.
        """
        if self._size() != self._num_params or [*chain.from_iterable(map(_VALUES, self._children))] != self._modules:
            root = self._root()
            assert root is not None  # its forward is running
            self._note_tree(root)
        if [*map(torch_private.storage_id, [param.sharded for param in self._wrapped])] != self._storages:
            self._check_data()

    def after_step(self, mismatch_check: MismatchCheck | None) -> None:
        """Warn, in the first steps that have reduced gradients, of buffers that differ between ranks."""
        self._num_steps += 1
        root = self._root()
        if root is not None and mismatch_check is not None:
            warn_of_unlike(root, self._num_steps, mismatch_check)

    def _size(self) -> int:
        return sum(map(len, self._tables))

    def _note_tree(self, root: nn.Module) -> None:
        check_tree(root)
        modules = list(root.modules())
        self._children = [children for module in modules if (children := torch_private.children_of(module))]
        self._modules = [*chain.from_iterable(map(_VALUES, self._children))]
        self._tables = [torch_private.parameters_of(module) for module in modules]
        self._tables += self._children  # counts children, too, except a first child of a module that had none
        self._num_params = self._size()

    def _check_data(self) -> None:
        """Raise StateError if a DTensor has another storage than before, but the same local tensor."""
        self._wrapped = [param for param in self._params if isinstance(param.sharded, DTensor)]
        self._storages = [torch_private.storage_id(param.sharded) for param in self._wrapped]
        assigned: list[str] = []
        for param, storage in zip(self._wrapped, self._storages, strict=True):
            before, local = param.made_of
            if storage != before and local() is param.local:
                assigned.append(param.fqn)
            param.made_of = storage, weakref.ref(param.local)
        if assigned:
            raise StateError(
                f".data of {_few(assigned)} was assigned to, which changes nothing: torch's DTensors compute with the local "
                "tensor that they were made from. Write p.copy_(values) under torch.no_grad() in place of p.data = values "
                "(torch.nn.utils.vector_to_parameters assigns to .data, too)"
            )


def check_tree(root: nn.Module) -> None:
    """Raise StateError if a trainable parameter belongs to no unit, or a parameter of a unit was removed from its module."""
    attachments = {id(each): each for module in root.modules() if (each := attachment_of(module)) is not None}
    params = [param for each in attachments.values() for param in each.unit.params]
    known = {id(form) for param in params for form in (param.sharded, param.full, param.subsharded)}
    ignored = {(id(table), name) for each in attachments.values() for table, name in each.ignored}
    of_torch = {each for module in root.modules() if is_managed_by_torch(module) for each in module.modules()}
    tables = {id(torch_private.parameters_of(module)): (path, module) for path, module in root.named_modules()}
    added = {
        f"{path}.{name}".lstrip("."): param
        for table, (path, module) in tables.items()
        for name, param in torch_private.parameters_of(module).items()
        if param is not None and param.requires_grad and id(param) not in known
        if (table, name) not in ignored and module not in of_torch
    }
    for param in params:
        param.check_places(lambda table: id(table) in tables)
    if not added:
        return
    owned = {id(form): owner for owner in managed_by_registration().values() for form in (owner.sharded, owner.full)}
    for path, param in added.items():
        owner = owned.get(id(param))
        if owner is not None:
            raise StateError(
                f"{path} of this {type(root).__name__} is shared with {type(owner.module()).__name__}, which was sharded by "
                "itself and is not below it: both would train the parameter separately. Call fully_shard (or replicate) on a "
                "module that contains both, and run the forward of that module"
            )
    raise StateError(
        f"{_few(added)} was added to the module tree after its units were made and belongs to none of them: every "
        "rank would train its own copy on its part of the batch. Add parameters before fully_shard (or replicate), shard "
        "the new module before the next forward, or freeze it (requires_grad_(False)); pass parameters that you train "
        "yourself as ignored_params"
    )
