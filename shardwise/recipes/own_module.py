"""Where a user's own module is found, without running it: a run folder of a stranger must not choose what is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from shardwise.errors import ConfigError


def look_here() -> None:
    """Let Python find modules of the current folder, where the script of an installed command does not look."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def file_of(model_from: str) -> str | None:
    """Return the file of the module (of its outermost package), None if there is none.  Nothing of it runs."""
    look_here()
    try:
        found = importlib.util.find_spec(model_from.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError):
        return None
    origin = None if found is None else found.origin
    return None if origin is None or not os.path.isabs(origin) else os.path.realpath(origin)


def check_recorded(run: Path, model_from: str, recorded: object) -> None:
    """Refuse a module that the run's folder names unless it is where it was, and the folder is this user's.

    ``recorded``: the file that it was found in when the run was written last.  Raises: ConfigError.
    """
    owners = {each.stat().st_uid for each in (run, run / "config.json")}
    found = file_of(model_from)
    reason = ""
    if owners != {os.geteuid()}:
        reason = f"the folder belongs to user {min(owners - {os.geteuid()})}"
    elif found is None or found != recorded:
        reason = f"it was in {str(recorded)[:200]}, and is now in {found}"
    elif Path(found).is_relative_to(run.resolve()):
        reason = "it is in the run's own folder"
    if reason:
        raise ConfigError(
            f"--resume {run}: the module of its model, {model_from!r}, is not imported: {reason}. If you trust it, say so with "
            f"--model-from {model_from}."
        )
