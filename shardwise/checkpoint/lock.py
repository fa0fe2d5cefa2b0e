"""One job per folder: a lock file that names the job, and can be taken over when its process has ended."""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.names import LOCK
from shardwise.comm.alive import host_id
from shardwise.errors import CheckpointError
from shardwise.safe_files import create_file, parse_object, read_text


def take(folder: Path) -> None:
    """Take the lock of ``folder`` for this process; it may hold it already.

    Raises: CheckpointError naming the job that holds it.  A process of this host that has ended holds nothing; of one on
    another host that cannot be known.
    """
    path = folder / LOCK
    mine = note_of(os.getpid())
    fresh = folder / f"{LOCK}-{uuid.uuid4().hex}"
    note = {**mine, "name": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with create_file(folder, fresh.name) as file:
        file.write(json.dumps(note).encode())
    try:
        for _ in range(8):
            try:
                os.link(fresh, path)  # made whole: nobody reads half a note
                return
            except FileExistsError:
                pass
            text, found = _read(path)
            if found.get("host") == mine["host"] and found.get("pid") == mine["pid"] and found == {**found, **mine}:
                return
            if found and not _is_stale(found):
                raise CheckpointError(
                    f"{folder} is being written by another job: process {found.get('pid')} on {found.get('name')}, since "
                    f"{found.get('since')}. Save into another folder, or end that job; if it has ended on another host, "
                    f"remove {path}"
                )
            _set_aside(path, text)
    finally:
        fresh.unlink(missing_ok=True)
    raise CheckpointError(f"{path}: other jobs take the lock again and again")


def give_back(folder: Path) -> None:
    """Give the lock back if this process holds it."""
    _, found = _read(folder / LOCK)
    if found and found == {**found, **note_of(os.getpid())}:
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, dict[str, object]]:
    text = ""
    try:
        text = read_text(path.parent, path.name, 4096)
        return text, parse_object(text, str(path))
    except OSError:  # it is gone, or is no note of a job
        return text, {}


def _set_aside(path: Path, text: str) -> None:
    """Remove a stale lock, unless somebody was faster and it is theirs now."""
    aside = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    with suppress(OSError):
        os.rename(path, aside)
        try:
            if _read(aside)[0] != text:
                os.link(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def note_of(pid: int) -> dict[str, object]:
    """Return what tells a process of this host from all others, also later ones of its number."""
    return {"host": host_id(), "pid": pid, "started": _start_of(pid)}


def _is_stale(found: dict[str, object]) -> bool:
    pid = found.get("pid")
    return found.get("host") == host_id() and isinstance(pid, int) and _start_of(pid) != found.get("started")


def _start_of(pid: int) -> str | None:
    """Return when a process of this host began, None if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
