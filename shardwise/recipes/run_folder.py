"""The run folder: what is in it, how one is started, how one is resumed, and how it stays whole.

config.json, metrics.jsonl, text/ (the cached text), tokenizer.json, checkpoints/, tensorboard/, report.png.  Only rank 0 writes
here (checkpoints apart).  Everything that can be refused is refused before the first byte is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from shardwise.doctor.recorder import BEFORE, BLACK_BOX
from shardwise.errors import ConfigError
from shardwise.recipes.checkpoints import (
    RunProgress,
    list_checkpoints,
    progress_from_json,
    read_progress,
    remove_unfinished,
)
from shardwise.recipes.config import (
    RESUME_MAY_CHANGE,
    TrainConfig,
    changed_values,
    check_config,
    config_from_json,
    config_to_json,
)
from shardwise.recipes.own_module import check_recorded, file_of
from shardwise.recipes.restart_log import Restart, whole_lines
from shardwise.recipes.text import (
    TextFacts,
    check_facts,
    check_length,
    digest_of,
    find_sources,
    read_facts,
    split_sources,
    write_cache,
)
from shardwise.recipes.tokens import TOKENIZER, open_vocabulary
from shardwise.safe_files import check_folders, open_append, parse_object, read_json, replace_file

CONFIG = "config.json"
_LOCK = ".lock"
_FOLDERS = ("checkpoints", "text", "tensorboard", f"{BLACK_BOX}/{BEFORE}")  # of a run: none of them is a link
_BEGUN_BY = "begun_by"  # the job that may resume it without being asked to
_MODULE = "module"  # the file of --model-from
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Start:
    """How a run begins: a new folder ``out`` (None: runs/<time>), or ``resume`` an old one.  One of the two is None.

    Attributes:
        job: a name of the process that would start the run again; None if none would.
        restart: set if it has done so: ``out`` is resumed if this very job has begun it with the same config.
        step_file: where rank 0 says how many steps are done, for that process.
        trace_steps: how many steps after the first are traced.
    """

    out: Path | None = None
    resume: Path | None = None
    job: str | None = None
    restart: Restart | None = None
    step_file: Path | None = None
    trace_steps: int = 0


@dataclass(frozen=True, slots=True)
class TrainRun:
    """A run that is ready to train.  ``checkpoint`` is None at the beginning; ``done`` says how far it is."""

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
        """The tokenizer's file; None where bytes are trained on."""
        return self.folder / TOKENIZER if self.facts.tokenizer else None

    @property
    def start_step(self) -> int:
        return self.done.step if self.done else 0


def run_to_json(run: TrainRun) -> dict[str, Any]:
    """Return what rank 0 has found, for the others; the config they all have."""
    values = asdict(run)
    del values["config"]
    return values | {"folder": str(run.folder), "checkpoint": None if run.checkpoint is None else str(run.checkpoint)}


def run_from_json(values: Mapping[str, Any], config: TrainConfig) -> TrainRun:
    """Read :func:`run_to_json`."""
    checkpoint = None if values["checkpoint"] is None else Path(values["checkpoint"])
    done = None if values["done"] is None else progress_from_json(values["done"])
    return TrainRun(Path(values["folder"]), config, TextFacts(**values["facts"]), checkpoint, done)


def check_new_folder(out: Path) -> None:
    """Refuse a folder that holds anything.  Raises: ConfigError."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, expected a folder that is new or empty.")
    if out.is_dir() and any(out.iterdir()):
        if _is_run(out):
            advice = f"Name another folder, or continue that run with --resume {out}."
        else:
            advice = (
                f"It holds no run of shardwise. Name a folder that is not there yet, such as --out {_free_name(out)}."
            )
        raise ConfigError(f"--out {out} exists and is not empty; nothing was changed. {advice}")


def _free_name(folder: Path) -> Path:
    """Return a name in ``folder`` that is not taken."""
    names = (f"run-{number}" if number > 1 else "run" for number in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _is_run(folder: Path) -> bool:
    try:
        read_run_config(folder)
    except ConfigError:
        return False
    return True


def read_run_config(folder: Path) -> TrainConfig:
    """Read the config of an earlier run.  Raises: ConfigError if ``folder`` is no run folder."""
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: no such folder.")
    try:
        saved = read_json(folder, CONFIG).get("config")
    except FileNotFoundError as error:
        raise ConfigError(f"--resume {folder}: not a run folder of shardwise (it has no config.json).") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"--resume {folder}: its config.json has no table 'config'. Name another run.")
    return config_from_json(cast(dict[str, object], saved))


def check_own_module(folder: Path, config: TrainConfig) -> None:
    """Refuse to import what a folder of a stranger names as its model.  Raises: ConfigError."""
    if config.model_from is not None:
        check_recorded(folder, config.model_from, read_json(folder, CONFIG).get(_MODULE))


def merge_resumed(saved: TrainConfig, asked: TrainConfig, folder: Path) -> TrainConfig:
    """Return the config to go on with.  Raises: ConfigError if ``asked`` changes what past steps were computed with."""
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
    """Return the last complete checkpoint; None if the run ended before its first, so that it begins again.

    Raises: ConfigError if it is of another model, or there is nothing left to do.
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
    """Return the newest that says how far it is; whether its tensors are whole is known when they are loaded."""
    for checkpoint in reversed(found[1:]):
        with contextlib.suppress(ConfigError):
            return checkpoint, read_progress(checkpoint)
    return found[0], read_progress(found[0])


def _sizes(shape: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {size}" for name, size in shape.items())


def check_start(start: Start, config: TrainConfig) -> None:
    """Refuse what cannot be started, writing nothing.  Raises: ConfigError."""
    check_config(config)
    if start.resume is not None:
        check_folders(start.resume, _FOLDERS)
        merge_resumed(read_run_config(start.resume), config, start.resume)
        find_checkpoint(start.resume, config)
        return
    if start.out is not None:
        check_new_folder(start.out)
    vocabulary = open_vocabulary(tokenizer_of(start, config))
    _, sources = find_sources(config.data, config.text_column)
    if not vocabulary.digest:
        check_length(split_sources(sources), config.model.context)
    if config.init is not None and not Path(config.init).exists():
        raise ConfigError(f"--init {config.init}: no such file or folder. Name safetensors weights.")


def prepare_run(start: Start, config: TrainConfig) -> TrainRun:
    """Check everything on disk, then create or reopen the folder and its cached text.  Only rank 0 calls it."""
    start = _found_again(start, config)
    check_start(start, config)
    if start.resume is not None:
        return _reopen(start.resume, config)
    folder = new_folder(start.out)
    try:
        # Whatever happens now can be resumed.
        _write_values(folder, config, {_BEGUN_BY: start.job})
        if config.tokenizer is not None:
            replace_file(folder, TOKENIZER, Path(config.tokenizer).read_bytes())
        facts = _write_text(folder, config)
    except (OSError, ConfigError):
        discard_new(folder)
        raise
    return TrainRun(folder, config, facts, None, None)


def discard_new(folder: Path) -> None:
    """Leave a folder that was new or empty so that the same command can be tried again."""
    for name in ("text", BLACK_BOX):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (CONFIG, TOKENIZER, _LOCK):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has put something there
        folder.rmdir()


def tokenizer_of(start: Start, config: TrainConfig) -> Path | None:
    """Return the tokenizer's file: the run's own once there is a run; None for bytes."""
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
    """Return ``start`` as a resume if it is a restart, and its job itself has begun a run of this config in the folder."""
    if start.restart is None or start.out is None or not (start.out / CONFIG).exists():
        return start
    saved = read_run_config(start.out)
    begun_by = read_json(start.out, CONFIG).get(_BEGUN_BY)
    is_own = begun_by is not None and begun_by == start.job and saved == config
    return replace(start, out=None, resume=start.out) if is_own else start


def _reopen(folder: Path, config: TrainConfig) -> TrainRun:
    found = find_checkpoint(folder, config)
    facts = _text_again(folder, config)
    remove_unfinished(folder / "checkpoints")
    checkpoint, done = found or (None, None)
    return TrainRun(folder, config, facts, checkpoint, done)


def _text_again(folder: Path, config: TrainConfig) -> TextFacts:
    """Return the cached text if it is what the run began with, to the byte; else make it again, if that gives the same."""
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
    """Make the folder ``out``, or one of a new name that tells the time, and return it.

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


def write_config(run: TrainRun, num_ranks: int, num_parameters: int, version: str) -> None:
    """Write config.json whole: readers see the old one or the new one."""
    known = read_json(run.folder, CONFIG)
    values = {
        "shardwise": version,
        "num_ranks": num_ranks,
        "num_parameters": num_parameters,
        "text": asdict(run.facts),
        _BEGUN_BY: known.get(_BEGUN_BY),
    }
    _write_values(run.folder, run.config, values)


def _write_values(folder: Path, config: TrainConfig, values: Mapping[str, object]) -> None:
    known: dict[str, object] = {"format": _FORMAT, "config": config_to_json(config)}
    if config.model_from is not None:
        known[_MODULE] = file_of(config.model_from)
    replace_file(folder, CONFIG, json.dumps(known | {**values}, indent=2) + "\n")


def lock_run(folder: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed.  Raises: ConfigError if another has it."""
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
    """Keep the lines up to ``step``, none for None: what came after the checkpoint will be computed again."""
    if os.path.lexists(metrics):
        lines = zip(whole_lines(metrics.parent, metrics.name), read_metrics(metrics), strict=True)
        kept = [line for line, values in lines if step is not None and values["step"] <= step]
        replace_file(metrics.parent, metrics.name, "".join(kept))


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in order.  Raises: ConfigError for one that names no step."""
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
