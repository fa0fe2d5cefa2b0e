"""The ranks of ``shardwise train`` and ``shardwise run`` on this host, and their restarts; ``shardwise prove``.

They meet through a file in a folder of this user: nothing listens for them, and nothing is read from a socket here.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardwise.cli import (
    CAUSE_VARIABLE,
    COUNT,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINAL,
    LAUNCHER_VARIABLE,
    SECONDS,
    STORE_VARIABLE,
    SWITCH,
    Row,
    add_command,
)
from shardwise.consistency.process_groups import host_id
from shardwise.consistency.recorder import BLACK_BOX, PATTERN
from shardwise.elastic.launcher import STUCK_S, ElasticTerms, Launcher
from shardwise.errors import ConfigError, RankError
from shardwise.formatting import format_ranks, plain
from shardwise.loop.launch import (
    LEAVE_S,
    Ended,
    FailedRank,
    LaunchContext,
    ProgramOutcome,
    UserProgram,
    describe,
    noted_signals,
    private_network,
    run_program,
    run_ranks,
)
from shardwise.one_host import PREFIX, read_proc
from shardwise.prove.compare import ProveOptions
from shardwise.prove.run import compare_folders, prove
from shardwise.recipes.config import TrainConfig, check_ranks

_SAID = (EXIT_FAILED, EXIT_CONFIG, EXIT_FINAL)  # of a rank that has reported why
COMMAND = ("-m", "shardwise.cli.main")


def conclude(ended: Ended, received: Sequence[int], run: Path | None) -> int:
    """Say how the ranks ended, unless one has said so, and how to read their records in ``run``; return the exit code."""
    if ended.failure is not None:
        return _explain(ended.failure, run)
    if received:
        rest = _stopped_in_words(ended) or "every rank has ended too"
        print(f"shardwise: ended by {signal.Signals(received[0]).name}; {rest}", file=sys.stderr)
        return 128 + received[0]
    return 0


def _stopped_in_words(ended: Ended) -> str:
    """Return which ranks were killed because they still ran after a signal; empty if none was."""
    are = "was" if len(ended.stopped) == 1 else "were"
    return f"{format_ranks(ended.stopped)} still ran and {are} killed {ended.why} (--leave-s)" if ended.stopped else ""


def _explain(failure: FailedRank, run: Path | None) -> int:
    if failure.code in _SAID:  # that rank has said why
        return EXIT_FAILED if failure.code == EXIT_FINAL else failure.code
    _report(failure, run, None if run is None else run / BLACK_BOX)
    return EXIT_FAILED


def _report(failure: FailedRank, folder: Path | None, records: Path | None) -> None:
    """Say which rank failed, and how to read ``records``, if there are any: those of ``folder``."""
    print(f"shardwise: error: {describe(failure)}; all ranks have been stopped", file=sys.stderr)
    if records is not None and any(records.glob(PATTERN)):
        print(f"shardwise: what each rank did last: shardwise diagnose {folder}", file=sys.stderr)


# ---- ``shardwise train --max-restarts N``: ranks that failed are started again, from the newest checkpoint that
# verifies.


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often ranks are started again, on how few (``min_nproc`` None: always on as many as before), and ``leave_s``.

    ``num_spares``: of ranks that outlive each other; None: they do not.  ``stuck_s``: of :class:`ElasticTerms`.
    """

    max_restarts: int
    min_nproc: int | None
    leave_s: float = LEAVE_S
    num_spares: int | None = None
    stuck_s: float = STUCK_S

    def check(self, nproc: int) -> None:
        """Refuse a start on ``nproc`` ranks that are too few.  Raises: ConfigError."""
        if self.min_nproc is not None and self.min_nproc > nproc:
            raise ConfigError(f"--min-nproc is {self.min_nproc}, expected at most the {nproc} rank(s) of the start.")


def read_terms(given: Mapping[str, Any]) -> RestartPolicy:
    """Return what :data:`LAUNCH_OPTIONS` say; an option that was not given is missing or None.  Raises: ConfigError."""
    found = {name: value for name, value in given.items() if value is not None}
    most, least, is_elastic = found.get("max_restarts", 0), found.get("min_nproc"), found.get("elastic", False)
    spares, stuck_s, leave_s = found.get("spares", 0), found.get("stuck_after", STUCK_S), found.get("leave_s", LEAVE_S)
    for option, number in (("--max-restarts", most), ("--spares", spares)):
        if number < 0:
            raise ConfigError(f"{option} is {number}, expected at least 0.")
    for option, seconds in (("--leave-s", leave_s), ("--hang-after", stuck_s)):
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"{option} is {seconds}, expected 0 or more seconds.")
    if not is_elastic and (spares or "stuck_after" in found):
        raise ConfigError("--spares and --hang-after need --elastic.")
    if least is not None and (least < 1 or not (most or is_elastic)):
        raise ConfigError(f"--min-nproc is {least}, expected at least 1, together with --max-restarts or --elastic.")
    return RestartPolicy(most, least, leave_s, spares if is_elastic else None, stuck_s)


def launch_ranks(
    folder: Path | None, config: TrainConfig, terms: RestartPolicy, nproc: int, device_type: str, words: Sequence[str]
) -> int:
    """Run the command with the same arguments in ``nproc`` processes, again if they fail; return the exit code.

    Again only for what may be another time: see :func:`why_not`.  The first signal is passed on, as SIGTERM: ranks save
    and leave; the second one ends them at once.  ``folder``: of the run; None only without restarts: ranks choose one.
    """
    number, cause = 0, ""
    # a user's own model may need the host's network (downloads), and so may NCCL
    is_private = config.model_from is None and device_type == "cpu"
    with (
        noted_signals() as received,
        TemporaryDirectory(prefix=PREFIX) as scratch,
        private_network(is_private) as network,
    ):
        while True:
            told: dict[str, object] = {LAUNCHER_VARIABLE: os.getpid(), STORE_VARIABLE: f"{scratch}/store-{number}"}
            if terms.max_restarts:
                told |= {"TORCHELASTIC_RESTART_COUNT": number, CAUSE_VARIABLE: cause}
            place = LaunchContext(received, told, network, _SAID, leave_s=terms.leave_s)
            ended = run_ranks(nproc, device_type, (*COMMAND, *words), place)
            code = conclude(ended, received, folder)
            if ended.failure is None or received or not terms.max_restarts:
                return code
            reason = why_not(ended, terms, number)
            if reason is not None:
                print(f"shardwise: not started again: {reason}", file=sys.stderr)
                return code
            number, cause = number + 1, describe(ended.failure)
            nproc = ranks_for(config, nproc, ended.num_killed, terms.min_nproc)
            print(f"shardwise: restart {number} of {terms.max_restarts}, on {nproc} rank(s)", file=sys.stderr)


def launch_elastic(terms: RestartPolicy, nproc: int, words: Sequence[str]) -> int:
    """Run the command in processes that outlive each other; return the exit code."""
    program = UserProgram("module", (COMMAND[1], *words), LaunchContext(told={LAUNCHER_VARIABLE: os.getpid()}))
    code = _run_elastic(program, terms, nproc)
    return EXIT_FAILED if code == EXIT_FINAL else code


def _run_elastic(program: UserProgram, terms: RestartPolicy, nproc: int) -> int:
    members = ElasticTerms(nproc, terms.num_spares or 0, terms.max_restarts, terms.min_nproc or 1, terms.stuck_s)
    try:
        return _run(replace(program, supervise=partial(Launcher, members)), nproc, 0, terms.leave_s)
    except RankError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        return EXIT_FAILED


def why_not(ended: Ended, terms: RestartPolicy, number: int) -> str | None:
    """Return why ranks that ended like this are not started again, None if they are; ``number``: restarts so far."""
    if {EXIT_CONFIG, EXIT_FINAL} & set(ended.codes):
        return "a restart would end alike"
    return f"--max-restarts {terms.max_restarts}" if number >= terms.max_restarts else None


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
    if "TORCHELASTIC_RESTART_COUNT" not in environment:
        return None
    stat = read_proc(f"{os.getppid()}/stat").rpartition(")")[2].split()
    return json.dumps([host_id(), os.getppid(), *stat[19:20]])  # and its start: a later process may have its pid


# ---- ``shardwise run``: a user's own script or module on the ranks of this host.

_CPU_RANKS = 2
_HOSTS_RESTARTS = 9  # in the command for several hosts: torchrun's default of 0 outlives nothing
# Options of ``run`` and ``train``, each with the defaults of its own.
LAUNCH_OPTIONS: tuple[Row, ...] = (
    (
        "--max-restarts",
        "start ranks again after a failure, up to K times; train: from the newest checkpoint that is whole; with --elastic: in "
        "place of lost ones (default: 0)",
        {"type": int, "metavar": "K"},
    ),
    ("--leave-s", f"seconds to leave, after a signal and the first rank (default: {LEAVE_S:g})", SECONDS),
    ("--elastic", "go on, from memory, when ranks are killed", SWITCH),
    ("--spares", "with --elastic: processes that wait to replace a lost rank (default: 0)", COUNT),
    (
        "--min-nproc",
        "with --elastic: end when fewer are left (default: 1); train --max-restarts: restart on those that are left after some "
        "were killed (default: on as many as before)",
        {"type": int, "metavar": "M"},
    ),
    (
        "--hang-after",
        f"with --elastic: end a rank without progress while others wait, after S seconds (default: {STUCK_S:g}; 0: never)",
        {**SECONDS, "dest": "stuck_after"},
    ),
)
_PROGRAM: Row = ("program", "a script and its arguments", {"nargs": argparse.REMAINDER, "metavar": "SCRIPT ARGS"})


def add_run_arguments(commands: Any) -> None:
    """Add ``run``."""
    described = (
        "Start a script, or a module as python -m does, on ranks of this host. dist.init_process_group() and fully_shard find "
        "what torchrun tells them. Nothing listens beyond loopback; signals reach all ranks, the first error is shown once, "
        "and no process is left over."
    )
    ranks = f"ranks (default: the number of GPUs; {_CPU_RANKS} where there is none)"
    rows: list[Row] = [("-n --nproc", ranks, COUNT), *LAUNCH_OPTIONS]
    # torchrun's: an error says how it is called
    rows += [(name, argparse.SUPPRESS, {}) for name in ("--nnodes", "--node-rank", "--rdzv-endpoint")]
    rows += [("-m --module", "run the module of this name in place of a script", SWITCH), _PROGRAM]
    parser = add_command(commands, "run", ("start your own script on several ranks of this host", described), rows)
    parser.usage = "shardwise run [-n N] [--max-restarts K] [--] SCRIPT ARGS ... | -m MODULE ARGS ..."
    parser.set_defaults(nnodes="1")


def run_run(arguments: argparse.Namespace) -> int:
    """Run the program; return 0, or the exit code of the rank that failed first.  Raises: ConfigError."""
    words: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        raise ConfigError("shardwise run: name a script, or a module after -m.")
    nproc = torch.cuda.device_count() or _CPU_RANKS if arguments.nproc is None else int(arguments.nproc)
    if nproc < 1:
        raise ConfigError(f"-n is {nproc}, expected at least 1.")
    terms = read_terms(vars(arguments))
    if arguments.nnodes != "1" or arguments.node_rank is not None or arguments.rdzv_endpoint is not None:
        raise ConfigError(
            f"shardwise run starts the ranks of one host; for several, run this on each of them: "
            f"{shlex.join(_torchrun_words(arguments, terms.max_restarts, nproc, words))}"
        )
    if not arguments.module and not Path(words[0]).exists():
        raise ConfigError(f"{words[0]}: no such script.")
    if arguments.nproc is None:
        where = "one for each GPU" if torch.cuda.device_count() else "no GPU found"
        print(f"shardwise: {nproc} ranks ({where}; -n N changes it)", file=sys.stderr)
    program = UserProgram("module" if arguments.module else "script", tuple(words))
    if terms.num_spares is not None:
        terms.check(nproc)
        return _run_elastic(program, terms, nproc)
    if terms.min_nproc is not None:
        raise ConfigError("--min-nproc needs --elastic.")
    return _run(program, nproc, terms.max_restarts, terms.leave_s)


def _torchrun_words(arguments: argparse.Namespace, restarts: int, nproc: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts ``words`` on several hosts."""
    hosts: str = arguments.nnodes if arguments.nnodes != "1" else "2"
    if arguments.elastic and ":" not in hosts:
        hosts, restarts = f"1:{hosts}", restarts or _HOSTS_RESTARTS
    command = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] * bool(arguments.elastic)
    command += ["torchrun", "--nnodes", hosts, "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(restarts)] if restarts else []
    endpoint = arguments.rdzv_endpoint or "FIRST_HOST:29400"
    return [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *["-m"] * arguments.module, *words]


def _run(program: UserProgram, nproc: int, max_restarts: int, leave_s: float) -> int:
    with noted_signals() as received, TemporaryDirectory(prefix=PREFIX) as scratch:
        for number in range(max_restarts + 1):
            outcome = run_program(program, nproc, received, Path(scratch), number, leave_s)
            code = _conclude(outcome, received)
            if not code or received or number == max_restarts:
                return code
            print(f"shardwise: restart {number + 1} of {max_restarts}", file=sys.stderr)
    return 0


def _conclude(outcome: ProgramOutcome, received: Sequence[int]) -> int:
    if received:
        if stopped := _stopped_in_words(outcome.ended):
            print(f"shardwise: {signal.Signals(received[0]).name}: {stopped}", file=sys.stderr)
        return 128 + received[0] if outcome.ended.codes or stopped else 0
    failure = outcome.failure
    if failure is None:
        return 0
    _report(failure, outcome.records, outcome.records)
    return failure.code if failure.code > 0 else 128 - failure.code


# ---- ``shardwise prove``: is this training right?

_OPTIONS: tuple[Row, ...] = (
    ("-n --nproc", "ranks (default: %(default)s)", {**COUNT, "default": 2}),
    ("--steps", "optimizer steps (default: %(default)s)", {"type": int, "metavar": "K"}),
    ("--rtol", "a fault is X times what rounding does (default: %(default)g)", {"type": float, "metavar": "X"}),
    ("--only", "compare modules and parameters of these names", {"metavar": "GLOB"}),
    ("--keep", "keep the recordings there", {"type": Path, "metavar": "FOLDER"}),
    ("--limit-s", "seconds of one run (default: %(default)g)", SECONDS),
    ("--exact", "every difference of a bit is a fault", SWITCH),
    ("--init", "compare initial values, too", SWITCH),
    ("--strict", "notes about the script are faults", SWITCH),
    ("--json", "print the verdict as JSON", SWITCH),
    ("--compare", "compare two folders of shardwise.recorded in place of a script", SWITCH),
    _PROGRAM,
)


def add_prove_arguments(commands: Any) -> None:
    """Add ``prove``."""
    described = (
        "Run a script as it is, as plain data parallelism, and once more moved by rounding; name the first tensor that "
        "differs. Exit code 0: right, 1: it differs, 2: it cannot be proven. The script runs three times: the second and third "
        "time in a copy of this folder; what it writes outside of this folder is written three times."
    )
    text = "hold your training script against plain data parallelism"
    parser = add_command(commands, "prove", (text, described), _OPTIONS)
    parser.usage = "shardwise prove [-n N] [options] [--] SCRIPT ARGS ... | --compare A B"
    parser.set_defaults(**asdict(ProveOptions()))


def run_prove(arguments: argparse.Namespace) -> int:
    """Print the verdict; return its code.  Raises: ConfigError."""
    words: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    options = ProveOptions(**{each.name: getattr(arguments, each.name) for each in fields(ProveOptions)})
    if arguments.nproc < 1 or options.steps < 1 or not options.rtol > 0 or not options.limit_s > 0:
        raise ConfigError(
            f"-n is {arguments.nproc}, --steps {options.steps}, --rtol {options.rtol:g}, --limit-s {options.limit_s:g}; "
            "expected at least 1 rank and step, and positive limits"
        )
    if arguments.compare and len(words) != 2:
        raise ConfigError(f"--compare takes two folders, found {words}")
    if not arguments.compare and not (words and Path(words[0]).exists()):
        raise ConfigError(f"shardwise prove: no such script: {words[:1]}. Name a script")
    if arguments.compare:
        verdict = compare_folders(Path(words[0]), Path(words[1]), options)
    else:
        verdict = prove(words, arguments.nproc, options, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(verdict.as_dict(), indent=2))
    else:
        print("\n".join(map(plain, verdict.lines())), file=sys.stderr if verdict.reason else sys.stdout)
    return verdict.code
