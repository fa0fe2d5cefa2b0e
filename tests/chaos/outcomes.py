"""The results of chaos as lines, and as the table of a page.  Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from chaos.campaign import FAULTS, TRANSACTED, Result
from chaos.program import DIVERGENCES

BEGIN = "<!-- written by python -m chaos --matrix --table: run it again -->"
END = "<!-- end of the table -->"
_MOST_TEXT = 280


def line_of(result: Result) -> str:
    """Return one line, and one more for each thing that is wrong."""
    verdict = result.verdict
    mark = "WRONG" if verdict.faults else verdict.how
    lines = [f"{mark:9} {verdict.seconds:6.2f} s  {result.job.text}"]
    return "\n".join([*lines, *(f"          {each}" for each in verdict.faults)])


def summary_of(results: Sequence[Result]) -> str:
    """Return how many jobs ended how."""
    counts = Counter("WRONG" if each.verdict.faults else each.verdict.how for each in results)
    hung = sum("hung" in text for each in results for text in each.verdict.faults)
    found = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    return f"{len(results)} jobs: {found}; {hung} ranks hung"


def tables_of(results: Sequence[Result], title: str) -> str:
    """Return a table of seconds (fault by API), what was wrong, and a table of messages."""
    return "\n".join(
        [f"{title}: {summary_of(results)}.", "", *_seconds(results), "", *_wrong(results), "", *_messages(results)]
    )


def embed(page: str, table: str) -> str:
    """Return ``page`` with ``table`` between its markers.  Raises: ValueError if a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks a marker; it needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _seconds(results: Sequence[Result]) -> Iterator[str]:
    """Longest seconds over transports, world sizes and places, per fault and API."""
    apis = list(dict.fromkeys(each.job.program.api for each in results))
    yield f"| fault | {' | '.join(apis)} |"
    yield f"| --- |{' ---: |' * len(apis)}"
    transacted = [f"{name}, {outcome}" for name, outcome in TRANSACTED]
    for name in [*FAULTS, "kills", *transacted, *(f"diverge: {each}" for each in DIVERGENCES)]:
        cells = [_cell([r for r in results if r.job.name == name and r.job.program.api == api]) for api in apis]
        if any(cells):
            yield f"| {name} | {' | '.join(cells)} |"


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return ""
    wrong = sum(bool(each.verdict.faults) for each in results)
    longest = max(each.verdict.seconds for each in results)
    kinds = {each.verdict.how for each in results if not each.verdict.faults}
    how = "recovers, " if kinds == {"recovered"} else ""
    return f"{how}{longest:.1f} s of {len(results)}" + (f", **{wrong} wrong**" if wrong else "")


def _wrong(results: Sequence[Result]) -> Iterator[str]:
    found = [each for each in results if each.verdict.faults]
    yield f"What ended as none should: {'nothing' if not found else ''}".rstrip()
    yield from ([""] if found else [])
    for each in found:
        yield f"- {each.job.text}: {_plain(each.verdict.faults[0])}"


def _messages(results: Sequence[Result]) -> Iterator[str]:
    """One message per fault and API, as another rank than the struck one sees it."""
    yield "| fault | api | what another rank reads |"
    yield "| --- | --- | --- |"
    seen: set[tuple[str, str]] = set()
    for each in results:
        key = (each.job.name, each.job.program.api)
        if each.verdict.message and not each.verdict.faults and key not in seen:
            seen.add(key)
            yield f"| {key[0]} | {key[1]} | {_plain(each.verdict.message)} |"


def _plain(text: str) -> str:
    """Return ``text`` on one line of a table, without the addresses and paths of one machine."""
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text)
    text = re.sub(r"(?<![\w.])/\S*?/(?=checkpoints)", "FOLDER/", text)
    cut = text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + " ..."
    return cut.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")")
