"""The run folder: its contents, and how a run starts, resumes and stays consistent.

config.json, config.toml, metrics.jsonl, report.html, text/ (the cached text), tokenizer.json, checkpoints/, tensorboard/.
Only rank 0 writes here (except checkpoints).  Everything that can be refused is refused before the first
byte is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from torch import nn
from torch.optim import Optimizer

from shardwise import Microbatches, Reproducible
from shardwise.checkpoint import DamagedCheckpointError, RandomState, load, save
from shardwise.checkpoint.contents import decode
from shardwise.checkpoint.files import Files, read_manifest
from shardwise.checkpoint.files import list_checkpoints as list_new
from shardwise.consistency.recorder import BEFORE, BLACK_BOX
from shardwise.errors import CheckpointError, ConfigError
from shardwise.recipes.config import (
    RESUME_MAY_CHANGE,
    ModelShape,
    TrainConfig,
    changed_values,
    check_config,
    config_from_json,
    config_to_toml,
    typed,
)
from shardwise.recipes.data import (
    TOKENIZER,
    TextFacts,
    check_facts,
    digest_of,
    find_sources,
    open_vocabulary,
    read_facts,
    split_sources,
    write_cache,
)
from shardwise.safe_files import check_folders, open_append, parse_object, read_json, read_text, replace_file

# ---- Restarts of a run: what a rank gets to know of one, what the run folder records of all.

RESTARTS = "restarts.jsonl"


@dataclass(frozen=True, slots=True)
class Restart:
    """The ``number``-th automatic restart of a run, and its cause."""

    number: int
    cause: str


def note_restart(folder: Path, restart: Restart, step: int, num_ranks: int) -> None:
    """Record that the run continues after ``step`` on ``num_ranks`` ranks.  Only rank 0 calls it."""
    line = {"kind": "restart", "step": step, "ranks": num_ranks, "number": restart.number, "cause": restart.cause}
    with open_append(folder, RESTARTS) as file:
        file.write(json.dumps(line | {"time": round(time.time(), 3)}) + "\n")


def whole_lines(folder: Path, name: str) -> list[str]:
    """Return the complete lines of a file."""
    return [line for line in read_text(folder, name).splitlines(keepends=True) if line.endswith("\n")]


# ---- Checkpoints of a run: ``shardwise.checkpoint`` folders with the model, the optimizer, and the progress.

_PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run: ``step`` steps and ``windows`` windows of the text are done, by a model of shape ``model``."""

    step: int
    windows: int
    model: ModelShape


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [each.path for each in list_new(Files(), folder)] if folder.is_dir() else []


def read_progress(checkpoint: Path) -> RunProgress:
    """Return the progress in a checkpoint.  Raises: ConfigError if it is not one of a run, or damaged."""
    try:
        manifest = read_manifest(Files(), checkpoint)
        return progress_from_json(decode(manifest.values[_PROGRESS], _PROGRESS))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{checkpoint} is not a checkpoint of this version of shardwise ({error!r}).") from error
    except CheckpointError as error:
        raise ConfigError(f"{error}.") from error


def progress_from_json(values: Mapping[str, Any]) -> RunProgress:
    """Return the Progress that ``asdict`` has converted.  Raises: KeyError, TypeError, ConfigError."""
    shape = typed(ModelShape, values["model"], "the checkpoint's model")
    done = {"step": values["step"], "windows": values["windows"], "model": shape}
    return typed(RunProgress, done, "the checkpoint's progress")


def start_saving(folder: Path, progress: RunProgress, entries: Mapping[str, Any], keep: int, wait: bool) -> None:
    """Begin a checkpoint with all ranks; files are written while training continues.

    Args:
        entries: of :func:`entries_of`.  wait: until they are written, which needs no copy of what is in host memory.
    Raises: CheckpointError on every rank if this one cannot begin, or the one before was not written.
    """
    state = {**entries, _PROGRESS: asdict(progress)}
    save(folder, state, step=progress.step, keep=keep, wait=wait, buffers="rank0")


def load_newest(run: TrainRun, entries: Mapping[str, Any]) -> tuple[TrainRun, tuple[str, ...]]:
    """Load the newest checkpoint that verifies on all ranks, into any number of ranks and any sharding strategy.

    Return the run that goes on from it, and notes: newer checkpoints that were damaged, and a changed order of data.
    Raises: ConfigError on every rank, before any change, if there is none, or if it has other parameters.
    """
    progress: dict[str, Any] = {}
    state = {**entries, _PROGRESS: progress}
    without = [each for each in list_checkpoints(run.checkpoints) if _lacks_data(each)]
    if without:  # also if a newer one has its data: it may be damaged
        del state["data"]
    try:
        loaded = load(run.checkpoints, state, fallback=True)
    except DamagedCheckpointError as error:
        raise ConfigError(f"no checkpoint of the run is whole: {error}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    done, notes = progress_from_json(progress), [f"DAMAGED: {each}" for each in loaded.skipped]
    entries["data"].step = done.step
    if loaded.path in without:
        notes.append(
            f"OTHER ORDER: {loaded.path} is of a version that saved no data. The run goes on at its step; until an epoch ends, "
            "windows may come twice or not at all. To keep the order, resume with that version"
        )
    return replace(run, checkpoint=loaded.path, done=done), tuple(notes)


def _lacks_data(checkpoint: Path) -> bool:
    """Return True for a checkpoint of an earlier version; a damaged one is named by the load."""
    with contextlib.suppress(CheckpointError):
        return "data" not in read_manifest(Files(), checkpoint).values
    return False


def entries_of(
    model: nn.Module, optimizer: Optimizer, fixed: Reproducible | None, data: Microbatches
) -> dict[str, Any]:
    """Return the entries of a checkpoint, except the progress.  ``model``: the unwrapped one."""
    found = {"model": model, "optimizer": optimizer, "random": RandomState(), "data": data}
    return found if fixed is None else {**found, "reproducible": fixed}


CONFIG = "config.json"
CONFIG_FILE = "config.toml"  # the options, for --config
_LOCK = ".lock"
_FOLDERS = ("checkpoints", "text", "tensorboard", f"{BLACK_BOX}/{BEFORE}")  # of a run: none of them is a link
_BEGUN_BY = "begun_by"  # the job that may resume it automatically
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run: a new folder ``out`` (None: runs/<time>), or ``resume`` an old one.  One of the two is None.

    Attributes:
        job: a name of the process that would restart the run; None if none would.
        restart: set after a restart: ``out`` is resumed if this same job began it with the same config.
        trace_steps: how many steps after the first are traced.
        memory_bytes: what a rank may need, with which the run is made to fit.
        record_digests: write those of each step.  compare_with: the run folder whose digests they are compared with.
    """

    out: Path | None = None
    resume: Path | None = None
    job: str | None = None
    restart: Restart | None = None
    trace_steps: int = 0
    record_digests: bool = False
    compare_with: Path | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TrainRun:
    """A run that is ready to train.  ``checkpoint`` is None for a new run; ``done`` is the progress."""

    folder: Path
    config: TrainConfig
    facts: TextFacts
    checkpoint: Path | None
    done: RunProgress | None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's file; None when training on bytes."""
        return self.folder / TOKENIZER if self.facts.tokenizer else None

    @property
    def resume_command(self) -> str:
        own = "" if self.config.model_from is None else f" --model-from {self.config.model_from}"
        return f"shardwise train --resume {self.folder}{own}"

    @property
    def start_step(self) -> int:
        return self.done.step if self.done else 0


def run_to_json(run: TrainRun) -> dict[str, Any]:
    """Return rank 0's result as JSON for the other ranks; all have the config."""
    values = asdict(run)
    del values["config"]
    return values | {"folder": str(run.folder), "checkpoint": None if run.checkpoint is None else str(run.checkpoint)}


def run_from_json(values: Mapping[str, Any], config: TrainConfig) -> TrainRun:
    """Read :func:`run_to_json`."""
    checkpoint = None if values["checkpoint"] is None else Path(values["checkpoint"])
    done = None if values["done"] is None else progress_from_json(values["done"])
    return TrainRun(Path(values["folder"]), config, TextFacts(**values["facts"]), checkpoint, done)


def check_new_folder(out: Path) -> None:
    """Refuse a folder that is not empty.  Raises: ConfigError."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, expected a folder that is new or empty.")
    if out.is_dir() and any(out.iterdir()):
        advice = "; it holds no run of shardwise"
        with contextlib.suppress(ConfigError):
            read_run_config(out)
            advice = f", or continue that run with --resume {out}"
        raise ConfigError(f"--out {out} exists and is not empty; nothing was changed. Name another folder{advice}.")


def read_run_config(folder: Path) -> TrainConfig:
    """Read the config of an earlier run.  Raises: ConfigError if ``folder`` is not a run folder."""
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: no such folder.")
    try:
        saved = read_json(folder, CONFIG).get("config")
    except FileNotFoundError as error:
        raise ConfigError(f"--resume {folder}: not a run folder of shardwise (it has no config.json).") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"--resume {folder}: its config.json has no table 'config'. Name another run.")
    return config_from_json(cast(dict[str, object], saved))


def merge_resumed(saved: TrainConfig, asked: TrainConfig, folder: Path) -> TrainConfig:
    """Return the config to continue with.  Raises: ConfigError if ``asked`` changes what past steps were computed with."""
    refused = {name: pair for name, pair in changed_values(saved, asked).items() if name not in RESUME_MAY_CHANGE}
    if refused:
        listed = ", ".join(
            f"--{name.replace('_', '-')} {new} (the run has {old})" for name, (old, new) in refused.items()
        )
        raise ConfigError(
            f"--resume {folder}: a run cannot be continued with {listed}. Leave these options out, or start a new run."
        )
    return asked


def find_checkpoint(folder: Path, config: TrainConfig) -> tuple[Path, RunProgress] | None:
    """Return the last complete checkpoint; None if the run ended before its first, so that it starts over.

    Raises: ConfigError if it is of another model, or no steps are left.
    """
    found = list_checkpoints(folder / "checkpoints")
    if not found:
        return None
    newest, done = _newest_readable(found)
    if done.model != config.model:
        raise ConfigError(
            f"--resume {folder}: {newest.name} is a checkpoint of another model: it has "
            f"{_sizes(asdict(done.model))}, "
            f"the run's config.json says {_sizes(asdict(config.model))}."
        )
    if done.windows != done.step * config.batch:
        raise ConfigError(
            f"--resume {folder}: {newest.name} is {done.windows} windows into the text, "
            f"expected {done.step} steps x --batch {config.batch}: another run's, or config.json was edited."
        )
    if done.step >= config.steps:
        raise ConfigError(f"--resume {folder}: the run has done all its {done.step} steps. Ask for more with --steps.")
    return newest, done


def _newest_readable(found: Sequence[Path]) -> tuple[Path, RunProgress]:
    """Return the newest checkpoint with progress; whether its tensors are intact is known once they are loaded."""
    for checkpoint in reversed(found[1:]):
        with contextlib.suppress(ConfigError):
            return checkpoint, read_progress(checkpoint)
    return found[0], read_progress(found[0])


def _sizes(shape: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {size}" for name, size in shape.items())


def check_start(start: Start, config: TrainConfig) -> None:
    """Refuse what cannot be started, before anything is written.  Raises: ConfigError."""
    check_config(config)
    if start.resume is not None:
        check_folders(start.resume, _FOLDERS)
        merge_resumed(read_run_config(start.resume), config, start.resume)
        find_checkpoint(start.resume, config)
        return
    if start.out is not None:
        check_new_folder(start.out)
    open_vocabulary(tokenizer_of(start, config))
    find_sources(config.data, config.text_column)
    if config.init is not None and not Path(config.init).exists():
        raise ConfigError(f"--init {config.init}: no such file or folder. Name safetensors weights.")


def prepare_run(start: Start, config: TrainConfig) -> TrainRun:
    """Check everything on disk, then create or reopen the folder and its cached text.  Only rank 0 calls it."""
    start = _found_again(start, config)
    check_start(start, config)
    if start.resume is not None:
        checkpoint, done = find_checkpoint(start.resume, config) or (None, None)
        return TrainRun(start.resume, config, _text_again(start.resume, config), checkpoint, done)
    folder = new_folder(start.out)
    try:
        # From here on the run can be resumed.
        _write_values(folder, config, {_BEGUN_BY: start.job})
        if config.tokenizer is not None:
            replace_file(folder, TOKENIZER, Path(config.tokenizer).read_bytes())
        facts = _write_text(folder, config)
    except (OSError, ConfigError):
        discard_new(folder)
        raise
    return TrainRun(folder, config, facts, None, None)


def prepare_again(start: Start, config: TrainConfig) -> TrainRun:
    """Do as :func:`prepare_run`, in a folder that may have been prepared; the run does not begin from a checkpoint here."""
    folder = start.resume or start.out
    if folder is None or not (folder / CONFIG).exists():
        return prepare_run(start, config)
    return TrainRun(folder, config, _text_again(folder, config), None, None)


def discard_new(folder: Path) -> None:
    """Remove what was written to a folder that was new or empty, so that the same command can be tried again."""
    for name in ("text", BLACK_BOX):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (CONFIG, TOKENIZER, _LOCK):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has put something there
        folder.rmdir()


def tokenizer_of(start: Start, config: TrainConfig) -> Path | None:
    """Return the tokenizer's file: the run's own copy once it exists; None for bytes."""
    if config.tokenizer is None:
        return None
    return Path(config.tokenizer).resolve() if start.resume is None else start.resume / TOKENIZER


def _write_text(folder: Path, config: TrainConfig) -> TextFacts:
    description, sources = find_sources(config.data, config.text_column)
    vocabulary = open_vocabulary(None if config.tokenizer is None else folder / TOKENIZER)
    facts = write_cache(folder / "text", description, split_sources(sources), vocabulary)
    check_facts(facts, config.model.context)
    return facts


def _found_again(start: Start, config: TrainConfig) -> Start:
    """Return ``start`` as a resume if it is a restart, and the same job began a run of this config in the folder."""
    if start.restart is None or start.out is None or not (start.out / CONFIG).exists():
        return start
    saved = read_run_config(start.out)
    begun_by = read_json(start.out, CONFIG).get(_BEGUN_BY)
    is_own = begun_by is not None and begun_by == start.job and saved == config
    return replace(start, out=None, resume=start.out) if is_own else start


def _text_again(folder: Path, config: TrainConfig) -> TextFacts:
    """Return the cached text if its bytes are those that the run began with; else rebuild it, if that gives the same bytes."""
    text = read_json(folder, CONFIG).get("text")
    known = cast(dict[str, object], text).get("digest") if isinstance(text, dict) else None
    facts = read_facts(folder / "text")
    vocabulary = open_vocabulary(folder / TOKENIZER if config.tokenizer else None)
    expected = (vocabulary.size, vocabulary.itemsize, vocabulary.digest)
    is_of_it = facts is not None and (facts.vocabulary, facts.itemsize, facts.tokenizer) == expected
    if facts is not None and is_of_it and facts.digest == digest_of(folder / "text") and known in (None, facts.digest):
        return facts
    facts = _write_text(folder, config)
    if known not in (None, facts.digest):
        (folder / "text" / "facts.json").unlink()
        raise ConfigError(
            f"--resume {folder}: its cached text is gone or was changed, and {facts.description} has changed since: the run "
            f"cannot go on with the same windows. Restore {folder / 'text'} or start a new run."
        )
    return facts


def new_folder(out: Path | None) -> Path:
    """Create the folder ``out``, or one named after the time, and return it.

    Raises: ConfigError if there are too many of that name.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return out
    stem = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = stem.with_name(stem.name + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{stem} and 98 names like it exist already. Name a folder with --out.")


def write_config(run: TrainRun, num_ranks: int, device_type: str, num_parameters: int, version: str) -> None:
    """Write config.json and config.toml atomically: readers see the old one or the new one."""
    known = read_json(run.folder, CONFIG)
    values = {
        "shardwise": version,
        "num_ranks": num_ranks,
        "num_parameters": num_parameters,
        "text": asdict(run.facts),
        _BEGUN_BY: known.get(_BEGUN_BY),
    }
    _write_values(run.folder, run.config, values)
    text = config_to_toml(run.config, num_ranks, device_type)
    replace_file(run.folder, CONFIG_FILE, text.encode(errors="backslashreplace"))


def _write_values(folder: Path, config: TrainConfig, values: Mapping[str, object]) -> None:
    known: dict[str, object] = {"format": _FORMAT, "config": asdict(config)}
    replace_file(folder, CONFIG, json.dumps(known | {**values}, indent=2) + "\n")


def lock_run(folder: Path) -> IO[str]:
    """Lock the folder for this process until the returned file is closed.  Raises: ConfigError if another has it."""
    file = open_append(folder, _LOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"{folder}: another shardwise train is writing to this folder. Wait for it or end it."
        ) from error
    return file


def drop_later_metrics(metrics: Path, step: int | None) -> None:
    """Keep the lines up to ``step``, none for None: later steps will be computed again."""
    if os.path.lexists(metrics):
        lines = zip(whole_lines(metrics.parent, metrics.name), read_metrics(metrics), strict=True)
        kept = [line for line, values in lines if step is not None and values["step"] <= step]
        replace_file(metrics.parent, metrics.name, "".join(kept))


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in order.  Raises: ConfigError for one without a step."""
    found = [parse_object(line, str(metrics)) for line in whole_lines(metrics.parent, metrics.name)]
    for values in found:
        if type(values.get("step")) is not int:
            raise ConfigError(f"{metrics}: a line has no step ({str(values)[:80]}). Remove the line.")
    return found


def with_overrides(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """Return ``config`` with named values replaced; model sizes are named like the options."""
    sizes = {name: value for name, value in values.items() if hasattr(config.model, name)}
    rest = {name: value for name, value in values.items() if name not in sizes}
    model = replace(config.model, **sizes)  # pyright: ignore[reportArgumentType]
    return replace(config, model=model, **rest)  # pyright: ignore[reportArgumentType]
