"""``load``: a checkpoint, or files of other tools, into models and optimizers of any door at any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.api.arguments import explains_arguments
from shardwise.black_box import note
from shardwise.checkpoint.carriers import Apply
from shardwise.checkpoint.files import DiskFiles, Files
from shardwise.checkpoint.folder import list_checkpoints, note_verified
from shardwise.checkpoint.foreign import find_foreign, foreign_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.meeting import together
from shardwise.checkpoint.names import MANIFEST, join, step_of
from shardwise.checkpoint.order import LoadRequests
from shardwise.checkpoint.reader import read_manifest, read_requests
from shardwise.checkpoint.state import carriers_of
from shardwise.comm.roll_call import RollCall, open_roll_call
from shardwise.errors import CheckpointError, DamagedCheckpointError, did_you_mean

logger = logging.getLogger(__name__)

_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the checkpoint's folder.
        step: the checkpoint's; 0 for files of other tools, which have none.
        missing, unexpected: names that were not there or not asked for; empty after a strict load.
        skipped: newer checkpoints that did not verify, and what was wrong with them.
        num_bytes_read: by this rank.
    """

    path: Path
    step: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    num_bytes_read: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """All that this rank needs, read and verified, in new memory."""

    manifest: Manifest
    order: LoadRequests
    applies: tuple[Apply, ...]
    unexpected: tuple[str, ...]
    num_bytes_read: int


@explains_arguments
def load(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load the newest checkpoint of ``folder`` into ``state``, whatever door and number of ranks wrote it.

    Args:
        folder: where checkpoints are, or one checkpoint; or a model as Hugging Face has it (a folder with
            ``model.safetensors`` or its index, or one such file), which has no sums to be verified by.
        state: as for :func:`save`, or some entries of it.
        step: the checkpoint to load (default: the newest).
        strict: raise if names differ between the state and the checkpoint, in entries that are asked for.
        fallback: if a checkpoint does not verify take the newest one before that does; says so as a warning.
        group: as for :func:`save`.

    Each rank reads the ranges that it needs and verifies every block that it reads.  Nothing is changed before all ranks
    have read everything; memory is one copy of what a rank holds.  Collective.
    Raises: CheckpointError on every rank; DamagedCheckpointError if bytes are not those that were saved, naming file, block
    and tensor.

    Example:
        >>> step = load("run", {"model": model, "optimizer": optimizer}, fallback=True).step  # doctest: +SKIP
    """
    path = Path(folder).absolute()
    files = DiskFiles(path)
    roll = open_roll_call(group, f"checkpoint-load/{str(path)!a}")
    candidates = _candidates(path, step, files, roll)
    skipped: list[str] = []
    for place, candidate in enumerate(candidates):
        try:
            return _load_one(candidate, state, strict, tuple(skipped), roll)
        except DamagedCheckpointError as error:
            if not fallback or place == len(candidates) - 1:
                raise
            skipped.append(str(error))
            logger.warning("%s; going back to %s", error, candidates[place + 1])
    raise AssertionError


def _candidates(path: Path, step: int | None, files: Files, roll: RollCall) -> list[Path]:
    """Return the checkpoints to try, newest first: those that rank 0 sees."""

    def look() -> list[str]:
        if roll.rank:
            return []
        if MANIFEST in files.names(path) or find_foreign(files, path) is not None:
            return [str(path)]
        if path.is_file():
            raise CheckpointError(
                f"{path} is a file; name the folder of a checkpoint, or the one that checkpoints are in"
            )
        found = [each for each in list_checkpoints(files, path) if step is None or each.step <= step]
        if not found or (step is not None and found[-1].step != step):
            there = ", ".join(str(each.step) for each in list_checkpoints(files, path)) or "none"
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{path}: {wanted} is there; checkpoints of steps: {there}")
        return [str(each.path) for each in reversed(found)]

    return [Path(each) for each in together(roll, "load", look)[0]]


def _load_one(path: Path, state: Mapping[str, Any], strict: bool, skipped: tuple[str, ...], roll: RollCall) -> Loaded:
    staged: list[_Staged] = []

    def stage() -> str:
        staged.append(_stage(path, state, strict, roll))
        return staged[0].manifest.save_id

    what = f"{path} was not loaded, nothing has changed"
    found = together(roll, what, stage)
    together(roll, what, lambda: _check_one_save(found))
    result = staged[0]

    def put_into_place() -> None:
        for apply in result.applies:
            apply()

    together(
        roll, f"{path} was read, and putting it into place failed; the state may have changed in part", put_into_place
    )
    if roll.rank == 0 and result.order.is_whole:
        note_verified(DiskFiles(), path, result.manifest.save_id)
    missing = (*result.order.missing, *result.order.unlike)
    if missing or result.unexpected:
        logger.warning("%s: missing: %s; unexpected: %s", path, _listing(missing), _listing(result.unexpected))
    step = result.manifest.step
    assert step_of(path.name) in (None, step)
    return Loaded(path, step, missing, result.unexpected, skipped, result.num_bytes_read)


def _stage(path: Path, state: Mapping[str, Any], strict: bool, roll: RollCall) -> _Staged:
    files = DiskFiles(path.parent)
    note("checkpoint load", str(path))
    foreign = None if MANIFEST in files.names(path) else find_foreign(files, path)
    if foreign is not None:
        path, names = foreign
        manifest = foreign_manifest(files, path, names, _only_module(state))
    else:
        manifest = read_manifest(files, path)
    if foreign is None and step_of(path.name) not in (None, manifest.step):
        raise DamagedCheckpointError(f"{path / MANIFEST}: is that of step {manifest.step}")
    order = LoadRequests(manifest)
    carriers = carriers_of(state, roll.rank, roll.size)
    applies = tuple(carrier.ask(order) for carrier in carriers)
    unexpected = tuple(order.unexpected([carrier.prefix for carrier in carriers]))
    if strict:
        _refuse_differences(order, state, unexpected)
    return _Staged(manifest, order, applies, unexpected, read_requests(files, path, manifest, order.requests))


def _refuse_differences(order: LoadRequests, state: Mapping[str, Any], unexpected: Sequence[str]) -> None:
    entries = order.entries()
    for key in state:
        if key not in entries and any(join(key) in name.split("/") for name in order.missing):
            raise CheckpointError(
                f"the checkpoint has no entry {key!r}.{did_you_mean(key, entries)} It has {', '.join(map(repr, entries))}. "
                "Leave the entry out of the state, or load what there is with strict=False"
            )
    if order.missing or order.unlike or unexpected:
        raise CheckpointError(
            f"the state and the checkpoint differ: missing there: {_listing(order.missing)}; unexpected: "
            f"{_listing(unexpected)}; of another shape: {_listing(order.unlike)}. Load with the model that was saved, or "
            "strict=False"
        )


def _only_module(state: Mapping[str, Any]) -> str:
    keys = [key for key, thing in state.items() if isinstance(thing, nn.Module)]
    if len(keys) != 1 or len(state) != 1:
        raise CheckpointError("files of other tools hold one model: give a state of one module, as {'model': model}")
    return keys[0]


def _check_one_save(found: Sequence[str]) -> None:
    if len(set(found)) > 1:
        raise DamagedCheckpointError(f"ranks see different saves under this name: {', '.join(sorted(set(found)))}")


def _listing(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
