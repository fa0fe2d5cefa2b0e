"""What the kernel and the C library say about this process: memory, page faults, bytes on the loopback device.

None stands for what this host does not tell (Linux with glibc tells everything).
"""

from __future__ import annotations

import ctypes
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

from shardwise.recipes.held_bytes import peak_rss_bytes

SAMPLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of this process in memory now, and the most since :func:`reset_peak`."""

    total: int
    peak: int
    anonymous: int
    shared: int


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: bytes, over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def malloc_live_bytes() -> int | None:
    """Return bytes malloc has handed out and not got back: in its arenas and mapped one by one."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    found = ask()
    return found.uordblks + found.hblkhd


def resident() -> Resident | None:
    """Return what is resident, from /proc/self/status."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    wanted = ("VmRSS", "VmHWM", "RssAnon", "RssShmem")
    if not all(name in fields for name in wanted):
        return None
    return Resident(*(1024 * int(fields[name].split()[0]) for name in wanted))


def others_part_of_shared() -> int:
    """Return the bytes of resident shared memory that are other processes': each page belongs in equal parts to all users.

    0 where the kernel does not tell.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    own = next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:")), None)
    now = resident()
    return max(now.shared - own, 0) if own is not None and now is not None else 0


def reset_peak() -> bool:
    """Start counting ``Resident.peak`` anew; False if the kernel does not let us: then it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Return the largest resident set: since :func:`reset_peak` where that works, else since the process started."""
    now = resident()
    return peak_rss_bytes() if now is None else now.peak


def available_bytes() -> int | None:
    """Return the memory of this host that processes can still have without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def minor_faults() -> int:
    """Return how many page faults without input or output this process, all threads, has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def loopback_bytes() -> int | None:
    """Return the bytes that this host's loopback device has sent, of all processes, headers counted."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    return None


class PeakSampler:
    """Look at memory every millisecond on a thread of its own, and keep the highest of what was seen.

    Attributes: ``live`` and ``shared``: most bytes live (malloc'ed and shared) and most shared at one moment, since the
    start or :meth:`forget_live`; ``largest``: the sample with the largest resident set.
    """

    def __init__(self) -> None:
        self.live: int | None = None
        self.shared: int | None = None
        self.largest: Resident | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="sample-memory", daemon=True)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        """Look once."""
        with self._lock:  # from the first look on: what was seen before forget_live() must not be kept after it
            live, now = malloc_live_bytes(), resident()
            if now is not None:
                self.shared = max(self.shared or 0, now.shared)
                if self.largest is None or now.total > self.largest.total:
                    self.largest = now
                if live is not None:
                    self.live = max(self.live or 0, live + now.shared)

    def forget_live(self) -> None:
        """Start ``live`` and ``shared`` anew."""
        with self._lock:
            self.live = self.shared = None

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.sample()
