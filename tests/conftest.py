"""Shared fixtures: one worker pool for the whole session.  (Where this file lies, pytest finds ``helpers``.)"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)  # how long an example takes is not what is tested
hypothesis.settings.load_profile("any machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SHARDWISE_CHECKS"] = "always"  # ranks inherit it
# The server from which processes are forked does not have pytest's sys.path, and passes over what it cannot import.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # read when torch is imported: by the server of forked commands, too


@pytest.fixture(scope="session")
def pool() -> Iterator["SessionPool"]:  # noqa: F821, UP037
    from helpers.jobs import SessionPool

    with SessionPool(4) as workers:
        yield workers


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist take files in the order of collection: by number of tests, the longest files would come last, one by one."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """Let no collection go through what stays as long as the process: thousands of tests and the modules they import."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
