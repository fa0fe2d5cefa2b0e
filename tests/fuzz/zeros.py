"""The APIs where parameters stay whole: DDP, ZeRO-1 under DDP, ZeRO-2 without it; ours and torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardwise
from fuzz import peers
from fuzz.case import Contender
from fuzz.optims import OPTIMIZERS, groups_of
from fuzz.phases import Play, Seat
from fuzz.record import Record
from fuzz.sides import Side

ALONE = "zero_alone"  # without DDP
HOOKS = {"overlap": shardwise.hook_with_zero_step, "interleaved": shardwise.hook_with_zero_step_interleaved}


class ZeroSide(Side):
    """A rank whose parameters are whole.

    Apis: "ddp" (plain DDP), "zero1", "torch_zero" (DDP and a sharded optimizer), "zero_alone" (no DDP, nobody
    averages gradients), "overlap", "interleaved" (the step happens in DDP's backward).
    """

    def __init__(self, play: Play, seat: Seat, contender: Contender, device: str) -> None:
        super().__init__(play, seat, device)
        self.contender = contender
        self.net = self.model = self.hooked(self.begin(play.build()).to(device))
        self._hooked: DistributedDataParallel | None = None
        if contender.api != ALONE:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer names of the same arguments
                self.model = DistributedDataParallel(
                    self.net,
                    find_unused_parameters=contender.api not in HOOKS,
                    broadcast_buffers=self.settings.sync_buffers,
                    gradient_as_bucket_view=self.settings.bucket_view,
                )
        hides_grads = contender.api in (ALONE, *HOOKS)
        self.hidden = frozenset({"state", "grad"} if hides_grads else {"state"})  # each rank knows its own share alone
        self.remake_optimizer()

    def make_optimizer(self) -> Optimizer:
        optim, api = self.settings.optim, self.contender.api
        if api == "ddp":
            return super().make_optimizer()
        kind = OPTIMIZERS[optim.name]
        groups = groups_of(self.stepped(), optim)
        if api == "torch_zero":
            return peers.zero(groups, kind.make, self.settings.bucket_view, kind.options)
        is_mixed = len({param.dtype for param in self.net.parameters()}) > 1
        zero = shardwise.ZeroRedundancyOptimizer(
            groups,
            kind.make,
            parameters_as_bucket_view=self.settings.bucket_view,
            overlap_with_ddp=api in HOOKS,
            partition="even" if self.contender.update.startswith("even") else "whole",
            mixed_dtypes=is_mixed,
            **kind.options,
        )
        if api in HOOKS:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(None, HOOKS[api](allreduce_hook, self.model, zero))
        return zero

    # ---- what a program does ----

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        if self.contender.api in HOOKS:
            return None
        return super().step(closure)

    def join_loop(self, first: int, counts: tuple[int, ...]) -> None:
        joinables: list[Any] = [self.model]
        if isinstance(self.optimizer, Joinable):
            joinables.append(self.optimizer)
        with Join(joinables):
            super().join_loop(first, counts)

    def unit(self, path: str) -> Any:
        return WholeUnit(self)

    # ---- state ----

    def save(self) -> Any:
        return {"model": copy.deepcopy(self.net.state_dict()), "optimizer": self._whole_optimizer_state()}

    def load(self, saved: Any) -> None:
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def _whole_optimizer_state(self) -> Any:
        optimizer: Any = self.optimizer
        if self.contender.api == "ddp":
            return copy.deepcopy(optimizer.state_dict())
        found: Any = None
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                found = copy.deepcopy(optimizer.state_dict())
        return found

    def record(self, moment: str | tuple[str, Tensor]) -> Record:
        found = super().record(moment)
        if self.contender.api in HOOKS and not found.label.startswith("step"):
            hidden = self.hidden | {"param", "kept", "grad"}  # backward has made the step already
            return Record(found.label, found.shared, found.own, hidden)
        return found


class WholeUnit:
    """The methods of a unit's module where there are no units but one."""

    def __init__(self, side: ZeroSide) -> None:
        self._side = side

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Hold gradients back by ``no_sync``; without DDP they are held until the step anyway."""
        if isinstance(self._side.model, DistributedDataParallel):
            self._side.model.require_backward_grad_sync = value
