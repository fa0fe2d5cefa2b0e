"""The main job on one rank: prepare the run folder, train, validate, sample, report."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from shardwise import Trace, __version__, describe_units, record
from shardwise.doctor.recorder import BLACK_BOX
from shardwise.errors import ConfigError
from shardwise.recipes.config import ENGINE_SHARDS, TrainConfig, check_ranks
from shardwise.recipes.doors import DOORS
from shardwise.recipes.gpt import generate
from shardwise.recipes.loop import Finished, Stopped, Trainer, build_trainer, train_steps
from shardwise.recipes.progress import ProgressDisplay, memory_table
from shardwise.recipes.ranks import RunRanks
from shardwise.recipes.restart_log import Restart, StepFile, note_restart, read_restarts
from shardwise.recipes.run_folder import (
    Start,
    TrainRun,
    discard_new,
    lock_run,
    prepare_run,
    read_metrics,
    run_from_json,
    run_to_json,
    write_config,
)
from shardwise.recipes.run_log import RunJournal, RunLog, SilentJournal, open_lines
from shardwise.recipes.step_memory import (
    HeldMemory,
    StepMemory,
    StepMeter,
    both,
    largest_of,
    measured_number,
    planned_memory,
)
from shardwise.recipes.step_watch import StepWatch, traced_steps, unwatched
from shardwise.recipes.stop import Listening, listen_to_nobody
from shardwise.recipes.text import Baseline
from shardwise.recipes.tokens import open_vocabulary
from shardwise.safe_files import opened_folder, replace_file

_PROMPT = "def "


def train(start: Start, config: TrainConfig, ranks: RunRanks, listening: Listening = listen_to_nobody) -> int:
    """Run the main job; every rank calls it with the same arguments.

    Return 0, or the number of the signal that ended training early, with a checkpoint.  ``listening`` is entered for as
    long as a run can be asked to stop; before and after, signals do what they did.
    Raises: ConfigError, OSError, DivergedError or a checkpoint error, possibly on one rank only: the caller must end the
    others.
    """
    check_ranks(config, ranks.num_ranks)
    ranks = replace(ranks, tp=config.tp)
    with ExitStack() as stack:
        told = ranks.from_first(run_to_json(prepare_run(start, config)) if ranks.is_first else None)
        run = run_from_json(told, config)
        is_new = start.resume is None and start.restart is None
        # The first rank takes a new folder away again where the options were wrong: until that is known, no other writes there.
        writes_early = ranks.is_first or not is_new
        if writes_early:
            stack.enter_context(record(run.folder / BLACK_BOX))
        if ranks.is_first:
            stack.enter_context(lock_run(run.folder))
        try:
            trainer = build_trainer(run, ranks)
        except ConfigError:
            stack.close()  # before it is raised on: wrong options are nothing for the black box
            if ranks.is_first and is_new:
                discard_new(run.folder)
            raise
        if not writes_early:
            stack.enter_context(record(run.folder / BLACK_BOX))
        run = trainer.run  # it knows now which checkpoint was whole
        if ranks.is_first:
            write_config(run, ranks.num_ranks, trainer.num_parameters, __version__)
        journal = _open_journal(run, stack, start.step_file) if ranks.is_first else SilentJournal()
        _say_start(trainer, journal)
        if start.restart is not None:
            _say_restart(start.restart, trainer, journal)
        if start.resume is not None and run.done is None:
            journal.say("this run has ended before its first checkpoint: it begins again")
        with listening() as asked:
            traced = tracing(trainer, start.trace_steps, journal) if start.trace_steps else unwatched
            meter = metering(trainer, start.trace_steps)
            finished = train_steps(trainer, journal, asked, both(traced, meter.watch if meter else unwatched))
        if isinstance(finished, Stopped):
            journal.say(
                f"stopped and saved after step {finished.step}; go on with: shardwise train --resume {run.folder}"
            )
            return finished.signal
        sample = _sample(trainer)
        memory = _largest_step(trainer, meter)
    if ranks.is_first:
        _conclude(trainer, finished, sample, memory)
    return 0


def metering(trainer: Trainer, traced: int) -> StepMeter | None:
    """Return what measures the memory of a step after the first ``traced`` + 1; None where operations are not seen."""
    config, start = trainer.config, trainer.run.start_step
    if config.compile or start >= config.steps:  # a compiled part allocates where nobody sees it
        return None
    number = measured_number(config, start, traced)
    return StepMeter(trainer.door.plain(trainer.model), trainer.optimizer, trainer.ranks.device, number)


def _largest_step(trainer: Trainer, meter: StepMeter | None) -> StepMemory | None:
    """Return the measured step of the rank that held most, on rank 0 beside its plan.  Collective."""
    if meter is None:
        return None
    run, ranks = trainer.run, trainer.ranks
    found = largest_of(ranks, run.start_step + meter.number + 1, meter.peaks)
    if found is None or not ranks.is_first:
        return found
    return replace(found, planned=planned_memory(run.config, run.facts.vocabulary, ranks, trainer.model))


def tracing(trainer: Trainer, steps: int, journal: RunLog) -> StepWatch:
    """Return what records ``steps`` steps after the first and writes them to the run's folder, one file for each rank."""
    steps = min(steps, trainer.config.steps - trainer.run.start_step - 1)
    if steps < 1:
        journal.say("no trace: it begins with the second step, and this run has but one")
        return unwatched
    path = trainer.run.folder / f"trace-rank{trainer.ranks.rank}.json"
    model = trainer.model if trainer.config.shard in ENGINE_SHARDS else None

    def write(recorded: Trace) -> None:
        replace_file(path.parent, path.name, recorded.to_json())
        journal.say(f"trace of {steps} step(s), rank {trainer.ranks.rank}: {path}\n{recorded.table()}")

    return traced_steps(model, steps, write)


def _say_restart(restart: Restart, trainer: Trainer, journal: RunLog) -> None:
    run, ranks = trainer.run, trainer.ranks
    if ranks.is_first:
        note_restart(run.folder, restart, run.start_step, ranks.num_ranks)
    journal.say(f"restart {restart.number}: {restart.cause}; going on after step {run.start_step}")


def _open_journal(run: TrainRun, stack: ExitStack, step_file: Path | None) -> RunJournal:
    from torch.utils.tensorboard import SummaryWriter  # only rank 0 needs it

    lines = stack.enter_context(open_lines(run))
    place = stack.enter_context(opened_folder(run.folder, "tensorboard"))
    scalars = stack.enter_context(SummaryWriter(place, purge_step=run.start_step + 1 if run.done else 0))
    display = stack.enter_context(ProgressDisplay(run.config.steps, run.start_step, is_shown=True))
    if step_file is None:
        return RunJournal(display, lines, scalars, unit=run.facts.unit)
    steps = stack.enter_context(closing(StepFile(step_file)))
    steps.write(run.start_step)
    return RunJournal(display, lines, scalars, steps.write, run.facts.unit)


def _say_start(trainer: Trainer, journal: RunLog) -> None:
    run, config, ranks, facts = trainer.run, trainer.config, trainer.ranks, trainer.run.facts
    sizes = "" if config.model_from else f"{config.model.layers} layers, width {config.model.width}, "
    journal.say(
        f"{run.folder}: {config.model_from or 'GPT'} with {trainer.num_parameters:,} parameters ({sizes}context "
        f"{config.model.context}) on {ranks.num_ranks} {ranks.device.type} rank(s), --shard {config.shard}"
    )
    train, validation = (num_bytes // facts.itemsize for num_bytes in (facts.train_bytes, facts.validation_bytes))
    journal.say(
        f"text: {facts.description}, {facts.num_files} files, {train:,} {facts.unit}s to train on, "
        f"{validation:,} to validate; unigram entropy {facts.unigram_nats:.4f} nats per {facts.unit}"
    )
    if trainer.config.shard in ENGINE_SHARDS:
        journal.say(str(describe_units(trainer.model)))
    for note in trainer.notes:
        journal.say(note)
    if run.done is not None:
        journal.say(f"resuming after step {run.done.step}, {run.done.windows:,} windows into the text")


def _sample(trainer: Trainer) -> str:
    config, ranks = trainer.config, trainer.ranks
    plain = trainer.door.plain(trainer.model)
    # one byte more each time: compiled parts would be compiled again and again
    with torch.compiler.set_stance("force_eager"), trainer.door.precision(config, ranks.device):
        if not config.sample_bytes:
            return ""
        vocabulary = open_vocabulary(trainer.run.tokenizer)
        prompt = vocabulary.encode(_PROMPT) or [0]
        sampled = generate(plain, prompt, config.sample_bytes, config.model.context, config.seed, ranks.device)
        return vocabulary.decode(sampled)


def _conclude(trainer: Trainer, finished: Finished, sample: str, memory: StepMemory | None) -> None:
    from shardwise.recipes.report import draw_report  # matplotlib: only rank 0, only when training is over

    run, config = trainer.run, trainer.config
    unsharded = trainer.unsharded
    on_gpu = trainer.ranks.device.type == "cuda"
    title = (
        f"shardwise train: {trainer.num_parameters / 1e6:.1f} million parameters on {trainer.ranks.num_ranks} rank(s), "
        f"{DOORS[config.shard].summary}"
    )
    path = run.folder / "report.png"
    draw_report(
        path,
        title,
        [*read_metrics(run.metrics), *read_restarts(run.folder)],
        Baseline(run.facts.unigram_nats, run.facts.unit),
        HeldMemory(finished.held, unsharded, memory),
    )
    display = ProgressDisplay(config.steps, config.steps, is_shown=True)
    if sample:
        display.say("\nA sample from the trained model:\n")
        display.say(sample + "\n")
    peak_name = "peak GPU memory" if on_gpu else "peak of the process (all)"
    display.show(memory_table(finished.held, unsharded, peak_name))
    if memory is not None:
        display.say(str(memory))
    display.say(f"{finished.tokens_per_s:,.0f} tokens/s; report: {path}; figures: {run.metrics}")
    display.say(f"continue with: shardwise train --resume {run.folder} --steps {2 * config.steps}")
