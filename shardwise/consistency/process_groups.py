"""Process groups and meshes that are created on demand; only the ranks of a new group wait for each other."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DeviceMesh

from shardwise import torch_private
from shardwise.consistency.liveness import ending_what_closes, own_sockets
from shardwise.consistency.store import refuse_deadlock
from shardwise.errors import StateError, TransportError
from shardwise.formatting import format_ranks
from shardwise.observe import EVERYBODY, note
from shardwise.torch_private import is_gloo, timeout_s_of

# ---- Connections are checked for their user: a process of another user of this host must not take the place of a rank.
# gloo accepts any connection that sends the number of a pair of ranks, which is easy to guess, and every user can read
# its port in the kernel's table of connections. The same table shows the user at the other end of each connection
# within this host.

_LISTENS = "0A"  # a state in the kernel's table
_MAPPED = "0000000000000000FFFF0000"  # precedes an IPv4 address in the IPv6 table

# The sockets of this process at the last check that passed: while they are the same, the table is not read again.
_checked: set[str] = set()


class _Row(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: str


def check_peers(before: Collection[str] = ()) -> None:
    """Raise if another user of this host is connected to a port of this process; call it before anything is sent.

    Only listeners on one address are checked, as gloo's are, not servers that listen on every interface.  Nothing is
    checked where the kernel's table cannot be read.  Cost: lists the open files; reads the table if there are new sockets.
    ``before``: sockets before a group was made through a store that others can write to: of newer ones also the other ends
    that this process has connected to are checked.
    Raises: TransportError naming the port and the user.
    """
    own = set(own_sockets())
    if own <= _checked:
        return
    rows = [row for name in ("tcp", "tcp6") for row in _table(name)]
    listening = {row.local for row in rows if row.state == _LISTENS and row.inode in own}
    users = {(row.local, row.remote): row.uid for row in rows if row.inode != "0"}  # "0": that end is closed
    for row in rows:
        uid = users.get((row.remote, row.local), os.geteuid())
        is_checked = row.local in listening or (before and row.inode not in before)
        if row.inode in own and row.state != _LISTENS and is_checked and uid != os.geteuid():
            raise TransportError(
                f"user {uid} of this host is connected to port {int(row.local[-4:], 16)} of this rank, expected only processes "
                f"of user {os.geteuid()}: it may have taken the place of another rank, so nothing is sent. End that "
                "process, then start the job again"
            )
    _checked.clear()
    _checked.update(own)


def _table(name: str) -> Iterator[_Row]:
    with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as lines:
        next(lines, None)
        for line in lines:
            fields = line.split()
            local, remote = fields[1].removeprefix(_MAPPED), fields[2].removeprefix(_MAPPED)
            yield _Row(local, remote, fields[3], int(fields[7]), fields[9])


# ---- Waits for gloo transfers that end when a connection breaks, also where gloo's own waits do not.
# When a connection breaks, gloo fails all messages in its queues. A message that it is just handing to the socket, or
# of which a part has arrived, is in no queue: a wait for a collective that uses it lasts until the timeout of the group.
# So a long wait is split into short ones, and checks between them whether the group's connections still exist.

FIRST = timedelta(seconds=0.5)  # before the first check
_MOST_S = 2.0  # seconds between two checks
_SETTLE_S = 0.25  # for messages that arrived before the connection broke
_MOST_PROBED = 64
_TAG = 0x5AFE  # of messages that no rank sends

# When each group was last probed: a receive that is never answered costs some bytes on both sides, which would add up
# over months.
_probed: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_PROBE_AGAIN_S = 5.0
_num_probes: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

# Groups of this process with a connection that was found closed; only a reconnect opens it again.
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def closed_to(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of ``group`` to which no gloo connection of this process leads any more.

    It probes by a receive that no rank answers: this fails at once without a connection, and otherwise costs both ranks
    some bytes. Within five seconds it does not probe again, and returns nothing.
    """
    found = _closed.get(group)
    last = _probed.get(group)
    if found is None and is_gloo(group) and (last is None or time.monotonic() - last > _PROBE_AGAIN_S):
        _probed[group] = time.monotonic()
        found = [rank for rank in range(group.size()) if rank != group.rank()][:_MOST_PROBED]
        found = [rank for rank in found if not _leads_to(group, rank)]
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # a destroyed group has no global ranks
            members = dist.get_process_group_ranks(group)
            found = [members[rank] for rank in found]
        if found:
            _closed[group] = found
    return found or []


def await_collective(
    work: dist.Work | None, group: dist.ProcessGroup | None, check: Callable[[], None] = refuse_deadlock
) -> None:
    """Wait for a collective of ``group`` (None: of all ranks) that was launched with ``async_op=True``.

    ``check``: is called every few seconds of a long wait over gloo; it may raise.

    Raises: RuntimeError, the backend's own, or one that names the ranks whose connection has broken meanwhile.
    """
    group = dist.group.WORLD if group is None else group
    if work is None:
        return
    if group is None or not is_gloo(group):
        work.wait()
        return
    try:
        work.wait(FIRST)
    except RuntimeError:
        outlast(work, group, check)


def outlast(work: dist.Work, group: dist.ProcessGroup, check: Callable[[], None] = refuse_deadlock) -> None:
    """Continue a wait for a collective of ``group`` after a wait raised, either by its timeout or as the collective failed.

    Raises: as :func:`await_collective`.
    """
    pause_s = FIRST.total_seconds()
    while not work.is_completed():
        check()
        closed = closed_to(group)
        with contextlib.suppress(RuntimeError):  # a failure of the collective is raised below
            work.wait(timedelta(seconds=_SETTLE_S if closed else pause_s))
        if closed and not work.is_completed():
            raise RuntimeError(f"the connection to {format_ranks(closed)} was closed in the middle of a transfer")
        pause_s = min(2 * pause_s, _MOST_S)
    refuse_deadlock()
    work.wait()


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this process has begun in each of its gloo groups, by name; messages count too."""
    groups = [group for group in torch_private.all_groups() if is_gloo(group) and group.size() > 1]
    return {group.group_name: torch_private.sequence_of(group) - _num_probes.get(group, 0) for group in groups}


def _leads_to(group: dist.ProcessGroup, rank: int) -> bool:
    _num_probes[group] = _num_probes.get(group, 0) + 1
    try:
        group.recv([torch.empty(1, device="cpu")], rank, _TAG)
    except RuntimeError:
        return False
    return True


# ---- The ranks of a group wait for each other.


def all_have_come(group: dist.ProcessGroup) -> None:
    """Return once all ranks of ``group`` have called this: one all-reduce of one number."""
    if group.size() > 1:
        await_collective(
            dist.all_reduce(torch.ones((), dtype=torch.int32, device="cpu"), group=group, async_op=True), group
        )


def gather_rows(row: torch.Tensor) -> list[list[float]]:
    """Return the 1-D ``row`` of every rank of the default process group, in rank order."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [each.tolist() for each in rows]


# ---- Abort and reconnect: close a group's connections so that no rank waits in it, and connect it again under the same
# object.
# References to the group (in a mesh, torch's DistributedDataParallel, user code) stay valid: the backend under it is
# replaced.

_RECONNECT_TAG = 0x5AFF  # of messages that no rank sends
_FIRST_KIND, _LAST_KIND = 8, 255  # numbers of backends that torch does not use, in one byte
_CPU = torch.device("cpu")

_num_reconnected: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def largest_words(words: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace each of ``words`` by the largest of all ranks of ``group``, a gloo group."""
    work = dist.all_reduce(words, dist.ReduceOp.MAX, group=group, async_op=True)
    note(EVERYBODY)
    await_collective(work, group)
    note("went on")


def broadcast(data: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Replace ``data`` by that of rank ``source`` of ``group``, a gloo group."""
    await_collective(dist.broadcast(data, group=group, group_src=source, async_op=True), group)


def begin_exchange(
    received: torch.Tensor, sent: torch.Tensor, takes: list[int], sends: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Send ``sends[rank]`` elements to each rank of ``group``, in order, and receive ``takes[rank]``."""
    return cast(dist.Work, dist.all_to_all_single(received, sent, takes, sends, group, async_op=True))


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the picklable objects of all ranks of ``group``."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def groups_within(members: Collection[int]) -> list[dist.ProcessGroup]:
    """Return this rank's gloo groups of several ranks that are all in ``members`` (global), in the same order on each rank."""
    found = [
        group
        for group in torch_private.all_groups()
        if torch_private.is_gloo(group)
        and group.size() > 1
        and set(dist.get_process_group_ranks(group)) <= set(members)
    ]
    return sorted(found, key=lambda group: group.group_name)


def abort_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in ``group``: collectives that wait for it, here and on other ranks, fail at once.

    Ranks that fail abort too, so that all ranks notice that wait, directly or not, for this one.  Cost: a few
    milliseconds.
    """
    backend = torch_private.backend_of(group, _CPU)
    with ending_what_closes():
        for step in range(1, group.size()):
            # gloo closes all open pairs when a message times out; one receive per peer, since some pairs may be closed
            # already.
            peer = (group.rank() + step) % group.size()
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1, device="cpu")], peer, _RECONNECT_TAG).wait(timedelta(milliseconds=1))


def abort_all_connections(members: Collection[int]) -> None:
    """Close this rank's connections in all gloo groups within global ranks ``members``."""
    for group in groups_within(members) if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):
            abort_connections(group)


def reconnect_group(group: dist.ProcessGroup) -> None:
    """Connect the ranks of ``group`` again.  Collective; takes a few milliseconds, and two threads until it is destroyed.

    Raises: StateError after 248 times.
    """
    number = _num_reconnected.get(group, 0)
    if _FIRST_KIND + number > _LAST_KIND:
        raise StateError(
            f"group {group.group_name} was reconnected {number} times; start the job again from a checkpoint"
        )
    _num_reconnected[group] = number + 1
    torch_private.replace_gloo(group, f"shardwise/mended/{number}", _FIRST_KIND + number)
    _closed.pop(group, None)
    _probed.pop(group, None)
    all_have_come(group)  # a rank that aborts at once would break others that are still connecting


_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group of global ``ranks``, this one included; only these ranks wait.

    ``backend``: its backend; None: that of all ranks.
    """
    world = dist.group.WORLD
    limit = None if world is None else timedelta(seconds=timeout_s_of(world))
    group = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    check_peers()
    return group


def patience_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return how long ranks of ``group`` wait for each other: its timeout, or that of the job if it was created without one.

    A gloo group without a timeout (those of ``init_device_mesh``) has torch's default of half an hour, whatever the
    job's; it gets the job's from here on.
    """
    seconds, world = timeout_s_of(group, device), dist.group.WORLD
    if world is None or group is world or not is_gloo(group) or seconds != default_pg_timeout.total_seconds():
        return seconds
    limit_s = timeout_s_of(world, device)
    if limit_s < seconds:
        group.set_timeout(timedelta(seconds=limit_s))
    return min(limit_s, seconds)


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank only, created once per default process group."""
    world = dist.group.WORLD
    assert world is not None
    known = _alone.setdefault(world, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group_of([dist.get_rank()]), device_type)
    return known[device_type]
