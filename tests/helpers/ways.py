"""Every way on which ranks of a group exchange buckets, each behind the communicator that units talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from helpers.ends import Ends, Shapes
from helpers.fake_communicator import FakeCommunicator
from helpers.inside import parts_from
from shardwise.collectives.c10d import GroupCommunicator, all_gather_single, reduce_scatter_single
from shardwise.collectives.local_peers import (
    HEADER_BYTES,
    HostGroup,
    meet,
)
from shardwise.collectives.routes import Link, PassTracker
from shardwise.collectives.shared_memory import ExchangeLink, HostLink, outbox_bytes, sums_bytes
from shardwise.collectives.streams import BufferPool, SideStream, device_of

SLOT_BYTES = 4096
SUM_SLOT_BYTES = 1024
SEGMENT_BYTES = HEADER_BYTES + outbox_bytes(SLOT_BYTES) + sums_bytes(SUM_SLOT_BYTES)
CPU = torch.device("cpu")


@dataclass
class Way:
    """A communicator of ``group`` whose collectives take one way; ``link`` None: the backend's own."""

    group: dist.ProcessGroup
    pool: BufferPool
    pass_tracker: PassTracker
    comm: GroupCommunicator
    link: Link | None
    publish_sections: Callable[[Sequence[Ends]], None]

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def ends(self, *bases: float, shapes: Shapes, full_dtype: torch.dtype = torch.float32) -> list[Ends]:
        """Return ends of all-gathers, known to the peers: outside of spans."""
        made = [
            Ends(
                self,
                base,
                shapes,
                full_dtype=full_dtype,
                number=number,
                shares=isinstance(self.link, HostLink),
            )
            for number, base in enumerate(bases)
        ]
        self.publish_sections(made)
        return made

    @contextmanager
    def in_pass(self, kind: str = "forward") -> Iterator[GroupCommunicator]:
        """Return the communicator in a span, which ends as the body does: closed, or left by an exception."""
        self.pass_tracker.begin(kind)  # type: ignore[arg-type]
        try:
            yield self.comm
        except BaseException:
            self.pass_tracker.abort()
            raise
        self.pass_tracker.end()


class Custom:
    """A user's collectives, as torch's ``set_custom_all_gather`` and its like take them."""

    def __init__(self, collective: Callable[..., dist.Work | None]) -> None:
        self.collective = collective

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *arguments: object, async_op: bool = False) -> dist.Work | None:
        assert async_op
        return self.collective(*arguments)


def _packed(way: Way) -> Link | None:
    return None


def _fake(way: Way) -> Link | None:
    way.comm = FakeCommunicator(way.group)
    return None


def _custom(way: Way) -> Link | None:
    assert isinstance(way.comm, GroupCommunicator)
    way.comm.custom.all_gather = Custom(all_gather_single)
    way.comm.custom.reduce_scatter = Custom(reduce_scatter_single)
    return None


def _exchange(way: Way) -> Link | None:
    return ExchangeLink(way.group, way.pool)


def _shared_memory(way: Way) -> Link | None:
    host = meet(way.group, "auto", SEGMENT_BYTES, "contract")
    assert isinstance(host, HostGroup), "ranks of one host share memory"
    link = HostLink(host, SLOT_BYTES, 20.0, SUM_SLOT_BYTES)

    def publish_sections(ends: Sequence[Ends]) -> None:
        link.sections.publish([each.arena for each in ends if each.arena is not None])

    way.publish_sections = publish_sections
    return link


WAYS = {
    "fake": _fake,
    "packed": _packed,
    "custom": _custom,
    "all-to-all": _exchange,
    "shared memory": _shared_memory,
}
LINKS = ("all-to-all", "shared memory")


@contextmanager
def way_over(name: str, group: dist.ProcessGroup | None = None) -> Iterator[Way]:
    """Return the way ``name``, on which tensors of ten elements travel like large ones."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    pool, pass_tracker = BufferPool(CPU), PassTracker()
    comm = GroupCommunicator(group, SideStream(device_of(CPU), "gather"), pool, pass_tracker)
    way = Way(group, pool, pass_tracker, comm, None, lambda _: None)
    with parts_from(10):
        way.link = WAYS[name](way)
        pass_tracker.register(group, lambda: way.link)
        yield way
        dist.barrier(group)  # nobody takes memory away that others read
