"""``save`` and ``finish``: state of any door into a folder, by all ranks together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise import torch_private
from shardwise.api.arguments import explains_arguments
from shardwise.checkpoint.buffer_choice import Buffers, check_choice
from shardwise.checkpoint.contents import Contents, Known
from shardwise.checkpoint.saving import Saver
from shardwise.checkpoint.state import contents_of
from shardwise.comm.roll_call import open_roll_call
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _KeptSaver:
    """The saver of a folder and a group: a save in the background outlives its call, and the next call must find it."""

    folder: Path
    saver: Saver
    group: weakref.ref[dist.ProcessGroup] | None

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        return group is None if self.group is None else group is not None and self.group() is group


_savers: list[_KeptSaver] = []
_turns: dict[Path, threading.RLock] = {}  # threads that save into one folder take turns


def _turn_of(folder: Path) -> threading.RLock:
    return _turns.setdefault(folder.absolute(), threading.RLock())


@explains_arguments
def save(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    wait: bool = True,
    group: dist.ProcessGroup | None = None,
    buffers: Buffers | None = None,
) -> Path | None:
    """Save ``state`` as the checkpoint after ``step`` steps; it is there whole when all ranks have written, or not at all.

    Args:
        folder: where checkpoints go, each into a folder ``step-NNNNNNNN``; the same on all ranks, on a disk that all see.
        state: models, optimizers of every door, and anything with ``state_dict`` and ``load_state_dict`` or dicts of plain
            values, by name.  The optimizer's parameters get their names from the models beside it.
        step: of the checkpoint, from 0 on; one of the same step is replaced.
        keep: how many checkpoints to keep; the last one that was verified by a load stays in any case.
        wait: False to return when this rank's part is copied to host memory; writing goes on in a thread, one save at a
            time.  What it fails of is raised by the next :func:`save` or :func:`finish` of the folder.  The memory, as many
            bytes as the rank writes, is kept for the next save; taking it makes the first one slower.
        group: the ranks that hold the state (default: all; without any process group this process alone).
        buffers: what to save of module buffers whose values differ between ranks: "rank0" (those of the lowest rank), "mean"
            (the mean over ranks; integers: those of the lowest rank), or "per_rank" (those of every rank; :func:`load` gives
            each its own at the same number of ranks, else all of them the lowest rank's).  None: raise CheckpointError.

    Returns: the checkpoint's folder, None if ``wait`` is False.

    Each rank writes its own shards; replicas share the writing.  Collective.  The folder is locked for this job until
    :func:`finish` or the end of the process.
    Raises: CheckpointError on every rank, naming the rank that failed and why; earlier checkpoints stand.  ConfigError for
    a wrong ``step`` or ``keep``; StateError outside of ``group``.

    Example:
        >>> save("run", {"model": model, "optimizer": optimizer}, step=100, keep=3)  # doctest: +SKIP
    """
    if type(step) is not int or step < 0 or (keep is not None and keep < 1):
        raise ConfigError(
            f"step is {step!r} and keep {keep!r}; expected a whole number from 0 on, and None or at least 1"
        )
    check_choice(buffers)
    with _turn_of(Path(folder)):
        saver = _saver_of(Path(folder), group)
        saver.wait()
        rank, size = saver.rank, saver.size

        def collect(known: Known) -> Contents:
            return contents_of(state, rank, size, known)

        if wait:
            return saver.save(collect, step, keep, buffers)
        saver.start(collect, step, keep, buffers)
        return None


def finish(folder: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Return when no save into ``folder`` is on its way; give its lock and host memory back.

    Args:
        folder: as for :func:`save`.
        group: end the saves of this group alone; None: all that this process takes part in, of whatever groups.

    To be called by every rank that saves, at any time: a rank waits for its own save, in which all take part, and meets
    nobody else.  A folder that was never saved into is finished.
    Raises: CheckpointError, on every rank, if the last save in the background failed; the rest is given back all the same.

    Example:
        >>> finish("run")
    """
    path = Path(folder).absolute()
    failures: list[BaseException] = []
    with _turn_of(path):
        for kept in [kept for kept in _savers if kept.folder == path and (group is None or kept.is_of(group))]:
            _savers.remove(kept)
            try:
                kept.saver.wait()
            except Exception as error:
                failures.append(error)
            finally:
                kept.saver.close(keeps_lock=any(other.folder == path for other in _savers))
    if failures:
        raise failures[0]


def _saver_of(folder: Path, group: dist.ProcessGroup | None) -> Saver:
    path = folder.absolute()
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    saver = next((kept.saver for kept in _savers if kept.folder == path and kept.is_of(group)), None)
    if saver is None:
        _let_go_of_ended_groups()
        saver = Saver(path, open_roll_call(group, f"checkpoint/{str(path)!a}"))
        _savers.append(_KeptSaver(path, saver, None if group is None else weakref.ref(group)))
    for kept in _savers:
        if kept.folder == path:
            kept.saver.settle()  # one at a time, of whatever group: who begins a save clears up what is unfinished
    return saver


def _let_go_of_ended_groups() -> None:
    """Nobody saves with a group that was destroyed: with it go a whole copy of the state and the group's threads.

    The lock, and what a save in the background failed of, stay for :func:`finish`.
    """
    alive = torch_private.all_groups() if dist.is_available() else []
    for kept in _savers:
        if kept.group is not None and not any(kept.is_of(group) for group in alive):
            kept.saver.retire()
