"""What a rank holds over one step of a run, beside what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise import describe_units, torch_private
from shardwise.plan.visits import Edge
from shardwise.planner.dry_run import dry_run
from shardwise.planner.hardware import cublas_bytes
from shardwise.planner.rank_memory import UPDATE, RankMemory
from shardwise.planner.search import memory_over_step
from shardwise.planner.setting import ROUTES, Setting
from shardwise.planner.split import TensorSplit
from shardwise.recipes.config import ENGINE_SHARDS, TrainConfig
from shardwise.recipes.gpt import GPT, next_byte_loss
from shardwise.recipes.held_bytes import HeldBytes, format_bytes
from shardwise.recipes.live_bytes import LiveBytes
from shardwise.recipes.own_model import blocks_of, build_own
from shardwise.recipes.parallel import HEADS
from shardwise.recipes.ranks import RunRanks
from shardwise.recipes.step_watch import StepWatch, unwatched


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A step of the rank that held most.

    Attributes:
        step: its number, from 1.  rank: whose.
        peaks: for each edge of a block in order, its name and the most bytes between it and the next one.
        planned: what the plan says; None where the model cannot be planned.
    """

    step: int
    rank: int
    peaks: tuple[tuple[str, int], ...]
    planned: RankMemory | None = None

    @property
    def peak(self) -> tuple[str, int]:
        """The edge after which most was held, and the bytes."""
        return max(self.peaks, key=lambda item: item[1])

    def __str__(self) -> str:
        edge, num_bytes = self.peak
        words = f"memory of step {self.step}: {format_bytes(num_bytes)} at most on rank {self.rank} ({edge})"
        if self.planned is None:
            return words
        planned = self.planned.peak
        return f"{words}, planned {format_bytes(planned.total)} ({planned.edge})"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What ranks hold.

    Attributes:
        held: between passes, of each rank; ``unsharded``: what any of them would hold of the whole model.
        step: over one step, of the rank that holds most; None: it was not measured.
    """

    held: Sequence[HeldBytes]
    unsharded: HeldBytes
    step: StepMemory | None = None


class StepMeter:
    """Measures one step of a run, the second of two that it watches: in the first one it learns what there is.

    Args:
        plain: the model without a wrapper around it.

    Attributes:
        number: of the step, 0-based within the run; with 0 there is none before.
    """

    def __init__(self, plain: nn.Module, optimizer: Optimizer, device: torch.device, number: int) -> None:
        self._plain, self._optimizer = plain, optimizer
        self.number = number
        self._live = LiveBytes(device)
        self._stack = ExitStack()

    @property
    def peaks(self) -> list[tuple[str, int]]:
        """As in :class:`StepMemory`, of this rank; empty before the step."""
        return [(edge, num_bytes) for edge, num_bytes in self._live.peaks if edge]

    @contextmanager
    def watch(self, number: int) -> Generator[None, None, None]:
        """Watch step ``number`` if it is one of the two."""
        if number == max(self.number - 1, 0):
            self._stack.enter_context(self._live.watching())
        if number == self.number:
            self._stack.enter_context(self._edges())
            self._live.restart()
        try:
            yield
        except BaseException:
            self._stack.close()
            raise
        if number == self.number:
            self._stack.close()

    @contextmanager
    def _edges(self) -> Generator[None, None, None]:
        names = {id(module): path for path, module in self._plain.named_modules()}
        handles: list[Any] = [self._optimizer.register_step_pre_hook(lambda *_: self._live.pass_edge(UPDATE))]
        for module in (self._plain, *blocks_of(self._plain)):
            name = names[id(module)] or "(root)"
            handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._live.pass_edge(f"{Edge.ENTER_FORWARD.value} {name}")

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: object, output: object) -> None:
            self._live.pass_edge(f"{Edge.EXIT_FORWARD.value} {name}")
            begun: list[bool] = []

            def enter_backward(_: torch.Tensor) -> None:
                if not begun:
                    begun.append(True)
                    self._live.pass_edge(f"{Edge.ENTER_BACKWARD.value} {name}")

            for each in torch_private.leaves_of(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(enter_backward)

        return leave


def measured_number(config: TrainConfig, start_step: int, traced: int) -> int:
    """Return which step of a run is measured, 0-based within it: the third, after those that are traced, or the last one."""
    return max(min(2 + traced, config.steps - start_step - 1), 0)


def both(first: StepWatch, second: StepWatch) -> StepWatch:
    """Return what watches a step as ``first`` and ``second`` do."""
    if first is unwatched or second is unwatched:
        return second if first is unwatched else first

    @contextmanager
    def watch(number: int) -> Generator[None, None, None]:
        with first(number), second(number):
            yield

    return watch


def largest_of(ranks: RunRanks, step: int, peaks: Sequence[tuple[str, int]]) -> StepMemory | None:
    """Return the step of the rank that held most, without a plan; None if none was measured.  Collective."""
    most = max((num_bytes for _, num_bytes in peaks), default=0)
    found = ranks.gather(most)
    rank = found.index(max(found))
    rows = ranks.gather([[edge, num_bytes] for edge, num_bytes in peaks] if ranks.rank == rank else [])[rank]
    return StepMemory(step, rank, tuple((str(edge), int(num_bytes)) for edge, num_bytes in rows)) if rows else None


def setting_of(config: TrainConfig, num_ranks: int, route: str = "") -> Setting:
    """Return how a run of ``config`` trains; ``route``: by which its units exchange tensors, as ``describe_units`` says."""
    return Setting(
        door=config.shard,
        ranks=num_ranks // config.tp,
        replicas=config.replicas if config.shard == "hybrid" else 1,
        min_unit_bytes=config.min_unit_bytes if config.shard != "replicate" else 0,
        precision=config.dtype,
        recompute=config.recompute,
        offload=config.offload,
        accumulate=config.accumulate,
        tensor=config.tp,
        transport=route if route in ROUTES else ROUTES[0],
    )


def planned_memory(config: TrainConfig, vocabulary: int, ranks: RunRanks, model: nn.Module) -> RankMemory | None:
    """Return what a rank of the run holds over a step by plan; ``model``: the one that runs, for its routes.

    None if the model of the user's own does not run on the meta device or on fake tensors.
    """
    route = ""
    if config.shard in ENGINE_SHARDS:
        route = next((row.route for row in describe_units(model).rows[::-1] if row.route), "")
    setting = setting_of(config, ranks.num_ranks, route)
    batch = config.batch // (ranks.num_data_ranks * config.accumulate)
    tokens = torch.empty((batch, config.model.context), dtype=torch.int64, device="meta")
    split = TensorSplit(config.tp, HEADS) if config.tp > 1 else None
    try:
        with torch.device("meta"):
            meant = planned_model(config, vocabulary)
        run = dry_run(meant, [tokens, tokens], next_byte_loss, precision=setting.computes_in, split=split)
    except Exception:  # whatever a model of somebody else raises there
        if config.model_from is None:
            raise
        return None
    capability = torch.cuda.get_device_capability(ranks.device)[0] if ranks.device.type == "cuda" else 0
    library_bytes = cublas_bytes(capability) if capability else 0
    return memory_over_step(run.profile, setting, ranks.device.type, library_bytes)


def planned_model(config: TrainConfig, vocabulary: int) -> nn.Module:
    """Return the model of a run, as :func:`build_trainer` makes it; within ``torch.device("meta")`` without memory."""
    if config.model_from is not None:
        return build_own(config.model_from, config.seed, vocabulary, config.model.context)
    return GPT(config.model, recompute=config.recompute, vocabulary=vocabulary)
