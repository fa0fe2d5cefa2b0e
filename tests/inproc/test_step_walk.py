"""One step takes fewer calls, and enters files less often, than torch's FSDP2 on the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_walk.py"


def test_a_step_walks_no_further_than_torchs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "--out", tmp_path / "walk"], check=True, timeout=100, capture_output=True)
    found = json.loads((tmp_path / "walk").read_text())
    assert found["shardwise"]["calls"] < found["fsdp2"]["calls"], found
    assert found["shardwise"]["room_entries"] < found["fsdp2"]["room_entries"], found
