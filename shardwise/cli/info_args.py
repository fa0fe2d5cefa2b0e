"""The options of ``shardwise info``."""

from __future__ import annotations

import argparse


def add_info_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``info``."""
    parser = commands.add_parser(
        "info",
        help="say what this host and installation offer",
        description="Print versions, backends, devices, cores, and which transports work here and why others do not. "
        "Nothing in it names the host or its user: paste it into a report of a bug.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
