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
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from shardwise.consistency.process_groups import check_peers, gather_objects, group_of, host_id, own_sockets
from shardwise.consistency.store import wait_until
from shardwise.elastic.keeper import Keeper, line_of
from shardwise.elastic.membership import Generation, backend
from shardwise.errors import ConfigError, StateError, TransportError
from shardwise.loop.launch import end_with_parent
from shardwise.torch_private import is_gloo

_NUM_SETS = 2
_MEET_S = 600.0  # for all ranks of a start to come: imports may be slow; torchrun waits as long for hosts
_PATIENCE_S = 5.0  # for the agent to end this process after a peer was lost: then no traceback hides the first failure
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each start gets a new store, on its own first host
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # torchrun alone sets it
_num_runs = itertools.count()  # of this process: each has a keeper of its own, which restarted ranks find by its number


class RestartedRanks:
    """This process, in the only generation that it is a rank of: a :class:`Membership`."""

    def __init__(self) -> None:
        self.fds: Sequence[Sequence[int]] = ()
        self.timeout_s = default_pg_timeout.total_seconds()
        self._begin_s = time.monotonic()
        self._generation = Generation(0, (), False, "")
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
        # torchrun starts a session for each rank, which a script that starts the rank shares with it
        others = [pid for pid, session in line_of(os.getpid()).items() if session != os.getsid(0)]
        agent = others[0] if self._is_torchrun and others else os.getppid()
        program = ""
        with suppress(OSError):
            program = os.path.basename(os.readlink(f"/proc/{agent}/exe"))
        if self._is_torchrun and not program.startswith("python"):  # init, which takes processes whose parent has ended
            raise StateError("elastic: the agent of torchrun that has started this process is gone: its ranks end, too")
        try:
            self._keeper = Keeper(agent, f"{'' if self._is_torchrun else _ray_job()}/{next(_num_runs)}")
        except (OSError, EOFError) as error:
            raise StateError(
                f"elastic: the keeper of this host, which holds the state between two starts, does not answer: {error}. It "
                "needs Linux, and /proc; see whether it runs with: ps -ef | grep keeper.py"
            ) from error
        self._over: Callable[[], object] = lambda: None

    @staticmethod
    def are_here() -> bool:
        """Return True if this process was started by such a launcher."""
        return _RESTARTS in os.environ or "ray.train" in sys.modules

    def join(self, num_used: Callable[[int], int]) -> Generation:
        """Do as :class:`Membership` says.  Raises: ConfigError if ranks are to wait that have a group.  SystemExit in these."""
        if dist.is_initialized():
            check_peers()
        else:
            self._make_group(num_used)
        world = cast(dist.ProcessGroup, dist.group.WORLD)
        size = world.size()
        if num_used(size) < size:
            raise ConfigError(
                f"elastic: num_microbatches is not divisible by {size} ranks, and a default process group has them all. Leave "
                f"init_process_group out: then {num_used(size)} take part, and the others wait"
            )
        group = world if is_gloo(world) else group_of(range(size), "gloo")
        keeper = self._keeper
        length = max([size, *(rank + 1 for _, rank in keeper.files)])
        found = gather_objects([f"{host_id()}{keeper.name}", keeper.generation, length], group)
        names = [name for name, _, _ in found]
        hosts = tuple(names.index(name) for name in names)
        number = 1 + max(each for _, each, _ in found)
        order = [*dict.fromkeys(hosts)]
        here = hosts[group.rank()]
        near = (here, order[order.index(here) - 1])  # the host whose copies this one holds
        held = {(number, rank) for number in range(_NUM_SETS) for rank in range(size) if hosts[rank] in near}
        fds = keeper.open(number, [*held | {*keeper.files}])
        length = max(each for _, _, each in found)
        self.fds = [[fds.get((each, rank), -1) for rank in range(length)] for each in range(_NUM_SETS)]
        cause = "all ranks were started again"
        self._generation = Generation(number, tuple(range(size)), True, cause, hosts, self._begin_s)
        return self._generation

    def _make_group(self, num_used: Callable[[int], int]) -> None:
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
            if rank == size:
                waiting = (
                    f"{world - size} of {world} processes wait, as num_microbatches is divisible by {size}, not by more"
                )
                print(f"shardwise: {waiting}", file=sys.stderr)
            with suppress(dist.DistError):  # the store has ended with the first rank
                wait_until(lambda: store.check(["over"]), pauses_s=(0.5, 0.5))
            raise SystemExit(0)
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=limit)
        check_peers(before)
        if not rank:  # which may have the store
            self._over = lambda: store.set("over", "")

    def formed(self) -> None:
        """Do as :class:`Membership` says: the launcher decides about the next one."""

    def leave(self) -> None:
        """Do as :class:`Membership` says: there is no next generation in this process."""

    def raised(self, error: BaseException) -> None:
        """Do as :class:`Membership` says: the launcher sees it."""

    def newest_number(self) -> int:
        """Return the number of this generation."""
        return self._generation.number

    def is_lost(self, error: BaseException) -> bool:
        """Return False: the launcher ends this process if a rank is lost.  It is given the time to do so."""
        if isinstance(error, RuntimeError | OSError):
            time.sleep(_PATIENCE_S)
        return False

    def finish(self) -> None:
        """Let the ranks that wait end, and the keeper if its launcher does not end with this job."""
        self._over()
        with suppress(OSError, EOFError):
            if not self._is_torchrun:
                self._keeper.finish()


def _ray_job() -> str:
    """Return the name of the run in Ray, whose launcher of processes outlives it."""
    ray: Any = importlib.import_module("ray")
    train: Any = importlib.import_module("ray.train")
    return json.dumps([ray.get_runtime_context().get_job_id(), train.get_context().get_experiment_name()])
