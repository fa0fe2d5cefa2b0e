"""The doors where parameters stay whole: DDP, ZeRO-1 under DDP, ZeRO-2 without it; ours and torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
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

ALONE = ("zero2", "zero_alone")  # without DDP
HOOKS = {"overlap": shardwise.hook_with_zero_step, "interleaved": shardwise.hook_with_zero_step_interleaved}


class ZeroSide(Side):
    """A rank whose parameters are whole.

    Doors: "ddp" (plain DDP), "zero1", "torch_zero" (DDP and a sharded optimizer), "zero2" (no DDP, gradients reduced to
    their owners before the step), "zero_alone" (nobody averages them), "overlap", "interleaved" (the step happens in DDP's
    backward).
    """

    def __init__(self, play: Play, seat: Seat, contender: Contender, device: str) -> None:
        super().__init__(play, seat, device)
        self.contender = contender
        self.net = self.model = self.hooked(self.begin(play.build()).to(device))
        self._is_reduced = False
        self.held = ExitStack()  # no_sync(), while gradients are held back
        self._hooked: DistributedDataParallel | None = None
        if contender.door not in ALONE:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer names of the same arguments
                self.model = DistributedDataParallel(
                    self.net,
                    find_unused_parameters=contender.door not in HOOKS,
                    broadcast_buffers=self.settings.sync_buffers,
                    gradient_as_bucket_view=self.settings.bucket_view,
                )
        hides_grads = contender.door in (*ALONE, *HOOKS)
        self.hidden = frozenset({"state", "grad"} if hides_grads else {"state"})  # each rank knows its own share alone
        self.remake_optimizer()

    def make_optimizer(self) -> Optimizer:
        optim, door = self.settings.optim, self.contender.door
        if door == "ddp":
            return super().make_optimizer()
        kind = OPTIMIZERS[optim.name]
        groups = groups_of(self.stepped(), optim)
        if door == "torch_zero":
            return peers.zero(groups, kind.make, self.settings.bucket_view, kind.options)
        is_mixed = len({param.dtype for param in self.net.parameters()}) > 1
        zero = shardwise.ZeroRedundancyOptimizer(
            groups,
            kind.make,
            parameters_as_bucket_view=self.settings.bucket_view,
            overlap_with_ddp=door in HOOKS,
            partition="even" if self.contender.update.startswith("even") else "whole",
            mixed_dtypes=is_mixed,
            overlap_grad_reduce=self.settings.overlap_grads and door == "zero2",
            overlap_param_gather=self.settings.overlap_params and door not in HOOKS,
            **kind.options,
        )
        if door in HOOKS:
            assert isinstance(self.model, DistributedDataParallel)
            reduce = "owner" if self.contender.update.endswith("owner") else "all"
            hook = HOOKS[door](allreduce_hook, self.model, zero, reduce=reduce)
            self.model.register_comm_hook(None, hook)
        return zero

    # ---- what a program does ----

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        if self.contender.door in HOOKS:
            return None
        if closure is not None:

            def reduced() -> Tensor:
                self._is_reduced = False
                loss = closure()
                self._reduce()
                return loss

            result = super().step(reduced)
            self._is_reduced = False
            return result
        self._reduce()
        self._is_reduced = False
        return super().step()

    def join_loop(self, first: int, counts: tuple[int, ...]) -> None:
        joinables: list[Any] = [self.model]
        if isinstance(self.optimizer, Joinable):
            joinables.append(self.optimizer)
        with Join(joinables):
            super().join_loop(first, counts)

    def _reduce(self) -> None:
        if self.contender.door == "zero2" and not self._is_reduced:
            assert isinstance(self.optimizer, shardwise.ZeroRedundancyOptimizer)
            self.optimizer.reduce_gradients()
            self._is_reduced = True

    def clip(self, how: str, bound: float) -> Tensor:
        self._reduce()
        return super().clip(how, bound)

    def clip_norm(self, params: list[nn.Parameter], bound: float, norm_type: float) -> Tensor:
        if self.contender.door == "zero2" and hasattr(self.optimizer, "clip_grad_norm_"):
            optimizer: Any = self.optimizer
            return optimizer.clip_grad_norm_(bound, norm_type)
        return super().clip_norm(params, bound, norm_type)

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
        if self.contender.door == "ddp":
            return copy.deepcopy(optimizer.state_dict())
        found: Any = None
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                found = copy.deepcopy(optimizer.state_dict())
        return found

    def record(self, moment: str | tuple[str, Tensor]) -> Record:
        found = super().record(moment)
        if self.contender.door in HOOKS and not found.label.startswith("step"):
            hidden = self.hidden | {"param", "kept", "grad"}  # backward has made the step already
            return Record(found.label, found.shared, found.own, hidden)
        return found


class WholeUnit:
    """The methods of a unit's module where there are no units but one."""

    def __init__(self, side: ZeroSide) -> None:
        self._side = side

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Hold gradients back by ``no_sync``; without DDP and overlap they are held until the step anyway."""
        side = self._side
        if isinstance(side.model, DistributedDataParallel):
            side.model.require_backward_grad_sync = value
        side.held.close()
        if not value and side.contender.door == "zero2":
            side.held.enter_context(cast(Any, side.optimizer).no_sync())
