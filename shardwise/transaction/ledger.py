"""What the transactions over one model share: the ranks, the number of the running one, and the state before it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.black_box import note
from shardwise.comm import alarm
from shardwise.comm.links import unfinished
from shardwise.comm.lost_peers import naming_lost_peers
from shardwise.comm.mending import groups_within, mend
from shardwise.comm.posts import begin_era
from shardwise.engine.renewal import KeptUnits
from shardwise.errors import ConfigError, StateError
from shardwise.transaction.agreement import Agreement
from shardwise.transaction.kept_optimizer import KeptOptimizer, Optimized, watch
from shardwise.transaction.kept_others import Undo, check_others, keep_others
from shardwise.transaction.kept_tensors import KeptBuffers, KeptGradients, holders_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """What users want of the transactions over a model.

    Attributes:
        also: objects with state dicts, and "rng" for random numbers, to be put back, too.
        undoes_optimizer: a fault in the optimizer's step can be undone, for copies of what it changes.  Else ranks agree before
            it, and nothing is copied.
    """

    also: tuple[Any, ...]
    undoes_optimizer: bool


class Ledger:
    """Keeps the state before each step of ``model`` and ``optimized``; all ranks of the job take part.

    Making one is collective.  Raises: ConfigError for groups whose collectives cannot be ended from outside.

    Attributes:
        agreement: how the ranks agree; None without other ranks.
        number: of transactions begun.  is_open: one runs.  is_agreed: all ranks have come to the optimizer's step of it, which
            cannot be undone.
        num_bytes: copied in the last one.
    """

    def __init__(self, model: nn.Module, optimized: Sequence[Optimized], wanted: Wanted) -> None:
        check_others(wanted.also)
        self.agreement = _agreement()
        self.number = self.num_bytes = 0
        self.is_open = self.is_agreed = False
        self._wanted = wanted
        self._model = weakref.ref(model)
        self._ddps = [weakref.ref(each) for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._units, self._buffers, self._gradients = KeptUnits(model), KeptBuffers(model), KeptGradients()
        self._optimizers = {id(each.outer): KeptOptimizer(each) for each in optimized}
        self._undo_others: list[Undo] = []
        this: weakref.ref[Ledger] = weakref.ref(self)
        for each in optimized:
            end = watch(each.outer, lambda optimizer: _before_step(this, optimizer))
            weakref.finalize(self, end).atexit = False

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that users step."""
        return [each.optimized.outer for each in self._optimizers.values()]

    def is_for(self, optimizers: Sequence[Optimizer], wanted: Wanted) -> bool:
        """Return True if this one keeps just these, over the ranks that there are now."""
        mine = self._wanted
        same = list(self._optimizers) == [id(each) for each in optimizers]
        same = same and [id(each) for each in mine.also] == [id(each) for each in wanted.also]
        same = same and mine.undoes_optimizer == wanted.undoes_optimizer
        return same and (self.agreement.group if self.agreement is not None else None) is _several_ranks()

    # ---- one transaction ----

    def begin(self) -> None:
        """Keep the state of now.  Raises: StateError inside another transaction, or with gradients on their way."""
        if self.is_open:
            raise StateError("a transaction over this model runs already; leave it first")
        note("transaction")
        for ddp in self._living_ddps():
            members = self.agreement.members if self.agreement is not None else (0,)
            mine = self.agreement.rank if self.agreement is not None else 0
            naming_lost_peers(
                lambda ddp=ddp: torch_private.settle_buckets(ddp), "a transaction cannot begin", members, mine
            )
        self.num_bytes = self._units.keep() + self._buffers.keep() + self._gradients.keep(list(self._holders()))
        for each in self._optimizers.values():
            each.begin()
        self._undo_others = keep_others(self._wanted.also)
        self.number += 1
        self.is_open = True
        agreement, number = self.agreement, self.number
        if agreement is not None:
            alarm.listen(lambda: agreement.check(number))

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the parameters and the state of ``optimizer``, which is about to change them, or agree that it may.

        Raises: like :meth:`Agreement.arrive`.
        """
        if self.is_open and not self._wanted.undoes_optimizer:
            if self.agreement is not None and not self.is_agreed:
                self.agreement.arrive(self.number)
            self.is_agreed = True
        elif self.is_open:
            self.num_bytes += self._optimizers[id(optimizer)].before_step()

    def close(self) -> None:
        """End it, one way or the other."""
        self.is_open = self.is_agreed = False
        alarm.leave()
        self._undo_others = []
        self._gradients.let_go()
        for each in self._optimizers.values():
            each.let_go()

    def undo(self) -> None:
        """Bring this rank back to the state before; waits for nobody."""
        self._units.put_back()
        for ddp in self._living_ddps():
            torch_private.reset_reducer(ddp)
        for each in self._optimizers.values():
            each.put_back()
        self._gradients.put_back()
        self._buffers.put_back()
        for undo in self._undo_others:
            undo()

    def reconnect(self) -> None:
        """Make the groups anew, and number what ranks post from one again.  Collective."""
        if self.agreement is not None:
            for group in groups_within(self.agreement.members):
                mend(group)
                unfinished.drop(group)
            begin_era(self.agreement.members)

    def _living_ddps(self) -> list[DistributedDataParallel]:
        return [ddp for ref in self._ddps if (ddp := ref()) is not None]

    def _holders(self) -> Iterator[torch.Tensor]:
        model = self._model()
        params = list(model.parameters()) if model is not None else []
        params += [param for each in self.optimizers for group in each.param_groups for param in group["params"]]
        for param in {id(param): param for param in params}.values():
            yield from holders_of(param)


def _before_step(ledger_ref: weakref.ref[Ledger], optimizer: Optimizer) -> None:
    ledger = ledger_ref()
    if ledger is not None:
        ledger.before_step(optimizer)


def _several_ranks() -> dist.ProcessGroup | None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return world if world is not None and world.size() > 1 and dist.get_backend(world) != "fake" else None


def _agreement() -> Agreement | None:
    world = _several_ranks()
    if world is None:
        return None
    for group in torch_private.all_groups():
        if group.size() > 1 and not torch_private.is_only_gloo(group):
            raise ConfigError(
                f"a transaction needs groups whose collectives end when a rank leaves; group {group.group_name} talks "
                f"{dist.get_backend(group)}, which waits in kernels that nobody can take back. Use gloo, or restart from a "
                "checkpoint (shardwise train --max-restarts)"
            )
    return Agreement(world)
