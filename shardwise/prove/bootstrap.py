"""``python -m shardwise.prove.bootstrap TERMS SCRIPT ...``: run a script in one rank, recorded."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from shardwise.prove.plain import PlainRecorder, Unprovable, replace_wrappers
from shardwise.prove.record import RunRecorder, Terms


def main() -> None:
    """Record the script, and say in the folder that it has ended."""
    text, *sys.argv = sys.argv[1:]
    terms = Terms(**json.loads(text) | {"rank": int(os.environ["RANK"])})
    if terms.files:
        os.chdir(terms.files)
        replace_wrappers()
    recorder = PlainRecorder(terms) if terms.files else RunRecorder(terms)
    recorder.install()
    script = Path(sys.argv[0]).resolve()
    sys.path[0] = str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    except Unprovable as error:
        terms.path("unprovable-{}").write_text(str(error))
        raise
    recorder.note_done()


if __name__ == "__main__":
    main()
