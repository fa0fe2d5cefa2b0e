"""``shardwise prove`` finds nothing wrong in right programs of accelerate, transformers and Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import COMMAND
from helpers.forked_commands import run_forked
from helpers.prove_clients import CLIENTS

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", CLIENTS)
def test_a_right_program_of_a_trainer_passes(name: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(CLIENTS[name].text)
    found = run_forked([*COMMAND[: COMMAND.index("train")], "prove", "-n", "2", str(script)], TMPDIR=str(tmp_path))
    assert found.code == 0, found.out + found.err
    assert found.out.rstrip().splitlines()[-1].startswith("right: "), found.out
