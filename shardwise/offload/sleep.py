"""``asleep``: a model and its optimizer leave the memory of the device for a while, and come back as the same objects."""

from __future__ import annotations

import bisect
import ctypes
import errno
import gc
import mmap
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import torch_private
from shardwise.checkpoint.format import BLOCK_BYTES
from shardwise.collectives.streams import device_of, join_from, suballocate_all
from shardwise.consistency.agreement import open_store_gather
from shardwise.consistency.failure_report import publish_failure
from shardwise.containers import tensors_in
from shardwise.errors import ArgumentTypeError, ConfigError, ShardwiseError, StateError
from shardwise.formatting import format_bytes
from shardwise.fsdp.attachment import units_in
from shardwise.fsdp.engine import engine_of
from shardwise.fsdp.unit import HELD
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.layout import align
from shardwise.offload.disk import StateFile, buffer_of
from shardwise.offload.optimizer import OffloadedStep
from shardwise.offload.staging import digest_of
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.zero.optimizer import OptimizerState

_PLAIN = (torch.Tensor, nn.Parameter)

# ---- What there is: tensors by name, and the memory under them.


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that ``tensor``, of any class, and its gradient consist of."""
    inner: list[torch.Tensor] = []
    if isinstance(tensor, torch_private.ShardedTensor):
        inner = [shard.tensor for shard in tensor.local_shards()]
    elif type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        inner = tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])  # pyright: ignore
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor
    if tensor.is_leaf and tensor.grad is not None:
        inner.append(tensor.grad)
    for each in inner:
        yield from _plain(each)


@dataclass(slots=True, eq=False)
class _SleepingExtent:
    """Memory without a gap.

    Attributes:
        name: of what is in it.  start, stop: addresses.
        storages: over it, with (offset, (size,)) of each in bytes.
        away: while asleep, what each storage gets back.
    """

    name: str
    start: int
    stop: int
    storages: list[tuple[torch.UntypedStorage, tuple[int, tuple[int]]]] = field(default_factory=list[Any])
    away: list[torch.UntypedStorage] = field(default_factory=list[torch.UntypedStorage])

    def bytes(self) -> torch.Tensor:
        """Return the memory, which the storages own."""
        storage = self.storages[0][0]
        first = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
        return join_from(first, self.stop - self.start, ())


def _extents_of(found: Iterable[tuple[str, torch.UntypedStorage]]) -> list[_SleepingExtent]:
    """Return the memory of storages, in the order of addresses."""
    extents: list[_SleepingExtent] = []
    for name, storage in sorted(found, key=lambda each: each[1].data_ptr()):
        start, num_bytes = storage.data_ptr(), storage.nbytes()
        if not extents or start > extents[-1].stop:
            extents.append(_SleepingExtent(name, start, start))
        last = extents[-1]
        last.stop = max(last.stop, start + num_bytes)
        last.storages.append((storage, (start - last.start, (num_bytes,))))
    return extents


def _memory_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[_SleepingExtent]:
    """Return the memory of tensors, with all storages over it that tensors of Python have."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, tensor in named:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(torch_private.storage_id(tensor), (name, storage))
        elif tensor.numel():
            raise StateError("it is asleep already: leave the block of shardwise.asleep() that it is in")
    extents, devices = _extents_of(found.values()), {storage.device for _, storage in found.values()}
    for each in gc.get_objects():  # a section, a joined tensor, a window
        if type(each) not in _PLAIN or each.layout is not torch.strided or each.device not in devices:
            continue
        if num_bytes := (storage := each.untyped_storage()).nbytes():
            at = bisect.bisect_left(extents, storage.data_ptr() + num_bytes, key=attrgetter("start")) - 1
            if at >= 0 and extents[at].stop > storage.data_ptr():
                found.setdefault(torch_private.storage_id(each), (extents[at].name, storage))
    return _extents_of(found.values())


# ---- Memory of the host returns to the system page by page, and stays where it is.

_PAGE = mmap.PAGESIZE
_OF_THIS_PROCESS = ("/memfd:", "/dev/zero", "/dev/shm/")  # shared memory that no file outlives


_Pages = tuple[str, torch.Tensor, int]


def _pages_of(extents: Iterable[_SleepingExtent]) -> Iterator[_Pages]:
    """Yield pages that can leave, by the name of what is in them, with the advice of madvise(2) that takes them.

    The rest stays as it is: pages with something else in them, and what is mapped from a file, which the system can write back.
    """
    places = list[tuple[int, int, int]]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, access, *_, path = line.split(maxsplit=5)
        low, high = (int(each, 16) for each in extent.split("-"))
        if access[1] == "w" and (access[3] == "p" or path.startswith(_OF_THIS_PROCESS)):
            places.append((low, high, mmap.MADV_DONTNEED if access[3] == "p" else mmap.MADV_REMOVE))
    for each in extents:
        memory, first = each.bytes(), max(0, bisect.bisect(places, (each.start, each.stop)) - 1)
        for low, high, advice in islice(places, first, None):
            if low >= each.stop:
                break
            begin, stop = align(max(low, each.start), _PAGE), min(high, each.stop) // _PAGE * _PAGE
            if begin < stop:
                yield each.name, memory[begin - each.start : stop - each.start], advice


# ---- Where it goes.


class _Disk:
    """A file without a name, with checksums in memory.  ``is_host``: what sleeps are pages of the host's memory."""

    def __init__(self, folder: str | os.PathLike[str], is_host: bool) -> None:
        self._file, self._places = StateFile(Path(folder)), list[tuple[int, list[str]]]()
        self._buffer = None if is_host else buffer_of(BLOCK_BYTES)

    def _blocks(self, parts: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each block, and memory of the host for it: its own, or that of the buffer."""
        for block in [block for part in parts for block in part.split(BLOCK_BYTES)]:
            yield block, block if self._buffer is None else self._buffer[: align(len(block), _PAGE)]

    def save(self, parts: Sequence[torch.Tensor]) -> None:
        """Write ``parts``, bytes.  Raises: OSError."""
        for block, data in self._blocks(parts):
            data[: len(block)].copy_(block)  # nothing is copied to where it is
            begin = self._file.take(len(data))
            self._places.append((begin, self._file.write(begin, data.numpy().data)))

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts`` with what was saved.  Raises: OSError, also if it is not what was written."""
        for (block, data), (begin, sums) in zip(self._blocks(parts), self._places, strict=True):
            self._file.read(begin, data.numpy().data, sums)
            block.copy_(data[: len(block)])


class _Host:
    """Memory of the host, page-locked where the device can copy to that."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device_of(device), list[tuple[torch.Tensor, list[int]]]()

    def save(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy ``parts``, bytes."""
        for part in parts:
            memory = self._device.host_memory(len(part), torch.uint8, self._device.can_pin)
            self._copies.append((memory.copy_(part), digest_of(part).tolist()))

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts`` with what was saved.  Raises: OSError if it is not that."""
        for part, (memory, digest) in zip(parts, self._copies, strict=True):
            if digest_of(part.copy_(memory)).tolist() != digest:
                raise OSError(errno.EIO, "memory of the host has changed")


# ---- Sleep.


@dataclass(slots=True)
class Sleep:
    """What sleeps.

    Attributes:
        num_bytes: that have left memory; on CPU in whole pages.
        held: bytes that could not leave it, by the name of what they are of.
    """

    num_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict[str, int])


_WORDS = "its values are not in memory. Leave the block of shardwise.asleep() first"


def _refusal(what: str) -> Callable[..., NoReturn]:
    """Return a hook that raises."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StateError(f"{what} while it is asleep: {_WORDS}")

    return refuse


class _Sleeper:
    """Models and optimizers of this rank, and what becomes of their memory."""

    def __init__(self, things: Sequence[nn.Module | Optimizer], to: str | os.PathLike[str]) -> None:
        self._models = [each for each in things if isinstance(each, nn.Module)]
        self._optimizers = [each for each in things if isinstance(each, Optimizer)]
        if not things or len(self._models) + len(self._optimizers) < len(things):
            raise ArgumentTypeError(
                f"asleep takes models and optimizers, found {[type(each).__name__ for each in things]}: "
                "shardwise.asleep(model, optimizer, to=...)"
            )
        self._to, self.report = to, Sleep()
        self._units = list(dict.fromkeys(unit for model in self._models for unit in units_in(model)))
        self._engines = list(dict.fromkeys(each for unit in self._units if (each := engine_of(unit)) is not None))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the plain tensors of parameters, gradients, buffers and optimizer state, by the names of what they are of."""
        things: list[tuple[str, Any]] = []
        for model in self._models:
            things += [*model.named_parameters(), *model.named_buffers()]
        for unit in self._units:
            earlier = unit.earlier.held, unit.earlier.partial, unit.earlier.stashed
            things.append((f"gradients of {unit.name} that wait", earlier))
        for optimizer in self._optimizers:
            things.append(("parameters and options of an optimizer", optimizer.param_groups))
            things.append(("optimizer state", OptimizerState.of(optimizer).inner.state))
        for name, thing in things:
            yield from ((name, each) for tensor in tensors_in(thing) for each in _plain(tensor))

    def save(self) -> None:
        """Copy all memory to where it sleeps; nothing has left yet, but full parameters of units.

        Raises: StateError, or ConfigError, for what cannot sleep now; OSError.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer) and isinstance(optimizer_backend(optimizer), OffloadedStep):
                raise ConfigError("OptimizerOffload has its state elsewhere already: put the model alone to sleep")
        for each in self._engines:
            if each.is_in_step or each.reductions.deferred or each.manual.awaits_completion:
                raise StateError("a forward or backward has not ended, or gradients are deferred: sleep between steps")
        for unit in self._units:
            engine = engine_of(unit)
            if unit.held is HELD and engine is not None and engine.awaits_backward and unit.full_bytes:
                raise StateError(
                    f"the graph of a forward holds {format_bytes(unit.full_bytes)} of full parameters of {unit.name}; run its "
                    "backward first, or evaluate under torch.no_grad()"
                )
            unit.reshard()
        with withdrawn([unit.earlier.waiting for unit in self._units]):
            named = [*self._tensors()]
        moving = [device for device in {tensor.device for _, tensor in named} if device_of(device).has_streams]
        if self._to == "host" and not moving:
            raise ConfigError('to="host": all of it is in memory of the host already; name a folder of a disk')
        self._extents = _memory_of((name, each) for name, each in named if not moving or each.device in moving)
        # Memory of a device is freed, and allocated again; that of the host stays in its place.
        self._moves = bool(moving)
        self._pages = [] if moving else [*_pages_of(self._extents)]
        self._store = _Host(moving[0]) if self._to == "host" else _Disk(self._to, not moving)
        parts = [each.bytes() for each in self._extents] if moving else [each for _, each, _ in self._pages]
        self._store.save(parts)
        self.report.num_bytes = sum(map(len, parts))

    def leave(self) -> None:
        """Give the memory up; from now on every use of it raises."""
        for extent in self._extents:
            for storage, _ in extent.storages:
                extent.away.append(torch.empty(0, dtype=torch.uint8, device=storage.device).untyped_storage())
                torch_private.refuse_reads(extent.away[-1], f"this tensor is asleep: {_WORDS}")
                torch_private.swap_storage(storage, extent.away[-1])
        for engine in self._engines:
            engine.comm_ctx.pool.trim()
            for link in filter(None, engine.comm_ctx.pass_tracker.known_links.values()):
                link.rest()
        for unit in self._units:
            unit.reduction.layouts.clear()  # with the memory of small gradients
        library = ctypes.CDLL(None)
        for name, memory, advice in self._pages:
            if library.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), advice):
                self.report.held[name] = self.report.held.get(name, 0) + len(memory)
                self.report.num_bytes -= len(memory)
        for extent in self._extents if self._moves else ():
            extent.away.clear()  # the last references to memory that is in no other place
        if self._moves and torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        if trim := getattr(library, "malloc_trim", None):
            trim(0)

    def wake(self) -> None:
        """Bring all memory back.  Raises: StateError if it cannot be read."""
        try:
            parts, sizes = [each for _, each, _ in self._pages], [each.stop - each.start for each in self._extents]
            if self._moves:
                device = self._extents[0].storages[0][0].device
                parts = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            self._store.load(parts)
            for extent, flat in zip(self._extents, parts, strict=True) if self._moves else ():
                places = [place for _, place in extent.storages]
                extent.away = [each.untyped_storage() for each in suballocate_all(flat, places)]
        except (OSError, RuntimeError) as why:
            text = f"asleep: this rank cannot wake: {getattr(why, 'strerror', None) or why}. Resume from a checkpoint"
            publish_failure(text)  # other ranks are about to wait for this one in a collective
            raise StateError(text) from why
        for extent in self._extents:
            for (storage, _), away in zip(extent.storages, extent.away, strict=True):
                torch_private.swap_storage(storage, away)
        for bucket in [bucket for unit in self._units for bucket in unit.main_buckets if self._moves]:
            bucket.has_moved()

    @contextmanager
    def refusing(self) -> Generator[None, None, None]:
        """Refuse forwards, backwards, optimizer steps and state dicts in the body."""
        modules = [module for model in self._models for module in model.modules()]
        own = {id(param) for model in self._models for param in model.parameters()}
        own |= {id(param) for each in self._optimizers for group in each.param_groups for param in group["params"]}

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
                _refusal(f"{type(optimizer).__name__}.step() was called")()

        hooks = [register_optimizer_step_pre_hook(before_step)]
        for each in (*modules, *self._optimizers):
            hooks.append(each.register_state_dict_pre_hook(_refusal("state_dict() was called")))
        for each in modules:
            refusal = _refusal(f"the forward of {type(each).__name__} was called")
            hooks.append(each.register_forward_pre_hook(refusal, prepend=True))
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            for engine in self._engines:  # what every forward and backward begins with
                stack.callback(setattr, engine, "refuse", None)
                engine.refuse = _refusal("a forward or backward began")
            yield


@contextmanager
def asleep(*things: nn.Module | Optimizer, to: str | os.PathLike[str]) -> Generator[Sleep, None, None]:
    """Let models and optimizers leave the memory of their device for the body, and bring them back as they were.

    Parameters, gradients, buffers, optimizer state and pools go to the host, or to a file without a name in a folder.
    Tensors stay the same objects, and their storages too: optimizers, an EMA, a state dict taken before see the values again.
    Meanwhile forwards, backwards, steps, state dicts and saves raise StateError.  A numpy array over a parameter on CPU is
    not refused: it reads zeros, and what is written to it is lost.  Collective, between steps.

    Args:
        things: models and optimizers.  A model sleeps with its gradients, an optimizer with its parameters.
        to: "host", from an accelerator; or a folder of a local disk, also for CPU ranks.

    Yields: the bytes that sleep, and by name what could not leave memory.

    Raises: StateError on all ranks, with nothing changed, if a rank cannot sleep (no space, a step that has not ended);
        StateError if what is read back is not what was written.

    Example:
        >>> with shardwise.asleep(model, optimizer, to="/local"):  # doctest: +SKIP
        ...     generate()
    """
    sleeper, wrong = _Sleeper(things, to), ""
    try:
        sleeper.save()
    except (ShardwiseError, OSError, RuntimeError) as error:  # of torch: no memory
        wrong = getattr(error, "strerror", None) or str(error) or type(error).__name__
    for rank, text in enumerate(open_store_gather(None, "asleep").call(wrong)):
        if text:
            raise StateError(f"asleep: rank {rank} cannot sleep, so that no rank does: {text}")
    with sleeper.refusing():
        sleeper.leave()
        try:
            yield sleeper.report
        finally:
            sleeper.wake()
