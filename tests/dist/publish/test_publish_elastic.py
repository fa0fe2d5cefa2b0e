"""After a rank of an elastic run is lost, the next version is right, and engines that have lived on follow it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import elastic_published
from helpers.commands import COMMAND
from helpers.forked_commands import run_forked

RUN = [*COMMAND[: COMMAND.index("train")], "run", "--elastic"]


@pytest.mark.parametrize("victim", [0, 2])
def test_the_version_after_a_loss_is_right(victim: int, tmp_path: Path) -> None:
    settings = json.dumps({"folder": str(tmp_path / "publish"), "victim": victim})
    ended = run_forked([*RUN, "-n", "3", elastic_published.__file__, settings], TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.err
    before = [[step, 3, step + 1, step + 1, []] for step in range(elastic_published.LOST_IN)]
    after = [
        [step, 2, step + 1, step + 1, []] for step in range(elastic_published.LOST_IN, elastic_published.NUM_STEPS)
    ]
    for process in range(3):
        seen = [json.loads(line) for line in (tmp_path / "publish" / f"seen-{process}").read_text().splitlines()]
        assert seen == (before if process == victim else before + after)
