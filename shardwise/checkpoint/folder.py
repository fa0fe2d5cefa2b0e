"""A folder of checkpoints: which there are, which is newest, and which may go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import Files, read_all, write_all
from shardwise.checkpoint.names import MANIFEST, REMOVING, REPLACED, SAVING, VERIFIED, step_of
from shardwise.checkpoint.reader import read_manifest
from shardwise.errors import DamagedCheckpointError

_DCP = ".metadata"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    step: int


def list_checkpoints(files: Files, folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints of ``folder``, oldest first, damaged ones too; what is half written is none."""
    by_step: dict[int, Checkpoint] = {}
    for name in files.names(folder):  # sorted: a name that begins with a dot comes first, and gives way
        step = step_of(name)
        if step is None:
            continue
        inside = files.names(folder / name)
        # Folders get such a name when they are whole: without its manifest one is damaged.  Those of DCP have .metadata.
        if MANIFEST in inside or (not name.startswith(REPLACED) and _DCP not in inside):
            by_step[step] = Checkpoint(folder / name, step)
    return [by_step[step] for step in sorted(by_step)]


def clean(files: Files, folder: Path) -> None:
    """Remove what saves that died left behind.  Only for who holds the folder's lock."""
    there = files.names(folder)
    for name in there:
        final = name.removeprefix(REPLACED)
        if final != name and final not in there:
            files.rename(folder / name, folder / final)
            files.sync_folder(folder)
        elif name.startswith((SAVING, REMOVING, REPLACED)):
            files.remove(folder / name)


def commit(files: Files, pending: Path, final: Path) -> Path:
    """Give a folder that is written and synced the name ``final``, and return it; one of that name is replaced."""
    folder = final.parent
    aside = folder / f"{REPLACED}{final.name}"
    is_there = final.name in files.names(folder)
    if is_there:
        files.remove(aside)
        files.rename(final, aside)
    files.rename(pending, final)
    files.sync_folder(folder)
    if is_there:
        files.remove(aside)
    return final


def keep_last(files: Files, folder: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints and the last one that was verified."""
    verified = verified_checkpoint(files, folder)
    for checkpoint in list_checkpoints(files, folder)[:-keep]:
        if checkpoint != verified:
            aside = folder / f"{REMOVING}{checkpoint.path.name}"
            files.rename(checkpoint.path, aside)
            files.sync_folder(folder)  # whoever finds half of it finds it under this name
            files.remove(aside)


def verified_checkpoint(files: Files, folder: Path) -> Checkpoint | None:
    """Return the checkpoint that was verified last, None if none is known.

    Another save of its step, put there by whomever, is not the one that was verified.
    """
    noted = _noted(files, folder)
    if noted is None:
        return None
    found = next((each for each in list_checkpoints(files, folder) if each.step == noted.step), None)
    if found is None:
        return None
    try:
        return found if read_manifest(files, found.path).save_id == noted.save_id else None
    except DamagedCheckpointError:
        return None


def note_verified(files: Files, checkpoint: Path, save_id: str) -> None:
    """Remember that all of a save was as it was written; folders that cannot be written are left alone."""
    step, folder = step_of(checkpoint.name), checkpoint.parent
    if step is None or _noted(files, folder) == _Noted(step, save_id):
        return
    fresh = folder / f"{VERIFIED}-new"
    try:
        files.remove(fresh)
        write_all(files, fresh, json.dumps({"step": step, "save": save_id}).encode())
        files.rename(fresh, folder / VERIFIED)
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class _Noted:
    step: int
    save_id: str


def _noted(files: Files, folder: Path) -> _Noted | None:
    if VERIFIED not in files.names(folder):
        return None
    try:
        found = json.loads(read_all(files, folder / VERIFIED, 4096))
        return _Noted(int(found["step"]), str(found["save"]))
    except (DamagedCheckpointError, ValueError, KeyError, TypeError):
        return None
