"""The wheel that users install carries its types: strict pyright has nothing to say about a script with every public call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.type_checker import SCRIPT, complaints

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.clients


def test_strict_pyright_has_nothing_to_say_about_a_script_beside_the_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, site, folder = (tmp_path / name for name in ("wheels", "site", "script"))
    folder.mkdir()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True, timeout=250)
    (wheel,) = wheels.glob("shardwise-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=250)
    assert (site / "shardwise" / "py.typed").is_file()
    assert complaints(folder, SCRIPT, site) == []
