"""What the ranks of a job run, as a value; a rank that diverges runs another value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from shardwise.collectives.routes import Transport

Api: TypeAlias = Literal["fully_shard", "hsdp", "replicate", "zero1", "zero2", "whole_matrix", "elastic"]
APIS: tuple[Api, ...] = ("fully_shard", "hsdp", "replicate", "zero1", "zero2", "whole_matrix")
Outcome: TypeAlias = Literal["retry", "skip"]
ENGINE_APIS = ("fully_shard", "hsdp", "replicate", "whole_matrix")  # those with a transport to choose
DIVERGING_APIS = ("fully_shard", "hsdp", "replicate")  # those whose ranks may take different ways


@dataclass(frozen=True, slots=True)
class Program:
    """A small training program: steps with accumulation, an evaluation in each, one checkpoint saved and loaded.

    Attributes:
        width, num_blocks, dtype: of the model.  frozen: its first block is not trained.
        order: in which its blocks run.
        num_microbatches: of a step; gradients are reduced with the last, or with every one if ``syncs_all``.
        graphless_step: the step in which one microbatch runs without gradients; 0: none.
        skipped_step: the step in which the optimizer does not step; 0: none.
        left_out_step: one that no rank makes; 0: none.
        last_step: after which the program returns.
        ranks_per_host: ranks count as processes of several hosts, so many of each; 0: of one host.
        takes_ways: in each step each rank leaves out another block, so ranks serve each other.
        transacts: steps are made in transactions; what raises in one is undone, and made again or left out.  No evaluation.
    """

    api: Api
    transport: Transport
    width: int = 8
    num_blocks: int = 3
    dtype: str = "float32"
    frozen: bool = False
    order: tuple[int, ...] = (0, 1, 2)
    num_microbatches: int = 2
    syncs_all: bool = False
    mesh_is_flat: bool = False
    graphless_step: int = 0
    skipped_step: int = 0
    left_out_step: int = 0
    last_step: int = 4
    ranks_per_host: int = 0
    takes_ways: bool = False
    transacts: Outcome | Literal[""] = ""


def _skip_step(program: Program) -> Program:
    return replace(program, skipped_step=3)


# By name: what is different on the rank that diverges.
DIVERGENCES: Mapping[str, Callable[[Program], Program]] = MappingProxyType(
    {
        "width": lambda program: replace(program, width=program.width + 5),
        "dtype": lambda program: replace(program, dtype="float64"),
        "frozen": lambda program: replace(program, frozen=True),
        "extra block": lambda program: replace(program, num_blocks=4, order=(0, 1, 2, 3)),
        "order": lambda program: replace(program, order=(1, 0, 2)),
        "one microbatch fewer": lambda program: replace(program, num_microbatches=program.num_microbatches - 1),
        "no_grad": lambda program: replace(program, graphless_step=3),
        "other accumulation": lambda program: replace(program, syncs_all=True),
        "other mesh": lambda program: replace(program, mesh_is_flat=True),
        "skipped step": _skip_step,
        "ends early": lambda program: replace(program, last_step=2),
    }
)


def diverges(program: Program, name: str, num_ranks: int) -> bool:
    """Return True if ranks behind this API must notice the divergence.

    Where nothing is reduced before the end of a step, or gradients add up on each rank, how many microbatches there were
    is each rank's own affair; a mesh is chosen behind one API alone.
    """
    if name == "other mesh":
        return program.api == "hsdp"
    if name == "skipped step":
        return program.api in ("zero1", "whole_matrix")
    if program.api == "zero1":
        return name not in ("order", "one microbatch fewer", "no_grad")
    if program.api == "replicate" or (program.api == "hsdp" and num_ranks == 2):  # two replicas of one shard
        return name not in ("order", "one microbatch fewer", "no_grad")
    return True
