"""A pool whose ranks are forked from one process that has imported the packages: each would take seconds to do so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from shardwise.testing import WorkerPool

PACKAGES = ("torchao.quantization", "transformers", "accelerate", "peft", "lightning", "schedulefree")

# Where `make clients` has not installed them there is nothing to collect: the modules import them at their top.
collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("datasets", "transformers"))) else ["test_*.py"]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Hide the pool of the other tests."""
    with WorkerPool(
        max_ranks=4,
        timeout_s=300.0,
        preload=("torch", "torch._dynamo", "pytest", *PACKAGES, "helpers.frozen"),
    ) as workers:
        yield workers
