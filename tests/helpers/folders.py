"""Folders that the ranks of a test share."""

from __future__ import annotations

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
