"""Ranks that a launcher ends and starts again, all together, when one is lost: torchrun, Ray Train.

Its rendezvous decides who is there; each start is a generation.  The state outlives the ranks in the keepers of their hosts.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from shardwise.consistency.process_groups import check_peers, gather_objects, group_of, host_id, own_sockets
from shardwise.consistency.store import wait_until
from shardwise.elastic.keeper import Keeper
from shardwise.elastic.membership import Generation, backend
from shardwise.elastic.memory import look
from shardwise.errors import ConfigError, StateError, TransportError
from shardwise.loop.launch import end_with_parent
from shardwise.one_host import read_proc
from shardwise.torch_private import is_gloo

_MEET_S = 600.0  # for all ranks of a start to come: imports may be slow; torchrun waits as long for hosts
_PATIENCE_S = 5.0  # for the agent to end this process after a peer was lost: then no traceback hides the first failure
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each start gets a new store, on its own first host
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # torchrun alone sets it
_num_runs = itertools.count()  # of this process: each has a keeper of its own, which restarted ranks find by its number


class RestartedRanks:
    """This process, in the only generation that it is a rank of: in place of a :class:`Process`."""

    def __init__(self) -> None:
        self.timeout_s = default_pg_timeout.total_seconds()
        self._begin_s = time.monotonic()
        self._is_torchrun = _RESTARTS in os.environ
        self._has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._is_torchrun:
            if self._has_agent_store and os.environ["GROUP_WORLD_SIZE"] != "1":
                raise ConfigError(
                    "elastic: torchrun's agents share a store, and keep its address when the host that has it is lost or its "
                    f"number changes: ranks would wait for each other in vain. On every host: export {_NO_SHARING}"
                )
            end_with_parent()  # a host whose agent is lost has no part in what the others do next
            if os.environ[_RESTARTS] == "0" and os.environ["RANK"] == "0":
                print("shardwise: torchrun --max-restarts is 0: a lost rank ends the run", file=sys.stderr)
        agent = _agent() if self._is_torchrun else os.getppid()
        try:
            self._keeper = Keeper(agent, f"{'' if self._is_torchrun else _ray_job()}/{next(_num_runs)}")
        except OSError as error:
            raise StateError(
                f"elastic: the keeper of this host, which holds the state between two starts, does not answer: {error}. It "
                "needs Linux, and /proc; see whether it runs with: ps -ef | grep keeper.py"
            ) from error
        self.fds = self._keeper.fds
        self.newest = Generation(look(self.fds)[0], (), 0, "")

    @staticmethod
    def are_here() -> bool:
        """Return True if this process was started by such a launcher."""
        return _RESTARTS in os.environ or "ray.train" in sys.modules

    def join(self, num_used: Callable[[int], int]) -> Generation:
        """Do as :class:`Process` does.  Raises: ConfigError if ranks are to wait that have a group.  SystemExit in these."""
        if dist.is_initialized():
            check_peers()
            num_started = dist.get_world_size()
        else:
            num_started = self._make_group(num_used)
        world = cast(dist.ProcessGroup, dist.group.WORLD)
        size = world.size()
        if num_used(size) < size:
            raise ConfigError(
                f"elastic: num_microbatches is not divisible by {size} ranks, and a default process group has them all. Leave "
                f"init_process_group out: then {num_used(size)} take part, and the others wait"
            )
        group = world if is_gloo(world) else group_of(range(size), "gloo")
        found = gather_objects([f"{host_id()}{self._keeper.name}", self.newest.number], group)
        hosts, number = tuple(name for name, _ in found), 1 + max(each for _, each in found)
        members, cause = tuple(range(num_started)), "all ranks were started again"
        self.newest = Generation(number, members, number, cause, hosts, self._begin_s)
        return self.newest

    def _make_group(self, num_used: Callable[[int], int]) -> int:
        """Make the default group; return how many processes there are."""
        limit = timedelta(seconds=_MEET_S)
        try:
            found, rank, world = next(rendezvous("env://", timeout=limit))
        except dist.DistError as error:
            raise TransportError(
                f"elastic: nothing answers at MASTER_ADDR {os.environ.get('MASTER_ADDR')}, MASTER_PORT "
                f"{os.environ.get('MASTER_PORT')}, in {_MEET_S:g} s. See whether hosts reach each other there, and start again"
            ) from error
        size, before = num_used(world), own_sockets()
        # One agent keeps its store from start to start, with all keys; several count starts separately.
        start = os.environ["TORCHELASTIC_RESTART_COUNT"] if self._has_agent_store else ""
        store = dist.PrefixStore(f"shardwise/elastic/{start}", found)
        if rank >= size:
            # The store ends with the first rank, or all are on this host.  What it has, any user may have written.
            with suppress(dist.DistError):
                wait_until(lambda: store.num_keys() and look(self.fds)[1], pauses_s=(0.5, 0.5))
            raise SystemExit(0)
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=limit)
        check_peers(before)
        return world

    def leave(self) -> None:
        """Do nothing: there is no next generation in this process."""

    def outlives(self, error: BaseException) -> bool:
        """Return False: the launcher ends this process if a rank is lost.  It is given the time to do so."""
        if isinstance(error, RuntimeError | OSError):
            time.sleep(_PATIENCE_S)
        return False

    def finish(self) -> None:
        """End the keeper if its launcher does not end with this job."""
        if not self._is_torchrun:
            self._keeper.finish()


def _agent() -> int:
    """Return the agent of torchrun.  Raises: StateError if it is gone.

    torchrun starts a session for each rank, which a script that starts the rank shares with it.
    """
    fields = read_proc(f"{os.getsid(0)}/stat").rpartition(")")[2].split()
    with suppress(OSError):  # else it is init, which takes processes whose parent has ended
        if fields and os.path.basename(os.readlink(f"/proc/{fields[1]}/exe")).startswith("python"):
            return int(fields[1])
    raise StateError("elastic: the agent of torchrun that has started this process is gone: its ranks end, too")


def _ray_job() -> str:
    """Return the name of the run in Ray, whose launcher of processes outlives it."""
    ray: Any = importlib.import_module("ray")
    train: Any = importlib.import_module("ray.train")
    return json.dumps([ray.get_runtime_context().get_job_id(), train.get_context().get_experiment_name()])
