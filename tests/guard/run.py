"""Run tests under guarded memory: ``python tests/guard/run.py [--only fence|heap] [pytest arguments]``.

fence.c watches the memory of tensors (it can never be touched once freed, or behind its end, not even by the kernel), heap.c
all other memory of the heap; both together unless one is asked for.  See the heads of both files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUARDS = ("fence", "heap")
MAP_LIMIT = Path("/proc/sys/vm/max_map_count")
WANTED_MAPPINGS = 4_000_000  # of fence.c: two for each live block


def compiler() -> str | None:
    """Return the system's C compiler, None if there is none."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build(guard: str, folder: Path) -> Path:
    """Compile ``guard`` into ``folder``; return the library to preload."""
    cc = compiler()
    assert cc is not None, "no C compiler"
    target = folder / f"{guard}.so"
    command = [cc, "-O2", "-Wall", "-Wno-maybe-uninitialized", "-shared", "-fPIC", "-o", str(target)]
    subprocess.run([*command, str(HERE / f"{guard}.c"), "-ldl", "-lpthread"], check=True)
    return target


def environment(*libraries: Path) -> dict[str, str]:
    """Return the environment in which Python runs guarded by ``libraries``; fence.c is to come first: it asks the next one."""
    preload = ":".join(str(library) for library in libraries)
    return {**os.environ, "LD_PRELOAD": preload, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def raise_map_limit() -> str:
    """Let a process have enough mappings for fence.c, where that is allowed; return what came of it."""
    now = int(MAP_LIMIT.read_text())
    if now >= WANTED_MAPPINGS:
        return f"vm.max_map_count is {now}"
    try:
        MAP_LIMIT.write_text(str(WANTED_MAPPINGS))
    except OSError as error:
        return (
            f"vm.max_map_count stays {now} ({error.strerror}): a process with more than {now // 2} live tensors keeps the "
            f"rest of them unguarded; as root: sysctl -w vm.max_map_count={WANTED_MAPPINGS}"
        )
    return f"vm.max_map_count raised from {now} to {WANTED_MAPPINGS}"


def run(guards: Sequence[str], arguments: list[str]) -> int:
    """Run pytest under ``guards``; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="shardwise-guard-") as folder:
        libraries = [build(guard, Path(folder)) for guard in guards]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, env=environment(*libraries), cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GUARDS, help="one of the two")
    chosen, arguments = parser.parse_known_args()
    print(raise_map_limit(), flush=True)
    return run(GUARDS if chosen.only is None else (chosen.only,), arguments)


if __name__ == "__main__":
    sys.exit(main())
