"""``shardwise info``: what this host and installation offer, as plain text to paste into a report of a bug, or as JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from shardwise.cli.host_facts import HostFacts, HostFeature, look_at_host


def run_info(arguments: argparse.Namespace) -> int:
    """Print the facts; return 0."""
    facts = look_at_host(os.environ)
    print(json.dumps(asdict(facts), indent=2) if arguments.json else "\n".join(in_lines(facts)))
    return 0


def in_lines(facts: HostFacts) -> Iterator[str]:
    """Yield the facts as lines of text, a heading over each kind."""
    yield from _named(facts.software)
    yield from _section("backends", _offers(facts.backends))
    devices = {f"GPU {number}": text for number, text in enumerate(facts.devices)}
    yield from _section("devices", {**facts.cores, **(devices or {"GPUs": "none that torch can use"})})
    yield from _section("transports", _offers(facts.transports))
    yield from _section("packages", facts.packages)
    yield from _section("environment", facts.environment or {"(none)": "no variable is set that changes how ranks run"})


def _section(heading: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"\n{heading}"
    for line in _named(values):
        yield f"  {line}"


def _named(values: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, values))
    for name, value in values.items():
        yield f"{name.ljust(width)}  {value}"


def _offers(offers: Mapping[str, HostFeature]) -> dict[str, str]:
    return {name: _in_words(offer) for name, offer in offers.items()}


def _in_words(offer: HostFeature) -> str:
    detail = f" ({offer.detail})" if offer.detail else ""
    return f"yes{detail}" if offer.is_usable else f"no{detail}: {offer.why_not}"
