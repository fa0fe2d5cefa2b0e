"""What a checkpoint of ``torch.distributed.checkpoint`` (DCP) holds of an optimizer's state.

DCP fills what it is handed and raises for an entry that the checkpoint lacks.  Parameters that no loss had used when it was
written have no state there, so whoever makes entries to be filled has to look first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from shardwise.errors import ConfigError
from shardwise.optim.forms import leaves_of

Checkpoint = str | os.PathLike[str] | StorageReader
_Key = TypeVar("_Key", str, int, int | str)
_Values = TypeVar("_Values", bound=Mapping[str, Any])


def only_saved(
    state: Mapping[_Key, _Values], checkpoint: Checkpoint, params: Iterable[int | str]
) -> dict[_Key, _Values]:
    """Return ``state`` without the parameters of which ``checkpoint`` has nothing, under whatever key it was saved.

    Args:
        state: entries to be filled, of some of ``params``, under the names or numbers that these have in the checkpoint.
        checkpoint: its folder, or the reader that DCP is to use.  Each rank reads the checkpoint's metadata.

    Raises: ConfigError, on every rank, if the checkpoint has state of other parameters where that of ``params`` is missing.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    names = {str(param) for param in params}
    known: dict[str, set[str]] = {}  # by the place of the optimizer in the checkpoint: its parameters with state
    unknown: dict[str, str] = {}
    saved: set[str] = set()
    for key in reader.read_metadata().state_dict_metadata:
        for place, entry in _splits(key):
            owner = _owner(entry, names)
            if owner is None:
                unknown[place] = key
            else:
                known.setdefault(place, set()).add(owner)
                saved.add(entry)
    places = known or unknown
    lacking = sorted(names.difference(*known.values()))
    others = [unknown[place] for place in places if place in unknown]
    if lacking and others:
        raise ConfigError(
            f"the checkpoint has no state of {lacking[0]!r} ({len(lacking)} of {len(names)} parameters), but an entry "
            f"{others[0]!r}, which belongs to none of them; use the names, or the form, that it was saved with"
        )
    return {
        key: values for key, values in state.items() if any(f"{key}.{path}" in saved for path, _ in leaves_of(values))
    }


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield what comes before and after each part of ``key`` that says "state"."""
    parts = key.split(".")
    for index, part in enumerate(parts):
        if part == "state":
            yield ".".join(parts[:index]), ".".join(parts[index + 1 :])


def _owner(entry: str, names: set[str]) -> str | None:
    parts = entry.split(".")
    return next((name for stop in range(len(parts) - 1, 0, -1) if (name := ".".join(parts[:stop])) in names), None)
