"""Pyright, strict, over a script of a user's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "types" / "every_public_call.py"


def complaints(folder: Path, script: Path, package: Path) -> list[str]:
    """Return what strict pyright says of ``script`` beside the ``package`` that has shardwise; ``folder``: for its config."""
    (folder / "script.py").write_text(script.read_text())
    values = {"include": ["script.py"], "extraPaths": [str(package)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(values))
    checker = Path(sys.executable).parent / "pyright"
    words = [str(checker), "--pythonpath", sys.executable, "--outputjson", "--project", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stderr
    return [f"{each['range']['start']['line'] + 1}: {each['message']}" for each in report["generalDiagnostics"]]
