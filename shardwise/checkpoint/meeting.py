"""Phases that end alike on all ranks: with what every rank has said, or with one error that names who failed and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwise.comm.roll_call import RollCall
from shardwise.errors import CheckpointError, DamagedCheckpointError, ShardwiseError, TransportError


def together(roll: RollCall, what: str, do: Callable[[], Any]) -> list[Any]:
    """Run ``do`` and return what it returned on every rank, in rank order; its values are JSON.

    Raises: the same CheckpointError on every rank if one raised anything, a DamagedCheckpointError if damage is all that
    was found; what is no error (an interrupt) goes on as it is on its own rank.
    """
    found: Any = None
    error: BaseException | None = None
    try:
        found = do()
    except BaseException as raised:
        error = raised
    report = [found, None if error is None else [type(error).__name__, _text(error), _is_damage(error), _is_own(error)]]
    try:
        said = [json.loads(text) for text in roll.call(json.dumps(report))]
    except TransportError as gone:
        rest = "" if "nothing has changed" in what else "; nothing has changed"
        raise CheckpointError(f"{what}: {gone}{rest}") from (error or gone)
    failures = [(rank, failure) for rank, (_, failure) in enumerate(said) if failure is not None]
    if not failures:
        return [value for value, _ in said]
    if error is not None and not isinstance(error, Exception):
        raise error
    texts: dict[str, list[int]] = {}
    for rank, (kind, text, _, is_own) in failures:
        texts.setdefault(text if is_own else f"{kind}: {text}", []).append(rank)
    causes = "; ".join(f"{_ranks(ranks)}{text}" if roll.size > 1 else text for text, ranks in texts.items())
    is_damage = all(damage for _, (_, _, damage, _) in failures)
    raise (DamagedCheckpointError if is_damage else CheckpointError)(f"{what}: {causes}") from error


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, DamagedCheckpointError)


def _is_own(error: BaseException) -> bool:
    return isinstance(error, ShardwiseError)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}: "
