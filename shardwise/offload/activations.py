"""What blocks keep of their forward for backward: all of it, their inputs, or copies in host memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from shardwise import torch_private
from shardwise.arguments import check_kind, explains_arguments, explains_fields
from shardwise.collectives.streams import Device, SideStream, device_of
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.api import blocks_of
from shardwise.fsdp.hooks import dynamo_disabled
from shardwise.fsdp.unit import is_in_backward

Choice = Literal["keep", "recompute", "offload"]


@explains_fields
@dataclass(frozen=True)
class ActivationPolicy:
    """What blocks keep of their forward for backward; see :func:`apply_activations`.

    Args:
        blocks: one choice for all repeated blocks (see :func:`shard_model`), or one per module path.  "keep": all that
            autograd saves.  "recompute": the inputs; the block's forward runs again in backward.  "offload": copies in
            host memory.
        keep_ops: operators (``torch.ops.aten.mm.default``) whose results "recompute" keeps instead of running them again.
        min_offload_bytes: "offload" leaves smaller tensors on the device.
    """

    blocks: Choice | Mapping[str, Choice] = "recompute"
    keep_ops: Sequence[Any] = ()
    min_offload_bytes: int = 2**16


# ---- Offload.  Copies are made per storage, since tensors that a block saves are often views of one (q, k and v).  Two blocks
# have their saved tensors on the device: the one that runs, and the one before it, which is being copied.


@dataclass(frozen=True)
class _Geometry:
    """The place of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, shift: int = 0) -> _Geometry:
        return cls(tensor.dtype, (*tensor.size(),), tensor.stride(), int(tensor.storage_offset()) + shift)

    def on(self, memory: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """Return the tensor in the storage of ``memory``, moved by ``shift`` elements."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset + shift, self.size, self.stride)


@dataclass(frozen=True)
class _Weight:
    """A saved view of a parameter, which is unsharded again when backward reads it.

    ``view``: from the first element of the parameter on.  ``version``: of the parameter.
    """

    module: nn.Module
    name: str
    view: _Geometry
    version: int


@dataclass(eq=False)
class _Stored:
    """The bytes of one storage that a block has saved, on the device, on the host, or both."""

    on_device: torch.Tensor | None
    on_host: torch.Tensor | None = None


@dataclass(eq=False)
class _Saved:
    """A tensor that a block has saved.

    ``original`` shares the version of the user's tensor; it is dropped when the storage leaves the device.
    """

    block: _Forward
    stored: _Stored
    view: _Geometry
    original: torch.Tensor | None
    version: int
    is_changed: bool = False

    def check(self) -> None:
        """Notice a write to the user's tensor, after which the copy may have either value."""
        if self.original is not None and torch_private.version_of(self.original) != self.version:
            self.is_changed = True


def _changed(shape: tuple[int, ...], name: str) -> StateError:
    return StateError(
        f"a tensor of shape {shape} that {name} saved for backward was changed in place since, so that its gradient would "
        'be wrong. Use an operation that is not in place, or "keep" this block in ActivationPolicy'
    )


class _Forward:
    """One forward of an offloaded block, and the memory of what it saved.

    Attributes:
        saved: the saved tensors that the graph, which owns them, still has.
        before: reference to the forward of the block before.
        copied, fetched: events after the copies to the host and to the device.
        by_address: what it has saved so far, by the address of the storage, while the forward runs.
    """

    def __init__(self, offloader: _Offloader, module: nn.Module, name: str) -> None:
        self.offloader, self.module, self.name = offloader, module, name
        self.saved = weakref.WeakSet[_Saved]()
        self.before = offloader.last
        self.copied: Any = None
        self.fetched: Any = None
        self.by_address: dict[int, _Stored] = {}

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd keeps of ``tensor``."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel():
            return tensor
        address = tensor.untyped_storage().data_ptr()
        for module in self.module.modules():
            for name, param in module.named_parameters(recurse=False):
                begin = int(param.storage_offset())
                is_its = begin <= tensor.storage_offset() < begin + param.numel() and param.dtype == tensor.dtype
                if is_its and param.untyped_storage().data_ptr() == address:
                    return _Weight(module, name, _Geometry.of(tensor, -begin), torch_private.version_of(param))
            if any(each.untyped_storage().data_ptr() == address for each in module.buffers(recurse=False)):
                return tensor
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes < self.offloader.min_bytes or tensor.device != self.offloader.place:
            return tensor
        if address not in self.by_address:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self.by_address[address] = _Stored(memory)
        found = _Saved(self, self.by_address[address], _Geometry.of(tensor), tensor, torch_private.version_of(tensor))
        self.saved.add(found)
        return found

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor of which :meth:`pack` returned ``kept``."""
        if isinstance(kept, _Weight):
            param: torch.Tensor = getattr(kept.module, kept.name)
            if torch_private.version_of(param) != kept.version:
                raise _changed(kept.view.size, self.name)
            return kept.view.on(param.detach(), int(param.storage_offset()))
        if not isinstance(kept, _Saved):
            return kept
        kept.check()
        if kept.is_changed:
            raise _changed(kept.view.size, self.name)
        self.offloader.use(self)
        assert kept.stored.on_device is not None
        return kept.view.on(kept.stored.on_device)


class _Offloader:
    """The copies of the blocks of one model on ``place``, on a stream of their own.

    Attributes:
        resident: the forwards whose saved tensors are on the device, at most two; the first is being copied.
        last: reference to the last forward.
        coming: memory of copies to the device that nothing has waited for, and the event at their end.
    """

    def __init__(self, place: torch.device, device: Device, min_bytes: int) -> None:
        self.place, self.device, self.min_bytes = place, device, min_bytes
        self.stream = SideStream(device, "activations")
        self.resident: list[_Forward] = []
        self.last: Callable[[], _Forward | None] = lambda: None
        self.coming: tuple[list[_Stored], Any] = [], None

    def __deepcopy__(self, memo: object) -> _Offloader:
        """Return this: copies of a model share its stream."""
        return self

    def begin(self, module: nn.Module, name: str) -> _Forward:
        """Free what the block before the last one saved, whose copies have had the time of a block."""
        while len(self.resident) > 1:
            self._release(self.resident.pop(0))
        found = _Forward(self, module, name)
        self.last = weakref.ref(found)
        return found

    def end(self, forward: _Forward) -> None:
        """Launch the copies of what ``forward`` saved."""
        forward.by_address = {}
        stored = {id(saved.stored): saved.stored for saved in [*forward.saved]}
        if not stored:
            return
        self.stream.wait_current()
        for each in stored.values():
            assert each.on_device is not None
            each.on_host = self.device.host_memory(each.on_device.numel(), torch.uint8, pins=self.device.can_pin)
            with self.stream.run():
                each.on_host.copy_(each.on_device, non_blocking=True)
        forward.copied = self.stream.mark()
        self.resident.append(forward)

    def _release(self, forward: _Forward) -> None:
        self.stream.current_waits(forward.copied)
        for saved in [*forward.saved]:
            saved.check()
            saved.original = saved.stored.on_device = None

    def use(self, forward: _Forward) -> None:
        """Wait until the saved tensors of ``forward`` are on the device, and launch the copies of the block before it."""
        if forward in self.resident:  # still on the device; what reads them frees them afterwards
            self.resident.remove(forward)
            forward.fetched = forward.copied
            self.stream.current_waits(forward.copied)
        elif forward.fetched is None:
            self._fetch(forward)
        if self.coming[1] is forward.fetched:
            self._arrive()
        before = forward.before()
        if before is not None and before.fetched is None and before not in self.resident:
            self._fetch(before)

    def _fetch(self, forward: _Forward) -> None:
        self._arrive()
        stored = [saved.stored for saved in [*forward.saved]]
        self.stream.wait_current()  # what had the memory of the copies before may still be at work
        for each in stored:
            if each.on_device is None and each.on_host is not None:
                each.on_device = torch.empty(each.on_host.numel(), dtype=torch.uint8, device=self.place)
                with self.stream.run():
                    each.on_device.copy_(each.on_host, non_blocking=True)
        forward.fetched = self.stream.mark()
        self.coming = stored, forward.fetched

    def _arrive(self) -> None:
        self.stream.current_waits(self.coming[1])
        self.coming = [], None


# ---- The hooks of blocks.


class _Blocks:
    """The hooks on the blocks of one model.

    Attributes:
        open: the context of the forward that runs; blocks are not inside of each other.
    """

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.open: list[AbstractContextManager[object]] = []
        self.offloader: _Offloader | None = None
        self.running: _Forward | None = None

    def hook(self, module: nn.Module, name: str, choice: Choice) -> None:
        """Let ``module`` do as ``choice`` says.  Hooks of sharding are before and after these, whichever come first."""
        begin = self.offload if choice == "offload" else self.recompute
        module.register_forward_pre_hook(partial(begin, name), with_kwargs=True)
        module.register_forward_hook(self.end, prepend=True, always_call=True)

    @dynamo_disabled
    def end(self, *_: Any) -> None:
        """Leave the forward that runs, or one that an interrupt has ended."""
        while self.open:
            self.open.pop().__exit__(None, None, None)
        if self.running is not None and self.offloader is not None:
            self.offloader.end(self.running)
        self.running = None

    @dynamo_disabled
    def recompute(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the forward of a block that runs again in backward."""
        self.end()
        if not torch.is_grad_enabled():
            return
        if not torch_private.is_last_pre_hook(module, self.recompute):
            raise StateError(
                f"a forward pre-hook was registered on {name} after apply_activations; it may change the arguments, with which "
                "the block is recomputed. Register it before"
            )
        contexts = noop_context_fn
        if self.policy.keep_ops:
            contexts = partial(create_selective_checkpoint_contexts, [*self.policy.keep_ops])
        region = torch_private.checkpoint_region(partial(module.forward, **kwargs), contexts, args)
        region.__enter__()
        self.open.append(region)

    @dynamo_disabled
    def offload(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the forward of a block whose saved tensors go to the host; of a block that runs in backward they stay."""
        self.end()
        if not torch.is_grad_enabled() or is_in_backward() or torch_private.innermost_transform() is not None:
            return
        if self.offloader is None:
            place = next((param.device for param in module.parameters()), torch.device("cpu"))
            self.offloader = _Offloader(place, device_of(place), self.policy.min_offload_bytes)
            if not self.offloader.device.has_streams:
                warnings.warn(f"{name} keeps its activations: they are in host memory already ({place})", stacklevel=2)
        if self.offloader.device.has_streams:
            self.running = self.offloader.begin(module, name)
            hooks = saved_tensors_hooks(self.running.pack, self.running.unpack)
            hooks.__enter__()
            self.open.append(hooks)


@explains_arguments
def apply_activations(model: nn.Module, policy: ActivationPolicy) -> dict[str, Choice]:
    """Let the blocks of ``model`` keep, recompute or offload what their forward saves for backward.

    Results are those of the plain model, to the bit.  Call it once, before or after ``model`` is sharded; a block that is a
    unit is gathered once in backward, whatever it does.  Blocks may contain calls of ``torch.utils.checkpoint``, reentrant or
    not.  "offload" copies on a stream of its own into page-locked memory while the next block runs, and back while backward
    runs through the block behind; on CPU ranks it warns and keeps.  Parameters and buffers are never copied.

    ``torch.compile``: compile what is inside blocks, or wrap blocks (``torch.compile(block)``); ``block.compile()`` would
    compile the first forward, and not the second.

    Args:
        model: not on which this was called before.
        policy: what each block does.

    Returns: what each block does, by its path.

    Raises:
        ConfigError: ``model`` has no repeated blocks, or no module of a given path; one is inside of another; a choice is
            unknown; a block that is to be recomputed is compiled in place.

    Example:
        >>> policy = ActivationPolicy("recompute", keep_ops=[torch.ops.aten.mm.default])
        >>> shardwise.apply_activations(shard_model(model), policy)  # doctest: +SKIP
    """
    check_kind("apply_activations: policy", policy, ActivationPolicy, f"ActivationPolicy({policy!r})")
    given = policy.blocks
    choices: dict[str, Choice] = dict.fromkeys(blocks_of(model), given) if isinstance(given, str) else dict(given)
    if not choices:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks: name modules, as in "
            'ActivationPolicy({"encoder": "recompute"})'
        )
    modules = dict(model.named_modules())
    for path, choice in choices.items():
        if choice not in get_args(Choice):
            raise ConfigError(
                f"ActivationPolicy: unknown choice {choice!r} for {path}; choose from {', '.join(get_args(Choice))}"
            )
        if path not in modules:
            raise ConfigError(f"ActivationPolicy: {type(model).__name__} has no module {path!r}")
        outer = next((each for each in choices if path.startswith(f"{each}.") or (path and not each)), None)
        if outer is not None:
            raise ConfigError(f"ActivationPolicy: {path} is inside of {outer}; give a choice to one of them")
        if choice == "recompute" and torch_private.is_compiled_in_place(modules[path]):
            raise ConfigError(
                f"ActivationPolicy: {path} was compiled by compile(), which recomputing does not go through; compile the "
                "modules inside of it"
            )
    blocks = _Blocks(policy)
    model.register_forward_pre_hook(blocks.end)  # what an interrupt has left open ends before the next forward
    for path, choice in choices.items():
        if choice != "keep":
            blocks.hook(modules[path], path, choice)
    return choices
