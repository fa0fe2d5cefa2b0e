"""``shardwise diagnose``: read the records of the ranks of a failed job, and explain what happened."""

from __future__ import annotations

import argparse
import pickle
import shlex
from collections.abc import Sequence
from pathlib import Path

from shardwise.consistency.diagnosis import PREFIX, diagnose, in_words, to_dumps
from shardwise.consistency.recorder import BEFORE, BLACK_BOX, PATTERN, Record, default_place, read_record
from shardwise.errors import ConfigError
from shardwise.formatting import plain
from shardwise.safe_files import replace_file

ANALYZER = "torch.distributed.flight_recorder.fr_trace"


def add_diagnose_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``diagnose``."""
    parser = commands.add_parser(
        "diagnose",
        help="say in plain words why a job failed or hangs",
        description="Read the records that the ranks of a failed or hanging job have written (shardwise train into its run "
        "folder, your own loop into the folder of shardwise.record or a temporary one), and say where ranks differ, who waits "
        "for whom, and what to look at next. For a job that hangs, first send every rank: kill -USR1 PID.",
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="a run folder, or the folder of shardwise.record (default: the temporary records of your last job on this host)",
    )
    parser.add_argument(
        "--flight-recorder",
        metavar="OUT",
        help="also write the collectives of all ranks as dumps of torch's FlightRecorder into the folder OUT, for its analyzer",
    )


def run_diagnose(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 0.  Raises: ConfigError for a folder without records; OSError of writing dumps."""
    records, is_before = find_records(last_job() if arguments.folder is None else Path(arguments.folder))
    if is_before:
        print("nothing has failed since the last start; this is what ended the start before\n")
    for line in in_words(diagnose(records)):
        print(plain(line))
    if arguments.flight_recorder is not None:
        out = Path(arguments.flight_recorder)
        count = write_dumps(records, out)
        print(f"\n{count} dump{'s' * (count != 1)} of FlightRecorder; read them with:")
        print(f"  {shlex.join(['python', '-m', ANALYZER, str(out)])}")
    return 0


def write_dumps(records: Sequence[Record], out: Path) -> int:
    """Write the dumps of ``records`` into the folder ``out``, replacing those of an earlier call; return how many."""
    dumps = {f"{PREFIX}{rank}": pickle.dumps(dump) for rank, dump in to_dumps(records).items()}
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{PREFIX}*"):  # the analyzer reads every file there
        old.unlink()
    for name, dump in dumps.items():
        replace_file(out, name, dump)
    return len(dumps)


def last_job() -> Path:
    """Return the temporary folder with the records of the last job on this host that did not call ``record``.

    Raises: ConfigError if there is none.
    """
    place = default_place()
    jobs = sorted(place.iterdir()) if place.is_dir() else []
    if not jobs:
        raise ConfigError(
            f"{place} has no record of a job; name the run folder, or the folder given to shardwise.record"
        )
    return jobs[-1]


def find_records(folder: Path) -> tuple[list[Record], bool]:
    """Return the readable records of ``folder``, and True if they are of the previous start.

    Raises: ConfigError with what is there instead.
    """
    place = folder / BLACK_BOX if (folder / BLACK_BOX).is_dir() else folder
    if not place.is_dir():
        raise ConfigError(f"{folder}: no such folder.")
    last, before = _read(place), _read(place / BEFORE)
    if not last and not before:
        raise ConfigError(
            f"{place} has no record of a rank: nothing has failed there, or its ranks wrote elsewhere. "
            "For a job that hangs: kill -USR1 PID, on every rank."
        )
    return (last, False) if last else (before, True)


def _read(place: Path) -> list[Record]:
    return [record for path in sorted(place.glob(PATTERN)) if (record := read_record(path)) is not None]
