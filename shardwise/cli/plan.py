"""``shardwise plan``: its options, and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.cli import COUNT, SIZE, SWITCH, Row, add_command, add_options
from shardwise.elastic.memory import describe_copies
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.planner.advice import Choices, Plan, plan
from shardwise.planner.hardware import (
    HARDWARE,
    OPTIMIZERS,
    STRATEGIES,
    UNIT_STRATEGIES,
    read_hardware,
    state_bytes_of,
    with_hosts,
    with_memory,
)
from shardwise.recipes.config import PRESETS, TrainConfig, microbatches_per_rank, refuse_beside
from shardwise.recipes.gpt import GPT, LLAMAS, Llama
from shardwise.recipes.sharding import HEADS, LLAMA_HEADS, build_own, named
from shardwise.reproducible.tree import BatchPlace
from shardwise.safe_files import replace_file

_GPT = "gpt-"
_PRESETS = (*LLAMAS, *(_GPT + name for name in PRESETS))


_OPTIONS: tuple[Row, ...] = (
    *(
        (f"--{name}", f"{text} (default: {default})", {**COUNT, "default": default})
        for name, default, text in (
            ("ranks", 8, "ranks, those that split a block together included"),
            ("batch", 1, "sequences of a microbatch, on each data-parallel rank"),
            ("seq", 2048, "tokens of a sequence"),
            ("accumulate", 1, "microbatches of a step"),
            ("reproducible", 0, "microbatches of a step over all ranks, with `Reproducible`; 0: without"),
        )
    ),
    ("--hosts", "hosts that the ranks are on (default: as the hardware says)", COUNT),
    ("--hardware", f"{', '.join(HARDWARE)}, or a JSON file (default: h100)", {"default": "h100", "metavar": "NAME"}),
    ("--precision", "of the computation (default: bf16)", {"choices": ("fp32", "bf16"), "default": "bf16"}),
    (
        "--optimizer",
        f"{', '.join(OPTIMIZERS)}, in fp32, or yours as torchao.optim:AdamW8bit, which is measured (default: adamw)",
        {"default": "adamw", "metavar": "NAME"},
    ),
    (
        "--tp",
        "numbers of ranks to split every block over: tensor parallelism (default: 1, none)",
        {**COUNT, "nargs": "+", "default": [1]},
    ),
    (
        "--tp-plan",
        "with --model-from: what parallelize_module takes for one block of the model (a preset has its own)",
        {"metavar": "MODULE:NAME"},
    ),
    ("--shard", "strategies to consider (default: all but DDP)", {"nargs": "+", "choices": STRATEGIES}),
    ("--memory", "that a plan may fill on a rank (default: 92 %% of the device's)", SIZE),
    ("--disk", "CPU ranks may have optimizer state on disk where nothing else fits", SWITCH),
    ("--elastic", "also say what the copies of `run --elastic` hold", SWITCH),
    ("--out", "write plan.json there", {"metavar": "FOLDER"}),
)


def add_plan_arguments(commands: Any) -> None:
    """Add ``plan``."""
    described = (
        "Compare strategies, meshes, sizes of units, recomputation and offload for a model on any number of ranks. Needs no "
        "GPU, no other process and no memory for the model."
    )
    text = "say what training a model on many ranks would hold and take, before it runs"
    parser = add_command(commands, "plan", (text, described), ())
    model = parser.add_mutually_exclusive_group(required=True)
    makes = "a function without arguments that makes the model; it is called on the meta device"
    add_options(model, [("--preset", "a model of known shape", {"choices": _PRESETS})])
    add_options(model, [("--model-from", makes, {"metavar": "MODULE:FUNCTION"})])
    add_options(parser, _OPTIONS)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan and the call to paste, and write it down if asked to; return 0.  Raises: ConfigError."""
    hardware = read_hardware(arguments.hardware)
    if arguments.hosts is not None:
        hardware = with_hosts(hardware, arguments.ranks, arguments.hosts)
    if arguments.memory is not None:
        hardware = with_memory(hardware, arguments.memory)
    optimizer = arguments.optimizer
    if ":" in optimizer:
        optimizer = _named(optimizer, "--optimizer", "FUNCTION")
    choices = Choices(
        precision=arguments.precision,
        accumulate=arguments.accumulate,
        optimizer=optimizer,
        disk=arguments.disk,
        keep_blocks=arguments.memory is not None,
        tensor=tuple(arguments.tp),
        tensor_plan=_tensor_plan_of(arguments),
    )
    if arguments.shard is not None:
        choices = replace(choices, strategies=tuple(arguments.shard))
    if arguments.reproducible:
        choices = _with_sums(choices, arguments)
    inputs = (arguments.batch, arguments.seq)
    build = _model_of(arguments)
    found = plan(build, inputs, arguments.ranks, hardware=hardware, choices=choices)
    copies = describe_copies(build, state_bytes_of(choices.optimizer)) if arguments.elastic else ""
    print(f"{found.table()}\n\n{_sums_of(found, arguments.reproducible)}{copies}{found.code()}", end="")
    if arguments.out is not None:
        folder = Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder, "plan.json", found.to_json())
        print(f"written: {folder}/plan.json")
    return 0


def plan_training(config: TrainConfig, ranks: int, device: str, vocabulary: int, is_elastic: bool) -> int:
    """Print what the run of ``config`` on ``ranks`` ranks would hold and take; return 0.  Raises: ConfigError."""
    is_asked = config.transport != "auto"
    refuse_beside(f"--transport {config.transport}", {"--plan": is_asked and "it follows from where ranks are"})
    accumulate = microbatches_per_rank(config, ranks // config.tp)
    choices = Choices(
        strategies=(config.shard,),
        replicas=config.replicas,
        unit_bytes=(config.min_unit_bytes,),
        recompute=(config.recompute,),
        offload=(config.offload,),
        precision=config.dtype,
        accumulate=accumulate,
        tensor=(config.tp,),
        tensor_plan=HEADS,
    )
    batch = max(config.batch // (ranks // config.tp * accumulate), 1)
    hardware = HARDWARE["cpu" if device == "cpu" else "h100"]
    if device == "cpu":  # all ranks of the command are on this host
        hardware = with_hosts(hardware, ranks, 1)
    size = (batch, config.model.context)

    def build() -> nn.Module:
        if config.model_from is not None:
            return build_own(config.model_from, config.seed, vocabulary, config.model.context)
        return GPT(config.model, vocabulary=vocabulary)

    found = plan(build, size, ranks, hardware=hardware, choices=choices)
    copies = describe_copies(build, state_bytes_of(choices.optimizer)) if is_elastic else ""
    print(f"{found}\n\n{_sums_of(found, config.reproducible)}{copies}".rstrip())
    return 0


def _with_sums(choices: Choices, arguments: argparse.Namespace) -> Choices:
    """Return what --reproducible leaves of ``choices``.  Raises: ConfigError."""
    others = {
        "--accumulate": arguments.accumulate > 1 and "microbatches per rank follow from the number of ranks",
        "--tp": arguments.tp != [1] and "it splits the sums of a layer over ranks",
        "--shard zero1 or none": set(arguments.shard or ()) - UNIT_STRATEGIES and "DDP sums in an order of its own",
    }
    refuse_beside(f"--reproducible {arguments.reproducible}", others)
    strategies = tuple(each for each in choices.strategies if each in UNIT_STRATEGIES)
    accumulate = BatchPlace(arguments.reproducible, arguments.ranks, 1, 0, 0).per_rank
    return replace(choices, strategies=strategies, accumulate=accumulate)


def _sums_of(found: Plan, num_microbatches: int) -> str:
    """Return what the sums of --reproducible cost in the recommended way."""
    if not num_microbatches or found.best is None:
        return ""
    setting, num_bytes = found.best.setting, found.best.section_bytes
    axes = num_microbatches, setting.num_shards, setting.num_replicas
    places = [BatchPlace(*axes, *divmod(rank, setting.num_replicas)) for rank in range(setting.ranks)]
    sent, held = places[0].sent(num_bytes), max(place.held(num_bytes) for place in places)
    total = format_bytes(found.best.peak.total + held)
    return (
        f"--reproducible {num_microbatches}: a rank sends {format_bytes(sent)} of gradients per step; partial sums hold "
        f"{format_bytes(held)}, {total} with the peak\n\n"
    )


def _model_of(arguments: argparse.Namespace) -> Callable[[], nn.Module]:
    if arguments.preset is not None:
        name = str(arguments.preset)
        if name in LLAMAS:
            return lambda: Llama(LLAMAS[name])
        shape = replace(PRESETS[name.removeprefix(_GPT)], context=arguments.seq)
        return lambda: GPT(shape)
    return _named(arguments.model_from, "--model-from", "FUNCTION, such as my_model:build")


def _tensor_plan_of(arguments: argparse.Namespace) -> Mapping[str, ParallelStyle]:
    if arguments.preset is not None:
        return LLAMA_HEADS if str(arguments.preset) in LLAMAS else HEADS
    if arguments.tp_plan is None:
        return {}
    found = _named(arguments.tp_plan, "--tp-plan", "NAME, such as my_model:TP_PLAN")
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"--tp-plan {arguments.tp_plan} is a {type(found).__name__}, expected what parallelize_module takes"
        )
    return cast("Mapping[str, ParallelStyle]", found)


def _named(source: str, option: str, expected: str) -> Any:
    """Return what MODULE:NAME names.  Raises: ConfigError."""
    if not source.partition(":")[2]:
        raise ConfigError(f"{option} is {source!r}, expected MODULE:{expected}")
    return named(source, option)
