"""Every operation of torch as the fake accelerator sees it: which bytes it reads and writes, on which lane.

The operations compute on the host, with real values, and are said to happen on the lane that work goes to.  An operation
whose memory is all the host's is the host's own, and has happened when it returns.  Collectives carry nothing; they are
taken to read and write their buffers on the lane that issues them, or, when they are issued asynchronously, on one of
their process group, as torch's NCCL group does it: whoever waits for such a work must do so by an event.

Simplified: operations of one process group on several lanes are not ordered by it (NCCL would launch one after the
other); an operation that reads device memory and answers on the host is known by its name, in ``_ANSWERS``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_accelerator.allocations import Access, Allocations, Block, Extent, Kind, owner_lane
from fake_accelerator.timeline import Timeline
from shardwise import torch_private
from shardwise.errors import StateError

# They touch no values, or make memory without writing to it.
_MAKE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_")
_SILENT = {*_MAKE, "_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh", "is_same_size"}
# The host waits for them, whatever it does with the answer.
_ANSWERS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "allclose"}
_EXCHANGE = "alltoall_base_"
# Of c10d: positions of what is read, of what is written.
_COLLECTIVES = {
    "_allgather_base_": ((1,), (0,)),
    "_reduce_scatter_base_": ((1,), (0,)),
    "allreduce_": ((0,), (0,)),
    "broadcast_": ((0,), (0,)),
    "reduce_": ((0,), (0,)),
    _EXCHANGE: ((1,), (0,)),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as it was issued: ``group`` by name, ``numel`` elements of what is sent or changed."""

    group: str
    name: str
    numel: int
    dtype: torch.dtype
    lane: str


class OperationRecorder(TorchDispatchMode):
    """Tells a timeline and its allocations what every operation does.

    Attributes:
        collectives: those that were issued, in their order.
    """

    def __init__(self, timeline: Timeline, allocations: Allocations) -> None:
        super().__init__()
        self._timeline = timeline
        self._allocations = allocations
        self._is_apart = False
        self.collectives: list[Collective] = []

    @contextmanager
    def apart(self) -> Generator[None, None, None]:
        """Let nothing be recorded inside."""
        kept, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked, and tell of it."""
        kwargs = kwargs or {}
        if self._is_apart:
            return func(*args, **kwargs)
        with torch_private.without_torch_function():
            return self._record(func, types, args, kwargs)

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes here again
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            self._on_collective(name, args)
            return func(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        inputs = [*_tensors((args, list(kwargs.values())))]
        if name in _SILENT:
            result = func(*args, **kwargs)
            if name == "lift_fresh" and self._is_on_host:
                inputs = []  # torch.tensor() has made it, where memory may have been that nobody heard to be gone
            self._adopt_new(name, inputs, result)
            return result
        _check_memory(name, inputs)
        result = func(*args, **kwargs)
        self._on_operation(name, inputs, _written(func, args, kwargs), result)
        blocks = name == "copy_" and not _is_non_blocking(args, kwargs)
        self._host_waits(name, inputs, blocks)
        return result

    # ---- what operations do ----

    def _on_operation(self, name: str, inputs: list[torch.Tensor], changed: list[Any], result: Any) -> None:
        written = [*_tensors(changed)]
        ids = {id(tensor) for tensor in written}
        read = [tensor for tensor in inputs if id(tensor) not in ids]
        lane = self._lane_of(name, self._kinds(inputs), is_copy=name in ("copy_", "_to_copy"))
        new = self._adopt_new(name, inputs, result)
        self._touch(name, lane, read, [*written, *new])

    def _host_waits(self, name: str, inputs: list[torch.Tensor], blocks: bool) -> None:
        if name in _ANSWERS or name == "copy_":
            kinds = self._kinds(inputs)
            is_between = len(kinds) > 1 and (blocks or "pageable" in kinds)
            if "device" in kinds and (name in _ANSWERS or is_between):
                lane = self._timeline.current[-1]
                self._timeline.host_waits_for(lane, f"{name} while {self._timeline.label()}")

    def _kinds(self, tensors: list[torch.Tensor]) -> set[Kind]:
        return {self._known(tensor).kind for tensor in tensors if _has_bytes(tensor)}

    def _lane_of(self, name: str, kinds: set[Kind], is_copy: bool) -> int:
        lane = self._timeline.current[-1]
        if "device" in kinds and len(kinds) > 1 and not is_copy:
            self._allocations.refuse("wrong memory", f"{name} on a lane takes memory of the host too")
        return self._timeline.thread if kinds and "device" not in kinds else lane

    def _adopt_new(self, name: str, inputs: list[torch.Tensor], result: Any) -> list[torch.Tensor]:
        """Take the memory that an operation has made into the hands of the allocator; return the tensors on it."""
        known = {tensor.untyped_storage()._cdata for tensor in inputs}  # pyright: ignore
        kinds = self._kinds(inputs)
        kind: Kind = "device" if "device" in kinds or not (kinds or self._is_on_host) else "pageable"
        lane = owner_lane(kind, self._timeline.current[-1])
        found: list[torch.Tensor] = []
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in known or not storage.nbytes():  # pyright: ignore
                continue
            known.add(storage._cdata)  # pyright: ignore
            if name != "set_":
                self._allocations.adopt(storage, kind, lane, f"{name} while {self._timeline.label()}")
            found.append(tensor)
        return found

    def _on_collective(self, name: str, args: Any) -> None:
        if name not in _COLLECTIVES:
            raise StateError(
                f"the fake accelerator was given c10d::{name}; it knows what {sorted(_COLLECTIVES)} read and write"
            )
        reads, writes = _COLLECTIVES[name]
        read = [*_tensors([args[index] for index in reads])]
        written = [*_tensors([args[index] for index in writes])]
        current = self._timeline.current[-1]
        lane = current
        # Asynchronous ones are on a lane of the group that nothing here comes back from, but exchanges, which are awaited.
        if name != _EXCHANGE and not any(each is False for each in args):
            lane = self._timeline.new_lane(f"work of {name}")
            self._timeline.order(lane, self._timeline.record(current))
        sent = read[0] if read else written[0]
        where = self._timeline.names[lane]
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        self.collectives.append(Collective(group.group_name, name, sent.numel(), sent.dtype, where))
        self._touch(name, lane, read, written)

    # ---- memory ----

    def _touch(self, name: str, lane: int, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        at = self._timeline.begin(lane, name)
        what = f"{name} while {self._timeline.label()}"
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._allocations.access(self._known(tensor), Access(at, _extent(tensor), is_write, what))

    def _known(self, tensor: torch.Tensor) -> Block:
        found = self._allocations.block_at(tensor.data_ptr())
        kind: Kind = "pageable" if self._is_on_host else "device"
        return found or self._allocations.know(tensor.untyped_storage(), kind, self._timeline.current[0])

    @property
    def _is_on_host(self) -> bool:
        """True if a thread beside the user's is in no stream."""
        return self._timeline.current[-1] in self._timeline.threads


def _check_memory(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise StateError(
                f"{name} takes a tensor of shape {tuple(tensor.shape)} whose memory was given back; on an accelerator this "
                "reads what others have there now. Keep the memory until its last reader is done"
            )


def _has_bytes(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel() and tensor.untyped_storage().nbytes())


def _extent(tensor: torch.Tensor) -> Extent:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(start, start + (last + 1) * tensor.element_size())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        has_memory = cast(Any, type(value)).__torch_dispatch__ is cast(Any, torch.Tensor).__torch_dispatch__
        if has_memory and value.is_cpu:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in cast(Iterable[Any], value):
            yield from _tensors(each)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
