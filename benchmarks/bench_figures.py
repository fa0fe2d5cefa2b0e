"""From measurements to rows: medians, ratios, sums and maxima over ranks, and the check of the losses.  Pure."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType

import torch
from bench_contenders import SHAPES, BenchConfig, Contender

from shardwise.one_host import cpu_model, usable_cores

# ---- The machine of the measurements; nothing names the host.


def describe_machine(num_threads: int) -> dict[str, object]:
    """Return processor, cores, versions, threads per rank, GPUs and the date (UTC)."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": num_threads,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


# Rounding: sums over ranks in another order, fused kernels.  bf16 has 8 bits: 5.5 is known to 1/32.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """One rank's memory while it trained one contender alone in its process; None where the host cannot tell.

    Bytes are above those of the same process after imports and one step of a tiny plain model.

    peak_live_bytes: maximum in use in a warm step: malloc'ed and shared pages (a page of n users counts 1/n), or CUDA's
        allocator's.
    peak_shared_bytes: maximum in pages of shared memory; a page that two ranks have used counts on both.
    peak_rss_bytes: highest resident set, from the construction on. rss_anonymous_bytes, rss_shared_bytes: parts of the
    resident set, in the sample with the largest one. faults_per_step: minor page faults of a warm step.
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
class HostLoad:
    """Seconds that passed, and those of processors: busy, taken by a hypervisor, used by ranks; ``num_cores`` of the host."""

    time_s: float = 0.0
    busy_s: float = 0.0
    stolen_s: float = 0.0
    own_s: float = 0.0
    num_cores: int = 0

    def since(self, before: HostLoad) -> HostLoad:
        """Return the differences to ``before``."""
        passed = {each: getattr(self, each) - getattr(before, each) for each in _SECONDS}
        return HostLoad(**passed, num_cores=self.num_cores)


_SECONDS = ("time_s", "busy_s", "stolen_s", "own_s")
MOST_OTHERS, MOST_STOLEN, MOST_SPREAD = 0.25, 0.02, 0.25  # cores of others; of the cores' time; (q3 - q1) / median


def load_of(runs: Sequence[Sequence[HostLoad]]) -> HostLoad:
    """Return the load over ``runs`` one after the other; each has what every rank has seen."""
    first = [ranks[0] for ranks in runs]
    time_s, busy_s, stolen_s = (sum(getattr(each, name) for each in first) for name in _SECONDS[:3])
    return HostLoad(time_s, busy_s, stolen_s, sum(each.own_s for ranks in runs for each in ranks), first[0].num_cores)


def disturbances(host: HostLoad, rows: Sequence[Row]) -> list[str]:
    """Return what has disturbed a run, in words: other processes, a hypervisor, rounds that differ much.

    Other processes disturb if they used more than a quarter of a core, and more than half of what the ranks left.
    """
    found: list[str] = []
    if host.time_s:
        own, others = host.own_s / host.time_s, (host.busy_s - host.own_s) / host.time_s
        if others > MOST_OTHERS and others > (host.num_cores - own) / 2:
            found.append(f"other processes used {others:.1f} of {host.num_cores} cores while contenders were timed")
        if host.stolen_s > MOST_STOLEN * host.time_s * host.num_cores:
            stolen = host.stolen_s / (host.time_s * host.num_cores)
            found.append(f"the hypervisor took {stolen:.0%} of the cores' time")
    wide = [row.name for row in rows if row.high_quartile_s - row.low_quartile_s > MOST_SPREAD * row.median_s]
    if wide:
        found.append(
            f"the middle half of the rounds spreads over more than {MOST_SPREAD:.0%} of the median: {', '.join(wide)}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one contender.

    Least, quartiles, median and most are seconds of a step, of the slowest rank.  Ratios are of medians: ``x_local`` 1.2
    takes a fifth longer than no communication at all.  ``memory`` has the largest rank's figure of each kind.
    """

    name: str
    family: str
    dtype: str
    transport: str
    median_s: float
    low_quartile_s: float
    high_quartile_s: float
    least_s: float
    most_s: float
    x_local: float
    x_fsdp2: float | None
    tokens_per_s: float
    loss: float
    memory: MeasuredMemory | None


def make_rows(
    contenders: Sequence[Contender],
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
                least_s=min(slowest[name]),
                most_s=max(slowest[name]),
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
        if not abs(loss - expected[name]) <= LOSS_TOLERANCE[dtypes[name]]  # NaN must count as wrong
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


# ---- The picture of a benchmark: one bar per contender, its step time as a multiple of no communication at all.

COLORS: Mapping[str, str] = MappingProxyType(
    {"local": "#7f7f7f", "DDP": "#9467bd", "ZeRO": "#8c564b", "FSDP2": "#ff7f0e", "shardwise": "#1f77b4"}
)


def draw_chart(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw ``rows`` from the top down, coloured by family; written as PNG at ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only a chart needs the package
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10.0, 1.6 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [row.name for row in rows]
    values = [row.x_local for row in rows]
    axes.barh(names, values, color=[COLORS[row.family] for row in rows], height=0.72)
    for index, row in enumerate(rows):
        label = f"{row.x_local:.2f}  ({1000 * row.median_s:.1f} ms)"
        axes.annotate(
            label, xy=(row.x_local, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.axvline(1.0, color="#333333", linestyle="--", linewidth=1.0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(values))
    axes.set_xlabel("step time / local (shorter is faster; dashed: no communication at all)")
    axes.set_title("\n".join(textwrap.wrap(title, 100)), fontsize=10)
    shown = {row.family for row in rows}
    handles = [Patch(color=color, label=family) for family, color in COLORS.items() if family in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


# ---- The rows as a table of text, and everything as JSON.

MIB = 1 << 20
_NUMBER_COLUMNS = (
    "step ms",
    "min",
    "max",
    "x local",
    "x FSDP2",
    "tokens/s",
    "live MiB",
    "RSS MiB",
    "wire MiB",
    "faults",
)
NOTES: Mapping[str, str] = {
    "time": "each round steps every contender once in an order drawn from the seed, between barriers; medians over rounds of "
    "the slowest rank's time for forward, backward, optimizer step and zero_grad; with --alone each contender in processes of "
    "its own",
    "memory": "of one contender alone in fresh processes, largest rank, above the process after imports and one tiny step",
    "live": "highest sample of a 1 ms sampler in warm steps: malloc in use (mallinfo2) plus resident shared memory, pages "
    "of n processes at 1/n; on CUDA max_memory_allocated",
    "rss": "VmHWM, reset after imports; from building on",
    "wire": "growth of the loopback device's counter over a warm step, all ranks together, with headers; valid on one host, "
    "where other processes' traffic counts too (least of several steps)",
    "faults": "minor page faults of a warm step",
    "losses": f"after equal updates, compared with data parallelism by hand within {LOSS_TOLERANCE['fp32']:g} (fp32), "
    f"{LOSS_TOLERANCE['bf16']:g} (bf16)",
}


def title_of(config: BenchConfig, num_parameters: int) -> str:
    """Return one line that describes what was measured."""
    shape = SHAPES[config.shape].model
    return (
        f"{config.shape}: GPT of {shape.layers} blocks, width {shape.width}, {num_parameters / 1e6:.1f}M parameters; "
        f"{config.batch} x {shape.context} tokens a rank, {config.ranks} rank(s) over {config.backend}; "
        f"medians of {config.rounds} round(s), {'each contender alone' if config.alone else 'interleaved'}"
    )


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned lines: step time, ratios, tokens per second, then memory ("-" where not measured)."""
    lines = [("contender", *_NUMBER_COLUMNS), *((row.name, *_numbers(row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _numbers(row: Row) -> tuple[str, ...]:
    memory = row.memory
    return (
        f"{1000 * row.median_s:.1f}",
        f"{1000 * row.least_s:.1f}",
        f"{1000 * row.most_s:.1f}",
        f"{row.x_local:.3f}",
        "-" if row.x_fsdp2 is None else f"{row.x_fsdp2:.3f}",
        f"{row.tokens_per_s:.0f}",
        _mib(memory and memory.peak_live_bytes),
        _mib(memory and memory.peak_rss_bytes),
        _mib(memory and memory.wire_bytes_per_step),
        "-" if memory is None or memory.faults_per_step is None else str(memory.faults_per_step),
    )


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:.1f}"


def write_json(
    path: Path,
    config: BenchConfig,
    rows: Sequence[Row],
    machine: Mapping[str, object],
    command: str,
    num_parameters: int,
) -> None:
    """Write all measurements, the machine, and how to read them."""
    shape = SHAPES[config.shape]
    values = {
        "command": command,
        "machine": machine,
        "shape": {"name": config.shape, **dataclasses.asdict(shape.model), "parameters": num_parameters},
        "ranks": config.ranks,
        "backend": config.backend,
        "batch_per_rank": config.batch,
        "rounds": config.rounds,
        "seed": config.seed,
        "alone": config.alone,
        "rows": [_rounded(dataclasses.asdict(row)) for row in rows],
        "notes": NOTES,
    }
    path.write_text(json.dumps(values, indent=2) + "\n")


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
