"""The rows as a table of text, and everything as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.recipes.bench.figures import LOSS_TOLERANCE, Row
from shardwise.recipes.bench.request import SHAPES, BenchConfig

MIB = 1 << 20
_NUMBER_COLUMNS = ("step ms", "x local", "x FSDP2", "tokens/s", "live MiB", "RSS MiB", "wire MiB", "faults")
NOTES: Mapping[str, str] = {
    "time": "each round steps every contender once in an order drawn from the seed, between barriers; medians over rounds of "
    "the slowest rank's time for forward, backward, optimizer step and zero_grad",
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
    """Return one line that says what was measured."""
    shape = SHAPES[config.shape].model
    return (
        f"{config.shape}: GPT of {shape.layers} blocks, width {shape.width}, {num_parameters / 1e6:.1f}M parameters; "
        f"{config.batch} x {shape.context} tokens a rank, {config.ranks} rank(s) over {config.backend}; "
        f"medians of {config.rounds} interleaved round(s)"
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
    """Write everything that was measured, on what, and how to read it."""
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
        "rows": [_rounded(dataclasses.asdict(row)) for row in rows],
        "notes": NOTES,
    }
    path.write_text(json.dumps(values, indent=2) + "\n")


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
