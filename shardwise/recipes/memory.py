"""The memory of a rank, and what an unsharded run would need."""

from __future__ import annotations

import gc
import math
import resource
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import Trace, describe_units, torch_private, trace
from shardwise.collectives.host.local_peers import foreign_ranges
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.planner.advice import step_under
from shardwise.planner.dry_run import TensorSplit, dry_run, hook_blocks
from shardwise.planner.hardware import HARDWARE, cublas_bytes
from shardwise.planner.profile import ROUTES, Setting
from shardwise.planner.rank_step import UPDATE, RankMemory
from shardwise.recipes.config import ENGINE_SHARDS, NUM_BYTES, ModelShape, TrainConfig, data_ranks
from shardwise.recipes.gpt import GPT, next_byte_loss
from shardwise.recipes.sharding import HEADS, RunRanks, blocks_of, build_own

# ---- Traces of some steps of a run.

StepWatch = Callable[[int], AbstractContextManager[None]]


def traced_steps(model: nn.Module | None, steps: int, write: Callable[[Trace], None]) -> StepWatch:
    """Return a callback that traces steps 1 to ``steps`` (0-based; the first one warms up) and then calls ``write``."""
    stack = ExitStack()
    traces: list[Trace] = []

    @contextmanager
    def watch(number: int) -> Generator[None, None, None]:
        if number == 1:
            traces.append(stack.enter_context(trace(model)))
        try:
            yield
        except BaseException:
            stack.close()
            raise
        if number == steps and traces:
            stack.close()
            write(traces.pop())

    return watch


# ---- The bytes of live tensors, counted where torch allocates them, after every operation.


class LiveBytes:
    """Counts the storages that operations allocate or use; on a GPU the caching allocator counts.

    Memory that neither Python nor an operation has used does not count: call :meth:`restart` after a watched step.
    Memory that other ranks share with this one counts there.  The watch does not change how ranks exchange tensors.

    Attributes:
        live: current bytes.
        peaks: (the last event, most bytes since then), in order.
        at: the operation with the highest memory since :meth:`restart`.
    """

    def __init__(self, device: torch.device) -> None:
        self.live = 0
        self.peaks: list[tuple[str, int]] = [("", 0)]
        self.at = ""
        self._device = device
        self._highest = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}

    @property
    def peak(self) -> int:
        """Most bytes since :meth:`restart`."""
        return max(num_bytes for _, num_bytes in self.peaks)

    def restart(self) -> None:
        """Forget all peaks except the current bytes."""
        self.peaks, self._highest = [], 0
        self.pass_event("")

    def pass_event(self, event: str) -> None:
        """Record the peak of what follows under ``event``."""
        self.peaks.append((event, self.live))

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Count inside the context; tensors that Python knows at its begin count from the start."""
        is_counted = self._device.type != "cuda"
        for each in gc.get_objects() if is_counted else ():
            if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == self._device.type:
                self._follow(each.untyped_storage())
        self.restart()
        with torch_private.watching(self._after if is_counted else self._ask, is_seen=False):
            yield

    def _ask(self, func: Any, given: object, out: object) -> None:
        self.live = torch.cuda.memory_allocated(self._device)
        self._note(func)

    def _after(self, func: Any, given: object, out: object) -> None:
        for each in torch_private.leaves_of((given, out)):
            if isinstance(each, torch.Tensor):
                local = torch_private.local_of(each)
                if type(local) in (torch.Tensor, nn.Parameter):
                    self._follow(local.untyped_storage())
        self._note(func)

    def _note(self, func: Any) -> None:
        event, peak = self.peaks[-1]
        if self.live > peak:
            self.peaks[-1] = (event, self.live)
        if self.live > self._highest:
            self._highest, self.at = self.live, str(func)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # a storage keeps its Python object alive as long as it lives
        if key in self._storages:
            return
        size = storage.nbytes()
        start = storage.data_ptr() if size else 0  # torch refuses the address of a storage without memory
        ranges = [
            *self._ranges.values()
        ]  # a copy: storages that are collected meanwhile, or on another thread, change it
        is_part = any(low <= start and start + size <= high for low, high in ranges)
        if is_part or any(low <= start < high for low, high in foreign_ranges()):
            size = 0  # it is counted already, or elsewhere

        def forget(_: object) -> None:
            self.live -= size
            self._storages.pop(key, None)
            self._ranges.pop(key, None)

        self._storages[key] = weakref.ref(storage, forget)
        if size:
            self._ranges[key] = (start, start + size)
        self.live += size


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The memory of one rank.  ``peak_bytes`` is the peak resident set on CPU, the allocator's peak on a GPU."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def fold_held(fold: Callable[[Iterable[int]], int], held: Sequence[HeldBytes]) -> HeldBytes:
    """Reduce each figure over ranks: ``fold_held(max, held)`` is the largest of each."""
    return HeldBytes(*map(fold, zip(*map(astuple, held), strict=True)))


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the local parts; a shared tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in distinct.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def measure_held(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure this rank's current memory; gradients exist only between backward and zero_grad.

    ``optimizer``: the one with this rank's state.
    """
    states = (value for state in optimizer.state.values() for value in state.values())
    return HeldBytes(
        parameter_bytes=local_bytes(model.parameters()),
        gradient_bytes=local_bytes(p.grad for p in model.parameters() if p.grad is not None),
        optimizer_bytes=local_bytes(value for value in states if isinstance(value, Tensor)),
    )


def unsharded_of(model: nn.Module) -> HeldBytes:
    """Return one rank's memory of ``model`` without sharding: AdamW's two averages are in the dtypes of the parameters."""
    params = {id(param): param for param in model.parameters()}.values()
    trained = local_bytes(param for param in params if param.requires_grad)
    return HeldBytes(local_bytes(params), trained, 2 * trained)


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak: of the CUDA allocator, or of resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the largest resident set since the process started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# ---- A rank's memory over one step of a run, compared with the plan.


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A step of the rank with the most memory.

    Attributes:
        step: its number, from 1.  rank: the rank.
        peaks: for each event of a block in order, its name and the most bytes before the next event.
        planned: the plan; None if the model cannot be planned.
    """

    step: int
    rank: int
    peaks: tuple[tuple[str, int], ...]
    planned: RankMemory | None = None

    @property
    def peak(self) -> tuple[str, int]:
        """The event with the highest memory, and the bytes."""
        return max(self.peaks, key=lambda item: item[1])

    def __str__(self) -> str:
        event, num_bytes = self.peak
        words = f"memory of step {self.step}: {format_bytes(num_bytes)} at most on rank {self.rank} ({event})"
        if self.planned is None:
            return words
        planned = self.planned.peak
        return f"{words}, planned {format_bytes(planned.total)} ({planned.event})"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The memory of ranks.

    Attributes:
        held: between passes, of each rank; ``unsharded``: what any rank would need for the full model.
        step: over one step, of the rank with the most memory; None if it was not measured.
    """

    held: Sequence[HeldBytes]
    unsharded: HeldBytes
    step: StepMemory | None = None


class StepMemoryMeter:
    """Measures one step of a run, the second of two that it watches: the first shows which storages exist.

    Args:
        plain: the model without a wrapper.

    Attributes:
        number: of the step, 0-based within the run; step 0 has no step before it.
    """

    def __init__(self, plain: nn.Module, optimizer: Optimizer, device: torch.device, number: int) -> None:
        self._plain, self._optimizer = plain, optimizer
        self.number = number
        self._live = LiveBytes(device)
        self._stack = ExitStack()

    @property
    def peaks(self) -> list[tuple[str, int]]:
        """As in :class:`StepMemory`, of this rank; empty before the step."""
        return [(event, num_bytes) for event, num_bytes in self._live.peaks if event]

    @contextmanager
    def watch(self, number: int) -> Generator[None, None, None]:
        """Watch step ``number`` if it is one of the two."""
        if number == max(self.number - 1, 0):
            self._stack.enter_context(self._live.watching())
        if number == self.number:
            self._stack.enter_context(self._events())
            self._live.restart()
        try:
            yield
        except BaseException:
            self._stack.close()
            raise
        if number == self.number:
            self._stack.close()

    @contextmanager
    def _events(self) -> Generator[None, None, None]:
        paths = {id(module): path for path, module in self._plain.named_modules()}
        modules = [self._plain, *blocks_of(self._plain)]
        names = [paths[id(module)] or "(root)" for module in modules]
        handles: list[Any] = [self._optimizer.register_step_pre_hook(lambda *_: self._live.pass_event(UPDATE))]
        handles += hook_blocks(modules, lambda event, place: self._live.pass_event(f"{event.value} {names[place]}"))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def measured_number(config: TrainConfig, start_step: int, traced: int) -> int:
    """Return the measured step of a run, 0-based: the third, after those that are traced, or the last one."""
    return max(min(2 + traced, config.steps - start_step - 1), 0)


def largest_of(ranks: RunRanks, step: int, peaks: Sequence[tuple[str, int]]) -> StepMemory | None:
    """Return the step of the rank with the most memory, without a plan; None if none was measured.  Collective."""
    most = max((num_bytes for _, num_bytes in peaks), default=0)
    found = ranks.gather(most)
    rank = found.index(max(found))
    rows = ranks.gather([[event, num_bytes] for event, num_bytes in peaks] if ranks.rank == rank else [])[rank]
    return StepMemory(step, rank, tuple((str(event), int(num_bytes)) for event, num_bytes in rows)) if rows else None


def setting_of(config: TrainConfig, num_ranks: int, route: str = "") -> Setting:
    """Return the setting of a run of ``config``; ``route``: that of its units, as ``describe_units`` shows it."""
    return Setting(
        strategy=config.shard,
        ranks=num_ranks // config.tp,
        replicas=config.replicas if config.shard == "hsdp" else 1,
        min_unit_bytes=config.min_unit_bytes if config.shard != "ddp" else 0,
        precision=config.dtype,
        recompute=config.recompute,
        offload=config.offload,
        accumulate=config.accumulate,
        tensor=config.tp,
        transport=route if route in ROUTES else ROUTES[0],
    )


def planned_memory(config: TrainConfig, vocabulary: int, ranks: RunRanks, model: nn.Module) -> RankMemory | None:
    """Return a rank's planned memory over a step of the run; ``model``: the running one, for its routes.

    None if a model of the user does not run on the meta device or on fake tensors, and for experts: what they compute
    depends on the text.
    """
    if config.model.experts:
        return None
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
    except Exception:  # a model of the user can raise anything there
        if config.model_from is None:
            raise
        return None
    capability = torch.cuda.get_device_capability(ranks.device)[0] if ranks.device.type == "cuda" else 0
    library_bytes = cublas_bytes(capability) if capability else 0
    hardware = replace(HARDWARE["cpu"], device=ranks.device.type, library_bytes=library_bytes)
    return step_under(run.profile, setting, hardware).memory


def planned_model(config: TrainConfig, vocabulary: int) -> nn.Module:
    """Return the model of a run, as :func:`build_trainer` makes it; inside ``torch.device("meta")`` without memory."""
    if config.model_from is not None:
        return build_own(config.model_from, config.seed, vocabulary, config.model.context)
    return GPT(config.model, recompute=config.recompute, vocabulary=vocabulary)


# ---- The least memory of a training step, from sizes only, to refuse before ranks start what cannot fit.
# A lower bound that counts what is certain: parameters, gradients and AdamW's state in fp32, what autograd saves of a
# microbatch, and the logits. What fits by this bound may still not fit; what does not fit by it never will.

_FP32, _INT64 = 4, 8
_TRIES = 10_000
_KINDS_OF_STATE = 4  # a parameter, its gradient, and AdamW's two averages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory available to one rank.

    Attributes:
        num_bytes: for the computation: of its GPU, or of the host divided by the ranks there.
        host_bytes: of the host divided by the ranks there, for shards and state with --offload; None for CPU ranks,
            whose memory is all in one place.
        place: a description of it.
    """

    num_bytes: int
    host_bytes: int | None
    place: str


@dataclass(frozen=True, slots=True)
class LeastBytes:
    """The least memory of a rank.

    Attributes:
        state: parameters, gradients and optimizer state.
        gradients: the part of ``state`` that does not exist yet while activations do.
        per_sequence: what one sequence of a microbatch saves until its backward.
        num_sequences: of a microbatch.
    """

    state: int
    gradients: int
    per_sequence: int
    num_sequences: int


def count_gpt_parameters(shape: ModelShape, vocabulary: int) -> int:
    """Return how many parameters the GPT of ``shape`` has over ``vocabulary`` tokens."""
    width = shape.width
    mlp, router = 8 * width**2 + 5 * width, shape.experts * width
    block = 4 * width**2 + 8 * width + max(shape.experts, 1) * mlp + router
    return shape.layers * block + width * (2 * vocabulary + shape.context + 2)


def least_bytes(config: TrainConfig, num_ranks: int, vocabulary: int = NUM_BYTES) -> LeastBytes:
    """Return the least memory of each of ``num_ranks`` ranks; for a model of the user, only the logits are known."""
    num_sequences = config.batch // (data_ranks(config, num_ranks) * config.accumulate)
    around = config.model.context * (2 * _INT64 + 2 * _FP32 * vocabulary)  # tokens, targets, logits, their log-softmax
    if config.model_from is not None:
        return LeastBytes(0, 0, around, num_sequences)
    state_shards, gradient_shards = _shards(config, num_ranks)
    each = _FP32 * count_gpt_parameters(config.model, vocabulary)
    parameters = each // state_shards if config.shard in ENGINE_SHARDS else each
    gradients = each // gradient_shards
    averages = (_KINDS_OF_STATE - 2) * each // state_shards
    sequence = around + config.model.context * _kept_of_token(config)
    return LeastBytes(parameters + gradients + averages, gradients, sequence, num_sequences)


def _shards(config: TrainConfig, num_ranks: int) -> tuple[int, int]:
    """Return over how many ranks optimizer state (and an engine's parameters) and gradients are divided, at most."""
    if config.shard in ("zero3", "hsdp", "zero2"):
        shards = num_ranks // (config.replicas if config.shard == "hsdp" else 1)
        return shards, shards
    if config.shard == "ddp":
        return config.tp, config.tp
    return (1 if config.shard == "none" else num_ranks), 1


def _kept_of_token(config: TrainConfig) -> int:
    """Return the bytes that autograd saves of a token in all blocks.

    Of a block: inputs of both norms, of qkv and of the MLP's first layer (four times the width, on every rank); query,
    key, value, the result of attention and the MLP between its layers, before and after GELU (twelve times, divided by
    --tp).
    """
    width, layers = config.model.width, config.model.layers
    block = 4 * width + 12 * width // config.tp
    kept = (layers - 1) * width + block if config.recompute else layers * block
    return (2 if config.dtype == "bf16" else _FP32) * (kept + 2 * width)


def check_memory(config: TrainConfig, num_ranks: int, limit: MemoryLimit, vocabulary: int = NUM_BYTES) -> None:
    """Refuse sizes that cannot fit into the memory of a rank.  Raises: ConfigError with the option to change."""
    least = least_bytes(config, num_ranks, vocabulary)
    host_bytes = limit.host_bytes if config.offload else None
    if least.state > (limit.num_bytes if host_bytes is None else host_bytes):
        raise ConfigError(
            f"{_sizes(config.model)}: {count_gpt_parameters(config.model, vocabulary):,} parameters with their gradients and "
            f"AdamW's state take at least {format_bytes(least.state)} on each of {num_ranks} rank(s) with --shard "
            f"{config.shard}, and {limit.place}. Use a smaller one of these, more ranks with --shard zero3, or more memory."
        )
    state = least.state - least.gradients if host_bytes is None else 0
    needed = state + least.num_sequences * least.per_sequence
    if needed <= limit.num_bytes:
        return
    found = (
        f"--batch {config.batch}: a microbatch of {least.num_sequences:,} sequence(s) on each of {num_ranks} rank(s) takes at "
        f"least {format_bytes(needed)}, and {limit.place}."
    )
    most = max(0, limit.num_bytes - state) // least.per_sequence
    if not most:
        less = "a smaller --context or --width" + ("" if config.recompute else ", or --recompute")
        raise ConfigError(f"{found} Not even one fits. Use {less}.")
    parts = data_ranks(config, num_ranks)
    fitting = most * parts * config.accumulate
    accumulate = _fitting_accumulate(config.batch // parts, most)
    raise ConfigError(f"{found} Use --batch {fitting} or less, or {accumulate}.")


def _fitting_accumulate(num_sequences: int, most: int) -> str:
    """Return the smallest --accumulate that cuts a rank's part of the batch into equal microbatches of ``most`` or fewer."""
    least = math.ceil(num_sequences / most)
    found = next((number for number in range(least, least + _TRIES) if num_sequences % number == 0), None)
    return f"a larger --accumulate, {least} at least" if found is None else f"--accumulate {found}"


def _sizes(shape: ModelShape) -> str:
    return f"--layers {shape.layers} --width {shape.width} --context {shape.context}"
