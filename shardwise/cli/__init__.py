"""The command ``shardwise``: options, local ranks and exit codes."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.formatting import parse_size

# ---- Packages that only some commands need.


def check_extras(names: Sequence[str], command: str = "train") -> None:
    """Refuse to start without the packages that only ``command`` needs.  Raises: ConfigError."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"shardwise {command} needs {', '.join(missing)}, which is not installed here. "
            f"Install with: pip install 'shardwise[train]'"
        )


# ---- Options of commands, as rows of a table.

Row = tuple[str, str, Mapping[str, Any]]  # the names of an option, its help, and what argparse needs besides
SWITCH: Mapping[str, Any] = {"action": "store_true"}
COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}
SECONDS: Mapping[str, Any] = {"type": float, "metavar": "S"}


def add_options(parser: Any, rows: Iterable[Row]) -> None:
    """Add an option, or a positional argument, for each of ``rows``, in this order."""
    for names, text, more in rows:
        parser.add_argument(*names.split(), help=text, **more)


def add_command(commands: Any, name: str, texts: tuple[str, str], rows: Iterable[Row]) -> argparse.ArgumentParser:
    """Add the command ``name`` with the options ``rows``; ``texts``: its help in the list of commands, and its own."""
    parser = commands.add_parser(name, help=texts[0], description=texts[1])
    add_options(parser, rows)
    return parser


# ---- Exit codes, and the variables by which a rank knows its launcher.

EXIT_FAILED = 1
EXIT_CONFIG = 2
# A rank's code for its launcher: it failed, and would fail again; the command's own code is EXIT_FAILED then.
EXIT_FINAL = 3
EXIT_INTERRUPTED = 130
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
STORE_VARIABLE = "SHARDWISE_STORE"
CAUSE_VARIABLE = "SHARDWISE_RESTART_CAUSE"  # beside torchrun's number of the restart


def format_size(num_bytes: int) -> str:
    """Return ``num_bytes`` as options of sizes read it back, to the byte: in powers of 1024 where that is shorter.

    Example:
        >>> format_size(3 << 19), format_size(64 << 20), format_size(1000)
        ('1.5M', '64M', '1000')
    """
    for power, unit in ((3, "G"), (2, "M"), (1, "k")):
        text = f"{num_bytes / 1024**power:.10g}"
        if num_bytes >= 1024**power and len(text) < 7 and int(float(text) * 1024**power) == num_bytes:
            return text + unit
    return str(num_bytes)


def read_num_bytes(text: str) -> int:
    """Read ``0``, ``4096``, ``512k``, ``1.5M`` or ``2GiB``; units are powers of 1024.  Raises: ArgumentTypeError."""
    found = parse_size(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size, expected a number of bytes such as 0, 4096, 512k or 1.5M"
        )
    return found


SIZE: Mapping[str, Any] = {"type": read_num_bytes, "metavar": "SIZE"}
