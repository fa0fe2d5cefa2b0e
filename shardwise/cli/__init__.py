"""The command ``shardwise``: options, local ranks and exit codes."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

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


# ---- Exit codes, and the variables by which a rank knows its launcher.

EXIT_FAILED = 1
EXIT_CONFIG = 2
# A rank's code for its launcher: it failed, and would fail again; the command's own code is EXIT_FAILED then.
EXIT_FINAL = 3
EXIT_INTERRUPTED = 130
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
STORE_VARIABLE = "SHARDWISE_STORE"
ATTEMPT_VARIABLE = "SHARDWISE_ATTEMPT"


def read_num_bytes(text: str) -> int:
    """Read ``0``, ``4096``, ``512k``, ``1.5M`` or ``2GiB``; units are powers of 1024.  Raises: ArgumentTypeError."""
    found = parse_size(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size, expected a number of bytes such as 0, 4096, 512k or 1.5M"
        )
    return found
