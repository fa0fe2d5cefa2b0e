"""What a script of the fuzzer does when it is run."""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.runner import Runner


def main(path: str) -> None:
    """Carry out the text in ``path`` as all its contenders, print the verdicts, exit with 1 if one is a failure."""
    text = Path(path).read_text()
    with Runner(limit_s=60.0) as runner:
        outcome = runner.run_text(text)
    for contender, verdict in (*outcome.verdicts.items(), *outcome.torch_differs.items()):
        print(f"{contender.name}: {verdict.kind}\n    {verdict.text}".rstrip())
    sys.exit(bool(outcome.failures))
