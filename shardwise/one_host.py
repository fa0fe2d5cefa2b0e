"""What a process has: the cores and memory of its host, what is installed there, its random generators."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import random
import resource
import sys
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

PREFIX = "shardwise-"  # of folders for temporary files
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")  # of cgroups v2 and v1
UNKNOWN = "0+unknown"  # the version of a copy of the source that is not installed
_INTERFACE = {"linux": "lo", "darwin": "lo0"}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def cpu_model() -> str:
    """Return the name of the processor according to the kernel, else the machine's."""
    for line in read_proc("cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def find_version(name: str = "shardwise") -> str:
    """Return the version of the installed package ``name``, :data:`UNKNOWN` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that all processes here can have together: the host's, or less if a container limits it.

    Swap does not count.  None if the system does not tell.  ``root``: where the system's files are.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int((root / limit).read_text()))
    return min(found, default=None)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now; their peak where the system tells no more."""
    fields = read_proc("self/statm").split()
    return int(fields[1]) * mmap.PAGESIZE if fields else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most bytes of this process that were in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on the loopback interface only, whatever was chosen for jobs of several hosts.

    Otherwise both would use the interface of the host's name, or any that is up.  Call it before the first process
    group exists.
    """
    interface = _INTERFACE.get(sys.platform)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = interface


def read_proc(name: str) -> str:
    """Return the text of the file ``name`` of ``/proc``; "" if the kernel does not tell, or the process has ended."""
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


# ---- The random generators of a process, saved and restored.


class RandomState:
    """The state of the random generators of Python, numpy and torch on this rank, as an entry of the state to save.

    At another number of ranks it cannot be restored: each rank gets a seed that depends on the save and its rank.

    Example:
        >>> state = {"random": RandomState()}
        >>> sorted(state["random"].state_dict())
        ['cuda', 'numpy', 'python', 'torch']
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators."""
        kind, keys, *rest = cast(Any, np.random.get_state())
        device = _device()
        numpy = (str(kind), np.asarray(keys).tobytes(), *[float(x) if isinstance(x, float) else int(x) for x in rest])
        return {
            "python": random.getstate(),
            "numpy": numpy,
            "torch": torch.get_rng_state(),
            "cuda": [] if device is None else [device.get_rng_state()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore that state."""
        random.setstate(state_dict["python"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        device = _device()
        if state_dict["cuda"] and device is not None:
            device.set_rng_state(state_dict["cuda"][0])


def set_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch (all devices); ``seed`` has up to 63 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _device() -> Any:
    """Return torch's module of the accelerator, or None."""
    return torch.get_device_module() if torch.accelerator.is_available() else None
