"""From measurements to rows: medians, ratios, sums and maxima over ranks, and the check of the losses.  Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Rounding: sums over ranks in another order, fused kernels.  bf16 has 8 bits: 5.5 is known to 1/32.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What one rank held while it trained one contender alone in its process; None where the host cannot tell.

    Bytes are above those of the same process after imports and one step of a tiny plain model.

    peak_live_bytes: most in use at one moment of a warm step: malloc'ed and shared pages (a page of n users counts 1/n),
        or CUDA's allocator's.
    peak_shared_bytes: most in pages of shared memory; a page that two ranks have touched counts on both.
    peak_rss_bytes: highest resident set from building on.
    rss_anonymous_bytes, rss_shared_bytes: parts of the resident set, where a sample found it largest.
    faults_per_step: minor page faults of a warm step.
    wire_bytes_per_step: bytes through the loopback device, of all ranks together, with headers.
    """

    peak_live_bytes: int | None
    peak_shared_bytes: int | None
    peak_rss_bytes: int | None
    rss_anonymous_bytes: int | None
    rss_shared_bytes: int | None
    faults_per_step: int | None
    wire_bytes_per_step: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one contender.

    Quartiles and median are seconds of a step, of the slowest rank; ratios are of medians: ``x_local`` 1.2 takes a fifth
    longer than no communication at all.  ``memory`` has the largest rank's figure of each kind.
    """

    name: str
    family: str
    dtype: str
    transport: str
    median_s: float
    low_quartile_s: float
    high_quartile_s: float
    x_local: float
    x_fsdp2: float | None
    tokens_per_s: float
    loss: float
    memory: MeasuredMemory | None


class Identity(Protocol):
    """What a row says about its contender beside figures."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def transport(self) -> str: ...


def make_rows(
    contenders: Sequence[Identity],
    seconds: Sequence[Mapping[str, Sequence[float]]],
    losses: Mapping[str, float],
    memory: Mapping[str, Sequence[MeasuredMemory]],
    tokens_per_step: int,
) -> list[Row]:
    """Return a row per contender.  ``seconds`` per rank; ``memory`` per contender and rank, empty if not measured."""
    slowest = {c.name: [max(ranks) for ranks in zip(*(s[c.name] for s in seconds), strict=True)] for c in contenders}
    medians = {name: statistics.median(values) for name, values in slowest.items()}
    rows: list[Row] = []
    for contender in contenders:
        name = contender.name
        low, high = _quartiles(slowest[name])
        rows.append(
            Row(
                name=name,
                family=contender.family,
                dtype=contender.dtype,
                transport=contender.transport,
                median_s=medians[name],
                low_quartile_s=low,
                high_quartile_s=high,
                x_local=medians[name] / medians["local"],
                x_fsdp2=medians[name] / medians["FSDP2"] if "FSDP2" in medians else None,
                tokens_per_s=tokens_per_step / medians[name],
                loss=losses[name],
                memory=largest(memory[name]) if name in memory else None,
            )
        )
    return rows


def largest(ranks: Sequence[MeasuredMemory]) -> MeasuredMemory:
    """Return the largest figure of each kind; None where a rank has none."""
    found: dict[str, int | None] = {}
    for field in dataclasses.fields(MeasuredMemory):
        values: list[int | None] = [getattr(rank, field.name) for rank in ranks]
        known = [value for value in values if value is not None]
        found[field.name] = max(known) if len(known) == len(values) else None
    return MeasuredMemory(**found)


def find_wrong_losses(
    losses: Mapping[str, float], expected: Mapping[str, float], dtypes: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a sentence for each contender whose loss is further from the expected one than rounding explains."""
    return tuple(
        f"{name}: loss {loss:.6f}, expected {expected[name]:.6f} within {LOSS_TOLERANCE[dtypes[name]]:g}"
        for name, loss in losses.items()
        if not abs(loss - expected[name]) <= LOSS_TOLERANCE[dtypes[name]]  # so that NaN is wrong too
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
