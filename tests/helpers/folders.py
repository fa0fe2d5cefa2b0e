"""Folders that the ranks of a test share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from helpers.compare import from_rank


@contextmanager
def folder_of_all() -> Generator[Path]:
    """Return a folder that every rank sees; it is removed when all of them are done with it."""
    with ExitStack() as first:
        own = first.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else None
        yield Path(from_rank(0, own))
        dist.barrier()


def files_on_disk(folder: str) -> list[int]:
    """Return the descriptors of this process that lead into ``folder``."""
    links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return [fd for fd, link in links.items() if os.path.lexists(link) and os.readlink(link).startswith(folder)]
