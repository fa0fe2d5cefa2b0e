"""``asleep``: a model and its optimizer leave the memory of the device for a while, and come back as the same objects."""

from __future__ import annotations

import bisect
import ctypes
import errno
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import torch_private
from shardwise.checkpoint.format import BLOCK_BYTES
from shardwise.collectives.streams import device_of, suballocate_all
from shardwise.consistency.agreement import open_store_gather
from shardwise.consistency.failure_report import publish_failure
from shardwise.errors import ArgumentTypeError, ConfigError, ShardwiseError, StateError
from shardwise.formatting import format_bytes
from shardwise.fsdp.attachment import units_in
from shardwise.fsdp.engine import engine_of
from shardwise.fsdp.unit import HELD, Gate, Unit
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.layout import align
from shardwise.offload.disk import StateFile, buffer_of
from shardwise.offload.optimizer import OffloadedStep
from shardwise.offload.staging import digest_of
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.zero.optimizer import OptimizerState

_PAGE = mmap.PAGESIZE
_OF_THIS_PROCESS = ("/memfd:", "/dev/zero", "/dev/shm/")  # shared memory that no file outlives
_REMOVE = getattr(mmap, "MADV_REMOVE", 9)

# ---- What there is: tensors by name, and their storages.


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in ``value``: a tensor of any class, or a container of them."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            for each in value.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
                yield from _tensors_in(name, getattr(value, each))
        elif isinstance(value, torch_private.ShardedTensor):
            yield from _tensors_in(name, [shard.tensor for shard in value.local_shards()])
        elif value.layout is torch.strided and not value.is_meta:
            yield name, value
    elif isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield from _tensors_in(f"{name}.{key}" if isinstance(key, str) else name, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(name, each)


def _of_parameter(name: str, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _tensors_in(name, param)
    yield from _tensors_in(f"the gradient of {name}", param.grad)


def _of_model(model: nn.Module, units: Iterable[Unit]) -> Iterator[tuple[str, torch.Tensor]]:
    in_files: set[int] = set()  # parameters that have left memory already
    for unit in units:
        for param in unit.params:
            if getattr(unit.settings.storage.offload, "folder", ""):
                in_files.add(id(param.sharded))
            else:
                yield from _of_parameter(param.fqn, param.sharded)
        earlier = [*unit.earlier.held.values(), *unit.earlier.partial.values(), *unit.earlier.stashed.values()]
        yield from _tensors_in(f"gradients of {unit.name} that wait", earlier)
    for name, param in model.named_parameters():
        if id(param) not in in_files:
            yield from _of_parameter(name, param)
    yield from _tensors_in("a buffer", dict(model.named_buffers()))


def _of_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield from _of_parameter("a parameter of the optimizer", param)
        yield from _tensors_in("an option of the optimizer", {k: v for k, v in group.items() if k != "params"})
    yield from _tensors_in("optimizer state", [*OptimizerState.of(optimizer).inner.state.values()])


@dataclass(slots=True, eq=False)
class _Sleeping:
    """One storage: ``name`` of a tensor in it, its bytes, and while asleep the storage that has its memory or its place."""

    name: str
    storage: torch.UntypedStorage
    start: int
    stop: int
    away: torch.UntypedStorage | None = None

    def bytes_from(self, start: int) -> torch.Tensor:
        """Return the memory from address ``start`` on."""
        storage = self.storage if self.away is None else self.away
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start - self.start :]  # pyright: ignore


def _extents_of(memory: Iterable[_Sleeping]) -> list[tuple[int, int]]:
    """Return where memory lies, (start, stop) without overlaps, in the order of addresses."""
    found: list[tuple[int, int]] = []
    for each in sorted(memory, key=lambda each: each.start):
        if found and each.start <= found[-1][1]:
            found[-1] = found[-1][0], max(each.stop, found[-1][1])
        else:
            found.append((each.start, each.stop))
    return found


def _memory_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[_Sleeping]:
    """Return the memory of tensors, in the order of addresses, and all storages over it that tensors of Python have."""
    found: dict[int, _Sleeping] = {}

    def add(name: str, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        start = storage.data_ptr()
        found.setdefault(torch_private.storage_id(tensor), _Sleeping(name, storage, start, start + storage.nbytes()))

    for name, tensor in named:
        if (storage := tensor.untyped_storage()).nbytes():
            add(name, tensor, storage)
    extents, devices = _extents_of(found.values()), {each.storage.device for each in found.values()}
    starts = [start for start, _ in extents]
    for each in gc.get_objects():
        if type(each) not in (torch.Tensor, nn.Parameter) or each.layout is not torch.strided:
            continue
        if each.device in devices and (num_bytes := (storage := each.untyped_storage()).nbytes()):
            at = bisect.bisect_left(starts, storage.data_ptr() + num_bytes) - 1
            if at >= 0 and extents[at][1] > storage.data_ptr():
                add("", each, storage)  # a section, a joined tensor, a window
    return sorted(found.values(), key=lambda each: (each.start, -each.stop))


# ---- Memory of the host, which is returned to the system page by page and stays where it is.


def _release(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the whole pages of ``extents``, in the order of addresses, to the system; return those that stay."""
    madvise, stay, at = ctypes.CDLL(None).madvise, list[tuple[int, int]](), 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    places = list[tuple[int, int, str, str]]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, access, *_, path = line.split(maxsplit=5)
        low, _, high = extent.partition("-")
        places.append((int(low, 16), int(high, 16), access, path))
    for start, end in extents:
        while at < len(places) and places[at][1] <= start:
            at += 1
        for first, last, access, path in islice(places, at, None):
            if first >= end:
                break
            begin, stop = align(max(first, start), _PAGE), min(last, end) // _PAGE * _PAGE
            is_shared = access[3] == "s"
            may_leave = access[1] == "w" and (not is_shared or path.startswith(_OF_THIS_PROCESS))
            advice = _REMOVE if is_shared else mmap.MADV_DONTNEED
            if begin < stop and (not may_leave or madvise(begin, stop - begin, advice)):
                stay.append((begin, stop))
    return stay


# ---- Where it goes.


class _Disk:
    """A file without a name, with checksums in memory, that is written and read through two buffers."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file, self._sums = StateFile(Path(folder)), list[list[str]]()

    def _blocks(self, parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield what blocks of the file hold."""
        block, free = list[torch.Tensor](), BLOCK_BYTES
        for part in parts:
            at = 0
            while at < part.numel():
                block.append(part[at : at + free])
                at, free = at + block[-1].numel(), free - block[-1].numel()
                if not free:
                    yield block
                    block, free = [], BLOCK_BYTES
        if block:
            yield block

    def save(self, parts: Sequence[torch.Tensor]) -> None:
        """Write ``parts``, bytes.  Raises: OSError, where there is no space before anything is written."""
        blocks = [*self._blocks(parts)]
        self._file.reserve(len(blocks) * BLOCK_BYTES)
        buffers = [buffer_of(BLOCK_BYTES) for _ in range(2)]
        with ThreadPoolExecutor(1) as thread:
            jobs: list[Future[list[str]]] = []
            for number, block in enumerate(blocks):
                if number > 1:
                    jobs[number - 2].result()
                buffer = buffers[number % 2]
                at = 0
                for part in block:
                    buffer[at : at + len(part)].copy_(part)
                    at += len(part)
                jobs.append(thread.submit(self._file.write, number * BLOCK_BYTES, buffer.numpy().data))
            self._sums = [job.result() for job in jobs]

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts`` with what was saved.  Raises: OSError, also if it is not what was written."""
        buffers = [buffer_of(BLOCK_BYTES) for _ in range(2)]
        with ThreadPoolExecutor(1) as thread:

            def read(number: int) -> Future[None]:
                data = buffers[number % 2].numpy().data
                return thread.submit(self._file.read, number * BLOCK_BYTES, data, self._sums[number])

            coming = read(0) if self._sums else None
            for number, block in enumerate(self._blocks(parts)):
                assert coming is not None
                coming.result()
                coming = read(number + 1) if number + 1 < len(self._sums) else None
                at, buffer = 0, buffers[number % 2]
                for part in block:
                    part.copy_(buffer[at : at + len(part)])
                    at += len(part)


class _Host:
    """Memory of the host, page-locked where the device can copy to that."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies, self._digests = device_of(device), list[torch.Tensor](), list[list[int]]()

    def save(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy ``parts``, bytes."""
        self._digests = [digest_of(part).tolist() for part in parts]
        for part in parts:
            memory = self._device.host_memory(part.numel(), torch.uint8, self._device.can_pin)
            self._copies.append(memory.copy_(part))

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts`` with what was saved.  Raises: OSError if it is not that."""
        for part, memory, digest in zip(parts, self._copies, self._digests, strict=True):
            part.copy_(memory)
            if digest_of(part).tolist() != digest:
                raise OSError(errno.EIO, "memory of the host has changed")


# ---- Sleep.


@dataclass(slots=True)
class Sleep:
    """What sleeps.

    Attributes:
        num_bytes: that have left memory.  held: what could not leave it, by name, in bytes.
    """

    num_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict[str, int])


_WORDS = "this tensor is asleep: leave the block of shardwise.asleep() first"
_asleep: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()


def _refuse(what: str) -> NoReturn:
    raise StateError(
        f"{what} while it is asleep: its values are not in memory. Leave the block of shardwise.asleep() first"
    )


class _AsleepGate(Gate):
    """What every forward and backward of an engine begins with."""

    def check(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("a forward or backward began")


class _Sleeper:
    """Models and optimizers of this rank, and what becomes of their memory."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], to: str | os.PathLike[str]
    ) -> None:
        self.models, self.optimizers, self._to, self.report = models, optimizers, to, Sleep()
        self._units = list(dict.fromkeys(unit for model in models for unit in units_in(model)))
        self._engines = list(dict.fromkeys(each for unit in self._units if (each := engine_of(unit)) is not None))
        self._memory: list[_Sleeping] = []
        self._moves = False  # memory of the device is freed and allocated again; that of the host stays in its place
        self._store: _Disk | _Host | None = None

    def check(self) -> None:
        """Raise StateError, or ConfigError, for what cannot sleep now; reshard units that are full between steps."""
        if any(each in _asleep for each in (*self.models, *self.optimizers)):
            raise StateError("it is asleep already: leave the block of shardwise.asleep() that it is in")
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer) and isinstance(optimizer_backend(optimizer), OffloadedStep):
                raise ConfigError("OptimizerOffload has its state elsewhere already: put the model alone to sleep")
        for each in self._engines:
            if each.is_in_step or each.reductions.deferred or each.manual.awaits_completion:
                raise StateError("a forward or backward has not ended, or gradients are deferred: sleep between steps")
        for unit in self._units:
            engine = engine_of(unit)
            if unit.held is HELD and engine is not None and engine.awaits_backward and unit.full_bytes:
                held = format_bytes(unit.full_bytes)
                raise StateError(
                    f"the graph of a forward holds {held} of full parameters of {unit.name}; run its backward first, or "
                    "evaluate under torch.no_grad()"
                )
            unit.reshard()

    def save(self) -> None:
        """Copy all memory to where it sleeps; nothing has left yet."""
        earlier = [unit.earlier.waiting for unit in self._units]
        with withdrawn(earlier):
            named = [each for model in self.models for each in _of_model(model, units_in(model))]
            named += [each for optimizer in self.optimizers for each in _of_optimizer(optimizer)]
        moving = [device for device in {tensor.device for _, tensor in named} if device_of(device).has_streams]
        if self._to == "host" and not moving:
            raise ConfigError('to="host": all of it is in memory of the host already; name a folder of a disk')
        self._moves = bool(moving)
        self._memory = _memory_of((name, tensor) for name, tensor in named if not moving or tensor.device in moving)
        self._store = _Host(moving[0]) if self._to == "host" else _Disk(self._to)
        self._store.save(self._parts())

    def _parts(self) -> list[torch.Tensor]:
        """Return all memory once, as bytes, in the order of addresses."""
        parts, end = list[torch.Tensor](), 0
        for each in self._memory:
            if each.stop > end:
                parts.append(each.bytes_from(max(each.start, end)))
                end = each.stop
        return parts

    def leave(self) -> None:
        """Give the memory up; from now on every use of it raises."""
        extents = _extents_of(self._memory)
        for each in self._memory:
            away = torch.empty(0, dtype=torch.uint8, device=each.storage.device).untyped_storage()
            torch_private.refuse_reads(away, _WORDS)
            torch_private.swap_storage(each.storage, away)
            each.away = away
        self.report.num_bytes = sum(stop - start for start, stop in extents)
        idle: list[_Sleeping] = []
        for engine in self._engines:
            for link in filter(None, engine.comm_ctx.pass_tracker.known_links.values()):
                link.rest()
            pool = engine.comm_ctx.pool
            for buffer in [each for free in pool.free.values() for each in free if pool.keeps]:
                start = buffer.storage.data_ptr()
                idle.append(_Sleeping("", buffer.storage, start, start + buffer.size))
        for unit in self._units:
            unit.reduction.layouts.clear()  # with the memory of small gradients
        if self._moves:
            for each in self._memory:
                each.away = None  # the last reference to memory that is in no other place
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            return
        _release(_extents_of(idle))
        for begin, stop in _release(extents):
            name = next(each.name for each in self._memory if each.start < stop and each.stop > begin)
            self.report.held[name] = self.report.held.get(name, 0) + stop - begin
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    def wake(self) -> None:
        """Bring all memory back.  Raises: StateError if it cannot be read."""
        assert self._store is not None
        extents = _extents_of(self._memory)
        try:
            if not self._moves:
                self._store.load(self._parts())
            else:
                device = self._memory[0].storage.device
                flats = [torch.empty(stop - start, dtype=torch.uint8, device=device) for start, stop in extents]
                self._store.load(flats)
                starts = [start for start, _ in extents]
                for each in self._memory:
                    at = bisect.bisect_right(starts, each.start) - 1
                    place = each.start - starts[at], (each.stop - each.start,)
                    each.away = suballocate_all(flats[at], [place])[0].untyped_storage()
        except (OSError, RuntimeError) as error:
            text = (
                f"asleep: this rank cannot wake: {getattr(error, 'strerror', None) or error}. Resume from a checkpoint"
            )
            publish_failure(text)  # other ranks are about to wait for this one in a collective
            raise StateError(text) from error
        for each in self._memory:
            assert each.away is not None
            torch_private.swap_storage(each.storage, each.away)
            each.away = None
        for unit in self._units if self._moves else ():
            for bucket in unit.main_buckets:
                bucket.has_moved()

    @contextmanager
    def refusing(self) -> Generator[None, None, None]:
        """Refuse forwards, backwards, optimizer steps and state dicts in the body."""
        own = {id(param) for model in self.models for param in model.parameters()}
        own |= {id(param.sharded) for unit in self._units for param in unit.params}

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer in self.optimizers or any(
                id(each) in own for group in optimizer.param_groups for each in group["params"]
            ):
                _refuse(f"{type(optimizer).__name__}.step() was called")

        def refuse(what: str) -> Callable[..., NoReturn]:
            return lambda *_, **__: _refuse(what)

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(before_step).remove)
            for module in [each for model in self.models for each in model.modules()]:
                forward = module.register_forward_pre_hook(
                    refuse(f"the forward of {type(module).__name__} was called"), prepend=True
                )
                stack.callback(forward.remove)
                stack.callback(module.register_state_dict_pre_hook(refuse("state_dict() was called")).remove)
            for optimizer in self.optimizers:
                stack.callback(optimizer.register_state_dict_pre_hook(refuse("state_dict() was called")).remove)
            for engine in self._engines:
                stack.callback(setattr, engine, "gate", engine.gate)
                engine.gate = _AsleepGate(())
            _asleep.update((*self.models, *self.optimizers))
            try:
                yield
            finally:
                for each in (*self.models, *self.optimizers):
                    _asleep.discard(each)


def _checked(things: Sequence[Any]) -> tuple[list[nn.Module], list[Optimizer]]:
    models = [each for each in things if isinstance(each, nn.Module)]
    optimizers = [each for each in things if isinstance(each, Optimizer)]
    if not things or len(models) + len(optimizers) < len(things):
        raise ArgumentTypeError(
            f"asleep takes models and optimizers, found {[type(each).__name__ for each in things]}: "
            "shardwise.asleep(model, optimizer, to=...)"
        )
    return models, optimizers


@contextmanager
def asleep(*things: nn.Module | Optimizer, to: str | os.PathLike[str]) -> Generator[Sleep, None, None]:
    """Let models and optimizers leave the memory of their device for the body, and bring them back as they were.

    Parameters, gradients, buffers, optimizer state and pools go to the host, or to a file without a name in a folder.
    Tensors stay the same objects, and their storages too: optimizers, an EMA, a state dict taken before see the values again.
    Meanwhile forwards, backwards, steps, state dicts and saves raise StateError.  Collective, between steps.

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
    sleeper, wrong = _Sleeper(*_checked(things), to), ""
    try:
        sleeper.check()
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
