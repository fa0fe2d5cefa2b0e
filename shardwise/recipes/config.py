"""The configuration of a training run: the values that decide its losses, checked once, before any process starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from shardwise.collectives.routes import TRANSPORTS
from shardwise.errors import ConfigError
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES
from shardwise.planner.hardware import STRATEGIES as SHARDS
from shardwise.planner.hardware import UNIT_STRATEGIES as ENGINE_SHARDS

T = TypeVar("T")
NUM_BYTES = 256  # the vocabulary without a tokenizer
DTYPES = ("fp32", "bf16")


def _option(default: Any, text: str, *, least: int | None = None, is_late: bool = False, **more: Any) -> Any:
    """Return a field that is an option of the command; ``text``: its help, ``more``: what argparse needs besides.

    ``least``: the lowest value.  ``is_late``: --resume may change it, since it alters neither which windows a step sees nor
    what a past step computed.
    """
    return field(default=default, metadata={"text": text, "least": least, "is_late": is_late, "more": more})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of the GPT: ``width`` features, ``heads`` heads, ``layers`` blocks, ``context`` bytes of input.

    With ``experts`` above 0 the MLP of a block is a mixture of that many, of which each position uses ``top_k``.
    """

    layers: int = _option(MISSING, "number of blocks", least=1)
    width: int = _option(MISSING, "features per position; divisible by --heads", least=1)
    heads: int = _option(MISSING, "attention heads", least=1)
    context: int = _option(MISSING, "bytes, or tokens, that the model sees at once", least=1)
    experts: int = _option(0, "make the MLP of every block a mixture of N experts, each a unit", least=0)
    top_k: int = _option(1, "experts that each position uses", least=1)


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": ModelShape(layers=4, width=192, heads=6, context=128),
        "small": ModelShape(layers=6, width=384, heads=6, context=256),
        "medium": ModelShape(layers=12, width=768, heads=12, context=512),
    }
)


_SHARDED = (
    "zero3 = fully_shard: parameters, gradients and optimizer state sharded over all ranks; hsdp = fully_shard within "
    "--replicas groups of ranks, whole copies between them (HSDP); ddp = our engine with everything on every rank; zero2 = "
    "ZeRO-2: gradients and optimizer state sharded, parameters gathered once per forward and backward; zero1 = ZeRO-1: DDP "
    "with only the optimizer state sharded; none = plain DistributedDataParallel: everything on every rank, for comparison"
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that decides what a run computes; saved as config.json.  ``batch`` counts sequences of all ranks."""

    model: ModelShape = field(default_factory=lambda: PRESETS["tiny"])
    # How a step is carried out, but not what it computes.
    shard: str = _option("zero3", _SHARDED, is_late=True, choices=SHARDS)
    offload: bool = _option(False, "keep shards, gradients and optimizer state in host memory", is_late=True)
    recompute: bool = _option(
        False, "keep of blocks only inputs for backward, and compute them again there", is_late=True
    )
    compile: bool = _option(False, "compile attention and MLP of every block with torch.compile", is_late=True)
    compile_backend: str = _option("inductor", "of torch.compile, with --compile", is_late=True, metavar="NAME")
    min_unit_bytes: int = _option(
        DEFAULT_MIN_UNIT_BYTES,
        "merge neighbouring blocks until a unit has this many bytes of parameters, with --shard zero3, zero2 and hsdp; "
        "512k, 1.5M (powers of 1024); 0: never",
        least=0,
        is_late=True,
    )
    transport: str = _option(
        "auto",
        "how CPU ranks exchange tensors, with --shard zero3, zero2 and hsdp: auto = shared memory within a host, gloo = "
        "messages, collective = gloo's collectives",
        is_late=True,
        choices=TRANSPORTS,
    )
    replicas: int = _option(2, "whole copies of the model, with --shard hsdp", least=1, is_late=True)
    tp: int = _option(
        1, "ranks that share heads and columns of every block (tensor parallelism)", least=1, is_late=True
    )
    accumulate: int = _option(1, "microbatches per step and rank", least=1, is_late=True)
    # What it computes.
    dtype: str = _option("fp32", "type of the computation", choices=DTYPES)
    data: str | None = _option(
        None,
        "a text, .jsonl or .parquet file, a folder of such files, or one that datasets.save_to_disk wrote (default: "
        "Python's standard library)",
    )
    text_column: str = _option("text", "of JSONL, Parquet and datasets: the text", metavar="NAME")
    tokenizer: str | None = _option(None, "a tokenizer.json of the tokenizers package (default: bytes)")
    init: str | None = _option(None, "begin with these safetensors weights, a file or a folder (default: random)")
    model_from: str | None = None
    batch: int = _option(32, "sequences per step, of all ranks together", least=1)
    reproducible: int = _option(
        0,
        "microbatches of a step over all ranks, V: the same bits at every number of ranks that divides V (default: 0, off)",
        least=0,
        metavar="V",
    )
    lr: float = _option(2e-3, "highest learning rate")
    warmup: int = _option(40, "steps of linear warm-up, before the cosine", least=0)
    weight_decay: float = _option(0.1, "of AdamW, on matrices", least=0)
    clip: float = _option(1.0, "largest norm of the gradients; 0: clip nothing")
    seed: int = _option(0, "of the weights, the order of the text and the sample", least=0)
    # How long it goes on, and what it writes.
    steps: int = _option(400, "optimizer steps in all", least=1, is_late=True)
    log_every: int = _option(10, "steps between two lines of figures", least=1, is_late=True)
    eval_every: int = _option(100, "steps between two validations", least=1, is_late=True)
    eval_windows: int = _option(128, "windows of the validation text to measure", least=1, is_late=True)
    save_every: int = _option(200, "steps between two checkpoints", least=1, is_late=True)
    keep: int = _option(2, "checkpoints to keep", least=1, is_late=True)
    sample_bytes: int = _option(300, "length of the sample at the end, in bytes or tokens", least=0, is_late=True)


RESUME_MAY_CHANGE = frozenset(each.name for each in dataclasses.fields(TrainConfig) if each.metadata.get("is_late"))
_ADDED = RESUME_MAY_CHANGE | {"reproducible"}  # a config.json of an earlier version may lack these


def check_config(config: TrainConfig) -> None:
    """Refuse values that cannot be trained with.  Raises: ConfigError with the option and the next action."""
    shape = config.model
    for of in (shape, config):
        for each in dataclasses.fields(of):
            name, value = each.name.replace("_", "-"), getattr(of, each.name)
            least, choices = each.metadata.get("least"), each.metadata.get("more", {}).get("choices")
            if least is not None and value < least:
                raise ConfigError(f"--{name} is {value}, expected {'at least 1' if least else '0 or more'}.")
            if choices is not None and value not in choices:
                raise ConfigError(f"--{name} is {value!r}, expected one of {', '.join(choices)}.")
    if shape.width % shape.heads:
        raise ConfigError(
            f"--width {shape.width} is not divisible by --heads {shape.heads}: each head needs the same whole number "
            f"of features. Try --width {math.ceil(shape.width / shape.heads) * shape.heads}."
        )
    if shape.top_k > max(shape.experts, 1):
        raise ConfigError(f"--top-k is {shape.top_k}, expected at least 1 and at most --experts, {shape.experts}.")
    if not (math.isfinite(config.lr) and config.lr > 0):
        raise ConfigError(f"--lr is {config.lr}, expected a positive number.")
    if not (math.isfinite(config.clip) and config.clip >= 0):
        raise ConfigError(f"--clip is {config.clip}, expected a positive number, or 0 to clip nothing.")
    _check_together(config)
    _check_own_model(config)


def _check_own_model(config: TrainConfig) -> None:
    if config.model_from is None:
        return
    module, _, function = config.model_from.partition(":")
    if not module or not function:
        raise ConfigError(
            f"--model-from is {config.model_from!r}, expected module:function, for a function that returns a torch.nn.Module "
            "(in a file module.py of this folder, or installed)."
        )
    why = f"it splits blocks of shardwise's own GPT; split yours in {module} (torch.distributed.tensor.parallel)"
    refuse_beside("--model-from", {f"--tp {config.tp}": config.tp > 1 and why})


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Refuse the first of ``others`` that does not go with ``option``: one whose value is the reason, and not empty.

    Raises: ConfigError.
    """
    for other, reason in others.items():
        if reason:
            raise ConfigError(f"{other} does not go with {option}: {reason}. Leave one of them out.")


def _check_together(config: TrainConfig) -> None:
    has_units, experts = config.shard in ENGINE_SHARDS, config.model.experts
    shard, tp = f"--shard {config.shard}", f"--tp {config.tp}"
    if experts:
        others = {
            shard: not has_units and "only --shard zero3, hsdp, zero2 and ddp let ranks run different experts",
            tp: config.tp > 1 and "it splits one MLP per block",
            "--compile": config.compile and "the number of positions of an expert changes in each step",
        }
        refuse_beside(f"--experts {experts}", others)
    if config.reproducible:
        others = {
            f"--accumulate {config.accumulate}": config.accumulate > 1 and "the number of ranks decides it",
            tp: config.tp > 1 and "it splits the sums of a layer over ranks",
            f"--experts {experts}": experts and "ranks run different experts",
            shard: not has_units and "DDP sums in an order of its own",
        }
        refuse_beside(f"--reproducible {config.reproducible}", others)
        if config.batch % config.reproducible:
            raise ConfigError(
                f"--reproducible {config.reproducible} does not divide --batch {config.batch}: microbatches must have equally "
                "many sequences. Choose a divisor of --batch."
            )
    if not has_units:
        others = {
            "--offload": config.offload
            and "only --shard zero3, hsdp, zero2 and ddp move parameters to the host and back",
            tp: config.tp > 1 and "DDP takes no tensors that are split; --shard zero3, hsdp, zero2 and ddp do",
        }
        refuse_beside(shard, others)
    if config.model.heads % config.tp:
        raise ConfigError(
            f"--tp {config.tp} does not divide --heads {config.model.heads} (--width {config.model.width}): every rank "
            f"of a tensor-parallel group computes the same number of whole heads. Choose a divisor of --heads."
        )


def data_ranks(config: TrainConfig, num_ranks: int) -> int:
    """Return the number of parts of the batch for ``num_ranks`` ranks: the ranks of a tensor-parallel group share one part.

    Raises: ConfigError if ``num_ranks`` cannot be laid out for --tp and --shard hsdp.
    """
    if num_ranks % config.tp:
        raise ConfigError(
            f"--tp {config.tp} does not divide the number of ranks, {num_ranks}. Start a multiple of {config.tp} ranks."
        )
    parts = num_ranks // config.tp
    if config.shard == "hsdp" and (parts % config.replicas or parts <= config.replicas or config.replicas == 1):
        raise ConfigError(
            f"--shard hsdp cannot lay {parts} data-parallel rank(s) out as --replicas {config.replicas} copies of "
            f"two or more shards each. Start an even number of ranks above 2 (--nproc 4), choose another divisor with "
            f"--replicas, or use --shard zero3 (one copy) or ddp (no shards)."
        )
    return parts


def microbatches_per_rank(config: TrainConfig, num_parts: int) -> int:
    """Return how many microbatches of a step each of ``num_parts`` data-parallel ranks computes."""
    return config.reproducible // num_parts if config.reproducible else config.accumulate


def check_ranks(config: TrainConfig, num_ranks: int) -> None:
    """Refuse numbers of ranks that do not suit the options, or that do not cut the batch into equal microbatches.

    Raises: ConfigError.
    """
    num_parts = data_ranks(config, num_ranks)
    if config.reproducible % num_parts:
        raise ConfigError(
            f"--reproducible {config.reproducible} microbatches cannot be shared equally by {num_parts} data-parallel rank(s). "
            "Start a number of ranks that divides it (--nproc)."
        )
    parts = num_parts * config.accumulate
    if config.batch % parts:
        below, above = config.batch // parts * parts, (config.batch // parts + 1) * parts
        choices = f"{above}" if below == 0 else f"{below} or {above}"
        raise ConfigError(
            f"--batch {config.batch} (sequences of all ranks together) is not divisible by {num_parts} data-parallel rank(s) x "
            f"--accumulate {config.accumulate} = {parts}. Use --batch {choices}."
        )


def config_to_toml(config: TrainConfig, num_ranks: int, device_type: str) -> str:
    """Return the options of ``shardwise train`` that repeat a run; paths are absolute, and default flags are omitted."""
    values = dataclasses.asdict(config)
    sizes = values.pop("model")
    if config.model_from is not None:  # the new run gets its own
        sizes = {"context": sizes["context"]}
    values = sizes | values | {"nproc": num_ranks, "device": device_type}
    for name, path in (("data", config.data), ("tokenizer", config.tokenizer), ("init", config.init)):
        values[name] = None if path is None else os.path.abspath(path)
    lines = (f"{name.replace('_', '-')} = {_to_toml(value)}\n" for name, value in values.items() if value is not None)
    return "# shardwise train --config THIS_FILE --out FOLDER repeats the run\n" + "".join(lines)


def _to_toml(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def config_from_json(values: Mapping[str, object]) -> TrainConfig:
    """Rebuild a config; options that ``values`` lack, because a later version added them, get their defaults.

    Raises: ConfigError if other names are missing, or some are unknown (another version, or an edited file).
    """
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    odd_names = (set(values) - known) | (known - _ADDED - set(values))
    if odd_names:
        odd = ", ".join(sorted(odd_names))
        raise ConfigError(f"config.json does not match this version of shardwise: missing or unknown values: {odd}.")
    shape = values["model"]
    if not isinstance(shape, dict):
        raise ConfigError("config.json: 'model' is not a table of layers, width, heads, context.")
    model = typed(ModelShape, cast(dict[str, object], shape), "config.json: model")
    return typed(TrainConfig, {**values, "model": model}, "config.json")


def typed(kind: type[T], values: Mapping[str, object], what: str) -> T:
    """Return an instance of the dataclass ``kind`` with checked field types.  Raises: ConfigError with the field."""
    if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  of a file
        raise ConfigError(f"{what}: holds a {type(values).__name__}, expected a table; the file was edited.")
    hints = get_type_hints(kind)
    for name, value in values.items():
        allowed: tuple[type, ...] = get_args(hints.get(name)) or (hints.get(name, object),)
        found = float if type(value) is int and float in allowed else type(value)
        is_number = isinstance(value, int | float)
        limit = 2**63 if isinstance(value, int) else math.inf
        if found not in allowed or (is_number and not -limit < value < limit):
            expected = " or ".join(each.__name__ for each in allowed)
            raise ConfigError(f"{what}: {name} is {str(value)[:60]!r}, expected {expected}; the file was edited.")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}.") from error


def changed_values(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[object, object]]:
    """Return the names whose values differ, as {name: (old, new)}; model sizes under their own names."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    before |= before.pop("model")
    after |= after.pop("model")
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of ``step`` (0-based): linear warm-up to ``lr``, then a cosine down to a tenth of it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    span = max(1, config.steps - config.warmup)
    progress = min(1.0, (step - config.warmup) / span)
    return config.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
