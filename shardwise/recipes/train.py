"""The main program of one rank: prepare the run folder, train, validate, sample, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import (
    ActivationPolicy,
    MemoryLimit,
    Microbatches,
    Reproducible,
    RunDigests,
    StepMeter,
    Trace,
    __version__,
    apply_activations,
    clip_grad_norm_,
    describe_units,
    elastic,
    record,
    torch_private,
    trace,
)
from shardwise.checkpoint import finish
from shardwise.consistency.recorder import BLACK_BOX
from shardwise.elastic.run import ElasticRun
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.recipes.config import ENGINE_SHARDS, TrainConfig, check_ranks, learning_rate
from shardwise.recipes.data import (
    Windows,
    open_vocabulary,
    open_windows,
    validation_part,
)
from shardwise.recipes.gpt import GPT, build_gpt, generate, logits_of, next_byte_loss
from shardwise.recipes.report import (
    REPORT,
    HtmlReport,
    RunLog,
    TrainedStep,
    memory_table,
)
from shardwise.recipes.run_folder import (
    Restart,
    RunProgress,
    Start,
    TrainRun,
    discard_new,
    drop_later_metrics,
    entries_of,
    load_newest,
    lock_run,
    note_restart,
    prepare_again,
    prepare_run,
    run_from_json,
    run_to_json,
    start_saving,
    write_config,
)
from shardwise.recipes.sharding import (
    HeldBytes,
    RunRanks,
    blocks_of,
    build_meshes,
    build_optimizer,
    build_own,
    compile_blocks,
    load_init,
    local_optimizer,
    measure_held,
    peak_bytes,
    plain_of,
    precision_of,
    split_heads,
    syncing,
    try_own,
    unsharded_of,
    wrap,
)
from shardwise.safe_files import open_append, opened_folder, replace_file

# ---- Ends of a run before its last step: on request, or because training diverged.

Asked = Callable[[], int]  # the number of the signal that asks this rank to stop, 0 if there is none
StepWatch = Callable[[int], AbstractContextManager[None]]
Listening = Callable[[], AbstractContextManager[Asked]]  # entered while steps remain between which to stop


class DivergedError(ShardwiseError, ArithmeticError):
    """The loss, its gradients or the parameters are not finite, so that training cannot continue."""


def listen_to_nobody() -> AbstractContextManager[Asked]:
    """Train to the last step."""
    return nullcontext(lambda: 0)


# ---- The training loop: the same arithmetic for every sharding strategy and every number of ranks.


@dataclass(frozen=True, slots=True)
class Trainer:
    """Everything that a step needs on one rank."""

    run: TrainRun
    ranks: RunRanks
    model: nn.Module
    optimizer: Optimizer
    data: Microbatches
    validation: Windows
    num_parameters: int
    unsharded: HeldBytes  # a rank's memory without any sharding
    report: HtmlReport  # which rank 0 writes
    notes: tuple[str, ...]  # of the checkpoint with which the run goes on
    fixed: Reproducible | None = None  # with --reproducible
    memory: MemoryLimit | None = None  # with --memory

    @property
    def config(self) -> TrainConfig:
        return self.run.config

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.config.batch * self.config.model.context


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """How training has ended: after the last step, or saved after ``step`` steps because of a ``signal``.

    ``held``: by every rank.
    """

    held: tuple[HeldBytes, ...]
    step: int
    tokens_per_s: float = 0.0
    signal: int = 0


def build_trainer(run: TrainRun, ranks: RunRanks, memory_bytes: int | None = None) -> Trainer:
    """Build model and optimizer with the chosen sharding strategy, and load the checkpoint if the run has one.  Collective."""
    config = run.config
    torch.manual_seed(config.seed)
    plain = _build_model(run, ranks)
    num_parameters, unsharded = sum(p.numel() for p in plain.parameters()), unsharded_of(plain)
    data_mesh, tensor_mesh = build_meshes(config, ranks)
    if tensor_mesh is not None and isinstance(plain, GPT):
        split_heads(plain, tensor_mesh)
    if config.compile:
        compile_blocks(plain, config.compile_backend)
    memory = None
    if memory_bytes is not None:
        sizes = config.batch // (ranks.num_ranks * config.accumulate), config.model.context
        memory = MemoryLimit(memory_bytes, sizes, folder=str(run.folder), accumulate=config.accumulate)
    elif config.recompute:
        blocks = set(blocks_of(plain))
        paths = [path for path, module in plain.named_modules() if module in blocks]
        apply_activations(plain, ActivationPolicy(dict.fromkeys(paths, "recompute")))
    model = wrap(plain, config, data_mesh, memory)
    optimizer = build_optimizer(model, config, memory and memory.offload)
    if config.init is not None and run.checkpoint is None:
        load_init(config.init, plain_of(model))
    fixed = None
    if config.reproducible:
        fixed = Reproducible(model, optimizer, num_microbatches=config.reproducible, seed=config.seed)
    text = run.folder / "text"
    context, itemsize = config.model.context, run.facts.itemsize
    train, validation = (open_windows(text / name, context, itemsize) for name in ("train.bin", "validation.bin"))
    count = config.reproducible or ranks.num_data_ranks * config.accumulate
    options: dict[str, Any] = {"seed": config.seed, "mesh": data_mesh, "collate_fn": lambda both: both}
    data = Microbatches(train, num_microbatches=count, microbatch_size=config.batch // count, **options)
    notes: tuple[str, ...] = ()
    if run.checkpoint is not None:
        run, notes = load_newest(run, entries_of(plain_of(model), optimizer, fixed, data))
    peak = "peak GPU memory" if ranks.device.type == "cuda" else "peak of the process (all)"
    numbers = num_parameters, unsharded, HtmlReport(run, unsharded, peak), notes
    return Trainer(run, ranks, model, optimizer, data, validation, *numbers, fixed, memory)


def _build_model(run: TrainRun, ranks: RunRanks) -> nn.Module:
    config, vocabulary = run.config, run.facts.vocabulary
    if config.model_from is None:
        return build_gpt(config.model, config.seed, vocabulary=vocabulary).to(ranks.device)
    model = build_own(config.model_from, config.seed, vocabulary, config.model.context)
    model.to(ranks.device)
    window = torch.zeros(1, config.model.context, dtype=torch.long, device=ranks.device)
    try_own(model, config.model_from, vocabulary, window)
    return model


class _Figures:
    """The figures of the steps since the last line, and the time of training without validation and checkpoints.

    ``meter``: of the steps.
    """

    def __init__(self, trainer: Trainer, run_log: RunLog) -> None:
        self._trainer = trainer
        config = trainer.config
        counts = config.dtype == "bf16" and not config.compile  # what is compiled hides its operations
        self.meter = StepMeter(
            trainer.model,
            trainer.tokens_per_step / trainer.ranks.num_ranks,
            every=config.log_every,
            writers=(),
            peak_flops="auto" if counts else None,
            device=trainer.ranks.device,
        )
        self._run_log = run_log
        self._pending: list[tuple[TrainedStep, Tensor]] = []  # and this rank's part of the loss
        self._began = self._last = time.perf_counter()
        self.trained_s = 0.0

    def add(self, step: TrainedStep, loss: Tensor) -> None:
        """Record a step that has just ended; its time counts from the step before, or from the start of the clock."""
        now = time.perf_counter()
        speed = self._trainer.tokens_per_step / (now - self._last)
        self._last = now
        self._pending.append((replace(step, tokens_per_s=speed, time=time.time()), loss))
        self._run_log.advance(step.step)

    def write(self) -> None:
        """Stop the clock and write the recorded figures, with losses of all ranks.  Collective."""
        window_s = time.perf_counter() - self._began
        self.trained_s += window_s
        if not self._pending:
            return
        trainer, config = self._trainer, self._trainer.config
        step_s = window_s / len(self._pending)
        losses = trainer.ranks.mean([loss for _, loss in self._pending])
        steps = [replace(step, loss=loss) for (step, _), loss in zip(self._pending, losses, strict=True)]
        self._run_log.trained(steps, self.meter.figures(), (config.steps - steps[-1].step) * step_s)
        self._pending = []

    def go_on(self) -> None:
        """Start the clock again."""
        self._began = self._last = time.perf_counter()


def train_steps(
    trainer: Trainer, run_log: RunLog, asked: Asked, watch: StepWatch | None = None
) -> Iterator[TrainingEnd | None]:
    """Train to the last step, or until a rank is asked to stop, with validation, checkpoints and figures at intervals.

    Yield after each step: None, after the last one how training has ended.

    Raises: DivergedError on every rank if loss, gradients or parameters are not finite; no checkpoint contains them.
    """
    config, start = trainer.config, trainer.run.start_step
    if start == 0:
        run_log.validated(0, validate(trainer))
    figures = _Figures(trainer, run_log)
    intervals = (config.log_every, config.eval_every, config.save_every)
    held = HeldBytes(0, 0, 0)
    for number in range(start, config.steps):
        done = number + 1
        with ExitStack() as watched:
            if watch is not None:
                watched.enter_context(watch(number - start))
            watched.enter_context(figures.meter.step())
            step, loss = _train_step(trainer, number, figures.meter)
        is_broken = not (math.isfinite(step.grad_norm) and math.isfinite(float(loss)))
        # Each rank sees its own signals and its own part of the loss; after this exchange all know the same.
        signal, num_broken = trainer.ranks.highest([asked(), int(is_broken)])
        if num_broken:
            figures.write()
            finish(trainer.run.checkpoints)
            mean = trainer.ranks.mean([loss])[0]
            raise _diverged(trainer, done, f"the loss is {mean}, the norm of its gradients {step.grad_norm}")
        if signal or done == config.steps:
            on_disk = trainer.memory is not None and trainer.memory.offload is not None
            held = measure_held(trainer.model, local_optimizer(trainer.optimizer), on_disk)
        trainer.optimizer.zero_grad()
        figures.add(step, loss)
        is_first = number == start  # its figures are shown at once
        if not (signal or is_first or any(_is_due(done, every, config) for every in intervals)):
            yield None
            continue
        figures.write()
        if _is_due(done, config.eval_every, config):
            run_log.validated(done, validate(trainer))
        if signal or _is_due(done, config.save_every, config):
            run_log.flush()
            if trainer.ranks.is_first:
                trainer.report.write(every_s=60.0)  # it reads all figures again
            save(trainer, done)
        if signal or done == config.steps:
            finish(trainer.run.checkpoints)
        if signal and done < config.steps:
            yield TrainingEnd(_of_all_ranks(trainer, held), done, signal=signal)
            return
        figures.go_on()
        if done < config.steps:
            yield None
    speed = (config.steps - start) * trainer.tokens_per_step / figures.trained_s
    yield TrainingEnd(_of_all_ranks(trainer, held), config.steps, speed)


def _of_all_ranks(trainer: Trainer, held: HeldBytes) -> tuple[HeldBytes, ...]:
    held = replace(held, peak_bytes=peak_bytes(trainer.ranks.device))
    return tuple(HeldBytes(**values) for values in trainer.ranks.gather(asdict(held)))


def _diverged(trainer: Trainer, step: int, what: str) -> DivergedError:
    return DivergedError(
        f"step {step}: {what}: training has diverged and this run has ended; its checkpoints are as they were. "
        f"Start a new run with a lower --lr (it is {trainer.config.lr:g}), a longer --warmup or a smaller --clip "
        f"(it is {trainer.config.clip:g}{'' if trainer.config.clip else ': off'})."
    )


def _is_due(done: int, every: int, config: TrainConfig) -> bool:
    return done % every == 0 or done == config.steps


def _train_step(trainer: Trainer, step: int, meter: StepMeter) -> tuple[TrainedStep, Tensor]:
    """Train one step; return its figures without the loss, and this rank's part of the loss.  The gradients stay."""
    config = trainer.config
    rate = learning_rate(config, step)
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    trainer.model.train()
    fixed, losses = trainer.fixed, list[Tensor]()
    numbers = range(config.accumulate) if fixed is None else fixed.microbatches()
    for number, (tokens, targets) in zip(numbers, meter.data(trainer.data.of_step(step)), strict=True):
        tokens, targets = (each.to(trainer.ranks.device, non_blocking=True) for each in (tokens, targets))
        with syncing(trainer.model, fixed is not None or number == config.accumulate - 1):
            with precision_of(config, trainer.ranks.device):
                part = next_byte_loss(trainer.model, tokens, targets) / (config.reproducible or config.accumulate)
            part.backward()
        losses.append(part.detach())
    limit = config.clip or math.inf
    if fixed is None:
        loss, norm = torch.stack(losses).sum(), clip_grad_norm_(trainer.model.parameters(), limit)
    else:
        loss, norm = fixed.sum(losses), fixed.clip_grad_norm_(limit)
    trainer.optimizer.step()
    return TrainedStep(step + 1, 0.0, float(norm), rate), loss


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Return the mean loss over ``eval_windows`` windows of the validation text, in nats per byte or token, on every rank."""
    config, ranks = trainer.config, trainer.ranks
    # With --reproducible, ranks share the parts of as many ranks as there are microbatches: forwards get the same inputs.
    parts = config.reproducible or ranks.num_data_ranks
    size, per_rank = max(1, config.batch // parts), parts // ranks.num_data_ranks
    batches: list[tuple[list[int], list[int]]] = []
    for part in range(ranks.data_rank * per_rank, (ranks.data_rank + 1) * per_rank):
        windows, weights = validation_part(len(trainer.validation), config.eval_windows, part, parts)
        batches += [(windows[at : at + size], weights[at : at + size]) for at in range(0, len(windows), size)]
    model = trainer.model
    model.eval()
    # sums of a few fp32 numbers are exact in fp64, so their order does not count
    total, count = torch.zeros((), device=ranks.device, dtype=torch.float64), 0.0
    for windows, weighed in batches:
        tokens, targets = trainer.validation.stack(windows)
        with precision_of(config, ranks.device):
            tokens = tokens.to(ranks.device)
            logits = logits_of(model(tokens), tokens).float().flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, targets.to(ranks.device).flatten(), reduction="none")
        total += (losses.view(len(weighed), -1).mean(1) * torch.tensor(weighed, device=ranks.device)).sum()
        count += sum(weighed)
    summed, counted = ranks.total([total, torch.tensor(count)])
    return summed / counted


def save(trainer: Trainer, done: int) -> None:
    """Begin the checkpoint after ``done`` steps; the position in the text is counted in windows of all ranks.

    Raises: DivergedError on every rank, before anything is written, if a parameter is not finite; CheckpointError on
    every rank if it cannot begin, or the one before was not written.
    """
    config = trainer.config
    parts = [part.detach() for part in torch_private.locals_of(list(trainer.model.parameters()))]
    is_broken = not all(bool(part.isfinite().all()) for part in parts)
    if any(trainer.ranks.highest([int(is_broken)])):
        raise _diverged(trainer, done, "parameters are not finite")
    progress = RunProgress(done, done * config.batch, config.model)
    entries = entries_of(plain_of(trainer.model), trainer.optimizer, trainer.fixed, trainer.data)
    start_saving(trainer.run.checkpoints, progress, entries, config.keep, wait=trainer.memory is not None)


_PROMPT = "def "


def train(start: Start, config: TrainConfig, ranks: RunRanks, listening: Listening = listen_to_nobody) -> int:
    """Run the main program; every rank calls it with the same arguments.

    Return 0, or the number of the signal that ended training early, with a checkpoint.  ``listening`` is entered while
    a run can be asked to stop; before and after, signals keep their handlers.
    Raises: ConfigError, OSError, DivergedError or a checkpoint error, possibly on one rank only: the caller must end
        the others.
    """
    check_ranks(config, ranks.num_ranks)
    ranks = replace(ranks, tp=config.tp)
    with ExitStack() as stack:
        told = ranks.from_first(run_to_json(prepare_run(start, config)) if ranks.is_first else None)
        run = run_from_json(told, config)
        is_new = start.resume is None and start.restart is None
        # The first rank removes a new folder if the options were wrong; until that is decided, no other rank writes
        # there.
        writes_early = ranks.is_first or not is_new
        if writes_early:
            stack.enter_context(record(run.folder / BLACK_BOX))
        if ranks.is_first:
            stack.enter_context(lock_run(run.folder))
        try:
            trainer = build_trainer(run, ranks, start.memory_bytes)
        except ConfigError:
            stack.close()  # before the re-raise, so that no record is written about wrong options
            if ranks.is_first and is_new:
                discard_new(run.folder)
            raise
        if not writes_early:
            stack.enter_context(record(run.folder / BLACK_BOX))
        run = trainer.run  # it knows now which checkpoint was whole
        run_log = _begin(trainer, start.restart, stack)
        if start.resume is not None and run.done is None:
            run_log.say("this run has ended before its first checkpoint: it begins again")
        with listening() as asked, _digests(trainer, start):
            *_, outcome = train_steps(trainer, run_log, asked, tracing(trainer, start.trace_steps, run_log))
        return _end(trainer, run_log, outcome, stack)


def _begin(trainer: Trainer, restart: Restart | None, opened: ExitStack) -> RunLog:
    """Write what the folder has of a run before its first step, and say it."""
    run, ranks = trainer.run, trainer.ranks
    if ranks.is_first:
        write_config(run, ranks.num_ranks, ranks.device.type, trainer.num_parameters, __version__)
    run_log = _open_run_log(trainer, opened) if ranks.is_first else RunLog()
    _say_start(trainer, run_log)
    if restart is not None:
        if ranks.is_first:
            note_restart(run.folder, restart, run.start_step, ranks.num_ranks)
        run_log.say(f"restart {restart.number}: {restart.cause}; going on after step {run.start_step}")
    return run_log


def _end(trainer: Trainer, run_log: RunLog, outcome: TrainingEnd | None, opened: ExitStack) -> int:
    """Say how training has ended; return the number of the signal, or 0."""
    report = trainer.report
    if outcome is not None and outcome.signal:
        report.held = outcome.held
        report.state = f"stopped and saved after step {outcome.step}; go on with: {trainer.run.resume_command}"
        run_log.say(f"{report.state}\npictures: {trainer.run.folder / REPORT}")
        return outcome.signal
    if outcome is not None:
        report.held, report.sample, report.state = outcome.held, _sample(trainer), "The run has finished."
    opened.close()
    if trainer.ranks.is_first and outcome is not None:
        _conclude(trainer, outcome, run_log)
    return 0


# ---- ``--elastic``: the same steps on ranks that change.


def train_elastic(start: Start, config: TrainConfig, device: torch.device, listening: Listening) -> int:
    """Do as :func:`train`, of which ``start`` names the folder; there is no process group yet.

    Figures of steps that are made again are replaced.
    """
    folder, opened, run_log = start.resume or start.out or Path(), ExitStack(), RunLog()
    trainer: Trainer | None = None  # what the present ranks have built
    steps: Iterator[TrainingEnd | None] | None = None  # of these ranks, once they have begun

    def build() -> dict[str, Any]:
        nonlocal trainer, steps, run_log
        opened.close()
        trainer, steps, run_log = None, None, RunLog()  # their memory is free before there is more
        ranks = RunRanks(dist.get_rank(), dist.get_world_size(), device)
        told = ranks.from_first(run_to_json(prepare_again(start, config)) if ranks.is_first else None)
        if ranks.is_first:
            opened.enter_context(lock_run(folder))
        trainer = build_trainer(run_from_json(told, config), ranks)
        return entries_of(plain_of(trainer.model), trainer.optimizer, trainer.fixed, trainer.data)

    def begin(run: ElasticRun) -> None:
        nonlocal trainer, steps, run_log
        assert trainer is not None
        done = RunProgress(run.number, run.number * config.batch, config.model) if run.number else None
        trainer = replace(trainer, run=replace(trainer.run, done=done))
        restart = Restart(len(run.recoveries), run.recoveries[-1].cause) if run.recoveries else None
        run_log = _begin(trainer, restart, opened)
        steps = train_steps(trainer, run_log, asked, tracing(trainer, 0, run_log))

    def step(run: ElasticRun, **_: Any) -> TrainingEnd | None:
        if steps is None:
            begin(run)
        outcome = next(cast("Iterator[TrainingEnd | None]", steps))
        run_log.flush()
        if outcome is not None and outcome.signal:
            run.stop()
        return outcome

    def end(run: ElasticRun, outcome: TrainingEnd | None) -> None:
        nonlocal code
        if outcome is not None:  # after the last step; a rank that is lost in here is outlived, too
            if steps is None:
                begin(run)
            code = _end(cast(Trainer, trainer), run_log, outcome, opened)

    num_microbatches = math.gcd(config.reproducible, config.batch // config.accumulate)
    code = 0
    with listening() as asked, opened:
        elastic(
            build,
            step,
            num_steps=config.steps,
            num_microbatches=num_microbatches,
            on_commit=end,
            folder=folder / "checkpoints",
        )
        return code


def _digests(trainer: Trainer, start: Start) -> AbstractContextManager[object]:
    if trainer.fixed is None or not (start.record_digests or start.compare_with):
        return nullcontext()
    return RunDigests(trainer.fixed, trainer.run.folder, against=start.compare_with)


def tracing(trainer: Trainer, asked: int, run_log: RunLog) -> StepWatch | None:
    """Return the trace of ``asked`` steps after the first, which is written to the run's folder, one file per rank.

    The rank that writes the report traces one step in any case.
    """
    steps = min(asked or int(trainer.ranks.is_first), trainer.config.steps - trainer.run.start_step - 1)
    if steps < 1:
        if asked:
            run_log.say("no trace: it begins with the second step, and this run has but one")
        return None
    path = trainer.run.folder / f"trace-rank{trainer.ranks.rank}.json"
    model = trainer.model if trainer.config.shard in ENGINE_SHARDS else None

    stack, traces = ExitStack(), list[Trace]()

    @contextmanager
    def watch(number: int) -> Generator[None, None, None]:
        if number == 1:  # 0-based: the first step warms up
            traces.append(stack.enter_context(trace(model)))
        try:
            yield
        except BaseException:
            stack.close()
            raise
        if number == steps and traces:
            stack.close()
            found = traces.pop()
            trainer.report.spans = found.spans
            if asked:
                replace_file(path.parent, path.name, found.to_json())
                run_log.say(f"trace of {steps} step(s), rank {trainer.ranks.rank}: {path}\n{found.table()}")

    return watch


def _open_run_log(trainer: Trainer, stack: ExitStack) -> RunLog:
    from torch.utils.tensorboard import SummaryWriter  # only rank 0 needs it

    run = trainer.run
    stack.push(trainer.report.close)  # reads the lines once they are closed
    drop_later_metrics(run.metrics, run.done.step if run.done else None)  # which the checkpoint does not know of
    lines = stack.enter_context(open_append(run.folder, run.metrics.name))
    place = stack.enter_context(opened_folder(run.folder, "tensorboard"))
    scalars = stack.enter_context(SummaryWriter(place, purge_step=run.start_step + 1 if run.done else 0))
    run_log = RunLog(run.config.steps, run.start_step, run.facts.unit, (lines, scalars))
    stack.enter_context(run_log.bar)
    return run_log


def _say_start(trainer: Trainer, run_log: RunLog) -> None:
    run, config, ranks, facts = trainer.run, trainer.config, trainer.ranks, trainer.run.facts
    sizes = "" if config.model_from else f"{config.model.layers} layers, width {config.model.width}, "
    train, validation = (num_bytes // facts.itemsize for num_bytes in (facts.train_bytes, facts.validation_bytes))
    trainer.report.about = (
        f"{run.folder}: {config.model_from or 'GPT'} with {trainer.num_parameters:,} parameters ({sizes}context "
        f"{config.model.context}) on {ranks.num_ranks} {ranks.device.type} rank(s), --shard {config.shard}",
        f"text: {facts.description}, {facts.num_files} files, {train:,} {facts.unit}s to train on, "
        f"{validation:,} to validate; unigram entropy {facts.unigram_nats:.4f} nats per {facts.unit}",
    )
    run_log.say("\n".join(trainer.report.about))
    if trainer.memory is not None and trainer.memory.plan is not None:
        run_log.say(trainer.memory.plan.why())
    if trainer.config.shard in ENGINE_SHARDS:
        run_log.say(str(describe_units(trainer.model)))
    for text in trainer.notes:
        run_log.say(text)
    if run.done is not None:
        run_log.say(f"resuming after step {run.done.step}, {run.done.windows:,} windows into the text")


def _sample(trainer: Trainer) -> str:
    config, ranks = trainer.config, trainer.ranks
    plain = plain_of(trainer.model)
    # one byte more each time would compile the compiled parts again and again
    with torch.compiler.set_stance("force_eager"), precision_of(config, ranks.device):
        if not config.sample_bytes:
            return ""
        vocabulary = open_vocabulary(trainer.run.tokenizer)
        prompt = vocabulary.encode(_PROMPT) or [0]
        sampled = generate(plain, prompt, config.sample_bytes, config.model.context, config.seed, ranks.device)
        return vocabulary.decode(sampled)


def _conclude(trainer: Trainer, finished: TrainingEnd, run_log: RunLog) -> None:
    run, config = trainer.run, trainer.config
    if trainer.report.sample:
        run_log.say("\nA sample from the trained model:\n")
        run_log.say(trainer.report.sample + "\n")
    run_log.show(memory_table(finished.held, trainer.unsharded, trainer.report.peak_name))
    run_log.say(
        f"{finished.tokens_per_s:,.0f} tokens/s; figures: {run.metrics}; curves: tensorboard --logdir {run.folder}"
    )
    run_log.say(f"continue with: {run.resume_command} --steps {2 * config.steps}\npictures: {run.folder / REPORT}")
