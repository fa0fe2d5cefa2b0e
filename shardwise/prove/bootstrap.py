"""``python -m shardwise.prove.bootstrap TERMS KIND WORDS ...``: run a script in one rank, recorded."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

from shardwise.prove.plain import PlainRecorder, Unprovable, replace_wrappers
from shardwise.prove.record import RunRecorder, Terms


def main() -> None:
    """Record the script, and say in the folder that it has ended."""
    text, kind, *words = sys.argv[1:]
    terms = replace(Terms(**json.loads(text)), rank=int(os.environ["RANK"]))
    if terms.place:
        os.chdir(terms.place)
    if terms.initial:
        replace_wrappers()
    recorder = PlainRecorder(terms) if terms.initial else RunRecorder(terms)
    recorder.install()
    sys.argv = words
    try:
        if kind == "module":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    except Unprovable as error:
        terms.path("unprovable").write_text(str(error))
        raise
    recorder.note_done()


if __name__ == "__main__":
    main()
