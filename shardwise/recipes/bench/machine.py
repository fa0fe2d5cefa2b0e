"""What the figures were measured on; nothing that names the host."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from shardwise.one_host import usable_cores


def describe_machine(num_threads: int) -> dict[str, object]:
    """Return processor, cores, versions, threads per rank, GPUs and the date (UTC)."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": num_threads,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the name of the processor as the kernel tells it, else the machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
