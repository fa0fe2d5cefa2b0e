"""Process groups whose connections are closed on purpose, so that nobody waits in them, and made anew under the same object.

Whoever holds the group (a mesh, torch's DistributedDataParallel, user code) goes on with it: what lies under it is exchanged.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm.sync import all_have_come
from shardwise.comm.watched import forget_closed
from shardwise.errors import StateError

_TAG = 0x5AFF  # of messages that nobody sends
_FIRST_KIND, _LAST_KIND = 8, 255  # numbers of backends that torch does not use, in one byte
_CPU = torch.device("cpu")

_num_mended: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def groups_within(members: Collection[int]) -> list[dist.ProcessGroup]:
    """Return this rank's gloo groups of several ranks that are all among global ranks ``members``; the same order on each."""
    found = [
        group
        for group in torch_private.all_groups()
        if torch_private.is_gloo(group)
        and group.size() > 1
        and set(dist.get_process_group_ranks(group)) <= set(members)
    ]
    return sorted(found, key=lambda group: group.group_name)


def break_off(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in ``group``: collectives that wait for it, here and on other ranks, fail at once.

    Who fails breaks off, too: so all learn it that wait for a rank which waits for this one.  Cost: a few milliseconds.
    """
    backend = torch_private.backend_of(group, _CPU)
    for step in range(1, group.size()):
        # Of a message that does not come gloo closes all pairs that are open; asked of each, since one may be closed before.
        with contextlib.suppress(RuntimeError):
            backend.recv([torch.empty(1, device="cpu")], (group.rank() + step) % group.size(), _TAG).wait(
                timedelta(milliseconds=1)
            )


def break_off_all(members: Collection[int]) -> None:
    """Close this rank's connections in all gloo groups that are within global ranks ``members``."""
    for group in groups_within(members) if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):
            break_off(group)


def mend(group: dist.ProcessGroup) -> None:
    """Connect the ranks of ``group`` anew.  Collective over them; a few milliseconds, and two threads until it is destroyed.

    Raises: StateError after 248 times.
    """
    number = _num_mended.get(group, 0)
    if _FIRST_KIND + number > _LAST_KIND:
        raise StateError(
            f"group {group.group_name} was reconnected {number} times; start the job again from a checkpoint"
        )
    _num_mended[group] = number + 1
    torch_private.replace_gloo(group, f"shardwise/mended/{number}", _FIRST_KIND + number)
    forget_closed(group)
    all_have_come(group)  # one that breaks off at once would take those along that are still connecting
