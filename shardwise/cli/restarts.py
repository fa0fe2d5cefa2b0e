"""``shardwise train --max-restarts N``: ranks that failed are started again, from the newest checkpoint that verifies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.cli.exits import ATTEMPT_VARIABLE, EXIT_CONFIG, EXIT_FINAL
from shardwise.cli.local_ranks import Ended, LaunchContext, conclude, describe, noted_signals, run_ranks
from shardwise.cli.private_network import needs_no_network, private_network
from shardwise.errors import ConfigError
from shardwise.one_host import ScratchFolder
from shardwise.recipes.config import TrainConfig, check_ranks
from shardwise.recipes.restart_log import steps_in

MOST_STUCK = 2  # restarts in a row that come no further: a third would not either


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the ranks of one start are told: the run's folder, where to say how far they are, and which restart it is.

    ``number`` 0: the first start; ``cause``: of the restart.
    """

    folder: str
    step_file: str
    number: int = 0
    cause: str = ""


def attempt_from(environment: Mapping[str, str]) -> Attempt | None:
    """Return what the launcher has told this rank; None without ``--max-restarts``."""
    text = environment.get(ATTEMPT_VARIABLE)
    return None if text is None else Attempt(**json.loads(text))


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often ranks are started again, and on how few; ``min_nproc`` None: always on as many as before."""

    max_restarts: int
    min_nproc: int | None


@dataclass(frozen=True, slots=True)
class RestartProgress:
    """How far all starts together have come: ``furthest`` step, and the last restarts that came no further than that."""

    furthest: int = -1
    num_stuck: int = 0

    def after(self, step: int) -> RestartProgress:
        """Return the progress once a start has ended with ``step`` steps done.

        Example:
            >>> Progress().after(7).after(3).after(7)
            Progress(furthest=7, num_stuck=2)
        """
        return RestartProgress(step) if step > self.furthest else RestartProgress(self.furthest, self.num_stuck + 1)


def launch_with_restarts(
    folder: Path, config: TrainConfig, terms: RestartPolicy, nproc: int, device_type: str, words: Sequence[str]
) -> int:
    """Run the command with the same arguments in ``nproc`` processes, again if they fail; return the exit code.

    Again only for what may be another time: see :func:`why_not`.
    """
    progress, number, cause = RestartProgress(), 0, ""
    is_private = needs_no_network(config, device_type)
    with noted_signals() as received, ScratchFolder() as scratch, private_network(is_private) as network:
        while True:
            attempt = Attempt(str(folder.absolute()), str(scratch.path / f"step-{number}"), number, cause)
            told = {ATTEMPT_VARIABLE: json.dumps(asdict(attempt))}
            place = LaunchContext(scratch.path / f"store-{number}", received, told, network)
            ended = run_ranks(nproc, device_type, words, place)
            code = conclude(ended, received, folder)
            if ended.failure is None or received:
                return code
            progress = progress.after(steps_in(Path(attempt.step_file)))
            reason = why_not(ended, progress, terms, number)
            if reason is not None:
                print(f"shardwise: not started again: {reason}", file=sys.stderr)
                return code
            number, cause = number + 1, describe(ended.failure)
            nproc = ranks_for(config, nproc, ended.num_killed, terms.min_nproc)
            print(f"shardwise: restart {number} of {terms.max_restarts}, on {nproc} rank(s)", file=sys.stderr)


def why_not(ended: Ended, progress: RestartProgress, terms: RestartPolicy, number: int) -> str | None:
    """Return why ranks that ended like this are not started again, None if they are; ``number``: restarts so far."""
    if {EXIT_CONFIG, EXIT_FINAL} & set(ended.codes):
        return "a restart would end alike"
    if progress.num_stuck >= MOST_STUCK:
        return (
            f"{progress.num_stuck} restarts in a row have come no further than step {progress.furthest}; look for what fails "
            "there"
        )
    if number >= terms.max_restarts:
        return f"--max-restarts {terms.max_restarts}"
    return None


def ranks_for(config: TrainConfig, nproc: int, num_killed: int, min_nproc: int | None) -> int:
    """Return on how many ranks to go on: the most of those left that the options can use, or ``nproc`` as before.

    Example:
        >>> ranks_for(TrainConfig(batch=12), 4, 1, 2)
        3
        >>> ranks_for(TrainConfig(batch=32), 4, 1, 2)
        2
        >>> ranks_for(TrainConfig(batch=32), 4, 1, None)
        4
    """
    if min_nproc is None:
        return nproc
    for fewer in range(nproc - num_killed, min_nproc - 1, -1):
        try:
            check_ranks(config, fewer)
        except ConfigError:
            continue
        return fewer
    return nproc


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return a name of the process that starts this rank, and would start it again; None if none would.

    The same for all ranks and starts of one launcher on a host, and never that of another one.
    """
    if ATTEMPT_VARIABLE not in environment and "TORCHELASTIC_RESTART_COUNT" not in environment:
        return None
    from shardwise.checkpoint.lock import note_of

    return json.dumps(note_of(os.getppid()))
