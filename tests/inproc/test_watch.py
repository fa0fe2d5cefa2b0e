"""The thread that hears signals and sees when nothing moves."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, resource, signal, threading, time
from shardwise.consistency.recorder import Watch

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = 1100
if hard != resource.RLIM_INFINITY and hard < wanted:
    print("no room"), os._exit(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
while os.dup(0) < 1024:
    pass
heard = threading.Event()
watch = Watch(heard.set)
assert watch._read >= 1024
watch.open()
os.kill(os.getpid(), signal.SIGUSR1)
print("heard" if heard.wait(20.0) else "deaf")
watch.close()
"""


def test_signals_are_heard_in_a_job_of_more_than_a_thousand_files() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() in ("heard", "no room"), done.stderr
    assert not done.stderr
